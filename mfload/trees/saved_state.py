"""A state as it was saved: what `restore` fills beside the arrays that `load_into` fills.

Plain numbers of the target come from tensors without dims, or from the tree of the checkpoint,
which may hold them as they were; typed PRNG keys from their data. Names match as Flax and Orbax
write them: fields of named tuples as numbers, and with what Flax calls the value of a variable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mfload import dtypes, errors
from mfload.formats import structure
from mfload.index import Columns, Index, Piece, Table, TensorInfo
from mfload.options import LoadOptions
from mfload.planning.selection import Names
from mfload.sources.base import Source
from mfload.stored import Stored
from mfload.trees import matching, nested
from mfload.trees.recipe import Leaf, MisfitError, Recipe

_VALUE = "value"
_REMEDY = "the same names; or strict=False, which restores what fits, or names= for a part"
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
_HALF = 1 << 63
_INTEGERS = ("int", "uint")
_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: _INTEGERS,
    float: ("float", *_INTEGERS),
    complex: ("complex", "float", *_INTEGERS),
    np.float64: ("float", *_INTEGERS),
    np.complex128: ("complex", "float", *_INTEGERS),
}
"""The stored numbers that become one of Python's, or one of NumPy's that is one of Python's too."""


class PlainNumbers:
    """Python's numbers among the leaves of a target, which come from tensors without dims.

    Attributes:
        leaves: Those of the target.
        index: The checkpoint's.
        notes: What the target has no place for.
        picked: Names of the tensors that `names=` asks for; None for all.
    """

    def __init__(self, index: Index, leaves: Sequence[Leaf], names: Names = None) -> None:
        self.index, self.leaves = index, leaves
        self.picked = matching.picked(index, names)
        self.notes: list[str] = []
        self._values: dict[str, Any] = {}  # Of the checkpoint's tree, by name.

    def matching(self) -> dict[str, Any]:
        """Arguments of `matching.match`."""
        return {"fits": self.fits, "picked": self.picked}

    def fits(self, leaf: Leaf, recipe: Recipe) -> None:
        """Raises MisfitError if a plain number of the target can't be what is stored."""
        kinds = _KINDS.get(type(leaf.value))
        if kinds is None:
            return
        stored = recipe.tensors[0].dtype
        if not recipe.transform.plain:
            raise MisfitError("bad rule", "a plain number is one tensor as it is stored")
        if stored.kind not in kinds:
            wanted = type(leaf.value).__name__
            raise MisfitError("wrong dtype", f"wants a Python {wanted}, stored is {stored}")

    def numbers(self, recipes: dict[int, Recipe]) -> dict[int, TensorInfo]:
        """Takes the recipes of plain numbers out; returns their tensors, by number of the leaf."""
        found = [n for n in recipes if type(self.leaves[n].value) in _KINDS]
        return {n: recipes.pop(n).tensors[0] for n in found}

    def read(
        self,
        numbers: Mapping[int, TensorInfo],
        sources: Sequence[Source],
        options: LoadOptions,
    ) -> dict[int, Any]:
        """The plain numbers, by number of the leaf."""
        found = {n: self._values.get(info.name) for n, info in numbers.items()}
        left = [n for n, value in found.items() if value is None]
        if left:
            infos = [numbers[n] for n in left]
            values = nested.numbers(self.index, sources, infos, options)
            found |= dict(zip(left, values, strict=True))
        return {n: type(self.leaves[n].value)(value) for n, value in found.items()}

    def finished(self, number: int, array: Any) -> Any:
        """What becomes of a leaf's array: a scalar of NumPy's, if the target has one."""
        scalar = isinstance(self.leaves[number].value, np.generic)
        return array[()] if scalar and isinstance(array, np.ndarray) else array


