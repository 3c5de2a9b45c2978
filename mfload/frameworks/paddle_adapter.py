"""Paddle: aliased through DLPack, U16 as bytes.

Paddle calls bfloat16 "uint16" in places and takes a U16 capsule, or a NumPy uint16 array, for
bfloat16 without a word. So U16 arrives as the bytes it is.

Paddle finds the owner of an import by the address of its data: of two tensors alive at one
address, one is never given back. Only tensors of no size can share theirs with another, so
they get memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.utils import dlpack

from mfload.dlpack import View, capsule
from mfload.dtypes import TABLE
from mfload.frameworks import adapter
from mfload.placement import Need

OLDEST = "3.0"

_OWN = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _imports(name: str, kind: str) -> bool:
    """Whether this version's import takes a dtype, and for what it is."""
    probe = View("probe", TABLE[name], (1,), np.zeros(8, np.uint8), 0)
    try:
        return str(dlpack.from_dlpack(capsule(probe)).dtype) == f"paddle.{kind}"
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return False


_IMPORTED = {name: kind for name, kind in (adapter.COMMON | _OWN).items() if _imports(name, kind)}
# One-byte types that older versions have and don't import.
_VIEWED = {
    name: kind
    for name, kind in _OWN.items()
    if TABLE[name].bits == 8 and name not in _IMPORTED and hasattr(paddle, kind)
}


class PaddleAdapter:
    """See `adapter.Adapter`.

    Args:
        place: Where the tensors go.
    """

    name = "paddle"
    alignment = 64
    readonly_maps = False
    forms = adapter.forms(_IMPORTED | _VIEWED)
    # Paddle makes no tensors of the unsigned types that it imports.
    lendable = adapter.lendable(forms, unless=("U32", "U64"))

    def __init__(self, place: Any) -> None:
        self._place = place
        self.on_host = place.is_cpu_place() if hasattr(place, "is_cpu_place") else True

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `paddle.Tensor` for each view, in order."""
        tensors = [self._one(view) for view in views]
        return tensors if self.on_host else [x.to(self._place) for x in tensors]

    def _one(self, view: View) -> Any:
        if 0 in view.shape:
            view = View(view.name, view.dtype, view.shape, np.empty(64, np.uint8), 0)
        if view.dtype.name in _VIEWED:
            return dlpack.from_dlpack(capsule(view.as_bytes())).view(_VIEWED[view.dtype.name])
        return dlpack.from_dlpack(capsule(view))

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Tensors of Paddle's own allocator, one for each need."""
        lent: list[adapter.Lent] = []
        for need in needs:
            name, shape = adapter.lent_as(self.forms[need.dtype.name], need)
            tensor = paddle.empty(list(shape), dtype=name)
            if not tensor.place.is_cpu_place():
                tensor = tensor.cpu()
            address = tensor.data_ptr() if need.nbytes else 0
            lent.append(adapter.Lent(tensor, adapter.memory_at(tensor, address, need.nbytes)))
        return lent


def make(device: object) -> PaddleAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    adapter.check_version("paddle", paddle.__version__, OLDEST)
    if device is None:
        return _at(paddle.get_device())
    return _at(device if isinstance(device, str) else str(device))


def _at(name: str) -> PaddleAdapter:
    kind, number = adapter.split_device(name.removeprefix("Place(").removesuffix(")"))
    if kind == "cpu":
        return PaddleAdapter(paddle.CPUPlace())
    if kind in ("gpu", "cuda"):
        count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
        if (number or 0) < count:
            return PaddleAdapter(paddle.CUDAPlace(number or 0))
    raise adapter.no_device("Paddle", name, paddle.device.get_available_device())
