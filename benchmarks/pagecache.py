"""What the page cache holds of a file: ask, fill, drop. Linux only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_CACHESTAT = 451  # the same number on every architecture, as for all calls added since Linux 5.1
_BLOCK = 16 << 20
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Stat(ctypes.Structure):
    _fields_ = [
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    ]


def cached_share(paths: Sequence[str]) -> float | None:
    """The share of the files' pages that the page cache holds.

    Args:
        paths: Files.

    Returns:
        A share from 0 to 1, or None where the kernel lacks `cachestat` (it came with Linux 6.5).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = cached = 0
    for path in paths:
        found = _Stat()
        fd = os.open(path, os.O_RDONLY)
        try:
            failed = libc.syscall(
                _CACHESTAT, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(found), 0
            )
            pages += -(-os.fstat(fd).st_size // os.sysconf("SC_PAGE_SIZE"))
        finally:
            os.close(fd)
        if failed:
            return None
        cached += found.cached
    return cached / max(1, pages)


def warm(paths: Sequence[str]) -> float | None:
    """Read the files until the page cache holds all of them.

    Returns:
        The share it then holds, as `cached_share` gives it.

    Raises:
        RuntimeError: The cache does not keep them.
    """
    share = cached_share(paths)
    if share == 1:
        return share
    block = bytearray(_BLOCK)
    for _ in range(3):
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        share = cached_share(paths)
        if share is None or share == 1:
            return share
    raise RuntimeError(f"the page cache keeps only {share:.1%} of the checkpoint")


def drop(paths: Sequence[str]) -> float | None:
    """Make the page cache forget the files.

    Returns:
        The share it still holds, as `cached_share` gives it.

    Raises:
        RuntimeError: The cache keeps more than a thousandth of them.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages not yet on disk are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = cached_share(paths)
    if share and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        share = cached_share(paths)
    if share and share > 0.001:
        raise RuntimeError(f"the page cache still holds {share:.1%} of the checkpoint")
    return share


def file_system(path: str | os.PathLike[str]) -> str:
    """The type of the file system that holds a path, `ext4` for instance."""
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
