"""Lazy tensors of PyTorch: shape and dtype at once, bytes when they are used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from mfload import errors
from mfload.frameworks import private_api, torch_memory
from mfload.frameworks.base import Lent, memory_at
from mfload.io import buffers

_META = torch.device("meta")
_DEVICES = ("cuda",)  # Types of those that loads land on.
_SMALL = 1 << 20  # Bytes that PyTorch copies onto one in less time than a load takes to begin.
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # Subclasses may keep what they hold elsewhere.
# What the shape, the dtype and the layout of a tensor say.
_METADATA = {
    "__hash__", "__len__", "_version", "dim", "dtype", "element_size", "grad", "grad_fn",
    "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_leaf",
    "is_neg", "is_nested", "is_quantized", "is_shared", "is_signed", "is_sparse", "itemsize",
    "layout", "names", "nbytes", "ndim", "ndimension", "nelement", "numel", "output_nr",
    "requires_grad", "retains_grad", "shape", "size", "storage_offset", "stride",
}  # fmt: skip
# Operations whose results share the memory of the tensor, or do so if its layout allows it.
_VIEWS = {
    "H", "T", "__getitem__", "__iter__", "chunk", "contiguous", "data", "detach", "diagonal",
    "dsplit", "expand", "expand_as", "flatten", "hsplit", "mH", "mT", "moveaxis", "movedim",
    "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten",
    "unfold", "unsqueeze", "view", "view_as", "vsplit",
}  # fmt: skip
# These give it memory of its own, or a history; DTensors call the first of what they keep.
_OWNED = {"requires_grad_", "resize_", "resize_as_", "share_memory_"}
# New tensors that are like it in shape, dtype or device alone.
_LIKE = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
}  # fmt: skip
# These need all of it, so that reading all of it is no surprise.
_WHOLE = {"__array__", "clone", "contiguous", "cpu", "cuda", "numpy", "reshape", "to"}


class LazyTensor(torch.Tensor):  # pyright: ignore[reportUntypedBaseClass]
    """A tensor of a checkpoint that has not been read. Made by `mfload.stream(lazy=True)`.

    Views, such as `narrow`, `chunk`, slices, `unbind`, `transpose` and `view`, give lazy tensors
    again, which read what they hold alone, or the rows that hold it. Any other operation reads all
    that its tensor holds, as a plain tensor; `copy_` reads straight into the memory of a dense
    tensor on the CPU or a CUDA device of the same shape and dtype. So do `target[index] = lazy`,
    and `to` and `cuda` onto a CUDA device. To change one in place reads the whole tensor, which all
    its views then share. What PyTorch keeps is read, once: as a parameter, a buffer, or the data of
    another tensor.
    """

    whole: LazyStorage
    like: Any
    """A plain tensor on the meta device: as a view of the whole one it has the same layout."""
    _taken: Any = None

    # `nn.Parameter` and `nn.Buffer` set these on what they return.
    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        self.become(private_api.torch_class_in_making() or torch.nn.Parameter)

    @property
    def _is_buffer(self) -> bool:
        return False

    @_is_buffer.setter
    def _is_buffer(self, value: bool) -> None:
        self.become()._is_buffer = value

    def become(self, kind: Any = torch.Tensor) -> Any:
        """Reads it; from now on it is a tensor of another class, with its other attributes."""
        kept = {key: value for key, value in vars(self).items() if key not in _ATTRIBUTES}
        made = torch.Tensor._make_subclass(kind, self.read(unknown=False), self.like.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, made)
        self.__dict__.update(kept)
        return self

    def __repr__(self, **_: Any) -> str:
        whole = self.whole.part
        return f"<{whole.name}: {self.like.dtype} {list(self.like.shape)}, not read>"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        first: Any = args[0] if args else None
        kind = getattr(func, "__name__", "")
        # Of a property it is that of its accessor.
        name = func.__self__.__name__ if kind in ("__get__", "__set__") else kind  # pyright: ignore
        lazy = isinstance(first, LazyTensor)
        if lazy and name == "requires_grad_" and private_api.torch_class_in_making() is not None:
            func(first.like, *args[1:], **kwargs)
            return first
        made = (_answer if lazy else _into)(func, kind, name, args, kwargs)
        if made is not _READ:
            return made
        for each in _lazy([first if _changes(kind) else None, kwargs.get("out")]):
            each.whole.hold()
        needed = name in ("copy_", "__setitem__", "module_load") or (
            name in _WHOLE and isinstance(first, LazyTensor)
        )
        return func(*_read(args, not needed), **_read(kwargs, not needed))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What PyTorch calls past the protocol above, such as `torch.tensor(lazy)`.
        if func in _ANSWERS:
            return _ANSWERS[func](*args)
        return func(*_read(args, True), **_read(kwargs or {}, True))

    def taken(self) -> tuple[Any, int | None]:
        """A part that is read into C order of it, and None.

        Or the rows of its tensor that hold it, and the number of its first item in them.
        """
        if self._taken is None:  # It is set once: other threads may look meanwhile.
            self._taken = self._take()
        return self._taken

    def _take(self) -> tuple[Any, int | None]:
        like, every, whole = self.like, self.whole.like, self.whole.part
        if like is every:
            return whole, None
        shape, strides, first = tuple(like.shape), like.stride(), like.storage_offset()
        part = None
        if like.is_contiguous():
            if like.numel() == every.numel():
                return whole, None
            part = whole.run(first, shape)
        if part is None:
            part = whole.view(shape, strides, first)
        if part is not None:
            return part, None
        if not every.ndim:
            return whole, first
        row = every.stride(0)
        last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        low, high = first // row, last // row + 1
        if (low, high) == (0, every.shape[0]):
            return whole, first
        part = whole.view((high - low, *every.shape[1:]), every.stride(), low * row)
        return (whole, first) if part is None else (part, first - low * row)

    def read(self, unknown: bool) -> Any:
        """What it holds, as a plain tensor; `unknown` as in `loading.lazy_tensor`."""
        like, held = self.like, self.whole.held
        shape, strides, offset = like.shape, like.stride(), like.storage_offset()
        if held is not None:
            return _view(held, shape, strides, offset)
        if not like.numel():
            return torch.empty(shape, dtype=like.dtype, device=self.whole.part.adapter.place)
        if like is not self.whole.like and not like.is_contiguous():
            # In the order of the file, and what it repeats once: nothing is moved to be read.
            order = sorted(range(like.ndim), key=lambda dim: -strides[dim])
            once = [size if step else 1 for size, step in zip(shape, strides, strict=True)]
            if order != [*range(like.ndim)] or once != list(shape):
                turned = like.as_strided(once, strides, offset).permute(order)
                read = _lazy_view(self.whole, turned).read(unknown)
                return read.permute([order.index(dim) for dim in range(like.ndim)]).expand(shape)
        part, first = self.taken()
        read = part.read(unknown=unknown)
        if first is not None:
            return _view(read.contiguous(), shape, strides, first)
        return read if read.shape == shape else read.contiguous().view(shape)


_READ = object()
"""What `_answer` and `_into` give if lazy tensors are to be read for an operation."""


def _answer(func: Any, kind: str, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What an operation on a lazy tensor gives without reading it for that."""
    first: LazyTensor = args[0]
    if name in _METADATA and kind != "__set__":
        return id(first) if name == "__hash__" else func(first.like, *args[1:], **kwargs)
    place, held = first.whole.part.adapter.place, first.whole.held
    if kind == "__set__" or name in _OWNED:
        return func(first.become(), *_read(args[1:], True), **_read(kwargs, True))
    if name == "data_ptr" and held is None:
        # What is read would be gone before its address is used.
        raise errors.UsageError(
            "a lazy tensor has no memory of its own",
            tensor=first.whole.part.name,
            expected="a tensor that was read, such as lazy.clone()",
            found="data_ptr()",
        )
    if name == "device":
        return place
    if name in ("is_cpu", "is_cuda", "is_meta"):
        return place.type == name.removeprefix("is_")
    if name == "get_device":
        return -1 if place.type == "cpu" else place.index
    if name == "is_pinned":
        return False
    if name == "untyped_storage" and held is None:
        size = first.like.untyped_storage().nbytes()  # It has no bytes.
        return torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
    if name in _LIKE and next(_lazy(args[1:]), None) is None:
        if kwargs.get("device") is None:
            kwargs["device"] = place
        return func(first.like, *args[1:], **kwargs)
    if name in ("to", "cuda"):
        made = _moved(first, name, args[1:], kwargs)
        return _READ if made is None else made
    made = _views(func, name, args, kwargs) if name in _VIEWS else None
    return _READ if made is None else made


