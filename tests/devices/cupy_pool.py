"""CuPy's arrays on a `Pool`, as far as the adapter uses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from devices.pool import Owner, Pool, bytes_at
from devices.queues import Queue


class Array(np.ndarray):
    """CuPy's, with its address where CuPy has it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def package(pool: Pool) -> Any:
    """The package CuPy."""

    def empty(shape: Any, dtype: Any) -> Any:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        held = np.asarray(pool.take(count))
        return held[:count].view(dtype).reshape(shape).view(Array)

    def asarray(host: Any, blocking: bool = False) -> Any:
        made, copied = empty(host.shape, host.dtype), host.copy()
        pool.kernel(made, lambda: made.__setitem__(..., copied))
        if blocking:
            pool.stream.synchronize()
        return made

    def over(shape: Any, dtype: Any, pointer: Any) -> Any:
        (address, nbytes, owner, device), at = pointer
        assert device == 0
        place = Owner(bytes_at(address, nbytes))
        place.owner = owner  # type: ignore[attr-defined]
        whole = np.asarray(place)
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return whole[at : at + count].view(dtype).reshape(shape).view(Array)

    free = SimpleNamespace(free_bytes=lambda: 0)
    return SimpleNamespace(
        __version__="14.2.0",
        empty=empty,
        asarray=asarray,
        ndarray=over,
        moveaxis=np.moveaxis,
        get_default_memory_pool=lambda: free,
        cuda=SimpleNamespace(
            UnownedMemory=lambda *args: args,
            MemoryPointer=lambda *args: args,
            get_current_stream=lambda: _Stream(pool, pool.stream),
        ),
    )


class _Stream:
    def __init__(self, pool: Pool, queue: Queue) -> None:
        self._pool, self._queue = pool, queue
        self._entered: list[Any] = []

    def is_capturing(self) -> bool:
        if self._pool.implicit and self._queue is self._pool.default:
            raise RuntimeError("cudaErrorStreamCaptureImplicit")
        return self._queue is self._pool.captures

    def synchronize(self) -> None:
        assert not self.is_capturing()
        self._queue.synchronize()

    def __enter__(self) -> None:
        self._entered.append(self._pool.on(self._queue))
        self._entered[-1].__enter__()

    def __exit__(self, *args: Any) -> None:
        self._entered.pop().__exit__(*args)
