"""PyTorch with tensors of "cuda" on pools of host memory, as far as mfload asks for them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from devices.pool import Pool


class Place(NamedTuple):
    """A `torch.device` of a GPU."""

    index: int
    type: str = "cuda"


class Torch:
    """Stands in for the module where a test puts it; what it lacks is PyTorch's own.

    Args:
        pools: One a device.
    """

    class Tensor:
        """A tensor that is there already, over the bytes of an array."""

        layout = torch.strided

        def __init__(self, array: Any, device: Place) -> None:
            self.array, self.device = array, device
            self.nbytes: int = array.nbytes

        def data_ptr(self) -> int:
            return self.array.ctypes.data

        def is_contiguous(self) -> bool:
            return True

        def is_conj(self) -> bool:
            return False

        is_neg = is_conj

    def __init__(self, *pools: Pool) -> None:
        self.cuda = _Cuda(pools)
        self.version = _Version()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: Any, device: Any) -> Any:
        if not isinstance(device, Place):
            return torch.empty(shape, dtype=dtype, device=device)
        like = torch.empty(shape, dtype=dtype, device="meta")
        held = np.asarray(self.cuda.pools[device.index].take(like.nbytes))[: like.nbytes]
        return torch.from_numpy(held).view(dtype).view(like.shape)


class _Version:
    cuda = "13.0"


class _Cuda:
    OutOfMemoryError = MemoryError

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self.pools = pools
        self.capturing: set[int] = set()
        """Devices on whose stream a graph is captured."""
        self._current = 0

    @contextmanager
    def device(self, place: Place) -> Generator[None]:
        before, self._current = self._current, place.index
        yield
        self._current = before

    def current_stream(self, place: Place | None = None) -> Any:
        return _Stream(self.pools[self._current if place is None else place.index])

    def is_current_stream_capturing(self) -> bool:
        return self._current in self.capturing

    def stream(self, stream: Any) -> Any:
        return stream.pool.on(stream.queue)

    def memory_reserved(self, place: Place) -> int:
        return 0

    memory_allocated = memory_reserved


class _Stream:
    def __init__(self, pool: Pool) -> None:
        self.pool, self.queue = pool, pool.stream

    def synchronize(self) -> None:
        self.queue.synchronize()
