"""The machine that is measured: its page cache and its memory. Linux only.

No root is needed, and no other file's pages are touched.
"""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfload.bench.ceilings import MIB, ByteRange, Pattern, paths_of, read
from mfload.diagnostics import host
from mfload.io import probes

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_KEPT = 0.001  # The kernel keeps a page: this share may stay of what counts as dropped.


class UnfitError(Exception):
    """The page cache can't be brought into the state that a measurement needs."""


def cached_share(extents: Sequence[ByteRange]) -> float | None:
    """The share of the extents that is cached, 0 to 1. None: the kernel does not say."""
    nbytes = cached = 0.0
    for path, start, stop in extents:
        with open(path, "rb", buffering=0) as file:
            share = probes.cached_share(file.fileno(), stop - start, start)
        if share is None:
            return None
        nbytes += stop - start
        cached += share * (stop - start)
    return cached / max(1.0, nbytes)


def fill_or_drop(extents: Sequence[ByteRange], *, cold: bool) -> None:
    """Reads the extents until the page cache holds all of them, or has it forget their files.

    Raises UnfitError if it does not.
    """
    kinds = [kind for kind in map(file_system, paths_of(extents)) if kind in MEMORY_FILE_SYSTEMS]
    if cold and kinds:
        raise UnfitError(f"{kinds[0]} keeps its files in memory")
    share = cached_share(extents)
    for attempt in range(4):
        if share == (0 if cold else 1) and (attempt or not cold):
            return  # Headers may be cached where tensors are not: all is dropped once.
        # A page that a CPU still uses is not dropped: a moment later it is.
        time.sleep(0.05 * attempt)
        if cold:
            _drop(paths_of(extents))
        else:
            read(extents, Pattern(1, MIB, reuse=True))
        share = cached_share(extents)
        if share is None:
            return
    share = share or 0.0
    if not cold:
        raise UnfitError(f"the page cache keeps only {share:.1%} of it")
    if share > _KEPT:
        raise UnfitError(
            f"the page cache still holds {share:.1%} of it: another process maps the files, or "
            "their file system keeps them"
        )


def _drop(paths: Sequence[str]) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            try:
                os.fsync(file.fileno())  # Pages not yet on disk are not dropped.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise UnfitError(f"the system does not drop pages: {error.strerror}") from error


def facts(file: str) -> dict[str, str]:
    """What `mfload doctor` finds of the host and the disk of a file."""
    root = Path("/")
    disk = host.disk(root, host.mount(root, os.path.realpath(file)))
    found = {each.what: each.found for each in (*host.look(root), *disk)}
    return {**found, "Python": platform.python_version()}


def begun(**how: Any) -> dict[str, Any]:
    """What a run notes of itself when it begins: how it is made, its seed, when, and the load."""
    load = round(os.getloadavg()[0], 2)
    seed = random.SystemRandom().randrange(2**32)
    return {"seed": seed, **how, "load_average": load, "started": moment()}


def moment() -> str:
    """Date and time as runs note them."""
    return time.strftime("%Y-%m-%d %H:%M")


def file_system(path: str | os.PathLike[str]) -> str:
    """The type of the file system that holds a path, such as `ext4`; else "unknown"."""
    found = host.mount(Path("/"), os.path.realpath(path))
    return found.kind if found else "unknown"


def memory_status(field: str, pid: int | str = "self") -> int:
    """A memory field of a process's status, such as VmRSS or VmHWM, in bytes."""
    return probes.sizes(f"/proc/{pid}/status")[field]


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
    free, room = probes.sizes("/proc/meminfo")["MemFree"], probes.memory_room()
    most = free if room is None else min(free, room[0])
    command = [sys.executable, "-I", "-S", "-c", _PRIME, str(min(nbytes, int(0.4 * most)))]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def prepare(extents: Sequence[ByteRange], nbytes: int, *, cold: bool, primed: bool = True) -> None:
    """Empties the page cache of the extents or fills it, and has memory for a load ready."""
    fill_or_drop(extents, cold=cold)
    if primed:
        prime((256 << 20) + nbytes * 3 // 2)
        fill_or_drop(extents, cold=cold)  # Nothing to do, unless memory ran short meanwhile.
