"""Trees of JAX: a target as a row of leaves with names, and back as the same type with arrays.

Anything that JAX knows as a pytree is taken apart and rebuilt by JAX itself. What Flax adds is
handled here: modules and variables that are shared, boxes that name axes, train states. A target
can only hold these if Flax was imported, so that nothing here imports it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mfload import dtypes, errors
from mfload.trees.recipe import Leaf

_Path = tuple[Any, ...]
_KEYS = ("key", "idx", "name")  # What the entries of a path call theirs.
_STATISTICS = "batch_stats"  # Linen's collection of them.
_OPTIMIZER = ("opt_state", "step")  # Fields of a TrainState.


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


def take_apart(target: Any) -> Tree:
    """The leaves of any pytree, and how to put it together. The tree is left as it is."""
    walk = _Walk()
    top = walk.below if is_node(target) else walk.node
    build = top(target, (), _Role())
    leaves = tuple(_leaf(*found) for found in walk.found)
    counts = Counter(name for leaf in leaves for name in leaf.names)
    for name in (name for name, count in counts.items() if count > 1):
        raise errors.UsageError("two leaves of the target have the same name", found=repr(name))
    return Tree(leaves, lambda values: build(_Values(values, {})))


def take_apart_target(target: Any) -> Tree:
    """The same for a target that is to be filled, which has a place for a tensor."""
    if isinstance(target, str | os.PathLike):
        raise errors.UsageError(
            "load_into(target, path): the arguments are swapped",
            expected="a tree first, then a path",
            found=repr(target),
        )
    made = take_apart(target)
    definition = getattr(_nnx(), "GraphDef", ())
    if type(target) is tuple and target and isinstance(target[0], definition):
        raise errors.UsageError(
            "the target is what nnx.split gives, not a tree of its own",
            expected="the state alone; merge what comes back: nnx.merge(graphdef, loaded)",
            found="(graphdef, state)",
        )
    if not any(leaf.counts for leaf in made.leaves):
        kind = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise errors.UsageError(
            "no leaf of the target can hold a tensor",
            expected="a pytree with arrays or jax.ShapeDtypeStructs as its leaves, such as "
            "nnx.eval_shape or jax.eval_shape makes; dataclasses must be registered with "
            "jax.tree_util.register_dataclass",
            found=kind,
        )
    return made


class _Role(NamedTuple):
    """What Flax says of a leaf; see `Leaf`."""

    axes: Axes | None = None
    optional: bool = False
    optimizer: bool = False


class _Values(NamedTuple):
    """The values of the leaves, by number, and what was made of nodes that are shared, by id."""

    values: Sequence[Any]
    shared: dict[int, Any]


_Build = Callable[[_Values], Any]


class _Walk:
    """Goes through a tree once."""

    def __init__(self) -> None:
        self.found: list[tuple[list[_Path], Any, _Role]] = []  # Leaves, with all of their paths.
        # By id of a node that may occur again: its first path, and its leaves among all,
        # half-open; -1 while it is taken apart.
        self._seen: dict[int, tuple[_Path, int, int]] = {}
        self._kept: list[Any] = []  # Keeps ids unique.
        self._kinds = _kinds()

    def node(self, tree: Any, path: _Path, role: _Role) -> _Build:
        """Takes apart what JAX sees at once, and then the nodes of Flax that it stopped at."""
        top = True

        def stop(each: Any) -> bool:
            nonlocal top
            is_top, top = top, False
            return not is_top and isinstance(each, self._kinds)

        try:
            flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)
        except (TypeError, ValueError, RecursionError) as error:
            where, text = ".".join(path) or "the target", str(error).splitlines()[0]
            message, kind = f"JAX can't take {where} apart: {text}", type(tree).__name__
            raise errors.UsageError(message, expected="a pytree", found=kind) from error
        # What variables and boxes call their value is not part of a name.
        states = _states()
        hidden = isinstance(tree, self._kinds) and not isinstance(tree, (*_modules(), *states))
        builds: list[_Build] = []
        for entries, each in flat:
            names = tuple(_texts(entries[hidden:]))
            state = bool(names) and isinstance(tree, states) and names[0] in _OPTIMIZER
            said = role._replace(optimizer=True) if state else role
            builds.append(self.below(each, (*path, *names), said))
        return lambda values: structure.unflatten([build(values) for build in builds])

    def below(self, each: Any, path: _Path, role: _Role) -> _Build:
        """Takes apart a node of Flax, or notes a leaf."""
        key, first = id(each), len(self.found)
        if not isinstance(each, self._kinds):
            self.found.append(([path], each, role))
            return lambda values: values.values[first]
        if key in self._seen:
            self._again(path, *self._seen[key])
            return lambda values: values.shared[key]
        self._seen[key] = path, first, -1
        self._kept.append(each)
        build = self.node(each, path, _role(each, role))
        self._seen[key] = path, first, len(self.found)

        def remember(values: _Values) -> Any:
            values.shared[key] = made = build(values)
            return made

        return remember

    def _again(self, path: _Path, before: _Path, first: int, last: int) -> None:
        """Notes that the leaves of a node have another path each."""
        if last < 0:
            found = f"{'.'.join(path)} is {'.'.join(before) or 'the target'}"
            raise errors.UsageError("the target holds itself", expected="a tree", found=found)
        for paths, _, _ in self.found[first:last]:
            paths.append((*path, *paths[0][len(before) :]))


def _texts(entries: tuple[Any, ...]) -> Iterator[str]:
    """The texts of a path, as `jax.tree_util.keystr(simple=True)` gives them."""
    for entry in entries:
        names = (getattr(entry, each) for each in _KEYS if hasattr(entry, each))
        yield str(next(names, entry))


def _leaf(paths: list[_Path], value: Any, role: _Role) -> Leaf:
    names = tuple(dict.fromkeys(".".join(path) for path in paths))
    if isinstance(value, jax.core.Tracer):
        raise errors.UsageError(
            "a tracer can't be loaded into; load outside jit, grad and vmap",
            expected="arrays or jax.ShapeDtypeStruct",
            found=names[0],
        )
    leaf = Leaf(names, (), None, value, axes=role.axes, optional=True, optimizer=role.optimizer)
    if isinstance(value, bool | int | float | complex):  # Such as steps and rates.
        return leaf
    leaf = leaf._replace(held=False, abstract=isinstance(value, jax.ShapeDtypeStruct))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    array = isinstance(shape, tuple) and dtype is not None
    # Typed PRNG keys are arrays of an extended dtype.
    if not array or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    optional = role.optional or any(_STATISTICS in path for path in paths)
    leaf = leaf._replace(shape=shape, optional=optional)
    placed = getattr(value, "committed", getattr(value, "_committed", True))
    if placed or not isinstance(value, jax.Array):  # Others merely lie on the default device.
        leaf = leaf._replace(sharding=getattr(value, "sharding", None))
    try:
        return leaf._replace(dtype=dtypes.resolve(np.dtype(dtype).name), held=True)
    except (TypeError, errors.UsageError):
        return leaf


# -- Flax ------------------------------------------------------------------------------------


def is_node(value: Any) -> bool:
    """Whether a value is a module, a variable, a box or a train state of Flax."""
    return isinstance(value, _kinds())


def _kinds() -> tuple[type, ...]:
    meta, nnx = sys.modules.get("flax.core.meta"), _nnx()
    found = (*(() if meta is None else (meta.AxisMetadata,)), *_states())
    return found if nnx is None else (*found, nnx.Variable, *_modules())


def _modules() -> tuple[type, ...]:
    nnx = _nnx()
    return () if nnx is None else (nnx.Pytree,)


def _states() -> tuple[type, ...]:
    kind = getattr(sys.modules.get("flax.training.train_state"), "TrainState", None)
    return () if kind is None else (kind,)


def _nnx() -> Any:
    """`flax.nnx`, if it is there as a whole (another thread may be importing it)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if hasattr(nnx, "Pytree") else None


def _role(node: Any, before: _Role) -> _Role:
    """What a node of Flax says of the leaves in it, beside what those around it said."""
    nnx, meta = _nnx(), sys.modules.get("flax.core.meta")
    if nnx is not None and isinstance(node, nnx.Variable):
        state = isinstance(node, nnx.RngState | nnx.BatchStat)
        optimizer = before.optimizer or isinstance(node, nnx.OptState)
        axes, known = before.axes, node.get_metadata()
        for key in ("out_sharding", "sharding", "sharding_names"):  # Flax renamed it twice.
            if known.get(key):
                axes = Axes(known[key], known.get("mesh"), known.get("sharding_rules"), False)
                break
        return _Role(axes, before.optional or state, optimizer)
    if meta is not None and isinstance(node, meta.Partitioned):
        kind = getattr(sys.modules.get("flax.linen.spmd"), "LogicallyPartitioned", ())
        rules = getattr(node, "rules", None)
        return before._replace(axes=Axes(node.names, node.mesh, rules, isinstance(node, kind)))
    return before