class SavedState(PlainNumbers):
    """What a checkpoint holds for a target.

    Attributes:
        leaves: Those of the target, all of which are wanted; keys have the shape of their data.
        index: The checkpoint's, with the plain numbers of its tree as tensors.
    """

    def __init__(
        self, index: Index, leaves: Sequence[Leaf], names: Names, *, mapped: bool = False
    ) -> None:
        super().__init__(index, list(map(_wanted, leaves)))
        self._by_name: dict[str, str] = {}
        short: dict[str, set[str]] = {}
        for leaf in self.leaves:
            for name in leaf.also:
                self._by_name[name] = leaf.name
            for name in (*leaf.names, *leaf.also):
                short.setdefault(_without_value(name), set()).add(leaf.name)
        self._by_name |= {name: name for leaf in self.leaves for name in leaf.names}
        self._short = {name: min(found) for name, found in short.items() if len(found) == 1}
        if [*self._by_name] == [""] and len(index.tensors) == 1:  # One array, however it is named.
            self._by_name |= dict.fromkeys(index.tensors, "")
        # Of tensors in the tree, by name; not what `mapping=` gives.
        self._paths: dict[str, str] = {}
        self.index = self._with_numbers(index, mapped)
        self.picked = matching.picked(self.index, names)

    def resolve(self, name: str) -> str:
        """The leaf's name for one that a file has; the same if there is no such leaf."""
        name = self._paths.get(name, name)
        return self._by_name.get(name, self._short.get(_without_value(name), name))

    def matching(self) -> dict[str, Any]:
        """Arguments of `matching.match`."""
        given = {**PlainNumbers.matching(self), "resolve": self.resolve}
        return {**given, "remedy": _REMEDY, "file": self.index.files[0]}

    def _with_numbers(self, index: Index, mapped: bool) -> Index:
        """The index with a tensor for each plain number of the tree."""
        metadata = index.metadata or {}
        if structure.KEY not in metadata:
            return index
        file, tensors = index.files[0], index.tensors

        def tensor(name: structure.TensorName) -> structure.TensorName:
            return tensors[name] and name  # A row is true; KeyError if there is none.

        tree = structure.loads(metadata[structure.KEY], file, tensor)
        tree = self._of_target(tree, structure.items(metadata, file), file, mapped)
        _collect(tree, (), self._values, {} if mapped else self._paths, file)
        held = {leaf.name: leaf for leaf in self.leaves}
        rows = [
            _row(name, value, held.get(self.resolve(name)))
            for name, value in self._values.items()
            if type(value) in _KINDS and (type(value) is not int or -_HALF <= value < 2 * _HALF)
        ]
        if not rows:
            return index
        columns = Columns()
        columns.extend(index.columns)
        table = Table(columns)
        for twice in table.add(rows):
            what = "a number and an array have the same name: their keys, joined by dots"
            raise errors.HeaderError(what, file=file, tensor=twice.name)
        return index.part(table.columns)

    def _of_target(self, tree: Any, items: Mapping[str, bool], file: str, mapped: bool) -> Any:
        """The tree without items that have no tensors and no place in the target.

        If one item has tensors, and the target is not a dict by item, it is that item's tree. The
        tree of a single item is put under its name if the target has nothing but that.
        """
        there = [name for name, held in items.items() if held]
        asked = {leaf.name.partition(".")[0] for leaf in self.leaves}
        if len(there) == 1 and not mapped:
            own = tree if isinstance(tree, dict) else {}
            return tree if there[0] in own or asked != {*there} else {there[0]: tree}
        if not isinstance(tree, dict) or len(there) < 2:
            return tree
        full = [name for name in there if [*nested.tensors(tree.get(name))]]
        by_item = not asked.isdisjoint(there)
        if not by_item and len(full) > 1 and not mapped:
            raise errors.CheckpointError(
                "several items in the checkpoint, and the target has none of them as a key",
                file=file,
                expected="a target with the items as its keys, or the directory of one item",
                problems=tuple(there),
            )
        left = [name for name in there if name not in full and name not in asked]
        if left:
            self.notes.append(f"items that the target has no place for: {', '.join(left)}")
        if not by_item and len(full) == 1:
            return tree[full[0]]
        return {name: each for name, each in tree.items() if name not in left}

    def read(
        self,
        numbers: Mapping[int, TensorInfo],
        sources: Sequence[Source],
        options: LoadOptions,
    ) -> dict[int, Any]:
        """The plain numbers, and texts of the tree that the target has a place for."""
        made = super().read(numbers, sources, options)
        if self.picked is not None:
            return made
        by_leaf = {self.resolve(name): value for name, value in self._values.items()}
        for n, leaf in enumerate(self.leaves):
            kind, value = type(leaf.value), by_leaf.get(leaf.name)
            if kind in (str, bytes) and type(value) is kind:
                made[n] = value
        return made

    def finished(self, number: int, array: Any) -> Any:
        """What becomes of a leaf's array: also a typed key, if the target has one."""
        implementation = _implementation(getattr(self.leaves[number].value, "dtype", None))
        if implementation is None:
            return super().finished(number, array)
        return jax.random.wrap_key_data(array, impl=implementation)


def _wanted(leaf: Leaf) -> Leaf:
    """A leaf of which the checkpoint must say what becomes of it."""
    implementation = _implementation(getattr(leaf.value, "dtype", None))
    if implementation is not None:
        key = jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype)
        data = jax.eval_shape(jax.random.key_data, key)
        row, sharding = dtypes.resolve(data.dtype.name), getattr(leaf.value, "sharding", None)
        if not getattr(leaf.value, "committed", True):
            sharding = None
        leaf = leaf._replace(shape=data.shape, dtype=row, held=True, sharding=sharding)
    return leaf._replace(optional=not leaf.held, optimizer=False)


@functools.lru_cache
def _implementation(dtype: Any) -> str | None:
    """The algorithm of typed PRNG keys, by their dtype; None for all other dtypes."""
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    made = {name: jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)) for name in _KEYS}
    return next((name for name, key in made.items() if key.dtype == dtype), None)


def _without_value(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _VALUE)


def _collect(
    value: Any, path: tuple[str, ...], found: dict[str, Any], paths: dict[str, str], file: str
) -> None:
    """The plain values of a tree by their paths, joined by dots, and the paths of its tensors."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _collect(each, (*path, str(key)), found, paths, file)
    elif isinstance(value, structure.TensorName):
        paths.setdefault(value, ".".join(path))
    elif value is not None:
        name = ".".join(path)
        if name in found:
            what = "two values have the same name: their keys, joined by dots"
            raise errors.HeaderError(what, file=file, tensor=name)
        found[name] = value


def _row(name: str, value: Any, leaf: Leaf | None) -> TensorInfo:
    """A plain number as a tensor whose bytes lie in the header."""
    dtype = dtypes.TABLE[_narrowest(value)]
    wanted = leaf and leaf.dtype
    if wanted is not None and type(value) is int and wanted.kind in _INTEGERS:
        limits = np.iinfo(wanted.numpy)  # pyright: ignore
        dtype = wanted if limits.min <= value <= limits.max else dtype
    inline = np.asarray(value).astype(dtype.numpy).tobytes()
    return TensorInfo(name, dtype, (), (Piece(0, 0, 0, Stored(inline=inline)),))


def _narrowest(value: Any) -> str:
    if type(value) is int:
        bits = (~value if value < 0 else value).bit_length()
        return "I32" if bits < 32 else "I64" if bits < 64 else "U64"
    return {bool: "BOOL", float: "F64", complex: "C64"}[type(value)]
