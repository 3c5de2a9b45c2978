"""PyTorch: every dtype but F6 is aliased through DLPack, on a GPU too; any alignment will do.

Versions that have an 8-bit type and don't import it get bytes and are told what they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import dlpack

from mfload import errors
from mfload.dlpack import View, Views, capsule
from mfload.dtypes import NO_INFINITY, TABLE
from mfload.frameworks import base, private_api
from mfload.frameworks.traits import TRAITS
from mfload.io import pread

if TYPE_CHECKING:
    from mfload.cuda.device import Device
    from mfload.cuda.memory import DeviceBuffer

OLDEST = "2.4"

# Older versions lack the youngest of these types.
_OWN = {
    name: getattr(torch, kind) for name, kind in TRAITS["torch"].own.items() if hasattr(torch, kind)
}


def _imports(name: str) -> bool:
    """Whether this version's import takes a dtype."""
    probe = View("probe", TABLE[name], (TABLE[name].elements,), np.zeros(8, np.uint8), 0)
    try:
        return dlpack.from_dlpack(capsule(probe)).dtype is _OWN[name]
    except (RuntimeError, BufferError, ValueError):
        return False


_VIEWED = {name: kind for name, kind in _OWN.items() if not _imports(name)}


# Elements that torch does not share out among threads of its own: readers are threads already.
_ALONE = 1 << 15


def _convert(source: Any, target: Any) -> None:
    """Converts with PyTorch's loops.

    Raises RuntimeError inside a mode of PyTorch, such as that of fake tensors, which would record
    the copy and not make it.
    """
    given, made = (
        torch.from_numpy(each.reshape(-1).view(f"i{each.itemsize}")).view(
            getattr(torch, each.dtype.name)
        )
        for each in (source, target)
    )
    if type(made) is not torch.Tensor or made.data_ptr() != target.ctypes.data:
        raise RuntimeError("not a tensor over the memory of the array")
    private_api.torch_copy(made.split(_ALONE), given.split(_ALONE))


pread.CONVERTER = _convert


class TorchAdapter(base.Adapter):
    """Tensors on the `torch.device` of `place` (see `base.Adapter`)."""

    name = "torch"
    slices_are_views = counts_items = allocates = unifies = True
    alone = (1 << 20) + 1  # What torch takes from blocks of 2 MiB is not worth its call.
    forms = base.forms({name: str(kind).removeprefix("torch.") for name, kind in _OWN.items()})

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(place, device, notes)
        self.on_host = place.type == "cpu"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        with private_api.torch_undispatched():
            if type(views) is Views and all(map(_is_lent, views.memory)):
                tensors = _in_columns(views)
            else:
                make = _made if self.devices else _tensor
                tensors = [make(view) for view in views]
            # What landed on the device is there, and stays as it is.
            return tensors if self.on_host else [tensor.to(self.place) for tensor in tensors]

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        from mfload.frameworks import torch_memory  # No load to the host needs it.

        together = torch_memory.together(sizes)
        on_cuda = self.place.type == "cuda"

        def allocate(nbytes: int) -> DeviceBuffer:
            reserved = next(together)
            # Memory that is allocated into a graph is written to whenever it runs.
            if on_cuda and torch.cuda.is_current_stream_capturing():
                return self.devices[number].allocate(nbytes)
            # Torch cuts what follows out of a block that was given back, instead of calling
            # cudaMalloc for each: 0.09 ms. If there is no such block, it does without.
            if on_cuda and reserved:
                with (
                    contextlib.suppress(torch.cuda.OutOfMemoryError),
                    private_api.torch_undispatched(),
                ):
                    torch.empty(reserved, dtype=torch.uint8, device=self.place)
            ((held, address),) = self._new([("uint8", (max(nbytes, 1),))])
            return base.memory_at(held, address, nbytes, self.devices[number])

        return allocate

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        if self.place.type != "cuda" or not self.devices:
            yield
            return
        # Another thread may capture a graph, and torch would spoil that.
        with self.devices[0].current():
            yield
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self.place).synchronize()

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        with self.allocating():
            if self.place.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise base.in_a_graph("torch")
            return self._new(wanted)

    def _new(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        place = self.place if self.devices else "cpu"
        full = base.full_device("torch", torch.cuda.OutOfMemoryError)
        with full, private_api.torch_undispatched():
            tensors = [
                torch.empty(shape, dtype=getattr(torch, kind), device=place)
                for kind, shape in wanted
            ]
        return [(tensor, tensor.data_ptr()) for tensor in tensors]

    def follow(self) -> AbstractContextManager[object]:
        if self.place.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self.place))

    def lazy(self) -> Callable[[Any], Any]:
        from mfload.frameworks import torch_lazy  # Only lazy streams need it.

        return torch_lazy.make

    def pool(self, number: int) -> base.Pool | None:
        if self.place.type != "cuda":
            return None
        try:
            kept = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        except RuntimeError:  # An allocator that was plugged in may keep no count.
            return None
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            f"allocator='mfload' can't use the {errors.amount(kept)} that torch keeps for itself; "
            "in Python, torch.cuda.empty_cache() gives them back",
        )


