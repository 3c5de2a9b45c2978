"""Paddle: tensors over mfload's buffers through NumPy, U16 as bytes.

Not through DLPack: Paddle keeps the owners of all its imports in one table, by the address of their
data, and lets an owner go with the table locked. So of two tensors at one address, one was never
given back, and two threads that dropped tensors at once deadlocked.

Paddle takes a NumPy uint16 array for bfloat16, so U16 arrives as bytes. On a GPU there is no way
through NumPy: tensors land in memory that Paddle lends, and in no other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle.utils import dlpack

from mfload.dlpack import View
from mfload.frameworks import base, private_api
from mfload.frameworks.traits import TRAITS
from mfload.planning.request import Owner

if TYPE_CHECKING:
    from mfload.cuda.device import Device

OLDEST = "3.0"

# Paddle takes NumPy's memory of these under another type, and is told the right one afterwards.
_VIEWED = {"uint32": "int32", "uint64": "int64", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class PaddleAdapter(base.Adapter):
    """Tensors at one place (see `base.Adapter`)."""

    name = "paddle"
    alignment = TRAITS["paddle"].alignment
    forms = TRAITS["paddle"].forms(functools.partial(hasattr, paddle))

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(place, device, notes)
        self.on_host = isinstance(place, paddle.CPUPlace)
        self._take = private_api.paddle_constructor() or functools.partial(
            paddle.to_tensor, place=paddle.CPUPlace()
        )

    def owner(self, allocator: str) -> Owner:
        return "framework"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        private_api.dynamic_paddle()  # The mode may have changed since the adapter was made.
        tensors = [self._tensor(view) for view in views]
        return tensors if self.on_host else [x.to(self.place) for x in tensors]

    def _tensor(self, view: View) -> Any:
        kind = self.forms[view.dtype.name].type
        taken = "uint16" if kind == "bfloat16" else _VIEWED.get(kind, kind)
        tensor = self._take(np.ndarray(view.shape, taken, view.memory, view.at))
        return tensor.view(getattr(paddle, kind)) if kind in _VIEWED else tensor

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        private_api.dynamic_paddle()
        # Only the latest versions of Paddle take the place call by call.
        before = paddle.get_device()
        place = self.place if self.devices else paddle.CPUPlace()
        cpu = isinstance(place, paddle.CPUPlace)
        paddle.set_device("cpu" if cpu else f"gpu:{place.get_device_id()}")
        try:
            tensors = [_empty(kind, shape) for kind, shape in wanted]
        finally:
            paddle.set_device(before)
        if not self.on_host:
            # Kernels that were started before may still use memory that Paddle gave away again.
            paddle.device.synchronize(place)
        return [(x, x.data_ptr() if 0 not in x.shape else 0) for x in tensors]

    def pool(self, number: int) -> base.Pool | None:
        if self.on_host:
            return None
        memory = paddle.device.cuda
        kept = memory.memory_reserved(self.place) - memory.memory_allocated(self.place)
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            "delete tensors that are no longer needed, and end other processes on the device",
        )


def _empty(kind: str, shape: tuple[int, ...]) -> Any:
    tensor = paddle.empty(list(shape), dtype=_VIEWED.get(kind, kind))
    return tensor.view(getattr(paddle, kind)) if kind in _VIEWED else tensor


def make(device: object) -> PaddleAdapter:
    """The adapter for a device."""
    base.check_version("paddle", paddle.__version__, OLDEST)
    private_api.dynamic_paddle()
    name = paddle.get_device() if device is None else str(device)
    kind, number = base.split_device(name.removeprefix("Place(").removesuffix(")"))
    if kind == "cpu":
        return PaddleAdapter(paddle.CPUPlace())
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if kind not in ("gpu", "cuda") or number >= gpus:
        raise base.no_device("Paddle", name, paddle.device.get_available_device())
    # ROCm calls its devices so too.
    found = (None, ()) if paddle.is_compiled_with_rocm() else base.find_device(number)
    return PaddleAdapter(paddle.CUDAPlace(number), *found)


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor; one on a device is copied when its turn comes."""
    base.refuse("paddle", _refusal(array), array)
    row = base.row_of("paddle", str(array.dtype).removeprefix("paddle."))
    shape = tuple(array.shape)
    if not array.place.is_cpu_place():
        return base.Exported(row, shape, lambda: _units(array.cpu()))
    units = _units(array)
    return base.Exported(row, shape, lambda: units, base.span_of(units), lambda: units)


def _units(array: Any) -> Any:
    # Paddle's own `numpy()` is a copy. The capsule keeps the memory, and a tensor alone does not:
    # `Layer.to` takes it away.
    held = dlpack.to_dlpack(array)
    return base.host_units(array, array.strides, array.element_size(), held)


def _refusal(array: Any) -> str | None:
    """Why a tensor can't be saved, and what to save instead."""
    if not isinstance(array, paddle.Tensor):
        return "not a tensor with numbers; of a layer, save state_dict(), and in dynamic mode"
    if not paddle.in_dynamic_mode():
        return "its numbers can't be read in static mode; call paddle.disable_static() before"
    if array.is_dist():
        return "one process's part of a tensor; save it replicated, as a local tensor"
    if array.is_sparse():
        return "a sparse tensor; save x.to_dense()"
    if array.is_selected_rows():
        return "rows of a tensor; save a dense one"
    try:
        array.data_ptr()
    except RuntimeError:
        return "the tensor is not initialised"
    return None
