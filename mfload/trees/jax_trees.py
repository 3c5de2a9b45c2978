"""Trees of JAX: a target as a row of leaves with names, and back as the same type with arrays.

Anything that JAX knows as a pytree is taken apart and rebuilt by JAX itself. What Flax adds is
handled here: modules and variables that are shared, boxes that name axes, train states. A target
can only hold these if Flax was imported, so that nothing here imports it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.trees.recipe import Leaf, new_row

_Path = tuple[str, ...]
_STATISTICS = "batch_stats"  # Linen's collection of them.
_OPTIMIZER = ("opt_state", "step")  # Fields of a TrainState.

NUMPY: Any = "numpy"
"""What stands for the sharding of a leaf that is an array or a scalar of NumPy's."""


class Axes(NamedTuple):
    """The axes that a variable or a box names for the dims of its array."""

    names: Any  # One for each dim, as the owner wrote them; or a sharding.
    mesh: Any  # The owner's, if it has one.
    rules: Any  # The owner's, from logical axes to those of a mesh, if it has any.
    logical: bool  # Whether all names are of logical axes.


class Tree(NamedTuple):
    """A target taken apart: its leaves (a shared one once), and how to rebuild it from values."""

    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Sequence[Any]], Any]


class _Field(str):
    """A field of a named tuple, as a part of a name."""

    __slots__ = ("number",)
    number: str


def take_apart(target: Any, *, numbered: bool = False) -> Tree:
    """The leaves of any pytree, and how to put it together. The tree is left as it is.

    `numbered`: whether leaves have the names as well in which fields of named tuples are numbers.
    """
    walk = _TreeWalk(numbered=numbered)
    top = walk.below if is_node(target) else walk.node
    build: Any = top(target, (), Leaf((), ()))  # What is a node is no leaf.
    leaves = tuple(_leaf(*found) for found in walk.found)
    names = list(itertools.chain.from_iterable(leaf.names for leaf in leaves))
    if len(set(names)) < len(names):
        name = Counter(names).most_common(1)[0][0]
        raise errors.UsageError("two leaves of the target have the same name", found=repr(name))
    return Tree(leaves, lambda values: build(values, {}))


def take_apart_target(target: Any, *, numbered: bool = False) -> Tree:
    """The same for a target that is to be filled.

    It has a place for a tensor, unless it has no leaves at all, or texts alone: a checkpoint may
    hold no more than that (see `check_places`).
    """
    made = take_apart(target, numbered=numbered)
    if type(target) is tuple and target and isinstance(target[0], _flax("nnx", "GraphDef")):
        raise errors.UsageError(
            "the target is what nnx.split gives, not a tree of its own",
            expected="the state alone; merge what comes back: nnx.merge(graphdef, loaded)",
            found="(graphdef, state)",
        )
    if not all(isinstance(leaf.value, str | bytes) for leaf in made.leaves):
        check_places(target, made.leaves)
    return made


def check_places(target: Any, leaves: Sequence[Leaf]) -> None:
    """Refuses a target that has no place for a tensor."""
    if any(leaf.counts for leaf in leaves):
        return
    if isinstance(target, type):
        raise errors.UsageError(
            f"no leaf of the target can hold a tensor: it is the class {target.__name__}",
            expected="an instance, such as nnx.eval_shape makes without memory, or a module "
            "of PyTorch on the meta device",
        )
    raise errors.UsageError(
        "no leaf of the target can hold a tensor",
        expected="a pytree with arrays or jax.ShapeDtypeStructs as its leaves, such as "
        "nnx.eval_shape or jax.eval_shape makes; dataclasses must be registered with "
        "jax.tree_util.register_dataclass",
        found=type(target).__name__,
    )


def children(value: Any) -> list[tuple[str | None, Any]] | None:
    """The names and values one level below a node, None as the name of what a box holds.

    None for what JAX does not take apart.
    """
    calls = itertools.count()  # The first is for the value itself.
    try:
        flat, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda _: next(calls) > 0)
    except (TypeError, ValueError) as error:
        message, kind = f"JAX can't take it apart: {error}", type(value).__name__
        raise errors.UsageError(message, expected="a pytree", found=kind) from error
    if any(not path for path, _ in flat):
        return None
    hidden = isinstance(value, _kinds()) and not isinstance(value, _named_nodes())
    return [(None if hidden else ".".join(map(_text, path)), each) for path, each in flat]


def holders(array: Any) -> set[int]:
    """The processes that hold an array, or parts of it; none if it is this process's alone."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return set()
    if array.is_fully_addressable:
        return set()
    return {device.process_index for device in array.sharding.device_set}


def unsaved(node: Any) -> str | None:
    """Why a node of a tree can't be saved, and what to save instead."""
    if isinstance(node, _flax("nnx", "GraphDef")):
        return "a GraphDef can't be saved; save the state alone, and merge what is restored"
    return None


