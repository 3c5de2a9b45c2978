"""What the page cache holds of stretches of files: ask, fill, drop. Linux only.

Nothing needs root, and no other file's pages are touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mfload.bench.extents import Extent, paths_of
from mfload.io import probes

_BLOCK = 16 << 20
_TRIES = 4
_KEPT = 0.001
"""The share that may stay cached of what counts as dropped: the kernel keeps a page in hand."""
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class UnfitError(Exception):
    """The page cache can't be brought into the state that a measurement asks for."""


def cached_share(extents: Sequence[Extent]) -> float | None:
    """The share of the stretches' pages that the page cache holds.

    Returns:
        A share from 0 to 1, or None where neither `cachestat` (Linux 6.5) nor `mincore` says:
        both keep quiet about files that this user could not write.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    pages = cached = 0.0
    for path, start, stop in extents:
        fd = os.open(path, os.O_RDONLY)
        try:
            share = probes.cached_share(fd, stop - start, start)
            if share is None:
                share = _mincore(fd, start, stop)
        finally:
            os.close(fd)
        if share is None:
            return None
        count = -(-stop // page) - start // page
        pages += count
        cached += share * count
    return cached / max(1.0, pages)


def _mincore(fd: int, start: int, stop: int) -> float | None:
    """The same for one stretch by `mincore`, which older kernels have."""
    found = os.fstat(fd)
    owner = os.geteuid() in (0, found.st_uid)
    if not owner and not _writable(found):
        return None  # The kernel would call every page resident.
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    if stop <= first:
        return None
    with mmap.mmap(fd, stop - first, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first) as m:
        flags = np.zeros(-(-(stop - first) // mmap.PAGESIZE), np.uint8)
        window = np.frombuffer(m, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(window.ctypes.data), ctypes.c_size_t(stop - first)
        failed = libc.mincore(address, length, ctypes.c_void_p(flags.ctypes.data))
        del window  # The map can't be closed under it.
    return None if failed else float((flags & 1).mean())


def _writable(found: os.stat_result) -> bool:
    if found.st_gid in (os.getegid(), *os.getgroups()) and found.st_mode & stat.S_IWGRP:
        return True
    return bool(found.st_mode & stat.S_IWOTH)


def warm(extents: Sequence[Extent]) -> float | None:
    """Read the stretches until the page cache holds all of them.

    Returns:
        The share it then holds, as `cached_share` gives it.

    Raises:
        UnfitError: The cache does not keep them.
    """
    share = cached_share(extents)
    if share == 1:
        return share
    block = memoryview(bytearray(_BLOCK))
    for _ in range(3):
        for extent in extents:
            _read(extent, block)
        share = cached_share(extents)
        if share is None or share == 1:
            return share
    raise UnfitError(f"the page cache keeps only {share:.1%} of it")


def _read(extent: Extent, block: memoryview) -> None:
    fd = os.open(extent.path, os.O_RDONLY)
    try:
        at = extent.start
        while at < extent.stop:
            got = os.preadv(fd, [block[: min(len(block), extent.stop - at)]], at)
            if not got:
                return
            at += got
    finally:
        os.close(fd)


def drop(extents: Sequence[Extent]) -> float | None:
    """Make the page cache forget the files of the stretches, whole.

    Returns:
        The share it still holds of the stretches, as `cached_share` gives it.

    Raises:
        UnfitError: The cache keeps more than a thousandth of them.
    """
    share = None
    for attempt in range(_TRIES):
        # A page that some CPU still has in hand is not dropped: a moment later it is.
        time.sleep(0.05 * attempt)
        for path in paths_of(extents):
            _forget(path)
        share = cached_share(extents)
        if not share:
            return share
    if share and share > _KEPT:
        raise UnfitError(
            f"the page cache still holds {share:.1%} of it: another process maps the files, or "
            "their file system keeps them"
        )
    return share


def _forget(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # pages not yet on disk are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise UnfitError(f"the system refuses to drop its pages: {error.strerror}") from error
    finally:
        os.close(fd)


def why_not_cold(extents: Sequence[Extent]) -> str | None:
    """Why these stretches can't be measured cold, None where they can.

    Tries it: afterwards the page cache has forgotten them.
    """
    for path in paths_of(extents):
        kind = file_system(path)
        if kind in MEMORY_FILE_SYSTEMS:
            return f"{kind} keeps its files in memory"
    try:
        share = drop(extents)
    except UnfitError as error:
        return str(error)
    if share is None:
        return "the kernel does not tell this user what it caches of it"
    return None


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
