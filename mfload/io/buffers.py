"""Memory that mfload owns and counts.

Buffers are anonymous maps on 2 MiB boundaries with huge pages asked for: a read into fresh 4 KiB
pages takes several times as long in page faults as in the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from _thread import RLock  # That of `threading`, which small loads do not import.
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import errors
from mfload.runtime import in_forks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
# From here on the tail of a map is rounded up to a whole huge page: a few hundred small
# page faults cost more than the memory (at most a sixteenth).
_ROUND_FROM = 32 << 20


class ByteCounter:
    """Bytes live now and at most. Each buffer keeps it, so it outlives the module at exit."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.renew()
        in_forks(self.renew)

    def renew(self) -> None:
        """Makes the lock anew: a fork may have copied it while another thread held it."""
        # Reentrant: the garbage collector may free a buffer in the middle of counting one.
        self._lock = RLock()

    def add(self, nbytes: int) -> None:
        """Counts bytes; negative ones are freed."""
        with self._lock:
            self.live += nbytes
            if nbytes >= 0:
                self.peak = max(self.peak, self.live)

    def set_aside(self, nbytes: int) -> None:
        """Stops counting bytes that stay where they are; negative ones count again, not as new."""
        with self._lock:
            self.live -= nbytes

    def peak_bytes(self, *, reset: bool = False) -> int:
        """The most bytes that were live at once since the last reset."""
        with self._lock:
            peak = self.peak
            if reset:
                self.peak = self.live
            return peak


counter = ByteCounter()
peak_bytes = counter.peak_bytes


class _AnonymousMap:
    """Owner of one anonymous map. NumPy keeps it alive as the base of the arrays over it."""

    __slots__ = ("__array_interface__", "_count", "_held", "_map")

    def __init__(self, nbytes: int) -> None:
        unit = HUGE if nbytes >= _ROUND_FROM else PAGE
        length, lead = max(-(-nbytes // unit) * unit, unit), 0
        if unit == HUGE and 0 < nbytes % HUGE <= PAGE:
            # Weights are often whole huge pages, and a few bytes lead to their place: those go
            # before the first, or they would cost a huge page at the end.
            length, lead = nbytes // HUGE * HUGE + PAGE, PAGE
        # The kernel gives no promise of alignment below some versions: ask for room to cut.
        room = length + HUGE if length >= HUGE else length
        try:
            self._map = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise errors.MemoryLimitError(
                "the system refused memory", expected=errors.amount(nbytes), found=str(error)
            ) from error
        address = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        start = -(address + lead) % HUGE if length >= HUGE else 0
        if length >= HUGE:
            # A kernel without transparent huge pages is slower, not wrong.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE, start, room - start)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address + start, False),
        }
        self._held = nbytes
        self._count = counter.add
        self._count(nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_count"):
            self._count(-self._held)


def allocate(nbytes: int) -> Bytes:
    """A zeroed uint8 array on a page boundary, in huge pages from 2 MiB up.

    The memory goes when its last view does. Raises MemoryLimitError if the system has no such
    memory.
    """
    return np.asarray(_AnonymousMap(nbytes))


def small(nbytes: int, alignment: int | None) -> Bytes:
    """Uninitialised memory of NumPy's, which is not counted: for less than what a map costs."""
    if alignment is None:
        return np.empty(nbytes, np.uint8)
    memory = np.empty(nbytes + alignment, np.uint8)
    # NumPy's own ways to the address take four times as long.
    first = ctypes.c_char.from_buffer(memory)  # pyright: ignore[reportArgumentType]
    start = -ctypes.addressof(first) % alignment
    return memory[start : start + nbytes]


def is_own(memory: Any) -> bool:
    """Whether memory is a whole buffer of `allocate`, with its pages to itself."""
    return isinstance(getattr(memory, "base", None), _AnonymousMap)


def live_bytes() -> int:
    """Bytes in buffers that something still refers to."""
    return counter.live


class WorkerSlot:
    """Memory of one thread, made when first asked for, and reused."""

    _held: Bytes | None = None

    def bytes(self, nbytes: int) -> Bytes:
        """At least `nbytes` on a page boundary; what was there before is overwritten."""
        if self._held is None or self._held.size < nbytes:
            self._held = None
            self._held = allocate(nbytes)
            never_forked(self._held)
        return self._held


IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))
"""Buffers that one vectored call takes: 1024 on Linux; POSIX promises 16."""

