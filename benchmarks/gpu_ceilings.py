"""What no loader can beat: copies of page-locked memory to the device, and reads into such memory.

Slots are used again and again, and are there before the clock starts: nothing is kept. Beside them
copies from page-locked maps of the page cache, which have no slots, and copies on the device.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_memory import HOST, MIB
from benchmarks.tasks import Found, Job, Task

PEAK, DEVICE_COPY = "peak", "device-copy"
_KINDS = (PEAK, DEVICE_COPY, "cached", "direct", "maps")
_READ_ONLY = 8
"""CUDA's flag for host memory that it may not write."""
_BLOCK = 64 * MIB
_ALIGN = 4096


def cached(threads: int) -> str:
    """The name of reads through the page cache."""
    return f"cached:{threads}:16"


def direct(threads: int, mib: int) -> str:
    """The name of reads past the page cache."""
    return f"direct:{threads}:{mib}"


def maps(threads: int, mib: int) -> str:
    """The name of copies from maps of the page cache, page-locked window by window."""
    return f"maps:{threads}:{mib}"


def is_ceiling(name: str) -> bool:
    """Whether a name is that of a ceiling."""
    return name.partition(":")[0] in _KINDS


def label(name: str) -> str:
    """What a ceiling is called."""
    if name == PEAK:
        return "peak: copies of page-locked memory to the device"
    if name == DEVICE_COPY:
        return "a raw copy on the device"
    kind, threads, mib = name.split(":")
    many = f"{threads} {'threads' if int(threads) > 1 else 'thread'}"
    if kind == "maps":
        return f"page-locked maps of the page cache, {many}, windows of {mib} MiB"
    how = {"cached": "preadv through the page cache", "direct": "O_DIRECT"}[kind]
    return f"{how}, {many}, {mib} MiB, page-locked slots"


def _array(nbytes: int, device: str) -> Any:
    """Memory of the device."""
    if device == HOST:
        return np.ones(nbytes, np.uint8)
    return gpu_memory.cupy().zeros(nbytes, np.uint8)  # Other values take a kernel.


class _Peak:
    """Copies as many bytes as the checkpoint has from one page-locked block."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._source: Any = None
        self._target: Any = None

    def _make(self) -> None:
        self._source = gpu_memory.host_array(_BLOCK, self._device)
        self._target = _array(_BLOCK, self._device)
        if self._device != HOST:
            self._stream = gpu_memory.cupy().cuda.Stream(non_blocking=True)

    def run(self, job: Job) -> None:
        """Copies."""
        if self._source is None:
            self._make()
        for at in range(0, job["nbytes"], _BLOCK):
            self._copy(min(_BLOCK, job["nbytes"] - at))
        if self._device != HOST:
            self._stream.synchronize()

    def _copy(self, nbytes: int) -> None:
        if self._device == HOST:
            self._target[:nbytes] = self._source[:nbytes]
            return
        target, source = self._target.data.ptr, self._source.ctypes.data
        runtime = gpu_memory.cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, 1, self._stream.ptr)


class _DeviceCopy:
    """Copies as many bytes as the checkpoint has from one place of the device to another."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._arrays: Any = None

    def prepare(self, job: Job) -> None:
        """Both places."""
        self._arrays = [_array(job["nbytes"], self._device) for _ in range(2)]

    def run(self, job: Job) -> None:
        """Copies."""
        if self._arrays is None:  # The first, tiny load.
            return
        target, source = self._arrays
        if self._device == HOST:
            target[:] = source
            return
        cuda = gpu_memory.cupy().cuda
        cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, job["nbytes"], 3, 0)
        cuda.Device(0).synchronize()


_Piece = tuple[str, int, int]
"""A file, where a piece of it starts, and its bytes."""