def _is_lent(memory: Any) -> bool:
    """Whether memory is that of a tensor."""
    return isinstance(getattr(memory, "owner", None), torch.Tensor)


def _made(view: View) -> Any:
    return _over(view) if _is_lent(view.memory) else _tensor(view)


def _in_columns(views: Views) -> list[Any]:
    """The same as `_over` of each, several times as fast: PyTorch splits a buffer in one call.

    It calls this unsafe since each part has a count of changes of its own, as here it should.
    """
    kind, buffers = np.asarray(views.kind), views.buffers
    becomes = {n: base.arrives(TorchAdapter.forms, *views.kinds[n]) for n in set(views.kind)}
    dtypes = [getattr(torch, name) for name in dict.fromkeys(name for name, _ in becomes.values())]
    dtype, width, length = np.zeros((3, len(views.kinds)), np.int64)
    for n, (name, shape) in becomes.items():
        dtype[n], length[n] = dtypes.index(getattr(torch, name)), math.prod(shape)
        width[n] = dtypes[dtype[n]].itemsize
    like, at, length = buffers * len(dtypes) + dtype[kind], views.at // width[kind], length[kind]
    order = np.lexsort((length, at, like))
    like, at, length = like[order], at[order], length[order]
    begins = np.diff(like, prepend=-1) != 0
    gap = at - np.where(begins, 0, np.roll(at + length, 1))
    # What lies between two tensors is a part, too.
    parts, wanted = np.stack([gap, length], 1), np.stack([gap > 0, np.full(len(gap), True)], 1)
    sizes, tells = parts[wanted].tolist(), np.nonzero(wanted)[1].tolist()
    firsts = np.flatnonzero(begins)
    edges = [*(np.cumsum(wanted)[2 * firsts + 1] - 1 - (gap[firsts] > 0)).tolist(), len(sizes)]
    tensors: list[Any] = []
    for one, (first, end) in zip(like[firsts].tolist(), itertools.pairwise(edges), strict=True):
        buffer, number = divmod(one, len(dtypes))
        storage = views.memory[buffer].owner.untyped_storage()
        whole = torch.empty(0, dtype=dtypes[number], device=storage.device)
        whole.set_(storage, 0, (sum(sizes[first:end]),))
        split = torch.unsafe_split_with_sizes(whole, sizes[first:end])
        tensors += itertools.compress(split, tells[first:end])
    made: list[Any] = [None] * len(views)
    for number, tensor in zip(order.tolist(), tensors, strict=True):
        shape = becomes[views.kind[number]][1]
        # An empty one has an empty storage, and no part of another.
        made[number] = tensor.new_empty(shape) if 0 in shape else tensor.resize_(shape)
    return made


