"""The machine that is measured: its page cache, its memory, and what it is. Linux only.

No root is needed, and no other file's pages are touched.
"""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mfload.bench.ceilings import Extent, paths_of
from mfload.io import probes

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_KEPT = 0.001  # The kernel keeps a page in hand: this share may stay of what counts as dropped.
_PACKAGES = (
    "numpy", "ml_dtypes", "jax", "torch", "tensorflow", "tensorflow-cpu", "paddlepaddle",
    "safetensors", "fastsafetensors", "runai-model-streamer", "xxhash", "typer", "rich",
)  # fmt: skip


class UnfitError(Exception):
    """The page cache can't be brought into the state that a measurement needs."""


def cached_share(extents: Sequence[Extent]) -> float | None:
    """The share of the extents' pages that is cached, 0 to 1. None: the kernel does not say."""
    pages = cached = 0.0
    for path, start, stop in extents:
        with open(path, "rb", buffering=0) as file:
            share = probes.cached_share(file.fileno(), stop - start, start)
        if share is None:
            return None
        count = -(-stop // mmap.PAGESIZE) - start // mmap.PAGESIZE
        pages += count
        cached += share * count
    return cached / max(1.0, pages)


def warm(extents: Sequence[Extent]) -> None:
    """Reads the extents until the page cache holds all of them."""
    block = memoryview(bytearray(1 << 20))
    share = cached_share(extents)
    for _ in range(3):
        if share == 1:
            return
        for path, start, stop in extents:
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                while file.tell() < stop and file.readinto(block[: stop - file.tell()]):
                    pass
        share = cached_share(extents)
        if share is None:
            return
    if share != 1:
        raise UnfitError(f"the page cache keeps only {share:.1%} of it")


def drop(extents: Sequence[Extent]) -> None:
    """Makes the page cache forget the files of the extents."""
    share = None
    for attempt in range(4):
        # A page that some CPU still has in hand is not dropped: a moment later it is.
        time.sleep(0.05 * attempt)
        for path in paths_of(extents):
            with open(path, "rb", buffering=0) as file:
                try:
                    os.fsync(file.fileno())  # Pages not yet on disk are not dropped.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                except OSError as error:
                    raise UnfitError(f"the system does not drop pages: {error.strerror}") from error
        share = cached_share(extents)
        if not share:
            return
    if share and share > _KEPT:
        raise UnfitError(
            f"the page cache still holds {share:.1%} of it: another process maps the files, or "
            "their file system keeps them"
        )


def why_not(extents: Sequence[Extent], *, cold: bool) -> str | None:
    """Why these extents can't be measured cold or warm, or None. Tries it."""
    for kind in map(file_system, paths_of(extents)):
        if cold and kind in MEMORY_FILE_SYSTEMS:
            return f"{kind} keeps its files in memory"
    try:
        (drop if cold else warm)(extents)
    except UnfitError as error:
        return str(error)
    return None


def file_system(path: str | os.PathLike[str]) -> str:
    """The type of the file system that holds a path, such as `ext4`."""
    where = os.path.realpath(path)
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        point = left.split(" ")[4].encode().decode("unicode_escape")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        # `>=`: of two mounts on one point the later lies on top.
        if inside and len(point) >= len(best[0]):
            best = (point, right.split(" ", 1)[0])
    return best[1]


def memory_status(field: str, pid: int | str = "self") -> int:
    """A memory field of a process's status, such as VmRSS or VmHWM, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Sets this process's VmHWM back to what it holds now."""
    Path("/proc/self/clear_refs").write_text("5\n")


_PRIME = """
import mmap, sys
kept = []
for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
    kept.append(mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].madvise(advice)
    try:
        kept[-1].madvise(23)  # MADV_POPULATE_WRITE, Linux 5.14
    except OSError:
        for at in range(0, len(kept[-1]), mmap.PAGESIZE):
            kept[-1][at] = 1
"""


def prime(nbytes: int) -> bool:
    """Has another process touch `nbytes` in small and in huge pages; gives whether it could.

    A virtual machine may give freed pages back to its host, and the next process to touch them
    pays ten times what fresh memory costs. The page cache is not pushed out.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))
    room = probes.memory_room()
    most = free if room is None else min(free, room[0])
    command = [sys.executable, "-I", "-S", "-c", _PRIME, str(min(nbytes, int(0.4 * most)))]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def prepare(extents: Sequence[Extent], nbytes: int, *, cold: bool, primed: bool = True) -> None:
    """Empties the page cache of the extents or fills it, and has the memory of a load at hand."""
    fill_or_drop = drop if cold else warm
    fill_or_drop(extents)
    if primed:
        prime((256 << 20) + nbytes * 3 // 2)
        fill_or_drop(extents)  # Nothing to do, unless memory ran short meanwhile.


def busy_share(seconds: float = 1.0) -> float:
    """The share of the machine's CPU time that is in use now, 0 to 1; takes `seconds`."""

    def read() -> tuple[int, int]:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # All; idle and waiting for the disk.

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def describe(folder: str | os.PathLike[str], seconds: float = 1.0) -> dict[str, Any]:
    """Names and figures of this machine, none of which identifies a person or a host."""
    lines = (x.partition(":") for x in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    words = huge.read_text().split() if huge.exists() else []
    versions = {"mfload": sys.modules["mfload"].__version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu.get("model name") or platform.machine(),
        "cores": os.cpu_count(),
        "virtual": "hypervisor" in cpu.get("flags", "").split(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "huge_pages": next((word.strip("[]") for word in words if word[0] == "["), "unknown"),
        "python": platform.python_version(),
        "versions": versions,
        "busy_share_before": round(busy_share(seconds), 3),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def sentence(found: dict[str, Any]) -> str:
    """The machine in a sentence without its end: processor, cores, memory, kernel, disk, date."""
    kind = "virtual machine" if found["virtual"] else "machine"
    return (
        f"{found['cpu']} {kind}, {found['cores']} cores, {found['memory_gib']} GiB, "
        f"Linux {found['kernel']}, {found['file_system']}, {found['date']}"
    )


def versions_sentence(found: dict[str, Any]) -> str:
    """Python and the packages with their versions, with commas."""
    packages = [f"{name} {number}" for name, number in found["versions"].items()]
    return ", ".join([f"Python {found['python']}", *packages])
