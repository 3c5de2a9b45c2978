"""A checkpoint as nested dicts: the tree that it was saved from, or its names split at dots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mfload import errors
from mfload.formats import structure
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Index, TensorInfo
from mfload.loading.session import Loader
from mfload.options import LoadOptions
from mfload.planning import selection
from mfload.planning.request import Request
from mfload.planning.selection import Names
from mfload.sources.base import Source

MAX_DEPTH = 100
"""Dots in a name of which dicts are made: as deep as Orbax's trees may be."""

_GONE: Any = object()
_NUMBERS = ("bool", "int", "uint", "float")  # Kinds of dtypes.


def tree_of(index: Index, names: Names = None) -> Any:
    """The tree of a checkpoint, with `structure.TensorName`s for its tensors.

    Of files without a tree, or with one that lacks some of their tensors, those of the names that
    `names` asks for are split at dots.

    Raises:
        HeaderError: The tree in the metadata is malformed.
        CheckpointError: A tensor's name is the front of another's, so that it is no dict; or it
            has too many dots.
    """
    index = index.every
    text = (index.metadata or {}).get(structure.KEY)
    if text is not None:
        found: set[str] = set()

        def tensor(name: structure.TensorName) -> structure.TensorName:
            found.add(index.tensors[name].name)
            return name

        tree = structure.loads(text, index.files[0], tensor)
        if len(found) == len(index.tensors):
            return tree
    root: dict[str, Any] = {}
    for name in selection.select(index, names).names:
        *path, last = name.split(".")
        if len(path) > MAX_DEPTH:
            what, limit = "the name makes too many dicts", f"at most {MAX_DEPTH} dots"
            raise errors.CheckpointError(what, tensor=name, expected=limit, found=len(path))
        node: Any = root
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise _ambiguous(index, node, name)
        if last in node:
            raise _ambiguous(index, name, name + ".…")
        node[last] = structure.TensorName(name)
    return root


def tensors(tree: Any) -> Iterator[structure.TensorName]:
    """The names of the tensors in a tree."""
    if isinstance(tree, structure.TensorName):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(each)


def numbers(
    index: Index, sources: Sequence[Source], infos: Sequence[TensorInfo], options: LoadOptions
) -> list[Any]:
    """Tensors without dims as numbers of Python's."""
    requests = [Request(info, info.dtype, None, False, ()) for info in infos]
    options = options.replace(allocator="mfload", engine="auto")
    loader = Loader(index, sources, NumpyAdapter(), options)
    return [array.item() for array in loader.load(requests)]


def scalars(
    tree: Any, index: Index, sources: Sequence[Source], names: Iterable[str], options: LoadOptions
) -> dict[str, Any]:
    """What the tree calls scalars, of the tensors with such names."""
    called = {name for name in tensors(tree) if isinstance(name, structure.ScalarName)}
    infos = [index.tensors[name] for name in names if name in called]
    infos = [info for info in infos if not info.shape and info.dtype.kind in _NUMBERS]
    if not infos:
        return {}
    values = numbers(index, sources, infos, options)
    return {info.name: value for info, value in zip(infos, values, strict=True)}


def _ambiguous(index: Index, front: str, name: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        "the names are no tree: one is the front of another",
        file=index.files[0] if len(index.files) == 1 else None,
        expected="mfload.load, whose dict is flat; or names= without one of them",
        found=f"{front} and {name}",
    )


def filled(tree: Any, arrays: Mapping[str, Any], *, plain: bool) -> Any:
    """A tree with arrays in place of their names; what holds none of them is left out.

    `plain`: whether plain values and empty nodes stay. Of a list that lacks items a dict of the
    others is left, by their numbers.
    """
    made = _filled(tree, arrays, plain)
    return {} if made is _GONE else made


def _filled(value: Any, arrays: Mapping[str, Any], plain: bool) -> Any:
    if isinstance(value, structure.TensorName):
        return arrays.get(value, _GONE)
    if isinstance(value, dict):
        made = {key: _filled(each, arrays, plain) for key, each in value.items()}
        kept = {key: each for key, each in made.items() if each is not _GONE}
        return kept if plain or kept else _GONE
    if isinstance(value, list | tuple):
        items = [_filled(each, arrays, plain) for each in value]
        kept = {str(n): each for n, each in enumerate(items) if each is not _GONE}
        if len(kept) == len(items) and (plain or items):
            return type(value)(items)
        return kept or _GONE
    return value if plain else _GONE
