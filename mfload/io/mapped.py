"""Private maps of files: nothing is copied, and nothing written reaches the file.

A file cut short after it was mapped kills the process that touches the missing part. Bringing the
pages in during the load reports it as an error; later it is a risk of this engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import buffers
from mfload.sources.base import Source, shrunk

_PART = 64 << 20
_WILLNEED = 3  # Of `madvise`; the module `mmap` has it on some systems.


class _FileMap:
    """Owner of a private map of a file. NumPy keeps it alive as the base of the arrays over it.

    It holds no descriptor, as Python's maps do before 3.13: a thousand shards would exceed the
    usual limit of them.
    """

    __slots__ = ("__array_interface__", "_unmap")

    def __init__(self, libc: Any, fd: int, begin: int, nbytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = libc.mmap(None, nbytes, access, mmap.MAP_PRIVATE, fd, begin)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._unmap = functools.partial(libc.munmap, address, nbytes)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap()


def map_file(
    source: Source,
    ranges: list[tuple[int, int]],
    begin: int = 0,
    nbytes: int | None = None,
    *,
    cold: bool = True,
) -> Any:
    """A writable uint8 array over a private map of a file, with ranges of it brought in.

    `ranges` are (first byte, length) of what will be used. With `begin`, which is a multiple of
    `mmap.ALLOCATIONGRANULARITY`, and `nbytes` so much of the file is mapped; `ranges` count from
    there. Unless it is `cold`, the page cache holds most of it. Raises SourceChangedError if the
    file is shorter than its header said, ReadError if the device failed, and MemoryLimitError if
    the system has no room for the map.
    """
    length = source.size if nbytes is None else nbytes
    with source.open() as opened:
        if (size := os.fstat(opened.fd).st_size) < begin + length:
            raise shrunk(source.name, begin + length, size)
        try:
            array = np.asarray(_FileMap(buffers.libc(), opened.fd, begin, length))
        except (OSError, ValueError) as error:
            raise errors.MemoryLimitError(
                "the file could not be mapped", file=source.name, found=str(error)
            ) from error
    address = array.ctypes.data
    for start, size in ranges:
        bring_in(address, start, size, source, cold=cold)
    return array


def take_rows(source: Source, starts: Any, rows: Any) -> bool:
    """Copies rows of a file out of the page cache, many with one call.

    `starts` are their offsets, and `rows` a C-contiguous uint8[rows, bytes]. False if that can't be
    had, or if bytes are missing, which a read explains. The kernel copies out of a map of the file:
    a page that the file no longer has is an error of the call, where a load from it would kill the
    process.
    """
    copy, nbytes, first = buffers.copier(), rows.shape[1], int(starts.min())
    try:
        file, at = map_range(source, first, int(starts.max()) + nbytes - first, cold=False)
    except errors.MfloadError:  # No room for a map, or the file is shorter: the read says so.
        return False
    places = file.ctypes.data + at - first + starts
    for n in range(0, len(starts), buffers.IOV_MAX):
        ranges = np.full((len(places[n : n + buffers.IOV_MAX]), 2), nbytes, np.uintp)
        ranges[:, 0] = places[n : n + buffers.IOV_MAX]
        if not copy(rows.ctypes.data + n * nbytes, ranges):
            return False
    return True


MapRange = Callable[[Source, int, int], tuple[Any, int]]
"""Maps a range (first byte, length) of a file, and says where in the memory it begins."""


def map_range(source: Source, offset: int, nbytes: int, *, cold: bool = True) -> tuple[Any, int]:
    """Maps the pages of a range for one request alone (see `map_file`)."""
    at = offset % mmap.ALLOCATIONGRANULARITY
    return map_file(source, [(at, nbytes)], offset - at, at + nbytes, cold=cold), at


def shared_maps() -> MapRange:
    """What maps ranges for many requests: each file once, and its memory refuses writing."""

    @functools.cache
    def whole(source: Source) -> tuple[Any, int]:
        memory = map_file(source, [])
        memory.flags.writeable = False
        return memory, memory.ctypes.data

    def shared(source: Source, offset: int, nbytes: int) -> tuple[Any, int]:
        memory, address = whole(source)
        bring_in(address, offset, nbytes, source)
        return memory, offset

    return shared


def bring_in(address: int, start: int, length: int, source: Source, *, cold: bool = True) -> None:
    """Brings in pages of a map at an address; SourceChangedError if the file lacks them."""
    begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + length
    # In parts, so that Ctrl-C is heard between them. Of a cold file the next one is read meanwhile,
    # in larger blocks than for pages that are waited for: three times as fast from a slow disk.
    for part in range(begin, end, _PART):
        if cold:
            with contextlib.suppress(OSError):
                buffers.madvise(address + part, min(2 * _PART, end - part), _WILLNEED)
        _populate(address + part, min(_PART, end - part), source)


def _populate(address: int, nbytes: int, source: Source) -> None:
    try:
        buffers.madvise(address, nbytes, buffers.POPULATE_READ)
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.EIO):
            # EFAULT: touching the page would kill the process. The file was cut short, or
            # the disk failed.
            source.check()
            failed = OSError(errno.EIO, os.strerror(errno.EIO))
            raise errors.from_os(failed, source.name, "read") from error
        # Elsewhere pages come when they are touched.
