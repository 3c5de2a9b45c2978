"""Trees of JAX: a target as a row of leaves with names, and back as the same type with arrays.

Anything that JAX knows as a pytree is taken apart and put together by JAX itself. What Flax adds
(variables that several modules share, boxes with the names of axes) is told by `flax_trees`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.trees import flax_trees
from mfload.trees.flax_trees import PLAIN, Role

_Path = tuple[Any, ...]
_KEYS = ("key", "idx", "name")  # What the entries of a path call theirs.


class Leaf(NamedTuple):
    """One leaf of a target.

    Attributes:
        names: Its names, more than one where variables are shared.
        shape: In elements.
        dtype: Row of the dtype table; None where it takes what comes, or `held` is False.
        value: The leaf itself.
        sharding: Its own, as it is (the mesh may be abstract); None where it has none.
        role: What Flax says of it.
        optional: Whether it stays as it is where the checkpoint has nothing for it.
        held: Whether it can hold a tensor; functions, texts and random keys can't.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType | None
    value: Any
    sharding: Any
    role: Role
    optional: bool
    held: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def optimizer(self) -> bool:
        """Whether it is an optimizer's state."""
        return self.role.optimizer

    @property
    def counts(self) -> bool:
        """Whether it is a number or an array, of random keys too; not a function or a text."""
        return self.held or hasattr(self.value, "dtype")

    @property
    def abstract(self) -> bool:
        """Whether it is a shape without any numbers."""
        return isinstance(self.value, jax.ShapeDtypeStruct)


class Tree(NamedTuple):
    """A target taken apart.

    Attributes:
        leaves: Its leaves; one that is shared appears once.
        rebuild: Makes a tree of the same type from a value for each leaf.
    """

    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def take_apart(target: Any) -> Tree:
    """Takes a target apart. It is left as it is, and so is everything in it.

    Args:
        target: Any pytree whose leaves are arrays or `jax.ShapeDtypeStruct`s: dicts, lists,
            dataclasses, Flax modules, states, params, boxes and train states among them.

    Returns:
        Its leaves, and how to put it together.

    Raises:
        UsageError: Two leaves have the same name, a leaf is a tracer, or it is no tree.
    """
    walk = _Walk()
    build = walk.below(target, ()) if flax_trees.is_node(target) else walk.node(target, ())
    leaves = tuple(each.leaf() for each in walk.found)
    _check_names(leaves)

    def rebuild(values: Sequence[Any]) -> Any:
        return build(_Values(values))

    return Tree(leaves, rebuild)


def mould(target: Any) -> Tree:
    """Takes apart what is to be filled.

    Args:
        target: As for `take_apart`.

    Raises:
        UsageError: As `take_apart`, or it has no place for a tensor.
    """
    made = take_apart(target)
    if flax_trees.is_split(target) or not any(leaf.counts for leaf in made.leaves):
        raise _no_mould(target)
    return made