def _into(func: Any, kind: str, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What an operation gives that reads lazy tensors into a plain one, or needs their shape."""
    first: Any = args[0] if args else None
    if name == "copy_":
        if _fills(first, args[1:]):
            return _fill(first, args[1])
        if isinstance(first, torch.Tensor) and first.is_meta:
            # Nothing is kept there: loaders count so what they are given.
            given = [*args, *kwargs.values()]
            like = [each.like if isinstance(each, LazyTensor) else each for each in given]
            return func(*like[: len(args)], **dict(zip(kwargs, like[len(args) :], strict=True)))
    elif name == "__setitem__" and isinstance(args[2], LazyTensor) and _is_basic(args[1]):
        place = first[args[1]] if type(first) in _PLAIN and not first.is_sparse else None
        if _fills(place, args[2:]):
            _fill(place, args[2])
            return None
    return _READ


_ATTRIBUTES = ("whole", "like", "_taken")
_ANSWERS = private_api.torch_data_answers(LazyTensor)


def _read_buffer(module: Any, name: str, buffer: Any) -> Any:
    return buffer.read(unknown=False) if isinstance(buffer, LazyTensor) else None


register_module_buffer_registration_hook(_read_buffer)


class LazyStorage:
    """A tensor of a checkpoint, whose views share what is changed in it.

    Attributes:
        part: The `loading.lazy_tensor.LazyTensor`.
        like: A plain tensor of its layout.
        held: All of it, once it was changed in place.
    """

    __slots__ = ("_lock", "held", "like", "part")

    def __init__(self, part: Any, like: Any) -> None:
        self.part, self.like, self.held = part, like, None
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Reads it to be changed in place."""
        with self._lock:
            if self.held is None:
                self.held = self.part.read(unknown=True)


def make(part: Any) -> LazyTensor:
    """The tensor for a `loading.lazy_tensor.LazyTensor`."""
    like = torch.empty(part.shape, dtype=part.dtype, device=_META)
    return _lazy_view(LazyStorage(part, like), like)


def _lazy_view(whole: LazyStorage, like: Any) -> LazyTensor:
    made: Any = like.as_subclass(LazyTensor)
    made.whole, made.like = whole, like
    return made


def _view(dense: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
    return dense.as_strided(shape, strides, dense.storage_offset() + offset)


def _changes(name: str) -> bool:
    """Whether a function of that name changes its first argument: `add_`, `__iadd__`."""
    in_place = name.endswith("_") and not name.endswith("__")
    kept = ("__index__", "__int__", "__iter__", "__invert__")
    return (
        in_place
        or name in ("__setitem__", "__delitem__")
        or (name.startswith("__i") and name not in kept)
    )


def _views(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The lazy result of an operation that makes views; None if it has to copy."""
    first, *rest = args
    if name == "__getitem__" and not _is_basic(rest[0]):
        return None
    if next(_lazy([rest, kwargs]), None) is not None:
        return None
    # PyTorch checks the arguments, and makes the layout.
    made = func(first.like, *rest, **kwargs)
    if made is first.like or name == "data":
        return first
    plain = name == "contiguous" and not kwargs and not rest and first.whole.held is None
    if plain and first.like.numel():
        part, at = first.taken()
        if at is None and part.in_order:  # A copy has nothing to share.
            return make(part).view(first.like.shape)
    views = [made] if isinstance(made, torch.Tensor) else list(made)
    memory = first.like.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    for view in views:
        if (
            view.dtype != first.like.dtype
            or view.is_conj()
            or view.untyped_storage()._cdata != memory
        ):
            return None
    lazy = [_lazy_view(first.whole, view) for view in views]
    if isinstance(made, torch.Tensor):
        return lazy[0]
    return iter(lazy) if name == "__iter__" else type(made)(lazy)


def _is_basic(index: Any) -> bool:
    """Whether an index makes a view."""
    items = index if isinstance(index, tuple) else (index,)
    return all(type(item) in (int, slice, EllipsisType, NoneType) for item in items)


def _fills(target: Any, given: tuple[Any, ...]) -> bool:
    """Whether `target.copy_(*given)` can read a lazy tensor straight into the target's memory."""
    if not given or not isinstance(given[0], LazyTensor):
        return False
    lazy, kind = given[0], type(target)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    whole, like = lazy.whole, lazy.like
    return (
        whole.held is None
        and target.dtype == like.dtype
        and target.shape == like.shape
        and target.is_contiguous()
        and target.numel() > 0
        and (target.is_cpu or (target.is_cuda and not _is_capturing(target)))
        and whole.part.adapter.on_host
        and not private_api.torch_dispatches()  # It must see the copy.
        and not (target.requires_grad and torch.is_grad_enabled())
        and not (target.is_conj() or target.is_neg() or target.is_inference())
        and lazy.taken()[1] is None
    )


def _moved(lazy: LazyTensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `to` or `cuda` makes on a device that loads land on; None if that is not so."""
    names = ("device", "non_blocking")[: 1 if name == "to" else 2]
    if len(args) > len(names):
        return None
    given: dict[str, Any] = {
        "copy": True,
        "device": None,
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }
    device, _ = given.pop("device"), given.pop("non_blocking", False)
    if device is None and name == "cuda":
        device = "cuda"
    same = given.pop("dtype", None) in (None, lazy.like.dtype)
    if not (same and [*given] == ["copy"] and type(device) in (str, int, torch.device)):
        return None
    device = torch.device(device)
    if device.type not in _DEVICES or not lazy.whole.part.adapter.on_host:
        return None
    made = torch.empty(lazy.like.shape, dtype=lazy.like.dtype, device=device)
    return _fill(made, lazy) if _fills(made, (lazy,)) else None


def _is_capturing(target: Any) -> bool:
    """Whether a graph is captured on the CUDA device of a tensor."""
    with torch.cuda.device(target.device):
        return torch.cuda.is_current_stream_capturing()


def _memory(target: Any) -> Any:
    """The bytes of a dense tensor; asks for huge pages that lie wholly in its storage.

    Loaders fill one tensor in parts, each of which would leave small pages at both of its ends.
    """
    start, nbytes = target.data_ptr(), target.nbytes
    if nbytes >= buffers.PAGE:
        storage, stop = target.untyped_storage(), start + nbytes
        low = storage.data_ptr()
        low, high = max(low, start - buffers.HUGE), min(low + storage.nbytes(), stop + buffers.HUGE)
        buffers.ask_huge(low, high - low)
    return memory_at(target, start, nbytes)


def _fill(target: Any, lazy: LazyTensor) -> Any:
    """Reads into a tensor of the same shape and dtype (see `_fills`), and returns it."""
    part, *_ = lazy.taken()
    if target.device.type not in _DEVICES:
        memory = _memory(target)
    elif target.nbytes <= _SMALL or not part.simple:
        return target.copy_(lazy.read(unknown=False))
    else:
        memory = torch_memory.memory_of(target.detach())
        if memory is None:
            return target.copy_(lazy.read(unknown=False))
    try:
        part.read(Lent(target, memory))
    finally:  # What fails has changed it, too.
        torch.autograd.graph.increment_version(target)
    return target


def _read(value: Any, unknown: bool) -> Any:
    """The same arguments with all lazy tensors in them read."""
    if isinstance(value, LazyTensor):
        return value.read(unknown)
    if type(value) in (list, tuple):
        return type(value)(_read(each, unknown) for each in value)
    if isinstance(value, dict):
        return {key: _read(each, unknown) for key, each in value.items()}
    return value


def _lazy(value: Any) -> Generator[LazyTensor]:
    """All lazy tensors in some arguments."""
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _lazy(each)
