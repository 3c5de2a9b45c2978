"""A checkpoint as nested dicts: the tree that it was saved from, or its names split at dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfload import errors
from mfload.formats import structure
from mfload.index import Index
from mfload.planning import selection
from mfload.planning.selection import Names

MAX_DEPTH = 100
"""Dots in a name of which dicts are made: as deep as Orbax's trees may be."""

_GONE: Any = object()


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

        def tensor(name: str) -> structure.TensorName:
            found.add(index.tensors[name].name)
            return structure.TensorName(name)

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
