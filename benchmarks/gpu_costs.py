"""What steps of a load cost on their own; each is a trial with nobody else at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_given import Given
from benchmarks.gpu_memory import MIB
from benchmarks.memory import fresh_pages

_SIZES = (1, 4, 8, 16, 64, 256, 1024)
"""MiB that are page-locked."""
_SLOTS = (1, 4, 8)
"""MiB that each of several threads page-locks."""
_THREADS = 8
_BUFFERS = (64, 512, 1024)
"""MiB of the device that are allocated."""
_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bytes of a row; as many lie between it and the next."""
_ROWS = 8 * MIB
"""Bytes of all rows."""
_TURNS = 3

Times = dict[str, float]


def _best(turn: Callable[[], Times]) -> Times:
    """Least seconds of each step of several turns."""
    turns = [turn() for _ in range(_TURNS)]
    return {what: min(times[what] for times in turns) for what in turns[0]}


def _speeds(nbytes: int, times: Times) -> str:
    return ", ".join(f"{what} {nbytes / 1e9 / max(s, 1e-9):.2f}" for what, s in times.items())


class _Watch:
    """Notes how long each of several steps takes."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._at = time.perf_counter()

    def note(self, what: str) -> None:
        """Ends a step."""
        now = time.perf_counter()
        self.times[what] = now - self._at
        self._at = time.perf_counter()


def pinned(given: Given) -> str:
    """What page-locking costs: of our own 2 MiB pages, by CUDA's allocator, by several at once."""
    given.need_gpu()
    runtime = _runtime()
    parts = [
        f"{mib} MiB: {_speeds(mib * MIB, _best(lambda mib=mib: _pin(runtime, mib * MIB)))}"
        for mib in _SIZES
    ]
    parts += [
        f"{_THREADS} threads, {mib} MiB each: "
        + _speeds(_THREADS * mib * MIB, _best(lambda mib=mib: _pin_at_once(runtime, mib * MIB)))
        for mib in _SLOTS
    ]
    return f"GB/s, best of {_TURNS}; " + "; ".join(parts)


def _runtime() -> Any:
    cp = gpu_memory.cupy()
    cp.zeros(1, cp.uint8)  # Makes the context.
    return cp.cuda.runtime


def _touched(nbytes: int) -> np.ndarray:
    held, first = fresh_pages(nbytes)
    array = np.frombuffer(held, np.uint8)[first : first + nbytes]
    array[:: gpu_memory.PAGE] = 1
    return array


def _pin(runtime: Any, nbytes: int) -> Times:
    watch = _Watch()
    array = _touched(nbytes)
    watch.note("touch")
    runtime.hostRegister(array.ctypes.data, nbytes, 0)
    watch.note("hostRegister")
    runtime.hostUnregister(array.ctypes.data)
    watch.note("hostUnregister")
    address = runtime.hostAlloc(nbytes, 0)
    watch.note("hostAlloc")
    runtime.freeHost(address)
    watch.note("freeHost")
    return watch.times


def _pin_at_once(runtime: Any, nbytes: int) -> Times:
    """The same by threads that begin together; of all until the last is done."""
    arrays = [_touched(nbytes) for _ in range(_THREADS)]
    places = [array.ctypes.data for array in arrays]
    times: Times = {}

    def all_at_once(what: str, call: Callable[[int], Any], given: Iterable[int]) -> list[Any]:
        begin = threading.Barrier(_THREADS + 1)

        def one(value: int) -> Any:
            begin.wait()
            return call(value)

        with ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(one, value) for value in given]
            begin.wait()
            at = time.perf_counter()
            made = [each.result() for each in running]
            times[what] = time.perf_counter() - at
        return made

    all_at_once("hostRegister", lambda at: runtime.hostRegister(at, nbytes, 0), places)
    all_at_once("hostUnregister", runtime.hostUnregister, places)
    held = all_at_once("hostAlloc", lambda _: runtime.hostAlloc(nbytes, 0), places)
    all_at_once("freeHost", runtime.freeHost, held)
    return times


def allocating(given: Given) -> str:
    """What memory of the device costs, by size."""
    given.need_gpu()
    runtime = _runtime()

    def turn(nbytes: int) -> Times:
        watch = _Watch()
        address = runtime.malloc(nbytes)
        watch.note("cudaMalloc")
        runtime.free(address)
        watch.note("cudaFree")
        return watch.times

    parts: list[str] = []
    for mib in _BUFFERS:
        times = _best(lambda mib=mib: turn(mib * MIB))
        said = ", ".join(f"{what} {seconds * 1e3:.3f}" for what, seconds in times.items())
        parts.append(f"{mib} MiB: {said}")
    return f"milliseconds, best of {_TURNS}; " + "; ".join(parts)


def rows(given: Given) -> str:
    """What rows cost by their width: a 2-D copy, against gathering by one thread and one copy."""
    given.need_gpu()
    runtime, cp = _runtime(), gpu_memory.cupy()
    stream = cp.cuda.Stream(non_blocking=True)
    source = gpu_memory.host_array(2 * _ROWS, given.device)
    source[:] = np.random.default_rng(1).integers(0, 256, source.nbytes, np.uint8)
    spare = gpu_memory.host_array(_ROWS, given.device)
    target = cp.zeros(_ROWS, cp.uint8)
    place = target.data.ptr

    def turn(width: int) -> Times:
        wanted = source.reshape(-1, 2 * width)[:, :width]
        count = _ROWS // width
        watch = _Watch()
        runtime.memcpy2DAsync(
            place, width, source.ctypes.data, 2 * width, width, count, 1, stream.ptr
        )
        stream.synchronize()
        watch.note("2-D")
        found = gpu_memory.read(place, _ROWS, given.device)
        runtime.memset(place, 0, _ROWS)
        cp.cuda.Device(0).synchronize()
        watch.note("")
        np.copyto(spare.reshape(count, width), wanted)
        runtime.memcpyAsync(place, spare.ctypes.data, _ROWS, 1, stream.ptr)
        stream.synchronize()
        watch.note("gathered")
        if not found == gpu_memory.read(place, _ROWS, given.device) == wanted.tobytes():
            raise AssertionError(f"rows of {width} bytes: other bits than the source's")
        del watch.times[""]
        return watch.times

    parts = [f"{width} B: {_speeds(_ROWS, _best(lambda w=width: turn(w)))}" for width in _WIDTHS]
    return f"GB/s of {_ROWS // MIB} MiB, every second row, best of {_TURNS}; " + "; ".join(parts)


def names(*, gpu: bool) -> list[str]:
    """The trials of this module, by name; nobody else may be at work."""
    return ["pinned-cost", "allocation-cost", "rows-cost"] if gpu else []
