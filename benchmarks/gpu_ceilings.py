"""What no loader can beat: copies of page-locked memory to the device, and reads into such memory.

Slots are used again and again, and are there before the clock starts: nothing is kept.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_memory import HOST, MIB
from benchmarks.tasks import Found, Job, Task

PEAK = "peak"
_BLOCK = 64 * MIB
_ALIGN = 4096


def cached(threads: int) -> str:
    """The name of reads through the page cache."""
    return f"cached:{threads}:16"


def direct(threads: int, mib: int) -> str:
    """The name of reads past the page cache."""
    return f"direct:{threads}:{mib}"


def is_ceiling(name: str) -> bool:
    """Whether a name is that of a ceiling."""
    return name.partition(":")[0] in (PEAK, "cached", "direct")


def label(name: str) -> str:
    """What a ceiling is called."""
    if name == PEAK:
        return "peak: copies of page-locked memory to the device"
    kind, threads, mib = name.split(":")
    how = {"cached": "preadv from the page cache", "direct": "O_DIRECT"}[kind]
    many = "threads" if int(threads) > 1 else "thread"
    return f"{how}, {threads} {many}, {mib} MiB, page-locked slots"


class _Peak:
    """Copies as many bytes as the checkpoint has from one page-locked block."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._source: Any = None

    def _make(self) -> None:
        self._source = gpu_memory.host_array(_BLOCK, self._device)
        if self._device == HOST:
            self._target: Any = np.ones(_BLOCK, np.uint8)
            return
        cp = gpu_memory.cupy()
        self._target = cp.zeros(_BLOCK, cp.uint8)
        self._stream = cp.cuda.Stream(non_blocking=True)

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
        work = deque(
            (fds[path], at, min(self._block, stop - at))
            for path, start, stop in job["extents"]
            for at in range(start // _ALIGN * _ALIGN, stop, self._block)
        )
        try:
            with ThreadPoolExecutor(self._threads) as pool:
                for done in [pool.submit(self._drain, work, slot) for slot in self._slots]:
                    done.result()
        finally:
            for fd in fds.values():
                os.close(fd)

    def _drain(self, work: deque[tuple[int, int, int]], slot: memoryview) -> None:
        while True:
            try:
                fd, at, wanted = work.popleft()
            except IndexError:
                return
            # A direct read takes whole sectors: the last one asks for more than the file has.
            asked = -(-wanted // _ALIGN) * _ALIGN
            got = 0
            while got < wanted:
                done = os.preadv(fd, [slot[got:asked]], at + got)
                if done == 0:
                    raise OSError("the file ended early")
                got += done


def find(name: str, device: str) -> Task:
    """The task of a ceiling."""
    if name == PEAK:
        made: _Peak | _Reading = _Peak(device)
    else:
        kind, threads, mib = name.split(":")
        made = _Reading(device, int(threads), int(mib) * MIB, direct=kind == "direct")
    return Task(made.run, lambda result: Found(result, []))
