"""The machine that is measured: its page cache, its memory, and what it is. Linux only.

No root is needed, and no other file's pages are touched.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mfload.bench.ceilings import MIB, Extent, Pattern, paths_of, read
from mfload.io import probes

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_KEPT = 0.001  # The kernel keeps a page: this share may stay of what counts as dropped.
_PACKAGES = (
    "numpy", "ml-dtypes", "jax", "torch", "tensorflow", "tensorflow-cpu", "paddlepaddle",
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
    share = cached_share(extents)
    for _ in range(3):
        if share == 1:
            return
        read(extents, Pattern(1, MIB, reuse=True))
        share = cached_share(extents)
    if share is not None and share < 1:
        raise UnfitError(f"the page cache keeps only {share:.1%} of it")


def drop(extents: Sequence[Extent]) -> None:
    """Makes the page cache forget the files of the extents."""
    share = None
    for attempt in range(4):
        # A page that a CPU still uses is not dropped: a moment later it is.
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
    """The type of the file system that holds a path, such as `ext4`; else "unknown"."""
    try:
        command = ["df", "--output=fstype", os.fspath(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split()[-1]


def memory_status(field: str, pid: int | str = "self") -> int:
    """A memory field of a process's status, such as VmRSS or VmHWM, in bytes."""
    return _bytes(f"/proc/{pid}/status", field)


def _bytes(file: str, field: str) -> int:
    lines = (line.partition(":") for line in Path(file).read_text().splitlines())
    return int({name: rest for name, _, rest in lines}[field].split()[0]) << 10


def reset_peak() -> None:
    """Sets this process's VmHWM back to what it holds now."""
    Path("/proc/self/clear_refs").write_text("5\n")


_PRIME = """
import mmap, sys
kept = []
for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
    kept.append(mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].madvise(advice)
    kept[-1][:: mmap.PAGESIZE] = bytes(len(range(0, len(kept[-1]), mmap.PAGESIZE)))
"""


def prime(nbytes: int) -> bool:
    """Has another process touch `nbytes` in small and in huge pages; gives whether it could.

    A virtual machine may give freed pages back to its host, and the next process to touch them
    pays ten times what fresh memory costs. The page cache is not pushed out.
    """
    free = _bytes("/proc/meminfo", "MemFree")
    room = probes.memory_room()
    most = free if room is None else min(free, room[0])
    command = [sys.executable, "-I", "-S", "-c", _PRIME, str(min(nbytes, int(0.4 * most)))]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def prepare(extents: Sequence[Extent], nbytes: int, *, cold: bool, primed: bool = True) -> None:
    """Empties the page cache of the extents or fills it, and has memory for a load ready."""
    fill_or_drop = drop if cold else warm
    fill_or_drop(extents)
    if primed:
        prime((256 << 20) + nbytes * 3 // 2)
        fill_or_drop(extents)  # Nothing to do, unless memory ran short meanwhile.


def busy_share(seconds: float = 1.0) -> float:
    """The share of the machine's CPU time that is in use now, 0 to 1; takes `seconds`."""

    def ticks() -> tuple[int, int]:
        spent = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(spent), spent[3] + spent[4]  # All; idle and waiting for the disk.

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def describe(folder: str | os.PathLike[str], seconds: float = 1.0) -> dict[str, Any]:
    """Names and figures of this machine, none of which identifies a person or a host."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)$", cpu, re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = re.findall(r"\[(\w+)\]", huge.read_text()) if huge.exists() else []
    installed = {each.name.replace("_", "-"): each.version for each in metadata.distributions()}
    versions = {name: installed[name] for name in _PACKAGES if name in installed}
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "virtual": re.search(r"^flags.* hypervisor\b", cpu, re.MULTILINE) is not None,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "huge_pages": pages[0] if pages else "unknown",
        "python": platform.python_version(),
        "versions": {"mfload": sys.modules["mfload"].__version__} | versions,
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
