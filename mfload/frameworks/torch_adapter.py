"""PyTorch: every dtype but F6 is aliased through DLPack, on a GPU too; any alignment will do.

Versions that have an 8-bit type and don't import it get bytes and are told what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from mfload.cuda.device import Device
from mfload.dlpack import View, capsule
from mfload.dtypes import TABLE
from mfload.frameworks import base, giving, ground
from mfload.planning.requests import Request

OLDEST = "2.4"

_OWN = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


def _imports(name: str) -> bool:
    """Whether this version's import takes a dtype."""
    probe = View("probe", TABLE[name], (TABLE[name].elements,), np.zeros(8, np.uint8), 0)
    try:
        return dlpack.from_dlpack(capsule(probe)).dtype is getattr(torch, _OWN[name])
    except (RuntimeError, BufferError, ValueError):
        return False


_VIEWED = {
    name: getattr(torch, kind)
    for name, kind in _OWN.items()
    if hasattr(torch, kind) and not _imports(name)
}


class TorchAdapter(ground.Landing):
    """See `adapter.Adapter`.

    Args:
        device: Where the tensors go.
        land: The device that they land on, None to copy them there from the host.
        notes: See `adapter.Adapter`.
    """

    name = "torch"
    alignment = None
    readonly_maps = False
    # Older versions lack the youngest types: what is not there arrives as bytes.
    forms = base.forms(
        {key: name for key, name in (base.COMMON | _OWN).items() if hasattr(torch, name)}
    )
    lendable = base.lendable(forms)

    def __init__(
        self, device: Any, land: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(land, notes)
        self._device = device
        self.on_host = device.type == "cpu"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tensor for each view, in order."""
        take = dlpack.from_dlpack
        if _VIEWED:
            tensors = [self._one(view) for view in views]
        else:
            tensors = [take(capsule(view)) for view in views]
        # What landed on the device is there, and stays as it is.
        return tensors if self.on_host else [tensor.to(self._device) for tensor in tensors]

    def _one(self, view: View) -> Any:
        kind = _VIEWED.get(view.dtype.name)
        if kind is None:
            return dlpack.from_dlpack(capsule(view))
        return dlpack.from_dlpack(capsule(view.as_bytes())).view(kind)

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Tensors of torch's own allocator, one for each need."""
        land = self.devices[0] if self.devices else None
        lent: list[base.Lent] = []
        for request in requests:
            name, shape = base.lent_as(self.forms[request.dtype.name], request)
            where = "cpu" if land is None else self._device
            with ground.refusals("torch", torch.cuda.OutOfMemoryError):
                tensor = torch.empty(shape, dtype=getattr(torch, name), device=where)
            memory = base.memory_at(tensor, tensor.data_ptr(), request.nbytes, land)
            lent.append(base.Lent(tensor, memory))
        if self._device.type == "cuda":
            # Torch gives memory that was let go of to whoever asks next on the same stream,
            # where kernels that were started before may still use it.
            torch.cuda.current_stream(self._device).synchronize()
        return lent

    def pool(self, number: int) -> base.Pool | None:
        """What torch's caching allocator has of the device (see `adapter.Adapter`)."""
        if self._device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return base.Pool(
            self.devices[number].room().free + kept,
            f"torch.cuda.empty_cache() gives back the {kept} bytes that torch keeps for itself, "
            "and allocator='framework' uses them",
        )


def make(device: object) -> TorchAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    base.check_version("torch", torch.__version__, OLDEST)
    if device is None:
        # Not torch.get_default_device(), which older versions get wrong inside `with device:`.
        return _at(torch.empty(0).device)
    try:
        # That of a tensor has a number, where "cuda" says none.
        wanted = torch.empty(0, device=device).device  # pyright: ignore
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise base.no_device("torch", device, str(error).splitlines()[0]) from error
    return _at(wanted)


def _at(device: Any) -> TorchAdapter:
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices so too.
        return TorchAdapter(device)
    return TorchAdapter(device, *ground.device_to_land_on(device.index))


_ROWS = {
    getattr(torch, name): TABLE[key]
    for key, name in (base.COMMON | _OWN).items()
    if hasattr(torch, name)
}
# Of the width of each item, and known to NumPy in every version.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a tensor; one on a device is copied when its turn comes.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    _refuse(name, array)
    row = _ROWS.get(array.dtype)
    if row is None:
        raise giving.no_word("torch", name, array.dtype)
    shape = tuple(array.shape)
    if row.elements > 1:
        if not shape:
            raise giving.refused("torch", name, "two elements have no shape []", array.dtype)
        shape = (*shape[:-1], row.elements * shape[-1])
    plain = array.detach()
    span = _span(plain) if plain.device.type == "cpu" else None
    return giving.late("torch", name, row, shape, lambda: _units(plain), span, as_stored=True)


def _span(array: Any) -> giving.Span:
    first = array.data_ptr()
    if not array.numel():
        return first, first
    # Strides are never negative here.
    last = sum(step * (n - 1) for step, n in zip(array.stride(), array.shape, strict=True))
    return first, first + array.element_size() * (last + 1)


def _units(plain: Any) -> Any:
    """A tensor as a NumPy array of integers as wide as its items.

    Over its memory, unless that is on a device, or strided, or a conjugate or negative is still to
    be taken.
    """
    settled = plain.cpu().resolve_conj().resolve_neg()
    # PyTorch puts strided items in order several times as fast as NumPy would.
    return settled.view(_UNITS[settled.element_size()]).contiguous().numpy()


def _refuse(name: str, array: Any) -> None:
    if not isinstance(array, torch.Tensor):
        why = "not a tensor; of a module, save state_dict()"
        raise giving.refused("torch", name, why, type(array).__name__)
    kinds = {kind.__name__ for kind in type(array).__mro__ if kind.__module__.startswith("torch.")}
    for is_so, why in (
        ("DTensor" in kinds, "one process's part of a tensor; save x.full_tensor()"),
        ("FakeTensor" in kinds, "a fake tensor has no numbers"),
        (array.is_meta, "a tensor on the meta device has no numbers; materialise it first"),
        (torch.nn.parameter.is_lazy(array), "not initialised yet; run the model once"),
        (array.is_nested, "a nested tensor has no one shape; save its parts, x.unbind()"),
        (array.is_quantized, "a quantised tensor; save x.int_repr() and its scales"),
        (array.layout != torch.strided, "not a dense tensor; save x.to_dense()"),
    ):
        if is_so:
            raise giving.refused("torch", name, why, f"{array.dtype}, {array.layout}")
    if _memory(array) == 0 and array.numel():
        why = "a tensor without memory of its own; save a plain torch.Tensor made of it"
        raise giving.refused("torch", name, why, type(array).__name__)


def _memory(array: Any) -> int:
    try:
        return array.data_ptr()
    except RuntimeError:  # What torch.func and its like wrap has none to show.
        return 0