def _over(view: View) -> Any:
    """A tensor in the memory of another, as a part of its storage.

    Only what shares the storage can be sent to another process: of memory that is imported, torch
    looks up where the allocation begins and finds none. Not a view of the other, which would share
    its count of changes: to change one weight would spoil the backward pass of the others.
    """
    kind = getattr(torch, TorchAdapter.forms[view.dtype.name].type)
    shape = base.arrives(TorchAdapter.forms, view.dtype, view.shape)[1]
    storage = view.memory.owner.untyped_storage()
    made = torch.empty(0, dtype=kind, device=storage.device)
    return made.view(shape) if 0 in shape else made.set_(storage, view.at // made.itemsize, shape)


def _tensor(view: View) -> Any:
    if 0 in view.shape and view.dtype.elements == 1:  # NumPy refuses some of their shapes.
        kind = getattr(torch, TorchAdapter.forms[view.dtype.name].type)
        return torch.empty(view.shape, dtype=kind, device="cpu")
    kind = _VIEWED.get(view.dtype.name)
    if kind is None:
        return dlpack.from_dlpack(capsule(view))
    return dlpack.from_dlpack(capsule(view.as_bytes())).view(kind)


def check_range(name: str, tensor: Any, dtype: Any) -> None:
    """Raises LossyCastError if `copy_` would change numbers, other than by rounding floats."""
    row = base.ROWS.get(str(dtype).removeprefix("torch."))
    if row is None or tensor.dtype == dtype or not tensor.numel():
        return
    if not (tensor.is_floating_point() and dtype.is_floating_point):
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        wide = torch.complex128 if tensor.is_complex() or dtype.is_complex else wide
        given = tensor.detach().to(wide)
        changed = given != tensor.detach().to(dtype).to(wide)
        if changed.any():
            raise errors.LossyCastError(
                "a value does not fit the dtype of its target",
                tensor=name,
                expected=f"values that {dtype} holds, or a target of {tensor.dtype}",
                found=given[changed][0].item(),
            )
    elif row.name in NO_INFINITY:
        from mfload.io import convert  # A load that converts nothing does without it.

        wide = torch.float64 if tensor.element_size() > 4 else torch.float32
        most = tensor.detach().to(wide).abs().nan_to_num(0.0, torch.inf).max().reshape(1).cpu()
        convert.convert(most.numpy(), np.empty(1, row.numpy), name, checked=True)


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
    except (  # Of a kind of device whose package is not there, ImportError.
        RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError, ImportError,
    ) as error:  # fmt: skip
        gpu = str(device).lower().startswith("gpu")
        meant = "PyTorch's name for GPUs is 'cuda'" if gpu else error
        raise base.no_device("torch", device, str(meant).splitlines()[0]) from error
    return _at(wanted)


def _at(device: Any) -> TorchAdapter:
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices so too.
        return TorchAdapter(device)
    return TorchAdapter(device, *base.find_device(device.index))


# Of the width of each item, and known to NumPy in every version.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor; one on a device is copied when its turn comes."""
    base.refuse("torch", _refusal(array), array)
    row = base.row_of("torch", str(array.dtype).removeprefix("torch.").removesuffix("_x2"))
    shape = tuple(array.shape)
    if row.elements > 1:
        base.refuse("torch", None if shape else "two elements have no shape []", array)
        shape = (*shape[:-1], row.elements * shape[-1])
    span = lies = None
    with private_api.torch_undispatched():
        plain = array.detach()
        if plain.device.type == "cpu":
            units = functools.partial(base.host_units, plain, plain.stride(), plain.element_size())
            span = base.span_of(units())
            if plain.layout == torch.strided and not (plain.is_conj() or plain.is_neg()):
                # After a call of its method `numpy`, its storage could never be resized.
                lies = units
    return base.Exported(row, shape, lambda: _units(plain), span, lies)


def _units(plain: Any) -> Any:
    """A tensor as a NumPy array of integers as wide as its items, over its memory if possible.

    Not if it lies on a device, is strided, or is still to be conjugated or negated.
    """
    with private_api.torch_undispatched():
        settled = plain.cpu().resolve_conj().resolve_neg()
        # PyTorch puts strided items in order on all cores.
        return settled.view(_UNITS[settled.element_size()]).contiguous().numpy()


def _refusal(array: Any) -> str | None:
    """Why a tensor can't be saved, and what to save instead."""
    if not isinstance(array, torch.Tensor):
        return "not a tensor; of a module, save state_dict()"
    kinds = {kind.__name__ for kind in type(array).__mro__ if kind.__module__.startswith("torch.")}
    if "DTensor" in kinds:
        return "one process's part of a tensor; save x.full_tensor()"
    if "FakeTensor" in kinds:
        return "a fake tensor has no numbers"
    if array.is_meta:
        return "a tensor on the meta device has no numbers; materialise it first"
    if torch.nn.parameter.is_lazy(array):
        return "not initialised yet; run the model once"
    if array.is_nested:
        return "a nested tensor has no one shape; save its parts, x.unbind()"
    if array.is_quantized:
        return "a quantised tensor; save x.int_repr() and its scales"
    if array.layout != torch.strided:
        return "not a dense tensor; save x.to_dense()"
    try:
        held = array.data_ptr() != 0 or array.numel() == 0
    except RuntimeError:  # What torch.func and its like wrap has no address.
        held = array.numel() == 0
    return None if held else "a tensor without memory of its own; save a plain torch.Tensor of it"
