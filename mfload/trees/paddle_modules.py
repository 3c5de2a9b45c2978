"""Layers of Paddle: parameters and persistable buffers by the names of `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base, paddle_adapter, private_api
from mfload.trees.modules import New, WholeModule, tied, unfit
from mfload.trees.recipe import Leaf


class PaddleModule(WholeModule):
    """A `paddle.nn.Layer`, taken apart (see `modules.Module`)."""

    sharded_by = "a layer that each process holds whole"

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        own = set(map(id, (*layer.parameters(), *layer.buffers())))
        state: dict[str, Any] = layer.state_dict()
        found = tied(state, _key)
        self.tensors = [tensor for _, tensor in found]
        leaves = [_leaf(names, tensor, own) for names, tensor in found]
        saved = set(map(id, state.values()))
        leaves += [
            unfit((name,), "a buffer that the layer does not save (persistable=False)", True)
            for name, buffer in layer.named_buffers()
            if id(buffer) not in saved
        ]
        self.leaves: Sequence[Leaf] = leaves
        # Where Paddle initialises parameters.
        self._adapter = paddle_adapter.make(None if any(x.abstract for x in leaves) else "cpu")
        self._new: dict[int, Any] = {}

    def memory(self, number: int) -> Any:
        """Of a contiguous tensor in host memory."""
        tensor = self.tensors[number]
        if not tensor.place.is_cpu_place() or not tensor.is_contiguous():
            return None
        nbytes = tensor.element_size() * math.prod(tensor.shape)
        return base.memory_at(tensor, tensor.data_ptr() if nbytes else 0, nbytes)

    def adapter(self) -> base.Adapter:
        """Makes the memory of parameters from `paddle.LazyGuard`."""
        return self._adapter

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Memory of Paddle's own."""
        ((self._new[number], _),) = self._adapter.empty([(base.NAMES[dtype.name], shape)])
        return self._new[number]

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        """Copies on the host by NumPy, elsewhere by Paddle."""
        target = self._new.get(number)
        if target is None:
            target = self.tensors[number]
            private_api.paddle_written(target)
        part = tuple(slice(at, at + n) for at, n in zip(start, array.shape, strict=True)) or ...
        if target.place.is_cpu_place():
            units = base.host_units(target, target.strides, target.element_size())
            units[part] = array.view(units.dtype)
            return
        row, raw = base.ROWS[array.dtype.name], np.ascontiguousarray(array)
        view = View("", row, array.shape, raw.reshape(-1).view(np.uint8), 0)
        with paddle.no_grad():
            target[part] = paddle_adapter.make(str(target.place)).wrap([view])[0]

    def install(self, made: Mapping[int, New], written: Iterable[int]) -> None:
        """Gives parameters their memory; autograd refuses what it kept of others from before."""
        for number, new in made.items():
            private_api.paddle_give(new.array, self.tensors[number])
        for number in written:
            private_api.paddle_written(self.tensors[number])

    def bare(self) -> list[str]:
        """Names of what is not initialised."""
        every = (*self._layer.named_parameters(), *self._layer.named_buffers())
        return [name for name, tensor in every if not _initialised(tensor)]


make = PaddleModule


def _leaf(names: Sequence[str], tensor: Any, own: set[int]) -> Leaf:
    if not isinstance(tensor, paddle.Tensor) or id(tensor) not in own:
        return unfit(names, "what the layer makes when it is saved", True)
    kind = str(tensor.dtype).removeprefix("paddle.")
    if tensor.is_dist():
        return unfit(names, "a distributed tensor; load before paddle.distributed shards the layer")
    if tensor.is_sparse() or tensor.is_selected_rows() or kind not in base.ROWS:
        return unfit(names, f"a sparse tensor or one of {kind}")
    abstract, shape = not _initialised(tensor), tuple(tensor.shape)
    pairs = zip(shape, () if abstract else tensor.strides, strict=not abstract)
    if any(size > 1 and not step for size, step in pairs):
        return unfit(names, "an expanded tensor, of which several items share their memory")
    return Leaf(tuple(names), shape, base.ROWS[kind], tensor, abstract=abstract)


def _initialised(tensor: Any) -> bool:
    try:
        return 0 in tensor.shape or bool(tensor.data_ptr())
    except RuntimeError:
        return False


def _key(tensor: Any) -> Any:
    """What tensors have in common that are one: the object, or all of their memory."""
    plain = isinstance(tensor, paddle.Tensor) and tensor.is_dense() and not tensor.is_dist()
    if not plain or 0 in tensor.shape or not _initialised(tensor):
        return id(tensor)
    where = str(tensor.place), tensor.data_ptr(), tensor.dtype
    return *where, tuple(tensor.shape), tuple(tensor.strides)
