"""A framework's pool on host memory, with late kernels.

It does what the pools of frameworks do: memory that is given back goes to the next array of the
same stream at once, whatever still works on it there. New memory is memory of that kind, too: a
kernel that was started before still writes to it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from devices.queues import Queue, Queues, Span


class Pool:
    """Memory by streams, each of which has a queue of kernels that run when they are waited for."""

    def __init__(self) -> None:
        self.queues = Queues("lazy")
        self.default = self.queues.new()
        self.taken = 0
        self.captures: Queue | None = None
        """The one on which a graph is captured."""
        self.implicit = False
        """Whether one is captured on a stream that the default stream would wait for."""
        self.limit = 1 << 30
        """Bytes that it has, by those that were ever asked for."""
        self._free: dict[tuple[int, int], list[Any]] = {}
        self._here = threading.local()

    @property
    def stream(self) -> Queue:
        """The current one of this thread."""
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def on(self, stream: Queue) -> Generator[None]:
        """Makes a stream the current one."""
        before, self._here.stream = self.stream, stream
        try:
            yield
        finally:
            self._here.stream = before

    def take(self, nbytes: int) -> Any:
        """Memory for an array of this stream, which comes back when the last array over it goes."""
        stream = self.stream
        key = id(stream), nbytes
        self.taken += nbytes
        if self.taken > self.limit:
            raise MemoryError(f"out of memory allocating {nbytes} bytes")
        if left := self._free.get(key):
            held = left.pop()
        else:
            held = np.full(max(nbytes, 1) + 512, 0xA5, np.uint8)
            held = held[-held.ctypes.data % 512 :][: max(nbytes, 1)]
            whole = held
            self.kernel(held, lambda: whole.fill(0xEE))
        given = held.view()
        owner = Owner(given)
        weakref.finalize(owner, self._free.setdefault(key, []).append, held)
        return owner

    def kernel(self, memory: Any, run: Callable[[], Any]) -> None:
        """Starts work on memory on this thread's stream."""
        self.stream.give(run, [Span(memory.ctypes.data, memory.nbytes)])

    def finish(self) -> None:
        """Has all that was started run."""
        for queue in list(self.queues.all):
            queue.synchronize()


class Owner:
    """What arrays over some memory keep alive."""

    def __init__(self, held: Any) -> None:
        self.__array_interface__ = held.__array_interface__


def bytes_at(address: int, nbytes: int) -> Any:
    """The bytes there, which are not kept."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