def key_data(value: Any) -> Any:
    """The numbers of typed PRNG keys; anything else as it is."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


_Build = Callable[[Sequence[Any], dict[int, Any]], Any]
"""Makes a node of the values of all leaves, and of what was made of shared nodes, by id."""


class _TreeWalk:
    """Goes through a tree once. A role is a leaf with nothing but what Flax says of it."""

    def __init__(self, *, numbered: bool) -> None:
        self._parts = _numbered if numbered else _texts
        self.found: list[tuple[list[_Path], Any, Leaf]] = []  # Values, all of their paths, roles.
        # By id of a node that may occur again: the node, its first path, and its leaves among
        # all, None while it is taken apart.
        self._seen: dict[int, tuple[Any, _Path, slice | None]] = {}
        self._kinds = _kinds()

    def node(self, tree: Any, path: _Path, role: Leaf) -> _Build:
        """Takes apart what JAX sees at once, and then the nodes of Flax that it stopped at."""
        calls = itertools.count()  # The first is for the tree itself.
        try:
            flat, structure = jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda each: next(calls) > 0 and isinstance(each, self._kinds)
            )
        except (TypeError, ValueError, RecursionError) as error:
            where, text = ".".join(path) or "the target", str(error).splitlines()[0]
            message, kind = f"JAX can't take {where} apart: {text}", type(tree).__name__
            raise errors.UsageError(message, expected="a pytree", found=kind) from error
        # What variables and boxes call their value is not part of a name.
        hidden = isinstance(tree, self._kinds) and not isinstance(tree, _named_nodes())
        training = isinstance(tree, _flax("training.train_state", "TrainState"))
        builds: list[Any] = []  # Functions, and numbers of leaves.
        for entries, each in flat:
            names = self._parts(tree, entries)[hidden:]
            said = role
            if training and names[0] in _OPTIMIZER:
                said = role._replace(optimizer=True)
            builds.append(self.below(each, path + names, said))
        return lambda values, made: structure.unflatten(
            [values[b] if type(b) is int else b(values, made) for b in builds]
        )

    def below(self, each: Any, path: _Path, role: Leaf) -> _Build | int:
        """Takes apart a node of Flax, or notes a leaf and returns its number."""
        key, first = id(each), len(self.found)
        if not isinstance(each, self._kinds):
            self.found.append(([path], each, role))
            return first
        if key in self._seen:
            _, before, leaves = self._seen[key]
            if leaves is None:
                found = f"{'.'.join(path)} is {'.'.join(before) or 'the target'}"
                raise errors.UsageError("the target holds itself", expected="a tree", found=found)
            for paths, _, _ in self.found[leaves]:
                paths.append((*path, *paths[0][len(before) :]))
            return lambda _, made: made[key]
        self._seen[key] = each, path, None
        build = self.node(each, path, _role(each, role))
        self._seen[key] = each, path, slice(first, len(self.found))

        def remember(values: Sequence[Any], made: dict[int, Any]) -> Any:
            made[key] = build(values, made)
            return made[key]

        return remember


def _texts(_: Any, entries: Sequence[Any]) -> _Path:
    """The entries of a path as parts of a name."""
    return tuple(map(_text, entries))


def _numbered(node: Any, entries: Sequence[Any]) -> _Path:
    """The same; fields of named tuples on the path, which begins at a node, know their numbers."""
    parts: list[str] = []
    for entry in entries:
        part, kind, inner = _text(entry), type(entry), None
        with contextlib.suppress(AttributeError, LookupError, TypeError):
            if kind is jax.tree_util.GetAttrKey and not isinstance(node, _flax("nnx", "Variable")):
                if isinstance(node, tuple) and part in getattr(node, "_fields", ()):
                    part = _Field(part)
                    part.number = str(node._fields.index(part))  # pyright: ignore
                inner = getattr(node, part)
            elif kind is jax.tree_util.DictKey or kind is jax.tree_util.SequenceKey:
                inner = node[entry.key if kind is jax.tree_util.DictKey else entry.idx]
        parts.append(part)
        node = inner
    return tuple(parts)


def _text(entry: Any) -> str:
    """An entry of a path as a part of a name."""
    if type(entry) is jax.tree_util.DictKey and type(entry.key) is str:
        return entry.key  # For short: trees have many.
    return jax.tree_util.keystr((entry,), simple=True)


def _leaf(paths: list[_Path], value: Any, role: Leaf) -> Leaf:
    names, parts = (".".join(paths[0]),), paths[0]
    if len(paths) > 1:
        names = tuple(dict.fromkeys(map(".".join, paths)))
        parts = tuple(itertools.chain.from_iterable(paths))
    tracer, number, abstract, array, numpy = _traits(type(value))
    if tracer:
        raise errors.UsageError(
            "a tracer can't be loaded into; load outside jit, grad and vmap",
            expected="arrays or jax.ShapeDtypeStruct",
            found=names[0],
        )
    if number:  # Such as steps and rates.
        return role._replace(names=names, value=value, optional=True, also=_also(paths))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    try:
        extended, row = (True, None) if dtype is None else _row(dtype)
    except TypeError as error:  # Such as torch.float32.
        home = type(value).__module__.partition(".")[0]
        raise errors.UsageError(
            f"the leaf {names[0]!r} of the target is not an array of JAX or NumPy",
            expected="load_into(model, path) with the module itself, or load(path, framework) for "
            "tensors by name",
            found=f"{type(value).__name__} of {home}",
        ) from error
    # Typed PRNG keys are arrays of an extended dtype.
    if extended or not isinstance(shape, tuple):
        said = {"held": False, "abstract": abstract, "optional": True, "also": _also(paths)}
        return role._replace(names=names, value=value, **said)
    optional = role.optional or _STATISTICS in parts
    sharding = role.sharding
    # Others merely lie on a device.
    if not array or getattr(value, "committed", getattr(value, "_committed", True)):
        sharding = NUMPY if numpy else getattr(value, "sharding", None)
    held, also = row is not None, _also(paths)
    said = names, shape, row, value, sharding, role.axes, optional, role.optimizer, held, abstract
    return new_row(Leaf, (*said, also))


def _also(paths: Sequence[_Path]) -> tuple[str, ...]:
    """The names of a leaf with numbers for fields, if these are known."""
    return tuple(
        ".".join(part.number if type(part) is _Field else part for part in path)
        for path in paths
        if _Field in map(type, path)
    )


@functools.lru_cache
def _traits(kind: type) -> tuple[bool, bool, bool, bool, bool]:
    """Whether values of a type are tracers, plain numbers, abstract, arrays of JAX, of NumPy."""
    number = issubclass(kind, bool | int | float | complex)
    abstract = issubclass(kind, jax.ShapeDtypeStruct | jax.core.ShapedArray)
    array, numpy = issubclass(kind, jax.Array), issubclass(kind, np.ndarray | np.generic)
    return issubclass(kind, jax.core.Tracer), number, abstract, array, numpy


@functools.lru_cache
def _row(dtype: Any) -> tuple[bool, DType | None]:
    """Whether a dtype is an extended one of JAX's, and its row in the table, if it has one."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return True, None
    try:
        return False, dtypes.resolve(np.dtype(dtype).name)
    except (TypeError, errors.UsageError):
        return False, None