POPULATE_READ = 22  # Linux 5.14 and newer.
_POPULATE_WRITE = 23
_DONT_FORK = 10
_DO_FORK = 11
_HUGE_PAGES = 14
# Each range that is asked for may cost two of the 65,530 maps that Linux gives a process. Whether
# there is room for more is looked at after so many ranges.
_MOST_ASKED, _MOST_MAPS = 8192, 32768


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library."""
    found, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t
    found.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    found.mincore.argtypes = [ctypes.c_void_p, size, ctypes.c_char_p]
    found.mmap.argtypes = [ctypes.c_void_p, size, *[ctypes.c_int] * 3, ctypes.c_long]
    found.mmap.restype, found.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, size]
    return found


def madvise(address: int, nbytes: int, advice: int) -> None:
    """`madvise(2)` of a range that begins on a page; raises OSError if the kernel refuses.

    Python's own call keeps the interpreter lock, so reading a cold file into a map would stop every
    thread.
    """
    if libc().madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def copier() -> Callable[[int, Any], bool]:
    """What has the kernel copy ranges of this process's memory to an address, one after the other.

    Called with the address and an array of uintp[ranges, (address, bytes)], at most `IOV_MAX`;
    whether all were copied: a page that can't be had is no signal.
    """
    call: Any = libc().process_vm_readv
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    call.restype = ctypes.c_ssize_t

    def copy(target: int, ranges: Any) -> bool:
        nbytes = int(ranges[:, 1].sum())
        into = np.array([[target, nbytes]], np.uintp)
        addresses = into.ctypes.data, 1, ranges.ctypes.data, len(ranges)
        return call(os.getpid(), *addresses, 0) == nbytes

    return copy


def populate(memory: Any) -> None:
    """Has the kernel make the pages of a uint8 array at once: a fault for each takes as long.

    Memory whose last page is there is left alone: most likely it was used before, as a heap's is.
    Of shared memory, a page is there once any process made it.
    """
    if memory.nbytes < mmap.PAGESIZE:
        return
    address = memory.ctypes.data
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        there = ctypes.create_string_buffer(1)
        libc().mincore(start + whole - mmap.PAGESIZE, mmap.PAGESIZE, there)
        if there.raw == b"\0":
            with contextlib.suppress(OSError):  # Older kernels fault.
                madvise(start, whole, _POPULATE_WRITE)


class _Asked:
    """The ranges that were asked for since the process's maps were counted."""

    ranges, room = set[tuple[int, int]](), True

    @classmethod
    def may(cls, asked: tuple[int, int]) -> bool:
        if asked not in cls.ranges and len(cls.ranges) >= _MOST_ASKED:
            cls.ranges.clear()
            with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
                cls.room = sum(1 for _ in maps) < _MOST_MAPS
        cls.ranges.add(asked)
        return cls.room


def ask_huge(address: int, nbytes: int) -> None:
    """Asks for huge pages within memory that was lent: they are made in less time.

    The pages that are there already, and those that it shares with its neighbours, stay small.
    """
    start, stop = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    asked = start, stop - start
    if start < stop and _Asked.may(asked):
        with contextlib.suppress(OSError):  # As of `_AnonymousMap`.
            madvise(*asked, _HUGE_PAGES)


def never_forked(array: Any) -> None:
    """Keeps memory, which has its pages to itself, out of forked children as long as it lives."""
    # Systems without the call have nothing to forbid.
    with contextlib.suppress(OSError):
        madvise(array.ctypes.data, array.nbytes, _DONT_FORK)


class ForkProtection:
    """Keeps buffers that a disk writes to out of children forked meanwhile.

    open(2): O_DIRECT into private memory while the process forks can lose what the disk wrote, on
    kernels that share the page with the child before it arrives. Every reader enters the context
    while it reads; the protection ends when the last one has left it, so one that hangs in the
    kernel keeps it. Each buffer has its pages to itself, and is not kept: with its pages the
    protection goes.
    """

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self._arrays = [*map(weakref.ref, arrays)]
        self._readers = 0
        self._lock = RLock()

    def __enter__(self) -> None:
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                for array in self._live():
                    never_forked(array)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                for array in self._live():
                    with contextlib.suppress(OSError):
                        madvise(array.ctypes.data, array.nbytes, _DO_FORK)

    def _live(self) -> list[Any]:
        return [array for each in self._arrays if (array := each()) is not None]
