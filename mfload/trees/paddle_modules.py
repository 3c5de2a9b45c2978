"""Layers of Paddle: parameters and persistable buffers by the names of `state_dict`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base, paddle_adapter, private_api
from mfload.trees.landing import Target
from mfload.trees.modules import Module, New, overlapping, tied, unfit
from mfload.trees.recipe import Leaf


class PaddleModule(Module):
    """A `paddle.nn.Layer`, taken apart (see `modules.Module`)."""

    framework = "paddle"
    sharded_by = "a layer that is sharded already, by paddle.distributed.shard_layer"

    def __init__(self, layer: Any) -> None:
        private_api.dynamic_paddle()
        self._layer = layer
        own = set(map(id, (*layer.parameters(), *layer.buffers())))
        state: dict[str, Any] = layer.state_dict()
        found = tied(state, _key).values()
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

    def placed(self, tensor: Any) -> tuple[Any, Sequence[Any]] | None:
        """Those of a distributed tensor."""
        if not isinstance(tensor, paddle.Tensor) or not tensor.is_dist():
            return None
        mesh = tensor.process_mesh
        known = tuple(mesh.process_ids), tuple(mesh.shape), tuple(mesh.dim_names)
        return _mesh(*known), tensor.placements

    def local(self, tensor: Any) -> Any:
        """What this process holds."""
        return private_api.paddle_local(tensor)

    def memory(self, number: int) -> Any:
        """Of a contiguous tensor in host memory."""
        tensor = self.local(self.tensors[number])
        if not tensor.place.is_cpu_place() or not tensor.is_contiguous():
            return None
        nbytes = tensor.element_size() * math.prod(tensor.shape)
        return base.memory_at(tensor, tensor.data_ptr() if nbytes else 0, nbytes)

    def adapter(self) -> base.Adapter:
        """Makes the memory of parameters from `paddle.LazyGuard`."""
        return self._adapter

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Memory of Paddle's own."""
        ((self._new[number], _),) = self._adapter.empty(
            [(self._adapter.forms[dtype.name].type, shape)]
        )
        return self._new[number]

    def target(self, number: int) -> Target | None:
        """Of tensors on the host."""
        tensor = self._new.get(number)
        if tensor is None:
            tensor = self.local(self.tensors[number])
        if not tensor.place.is_cpu_place():
            return None
        return Target(tensor, tensor.data_ptr(), tuple(tensor.strides))

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        """Copies on the host by NumPy, elsewhere by Paddle."""
        target = self._new.get(number)
        if target is None:
            target = self.local(self.tensors[number])
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
            private_api.paddle_give(
                self.assembled(self.leaves[number].shape, new), self.tensors[number]
            )
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
    if tensor.is_sparse() or tensor.is_selected_rows() or kind not in base.ROWS:
        return unfit(names, f"a sparse tensor or one of {kind}")
    abstract, local = not _initialised(tensor), private_api.paddle_local(tensor)
    if not abstract and (why := overlapping(local.shape, local.strides)) is not None:
        return unfit(names, why)
    return Leaf(tuple(names), tuple(tensor.shape), base.ROWS[kind], tensor, abstract=abstract)


@functools.lru_cache(maxsize=64)
def _mesh(ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A mesh of the class that users make: tensors hold one of a class below it."""
    return paddle.distributed.ProcessMesh(np.reshape(ids, shape), list(names))


def _initialised(tensor: Any) -> bool:
    """Whether it has memory, or needs none: Paddle keeps none for an empty part."""
    local = private_api.paddle_local(tensor)
    try:
        return 0 in local.shape or bool(local.data_ptr())
    except RuntimeError:
        return False


def _key(tensor: Any) -> Any:
    """What tensors have in common that are one: the object, or all of their memory."""
    plain = isinstance(tensor, paddle.Tensor) and tensor.is_dense() and not tensor.is_dist()
    if not plain or 0 in tensor.shape or not _initialised(tensor):
        return id(tensor)
    where = str(tensor.place), tensor.data_ptr(), tensor.dtype
    return *where, tuple(tensor.shape), tuple(tensor.strides)