# -- Flax ------------------------------------------------------------------------------------


def is_node(value: Any) -> bool:
    """Whether a value is a module, a variable, a box or a train state of Flax."""
    return isinstance(value, _kinds())


def _kinds() -> tuple[type, ...]:
    return (*_flax("core.meta", "AxisMetadata"), *_flax("nnx", "Variable"), *_named_nodes())


def _named_nodes() -> tuple[type, ...]:
    """Those whose fields are parts of names."""
    return (*_flax("nnx", "Pytree"), *_flax("training.train_state", "TrainState"))


def _flax(module: str, name: str) -> tuple[type, ...]:
    """A class of Flax if its module was imported; none else."""
    found = getattr(sys.modules.get(f"flax.{module}"), name, None)
    return () if found is None else (found,)


def _role(node: Any, role: Leaf) -> Leaf:
    """What a node of Flax says of the leaves in it, beside what those around it said."""
    if isinstance(node, _flax("nnx", "Variable")):
        known = node.get_metadata()
        for key in ("out_sharding", "sharding", "sharding_names"):  # Flax renamed it twice.
            if known.get(key):
                axes = Axes(known[key], known.get("mesh"), known.get("sharding_rules"), False)
                role = role._replace(axes=axes)
                break
        if isinstance(node, (*_flax("nnx", "RngState"), *_flax("nnx", "BatchStat"))):
            role = role._replace(optional=True)
        if isinstance(node, _flax("nnx", "OptState")):
            role = role._replace(optimizer=True)
    elif isinstance(node, _flax("core.meta", "Partitioned")):
        logical = isinstance(node, _flax("linen.spmd", "LogicallyPartitioned"))
        rules = getattr(node, "rules", None)
        role = role._replace(axes=Axes(node.names, node.mesh, rules, logical))
    return role
