"""Lazy tensors of PyTorch: shape and dtype at once, bytes when they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch

from mfload import errors
from mfload.frameworks import private_api
from mfload.frameworks.base import Lent, memory_at

# What the shape, the dtype and the layout of a tensor in C order say.
_METADATA = {
    "__hash__", "__len__", "_version", "dim", "dtype", "element_size", "grad", "grad_fn",
    "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_leaf",
    "is_neg", "is_nested", "is_quantized", "is_signed", "is_sparse", "itemsize", "layout", "names",
    "nbytes", "ndim", "ndimension", "nelement", "numel", "output_nr", "requires_grad",
    "retains_grad", "shape", "size", "storage_offset", "stride",
}  # fmt: skip
_UNCHANGED = {"contiguous", "data", "detach"}
# Operations that take parts, with their arguments.
_PARTS = {
    "__getitem__": (),
    "chunk": ("chunks", "dim"),
    "narrow": ("dim", "start", "length"),
    "select": ("dim", "index"),
    "split": ("split_size", "dim"),
    "split_with_sizes": ("split_sizes", "dim"),
    "tensor_split": ("indices_or_sections", "dim"),
}
# These need all of it, so that reading all of it is no surprise.
_WHOLE = {"__array__", "clone", "cpu", "cuda", "numpy", "to"}


class LazyTensor(torch.Tensor):  # pyright: ignore[reportUntypedBaseClass]
    """A tensor of a checkpoint that has not been read. Made by `mfload.stream(lazy=True)`.

    `narrow`, `chunk`, `split`, `select`, integers and slices give lazy tensors again. Any other
    operation reads all of it, as a plain tensor; `copy_` reads straight into the memory of a dense
    tensor on the CPU of the same shape and dtype. It can't be changed in place.
    """

    part: Any

    def __repr__(self, **_: Any) -> str:
        return repr(self.part)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first: Any = args[0] if args else None
        kind = getattr(func, "__name__", "")
        # Of a property it is that of its accessor.
        name = func.__self__.__name__ if kind in ("__get__", "__set__") else kind  # pyright: ignore
        if isinstance(first, LazyTensor):
            part = first.part
            if _changes(kind):
                raise errors.UsageError(
                    f"a lazy tensor can't be changed in place: {name}",
                    tensor=part.name,
                    expected="a tensor that was read, such as lazy.clone()",
                )
            if kind == "data_ptr":  # What is read would be gone before its address is used.
                raise errors.UsageError(
                    "a lazy tensor has no memory of its own",
                    tensor=part.name,
                    expected="a tensor that was read, such as lazy.clone()",
                    found="data_ptr()",
                )
            if name == "device":
                return part.adapter.place
            if name in ("is_cpu", "is_cuda", "is_meta"):
                return part.adapter.place.type == name.removeprefix("is_")
            if name in _METADATA:
                return super().__torch_function__(func, types, args, kwargs)
            if name in _UNCHANGED and len(args) == 1 and not kwargs:
                return first
            if (made := _parts(func, name, part, args, kwargs)) is not None:
                return made
        elif name == "copy_" and _fills(first, args[1:]):
            nbytes = first.numel() * first.element_size()
            memory = memory_at(first, first.data_ptr(), nbytes)
            try:
                args[1].part.read(Lent(first, memory))
            finally:  # What fails has changed it, too.
                torch.autograd.graph.increment_version(first)
            return first
        elif name == "copy_" and isinstance(first, torch.Tensor) and first.is_meta:
            # Nothing is kept there: loaders count so what they are given.
            given = [*args, *kwargs.values()]
            like = [_like(each.part) if isinstance(each, LazyTensor) else each for each in given]
            return func(*like[: len(args)], **dict(zip(kwargs, like[len(args) :], strict=True)))
        if isinstance(kwargs.get("out"), LazyTensor):
            message, expected = "a lazy tensor can't be changed in place: out=", "a plain tensor"
            raise errors.UsageError(message, expected=expected)
        needed = name == "copy_" or (name in _WHOLE and isinstance(first, LazyTensor))
        return func(*_read(args, not needed), **_read(kwargs, not needed))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What PyTorch calls past the protocol above, such as `torch.tensor(lazy)`.
        return func(*_read(args, True), **_read(kwargs or {}, True))


def make(part: Any) -> LazyTensor:
    """The tensor for a `loading.lazy_tensor.LazyTensor`."""
    # The layout is that of the array that it becomes, and takes no memory.
    made: Any = _like(part).as_subclass(LazyTensor)
    made.part = part
    return made


def _like(part: Any) -> Any:
    return torch.empty(part.shape, dtype=part.dtype, device="meta")


def _changes(name: str) -> bool:
    """Whether a method of that name changes its tensor: `add_`, `__iadd__`, an assignment."""
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name in ("__set__", "__setitem__", "__delitem__")
        or (
            name.startswith("__i")
            and name not in ("__index__", "__int__", "__iter__", "__invert__")
        )
    )


def _parts(
    func: Callable[..., Any], name: str, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The lazy result of an operation that takes parts of a tensor; None if it is another one."""
    if name not in _PARTS:
        return None
    index = args[1] if name == "__getitem__" else ()
    items = index if isinstance(index, tuple) else (index,)
    if not all(type(item) in (int, slice, EllipsisType) for item in items):
        return None
    # PyTorch checks the arguments, and says the shapes.
    like = func(_like(part), *args[1:], **kwargs)
    with contextlib.suppress(errors.SliceError):  # It would cut through packed elements.
        if name == "__getitem__":
            return make(part[index])
        given = dict(zip(_PARTS[name], args[1:], strict=False)) | kwargs
        dim = int(given.get("dim", 0)) % len(part.shape)
        if name == "select":
            return make(part[(*[slice(None)] * dim, int(given["index"]))])
        pieces = [like] if name == "narrow" else like
        if name != "narrow" and sum(each.shape[dim] for each in pieces) != part.shape[dim]:
            return None  # Of indices that go back, the pieces overlap.
        start = int(given.get("start", 0)) % max(1, part.shape[dim])
        made: list[LazyTensor] = []
        for piece in pieces:
            stop = start + piece.shape[dim]
            made.append(make(part[(*[slice(None)] * dim, slice(start, stop))]))
            start = stop
        return made[0] if name == "narrow" else tuple(made)
    return None


def _fills(target: Any, given: tuple[Any, ...]) -> bool:
    """Whether `target.copy_(*given)` can read a lazy tensor straight into the target's memory."""
    if not given or not isinstance(given[0], LazyTensor):
        return False
    part = given[0].part
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and not private_api.torch_dispatches()  # It must see the copy.
        and target.device.type == "cpu"
        and part.adapter.on_host
        and target.dtype == part.dtype
        and target.shape == part.shape
        and target.numel() > 0
        and target.is_contiguous()
        and not (target.requires_grad and torch.is_grad_enabled())
        and not (target.is_conj() or target.is_neg() or target.is_inference())
    )


def _read(value: Any, unknown: bool) -> Any:
    """The same arguments with all lazy tensors in them read."""
    if isinstance(value, LazyTensor):
        return value.part.read(unknown=unknown)
    if type(value) in (list, tuple):
        return type(value)(_read(each, unknown) for each in value)
    if isinstance(value, dict):
        return {key: _read(each, unknown) for key, each in value.items()}
    return value
