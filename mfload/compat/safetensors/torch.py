"""The module `safetensors.torch`: files into PyTorch's tensors, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from mfload import frameworks
from mfload.compat import safetensors
from mfload.compat.safetensors import (  # Libraries import them from here too.
    TensorSpec as TensorSpec,
    deserialize as deserialize,
    loaders,
    safe_open as safe_open,
    serialize as serialize,
    serialize_file as serialize_file,
)
from mfload.frameworks.base import NAMES

torch: Any = frameworks.require("torch")
load_file, load = loaders(__name__)


def save_file(
    tensors: dict[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file; one of that name is replaced once the new one is whole.

    Raises:
        RuntimeError: Tensors share memory, or have none.
        ValueError: A tensor is sparse or not contiguous, or something else is not a tensor.
    """
    safetensors.save_file(_exported(tensors), filename, metadata)


def save(tensors: dict[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file (errors: see `save_file`)."""
    return safetensors.save(_exported(tensors), metadata)


def save_model(
    model: Any,
    filename: str,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Writes a module; of tensors that share memory one, and in the metadata whose it is."""
    tensors, notes = model.state_dict(), metadata
    for kept, names in _remove_duplicate_names(tensors).items():
        notes = {} if notes is None else notes
        for name in names:
            notes.setdefault(name, kept)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dict(tensors), filename, notes)
    except ValueError as error:
        advice = "or use save_model(..., force_contiguous=True)"
        raise ValueError(f"{error}, {advice}") from error


def load_model(
    model: Any,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file into a module; returns the names that one of the two lacks.

    Raises:
        RuntimeError: There are such names, and `strict` is set.
    """
    tensors = load_file(filename, device, backend=backend)
    duplicates = _remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    found = model.load_state_dict(tensors, strict=False)
    missing, unexpected = set(found.missing_keys), list(found.unexpected_keys)
    for name in (name for names in duplicates.values() for name in names):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    told = [("Missing", sorted(missing)), ("Unexpected", sorted(unexpected))]
    lines = [
        f"    {what} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names)
        for what, names in told
        if names
    ]
    if strict and lines:
        first = f"Error(s) in loading state_dict for {type(model).__name__}:"
        raise RuntimeError("\n".join([first, *lines]))
    return missing, unexpected


def storage_ptr(tensor: Any) -> int:
    """The address of the storage of a tensor."""
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: Any) -> int:
    """The bytes of the storage of a tensor."""
    return tensor.untyped_storage().nbytes()


def _end_ptr(tensor: Any) -> int:
    """The first address behind the elements of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps) if tensor.numel() else -1
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_complete(tensor: Any) -> bool:
    whole = tensor.numel() * tensor.element_size() == storage_size(tensor)
    return whole and tensor.data_ptr() == storage_ptr(tensor)


def _find_shared_tensors(state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Names in groups whose tensors overlap; those without memory are left out."""
    storages: dict[Any, list[Any]] = {}
    for name, tensor in state_dict.items():
        where = tensor.device, storage_ptr(tensor), storage_size(tensor)
        if tensor.device.type != "meta" and where[1] and where[2]:
            span = tensor.data_ptr(), _end_ptr(tensor), name
            storages.setdefault(where, []).append(span)
    groups: list[set[str]] = []
    for spans in storages.values():
        end = 0
        for start, stop, name in sorted(spans):
            if start >= end:
                groups.append(set())
            groups[-1].add(name)
            end = max(end, stop)
    return groups


def _remove_duplicate_names(
    state_dict: Mapping[str, Any],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """For each name that is kept, the names of tensors in its memory that go."""
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    removed: dict[str, list[str]] = {}
    for names in _find_shared_tensors(state_dict):
        complete = {name for name in names if _is_complete(state_dict[name])}
        if not complete:
            message = f"none of these tensors is all of the memory that they share: {sorted(names)}"
            raise RuntimeError(f"{message}; save clones of them")
        kept = min(complete & preferred or complete - discarded or complete)
        if others := sorted(names - {kept}):
            removed[kept] = others
    return removed


_SIZE = {kind: kind.itemsize for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_TYPES = {  # Libraries import it.
    name: getattr(torch, NAMES[name])
    for name in NAMES
    if hasattr(torch, NAMES[name]) and not name.startswith(("F8_E8M0", "F6_", "F4"))
}


def _getdtype(dtype_str: str) -> Any:  # pyright: ignore[reportUnusedFunction]
    """PyTorch's dtype of a name; `torch.distributed.checkpoint` imports it."""
    return _TYPES[dtype_str]


def _to_ndarray(tensor: Any) -> tuple[Any, Any]:  # pyright: ignore[reportUnusedFunction]
    """The bytes of a contiguous tensor as a NumPy array, and what holds them."""
    held = tensor.detach().cpu()
    return held.reshape(-1).view(torch.uint8).numpy(), held


def _exported(tensors: Any) -> Any:
    """What is to be saved, checked (errors: see `save_file`)."""
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dict of tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name!r} is a sparse tensor; save {name}.to_dense()")
    if shared := [sorted(names) for names in _find_shared_tensors(tensors) if len(names) > 1]:
        raise RuntimeError(f"tensors share memory: {shared}; use save_model, or save clones")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r} is not contiguous; save {name}.contiguous()")
        if tensor.is_meta:
            raise NotImplementedError(f"Cannot copy out of meta tensor; no data: {name!r}")
    return tensors