class _Values:
    """The values of the leaves, by number, and what was made of nodes that are shared."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        self.shared: dict[int, Any] = {}


_Build = Callable[[_Values], Any]


class _Found:
    """A leaf that was come by, perhaps on several paths."""

    def __init__(self, path: _Path, value: Any, role: Role) -> None:
        self.paths, self.value, self.role = [path], value, role

    def leaf(self) -> Leaf:
        names = tuple(dict.fromkeys(".".join(path) for path in self.paths))
        role = self.role
        if any(flax_trees.is_statistics(path) for path in self.paths):
            role = role._replace(optional=True)
        return _leaf(names, self.value, role)


class _Shared(NamedTuple):
    """A node that may be come by again.

    Attributes:
        path: Where it was first.
        first, last: Its leaves among all, half-open; `last` is -1 while it is taken apart.
    """

    path: _Path
    first: int
    last: int


class _Walk:
    """Goes through a tree once."""

    def __init__(self) -> None:
        self.found: list[_Found] = []
        self._seen: dict[int, _Shared] = {}
        self._kept: list[Any] = []  # Or else their ids could come again.
        self._kinds = flax_trees.kinds()

    def node(self, tree: Any, path: _Path, role: Role = PLAIN) -> _Build:
        """Takes apart what JAX sees at once, and then what Flax told it to stop at."""
        top = True

        def stop(each: Any) -> bool:
            nonlocal top
            is_top, top = top, False
            return not is_top and isinstance(each, self._kinds)

        try:
            flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)
        except (TypeError, ValueError, RecursionError) as error:
            where = ".".join(path) or "the target"
            raise errors.UsageError(
                f"JAX can't take {where} apart: {str(error).splitlines()[0]}",
                expected="a pytree",
                found=type(tree).__name__,
            ) from error
        # What variables and boxes call their value is no part of a name.
        hidden = isinstance(tree, self._kinds) and flax_trees.hides_its_key(tree)
        builds: list[_Build] = []
        for entries, each in flat:
            names = tuple(_texts(entries[hidden:]))
            said = flax_trees.role_of_field(tree, names[0], role) if names else role
            builds.append(self.below(each, (*path, *names), said))
        return lambda values: structure.unflatten([build(values) for build in builds])

    def below(self, each: Any, path: _Path, role: Role = PLAIN) -> _Build:
        """Takes apart a node of Flax, or notes a leaf."""
        if not isinstance(each, self._kinds):
            number = len(self.found)
            self.found.append(_Found(path, each, role))
            return lambda values: values.values[number]
        key = id(each)
        if key in self._seen:
            return self._again(each, path, self._seen[key])
        first = len(self.found)
        self._seen[key] = _Shared(path, first, -1)
        self._kept.append(each)
        build = self.node(each, path, flax_trees.role(each, role))
        self._seen[key] = _Shared(path, first, len(self.found))

        def remember(values: _Values) -> Any:
            values.shared[key] = made = build(values)
            return made

        return remember

    def _again(self, each: Any, path: _Path, before: _Shared) -> _Build:
        if before.last < 0:
            raise errors.UsageError(
                "the target holds itself",
                expected="a tree",
                found=f"{'.'.join(path)} is {'.'.join(before.path) or 'the target'}",
            )
        for found in self.found[before.first : before.last]:
            found.paths.append((*path, *found.paths[0][len(before.path) :]))
        key = id(each)
        return lambda values: values.shared[key]


def _texts(entries: tuple[Any, ...]) -> Iterator[str]:
    """The texts of a path, as `jax.tree_util.keystr(simple=True)` gives them."""
    for entry in entries:
        for attribute in _KEYS:
            if hasattr(entry, attribute):
                yield str(getattr(entry, attribute))
                break
        else:
            yield str(entry)


def _leaf(names: tuple[str, ...], value: Any, role: Role) -> Leaf:
    if isinstance(value, jax.core.Tracer):
        raise errors.UsageError(
            "a tracer can't be loaded into; load outside jit, grad and vmap",
            expected="arrays or jax.ShapeDtypeStruct",
            found=names[0],
        )
    if isinstance(value, bool | int | float | complex):
        # A number of the configuration, as steps and rates are.
        return Leaf(names, (), None, value, None, role, True, True)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or _is_extended(dtype):
        return Leaf(names, (), None, value, None, role, True, False)
    row = row_of(dtype)
    own = _own_sharding(value)
    return Leaf(names, shape, row, value, own, role, role.optional, row is not None)


def row_of(dtype: Any) -> DType | None:
    """The row of the dtype table for a dtype of JAX, None where it has none."""
    try:
        return dtypes.resolve(np.dtype(dtype).name)
    except (TypeError, errors.UsageError):
        return None


def _is_extended(dtype: Any) -> bool:
    """Whether it is a dtype of JAX's own, such as that of random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def _own_sharding(value: Any) -> Any:
    """The sharding that somebody gave a leaf; what merely lies on the default device has none."""
    if isinstance(value, jax.Array):
        committed = getattr(value, "committed", getattr(value, "_committed", True))
        return value.sharding if committed else None
    return getattr(value, "sharding", None)


def _no_mould(target: Any) -> errors.UsageError:
    """Says what to pass instead, as far as it can be seen."""
    message, found = "no leaf of the target can hold a tensor", type(target).__name__
    expected = "a pytree with arrays or jax.ShapeDtypeStructs as its leaves"
    if flax_trees.is_split(target):
        message = "the target is what nnx.split gives, not a tree of its own"
        expected = "pass the state, and merge what comes back: nnx.merge(graphdef, loaded)"
    elif isinstance(target, type):
        expected = "an instance, such as nnx.eval_shape or jax.eval_shape makes"
        found = f"the class {target.__name__}"
    elif dataclasses.is_dataclass(target) and jax.tree_util.all_leaves([target]):
        expected = "a dataclass that JAX knows, by jax.tree_util.register_dataclass"
    return errors.UsageError(message, expected=expected, found=found)


def _check_names(leaves: Sequence[Leaf]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        for name in leaf.names:
            if name in seen:
                raise errors.UsageError(
                    "two leaves of the target have the same name", found=repr(name)
                )
            seen.add(name)
