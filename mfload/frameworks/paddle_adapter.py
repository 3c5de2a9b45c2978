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

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from mfload import dtypes, errors
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.frameworks import base, giving, ground, private_api
from mfload.frameworks.base import Whose
from mfload.planning.requests import Request

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


class PaddleAdapter(ground.Landing):
    """See `adapter.Adapter`.

    Args:
        place: Where the tensors go.
        land: The device that they land on, None to copy them there from the host.
        notes: See `adapter.Adapter`.
    """

    name = "paddle"
    alignment = 64
    readonly_maps = False
    forms = base.forms(
        {name: base.COMMON.get(name, "bfloat16") for name in _TAKEN}
        | {name: kind for name, (_, kind) in _RENAMED.items()}
    )
    lendable = base.lendable(forms)

    def __init__(self, place: Any, land: Device | None = None, notes: tuple[str, ...] = ()) -> None:
        super().__init__(land, notes)
        self._place = place
        if land is not None:
            self.landings = frozenset(("framework",))
        self.on_host = isinstance(place, paddle.CPUPlace)
        self._take: Callable[[Any], Any] = private_api.paddle_constructor(paddle) or self._copy

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on the device (see `adapter.Adapter`)."""
        return "framework"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `paddle.Tensor` for each view, in order.

        Raises:
            UsageError: One lies on a device: Paddle takes no memory of others there.
        """
        tensors = [self._one(view) for view in views]
        return tensors if self.on_host else [x.to(self._place) for x in tensors]

    def _one(self, view: View) -> Any:
        if ground.on_device(view.memory):
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

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Tensors of Paddle's own allocator, one for each need."""
        land = self.devices[0] if self.devices else None
        place = paddle.CPUPlace() if land is None else self._place
        lent: list[base.Lent] = []
        with _making_at(place):
            for request in requests:
                name, shape = base.lent_as(self.forms[request.dtype.name], request)
                made, kind = _RENAMED.get(request.dtype.name) or (name, None)
                tensor = paddle.empty(list(shape), dtype=made)
                if kind is not None:
                    tensor = tensor.view(getattr(paddle, kind))
                address = tensor.data_ptr() if request.nbytes else 0
                memory = base.memory_at(tensor, address, request.nbytes, land)
                lent.append(base.Lent(tensor, memory))
        if not self.on_host:
            # Kernels that were started before may still use memory that Paddle gave away again.
            paddle.device.synchronize(place)
        return lent

    def pool(self, number: int) -> base.Pool | None:
        """What Paddle's allocator has of the device (see `adapter.Adapter`)."""
        if self.on_host:
            return None
        place = self._place
        reserved = paddle.device.cuda.memory_reserved(place)
        kept = reserved - paddle.device.cuda.memory_allocated(place)
        return base.Pool(
            self.devices[number].room().free + kept,
            "let go of tensors that are no longer needed, and end other processes on the device",
        )


@contextmanager
def _making_at(place: Any) -> Generator[None]:
    """A context in which new tensors lie at a place.

    Only the latest versions of Paddle can be told so call by call.
    """
    before = paddle.get_device()
    paddle.set_device(_name(place))
    try:
        yield
    finally:
        paddle.set_device(before)


def _name(place: Any) -> str:
    return "cpu" if isinstance(place, paddle.CPUPlace) else f"gpu:{place.get_device_id()}"


def make(device: object) -> PaddleAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
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
        if (number or 0) < count:
            place = paddle.CUDAPlace(number or 0)
            # ROCm calls its devices so too.
            rocm = paddle.is_compiled_with_rocm()
            found = (None, ()) if rocm else ground.device_to_land_on(number or 0)
            return PaddleAdapter(place, *found)
    raise base.no_device("Paddle", name, paddle.device.get_available_device())


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a tensor; one on a device is copied when its turn comes.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    _refuse(name, array)
    row = giving.BY_NAME.get(str(array.dtype).removeprefix("paddle."))
    if row is None:
        raise giving.no_word("paddle", name, array.dtype)
    shape = tuple(array.shape)
    if not array.place.is_cpu_place():
        return giving.late("paddle", name, row, shape, lambda: _units(array.cpu(), row))
    units = _units(array, row)
    return giving.late("paddle", name, row, shape, lambda: units, giving.span_of(units))


def _units(array: Any, row: dtypes.DType) -> Any:
    """A tensor as a NumPy array over its memory on the host; Paddle's own is a copy."""
    shape, strides = tuple(array.shape), tuple(array.strides)
    return giving.strided(array, array.data_ptr(), shape, strides, row.nbytes)


def _refuse(name: str, array: Any) -> None:
    found = type(array).__name__
    if not isinstance(array, paddle.Tensor):
        why = "not a tensor with numbers; of a layer, save state_dict(), and in dynamic mode"
        raise giving.refused("paddle", name, why, found)
    for is_so, why in (
        (array.is_dist(), "one process's part of a tensor; save it replicated, as a local tensor"),
        (array.is_sparse(), "a sparse tensor; save x.to_dense()"),
        (array.is_selected_rows(), "rows of a tensor; save a dense one"),
    ):
        if is_so:
            raise giving.refused("paddle", name, why, f"{found} of {array.dtype}")
    try:
        array.data_ptr()
    except RuntimeError as error:
        why = "the tensor is not initialised"
        raise giving.refused("paddle", name, why, f"{found} of {array.dtype}") from error
