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
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import buffers
from mfload.sources.base import Source, shrunk

_PART = 64 << 20
_WILLNEED = 3  # Of `madvise`; the module `mmap` has it on some systems.
_F_SETSIG = 10  # Linux's, which `fcntl` does not name.


class _Map:
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
    length, libc = source.size if nbytes is None else nbytes, buffers.libc()
    with source.open() as opened:
        if (size := os.fstat(opened.fd).st_size) < begin + length:
            raise shrunk(source.name, begin + length, size)
        try:
            if libc is None:
                how: Any = {"access": mmap.ACCESS_COPY, "offset": begin}
                array = np.frombuffer(mmap.mmap(opened.fd, length, **how), np.uint8)
            else:
                array = np.asarray(_Map(libc, opened.fd, begin, length))
        except (OSError, ValueError) as error:
            raise errors.MemoryLimitError(
                "the file could not be mapped", file=source.name, found=str(error)
            ) from error
    address = array.ctypes.data
    for start, size in ranges:
        bring_in(address, start, size, source, cold=cold)
    return array


@contextlib.contextmanager
def held_still(fd: int) -> Generator[bool]:
    """Whether an open file can't be cut short meanwhile, so that a map of it is safe to touch.

    A read lease of the kernel's: a process that opens the file for writing, or truncates it, waits
    until the context ends. False if the kernel refuses it: another process has the file open for
    writing already, it belongs to another user, or its file system or this system has no leases.
    """
    own = -1
    try:
        try:
            import fcntl
            from _signal import SIGURG  # That of `signal`, which takes longer to import.

            # A lease belongs to what was opened once, and `fd` may be that of many threads.
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            # The signal of a process that waits: by default it would end this one.
            fcntl.fcntl(own, _F_SETSIG, SIGURG)
            fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except (ImportError, AttributeError, OSError):
            yield False
            return
        try:
            yield True
        finally:  # Also of a child that was forked meanwhile, which has the descriptor.
            fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        if own >= 0:
            os.close(own)


MapRange = Callable[[Source, int, int], tuple[Any, int]]
"""Maps a range (first byte, length) of a file, and says where in the memory it begins."""


def map_range(source: Source, offset: int, nbytes: int, *, cold: bool = True) -> tuple[Any, int]:
    """Maps the pages of a range for one request alone (see `map_file`)."""
    at = offset % mmap.ALLOCATIONGRANULARITY
    return map_file(source, [(at, nbytes)], offset - at, at + nbytes, cold=cold), at


class Window:
    """Maps ranges of a file one after the other; those that lie together share a map.

    Unless it is `cold`, the page cache holds most of the file. To map and unmap each of them
    takes a fifth of the time of a conversion, and threads wait for each other meanwhile. A map has
    `most` bytes, or as many as a range needs.
    """

    def __init__(self, source: Source, most: int, *, cold: bool = True) -> None:
        self._source, self._most, self._cold = source, most, cold
        self._begin, self._memory = 0, np.empty(0, np.uint8)

    def map_range(self, offset: int, nbytes: int) -> tuple[Any, int]:
        """Maps a range, and says where in the memory it begins."""
        at = offset - self._begin
        if at >= 0 and at + nbytes <= self._memory.size:
            bring_in(self._memory.ctypes.data, at, nbytes, self._source, cold=self._cold)
            return self._memory, at
        at = offset % mmap.ALLOCATIONGRANULARITY
        begin = offset - at
        end = max(offset + nbytes, min(begin + self._most, self._source.size))
        how = begin, end - begin
        self._memory = map_file(self._source, [(at, nbytes)], *how, cold=self._cold)
        self._begin = begin
        return self._memory, at


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