def _drain(job: Job, block: int, threads: int, fill: Callable[[int, deque[_Piece]], None]) -> None:
    """Has threads work on all pieces of the files; each is given its number and what is left."""
    work = deque(
        (path, at, min(block, stop - at))
        for path, start, stop in job["extents"]
        for at in range(start // _ALIGN * _ALIGN, stop, block)
    )
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(fill, number, work) for number in range(threads)]:
            done.result()


class _Reading:
    """Reads all files, each thread into a slot of its own."""

    def __init__(self, device: str, threads: int, block: int, *, direct: bool) -> None:
        self._device, self._threads, self._block = device, threads, block
        self._flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        self._slots: list[memoryview] = []

    def run(self, job: Job) -> None:
        """Reads."""
        if not self._slots:
            block, device = self._block, self._device
            made = [gpu_memory.host_array(block, device) for _ in range(self._threads)]
            self._slots = [each.data for each in made]
        fds = {path: os.open(path, self._flags) for path, _, _ in job["extents"]}
        try:
            _drain(job, self._block, self._threads, partial(self._read, fds))
        finally:
            for fd in fds.values():
                os.close(fd)

    def _read(self, fds: dict[str, int], number: int, work: deque[_Piece]) -> None:
        slot = self._slots[number]
        while True:
            try:
                path, at, wanted = work.popleft()
            except IndexError:
                return
            # A direct read takes whole sectors: the last one asks for more than the file has.
            asked = -(-wanted // _ALIGN) * _ALIGN
            got = 0
            while got < wanted:
                done = os.preadv(fds[path], [slot[got:asked]], at + got)
                if done == 0:
                    raise OSError("the file ended early")
                got += done


class _Maps:
    """Copies all files from maps of them, each thread page-locking a window while one is copied."""

    def __init__(self, device: str, threads: int, window: int) -> None:
        self._device, self._threads, self._window = device, threads, window
        self._targets: list[Any] = []

    def run(self, job: Job) -> None:
        """Maps and copies."""
        if not self._targets:
            self._targets = [_array(self._window, self._device) for _ in range(self._threads)]
        held: dict[str, np.ndarray] = {}
        for path, _, _ in job["extents"]:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            held[path] = np.frombuffer(mapped, np.uint8)
        _drain(job, self._window, self._threads, partial(self._copy, held))

    def _copy(self, held: dict[str, np.ndarray], number: int, work: deque[_Piece]) -> None:
        target = self._targets[number]
        if self._device == HOST:
            while work:
                with suppress(IndexError):
                    path, at, nbytes = work.popleft()
                    target[:nbytes] = held[path][at : at + nbytes]
            return
        cuda = gpu_memory.cupy().cuda
        cuda.Device(0).use()
        stream = cuda.Stream(non_blocking=True)
        locked = 0
        while work:
            with suppress(IndexError):
                path, at, nbytes = work.popleft()
                place = held[path].ctypes.data + at
                cuda.runtime.hostRegister(place, nbytes, _READ_ONLY)
                stream.synchronize()  # The window before.
                if locked:
                    cuda.runtime.hostUnregister(locked)
                cuda.runtime.memcpyAsync(target.data.ptr, place, nbytes, 1, stream.ptr)
                locked = place
        stream.synchronize()
        if locked:
            cuda.runtime.hostUnregister(locked)


@cache
def find(name: str, device: str) -> Task:
    """The task of a ceiling; its slots stay page-locked for as long as the process lives."""
    if name == DEVICE_COPY:
        copy = _DeviceCopy(device)
        return Task(copy.run, lambda result: Found(result, []), copy.prepare)
    made: _Peak | _Reading | _Maps
    if name == PEAK:
        made = _Peak(device)
    else:
        kind, threads, mib = name.split(":")
        many, nbytes = int(threads), int(mib) * MIB
        if kind == "maps":
            made = _Maps(device, many, nbytes)
        else:
            made = _Reading(device, many, nbytes, direct=kind == "direct")
    return Task(made.run, lambda result: Found(result, []))
