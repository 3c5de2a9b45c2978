"""PyTorch: every dtype but F6 is aliased through DLPack, on a GPU too; any alignment will do.

Versions that have an 8-bit type and don't import it get bytes and are told what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from mfload import errors
from mfload.cuda.device import Device
from mfload.dlpack import View, capsule
from mfload.dtypes import TABLE, DType
from mfload.frameworks import base

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


class TorchAdapter(base.Adapter):
    """Tensors on one `torch.device` (see `base.Adapter`)."""

    name = "torch"
    # Older versions lack the youngest types: what is not there arrives as bytes.
    forms = base.forms(
        {key: name for key, name in (base.COMMON | _OWN).items() if hasattr(torch, name)}
    )

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(device, notes)
        self._place = place
        self.on_host = place.type == "cpu"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        take = dlpack.from_dlpack
        if _VIEWED:
            tensors = [self._one(view) for view in views]
        else:
            tensors = [take(capsule(view)) for view in views]
        # What landed on the device is there, and stays as it is.
        return tensors if self.on_host else [tensor.to(self._place) for tensor in tensors]

    def _one(self, view: View) -> Any:
        kind = _VIEWED.get(view.dtype.name)
        if kind is None:
            return dlpack.from_dlpack(capsule(view))
        return dlpack.from_dlpack(capsule(view.as_bytes())).view(kind)

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        with base.full_device("torch", torch.cuda.OutOfMemoryError):
            yield
        if self._place.type == "cuda":
            # Torch gives memory that was freed to the next tensor on the same stream, where
            # kernels that were started before may still use it.
            torch.cuda.current_stream(self._place).synchronize()

    def empty(self, dtype: DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        place = self._place if self.devices else "cpu"
        tensor = torch.empty(shape, dtype=getattr(torch, kind), device=place)
        return tensor, tensor.data_ptr()

    def pool(self, number: int) -> base.Pool | None:
        if self._place.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(self._place) - torch.cuda.memory_allocated(self._place)
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            f"torch.cuda.empty_cache() gives back the {kept} bytes that torch keeps for itself, "
            "and allocator='framework' uses them",
        )


def make(device: object) -> TorchAdapter:
    """The adapter for a device."""
    base.check_version("torch", torch.__version__, OLDEST)
    if device is None:
        # Not torch.get_default_device(), which older versions get wrong inside `with device:`.
        default = torch.empty(0).device
        if default.type == "meta":
            raise errors.DeviceError(
                "torch's default device is 'meta', where tensors have no weights",
                expected="device='cpu' or another device; model.load_state_dict(weights, "
                "assign=True) puts the weights into a model built on 'meta'",
                found="meta",
            )
        return _at(default)
    try:
        # That of a tensor has a number, where "cuda" says none.
        wanted = torch.empty(0, device=device).device  # pyright: ignore
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise base.no_device("torch", device, str(error).splitlines()[0]) from error
    return _at(wanted)


def _at(device: Any) -> TorchAdapter:
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices so too.
        return TorchAdapter(device)
    return TorchAdapter(device, *base.find_device(device.index))


# Of the width of each item, and known to NumPy in every version.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor; one on a device is copied when its turn comes."""
    base.refuse("torch", _refusals(array))
    row = base.row_of("torch", str(array.dtype).removeprefix("torch.").removesuffix("_x2"))
    shape = tuple(array.shape)
    if row.elements > 1:
        base.refuse("torch", [(not shape, "two elements have no shape []", array.dtype)])
        shape = (*shape[:-1], row.elements * shape[-1])
    plain = array.detach()
    span = _span(plain) if plain.device.type == "cpu" else None
    return base.Exported(row, shape, lambda: _units(plain), span, packed=True)


def _span(array: Any) -> base.Span:
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


def _refusals(array: Any) -> Iterator[tuple[bool, str, object]]:
    kind = type(array).__name__
    dense = isinstance(array, torch.Tensor)
    yield not dense, "not a tensor; of a module, save state_dict()", kind
    found = f"{array.dtype}, {array.layout}"
    kinds = {kind.__name__ for kind in type(array).__mro__ if kind.__module__.startswith("torch.")}
    parts = "one process's part of a tensor; save x.full_tensor()"
    yield "DTensor" in kinds, parts, found
    yield "FakeTensor" in kinds, "a fake tensor has no numbers", found
    meta = "a tensor on the meta device has no numbers; materialise it first"
    yield array.is_meta, meta, found
    lazy = torch.nn.parameter.is_lazy(array)
    yield lazy, "not initialised yet; run the model once", found
    yield array.is_nested, "a nested tensor has no one shape; save its parts, x.unbind()", found
    yield array.is_quantized, "a quantised tensor; save x.int_repr() and its scales", found
    yield array.layout != torch.strided, "not a dense tensor; save x.to_dense()", found
    why = "a tensor without memory of its own; save a plain torch.Tensor made of it"
    yield _memory(array) == 0 and array.numel() > 0, why, kind


def _memory(array: Any) -> int:
    try:
        return array.data_ptr()
    except RuntimeError:  # What torch.func and its like wrap has none to show.
        return 0
