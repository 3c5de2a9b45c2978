"""Paddle: tensors over mfload's buffers through NumPy, U16 as bytes.

Not through DLPack: Paddle keeps the owners of all its imports in one table, by the address of
their data, and lets an owner go with the table locked. So of two tensors at one address, which a
tensor of no size shares with its neighbour, one was never given back; and two threads that
dropped tensors at once waited for ever, one for the table, one for the interpreter.

Paddle calls bfloat16 "uint16" in places and takes a U16 capsule, or a NumPy uint16 array, for
bfloat16 without a word. So U16 arrives as the bytes it is.

On a GPU there is no such way through NumPy. So there tensors land in memory that Paddle lends, and
in no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from mfload import dtypes, errors
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.frameworks import base, private_api
from mfload.planning.requests import Owner

OLDEST = "3.0"

# The NumPy dtype under which Paddle takes the memory of each dtype; "uint16" is bfloat16.
_TAKEN = {
    **{name: kind for name, kind in base.COMMON.items() if name not in ("U16", "U32", "U64")},
    "BF16": "uint16",
}
# What it takes under another name and is told afterwards; older versions lack some.
_RENAMED = {
    name: (taken, kind)
    for name, taken, kind in (
        ("U32", "int32", "uint32"),
        ("U64", "int64", "uint64"),
        ("F8_E4M3", "uint8", "float8_e4m3fn"),
        ("F8_E5M2", "uint8", "float8_e5m2"),
    )
    if hasattr(paddle, kind)
}


class PaddleAdapter(base.Adapter):
    """Tensors at one place (see `base.Adapter`)."""

    name = "paddle"
    alignment = 64
    forms = base.forms(
        {name: base.COMMON.get(name, "bfloat16") for name in _TAKEN}
        | {name: kind for name, (_, kind) in _RENAMED.items()}
    )

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(device, notes)
        self._place = place
        self.on_host = isinstance(place, paddle.CPUPlace)
        self._take: Callable[[Any], Any] = private_api.paddle_constructor() or self._copy

    def owner(self, allocator: str) -> Owner:
        return "framework"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        tensors = [self._one(view) for view in views]
        return tensors if self.on_host else [x.to(self._place) for x in tensors]

    def _one(self, view: View) -> Any:
        if base.on_device(view.memory):
            raise errors.UsageError(
                "Paddle can't take memory of others on a device without losing track of it",
                tensor=view.name,
                expected="allocator='framework'",
                found="allocator='mfload'",
            )
        taken, kind = _RENAMED.get(view.dtype.name) or (_TAKEN[view.dtype.name], None)
        array = np.ndarray(view.shape, taken, view.memory, view.at)
        tensor = self._take(array)
        return tensor if kind is None else tensor.view(getattr(paddle, kind))

    @staticmethod
    def _copy(array: Any) -> Any:
        return paddle.to_tensor(array, place=paddle.CPUPlace())

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        # Only the latest versions of Paddle can be told so call by call.
        before = paddle.get_device()
        place = self._place if self.devices else paddle.CPUPlace()
        paddle.set_device(_name(place))
        try:
            yield
        finally:
            paddle.set_device(before)
        if not self.on_host:
            # Kernels that were started before may still use memory that Paddle gave away again.
            paddle.device.synchronize(place)

    def empty(self, dtype: dtypes.DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        made, viewed = _RENAMED.get(dtype.name) or (kind, None)
        tensor = paddle.empty(list(shape), dtype=made)
        if viewed is not None:
            tensor = tensor.view(getattr(paddle, viewed))
        return tensor, tensor.data_ptr() if 0 not in shape else 0

    def pool(self, number: int) -> base.Pool | None:
        if self.on_host:
            return None
        place = self._place
        reserved = paddle.device.cuda.memory_reserved(place)
        kept = reserved - paddle.device.cuda.memory_allocated(place)
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            "let go of tensors that are no longer needed, and end other processes on the device",
        )


def _name(place: Any) -> str:
    return "cpu" if isinstance(place, paddle.CPUPlace) else f"gpu:{place.get_device_id()}"


def make(device: object) -> PaddleAdapter:
    """The adapter for a device."""
    base.check_version("paddle", paddle.__version__, OLDEST)
    if device is None:
        return _at(paddle.get_device())
    return _at(device if isinstance(device, str) else str(device))


def _at(name: str) -> PaddleAdapter:
    kind, number = base.split_device(name.removeprefix("Place(").removesuffix(")"))
    if kind == "cpu":
        return PaddleAdapter(paddle.CPUPlace())
    if kind in ("gpu", "cuda"):
        count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
        if number < count:
            place = paddle.CUDAPlace(number)
            # ROCm calls its devices so too.
            rocm = paddle.is_compiled_with_rocm()
            found = (None, ()) if rocm else base.find_device(number)
            return PaddleAdapter(place, *found)
    raise base.no_device("Paddle", name, paddle.device.get_available_device())


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor; one on a device is copied when its turn comes."""
    base.refuse("paddle", _refusals(array))
    row = base.row_of("paddle", str(array.dtype).removeprefix("paddle."))
    shape = tuple(array.shape)
    if not array.place.is_cpu_place():
        return base.Exported(row, shape, lambda: _units(array.cpu(), row))
    units = _units(array, row)
    return base.Exported(row, shape, lambda: units, base.span_of(units))


def _units(array: Any, row: dtypes.DType) -> Any:
    """A tensor as a NumPy array over its memory on the host; Paddle's own is a copy."""
    shape, strides = tuple(array.shape), tuple(array.strides)
    return base.array_at(array, array.data_ptr(), shape, strides, row.nbytes)


def _refusals(array: Any) -> Iterator[tuple[bool, str, object]]:
    found = type(array).__name__
    why = "not a tensor with numbers; of a layer, save state_dict(), and in dynamic mode"
    yield not isinstance(array, paddle.Tensor), why, found
    found = f"{found} of {array.dtype}"
    part = "one process's part of a tensor; save it replicated, as a local tensor"
    yield array.is_dist(), part, found
    yield array.is_sparse(), "a sparse tensor; save x.to_dense()", found
    yield array.is_selected_rows(), "rows of a tensor; save a dense one", found
    try:
        array.data_ptr()
    except RuntimeError:
        yield True, "the tensor is not initialised", found
