"""The outline of a state that is saved: its arrays by name, and the tree that they hang in.

Names are paths joined by dots, as `jax_trees.take_apart` gives them. Nodes of any library become
dicts and lists, so that a tree can be read without the library that made it; fields that JAX does
not see, such as functions, are left out. Nothing here imports JAX.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from mfload import errors
from mfload.formats import structure
from mfload.trees import torn

_CONTAINERS = (Mapping, list, tuple)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_KEYS = (*_PLAIN, tuple)
_BOXED: Any = object()
"""The key of what a box holds."""


# A layer of Keras may be a module of PyTorch as well.
_MODULES = {"keras": "Layer", "torch": "nn.Module", "paddle": "nn.Layer"}
"""What a module is in each framework that `mfload.trees` has a `<framework>_modules` for."""


def framework_of(target: Any) -> str | None:
    """The framework whose module a target is, if it is one; that has been imported then."""
    for framework, kind in _MODULES.items():
        found: Any = sys.modules.get(framework)
        for name in kind.split("."):
            found = getattr(found, name, None)
        if isinstance(found, type) and isinstance(target, found):
            return framework
    return None


def by_name(
    state: Any, metadata: Mapping[str, str] | None = None
) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """The arrays of a state by name, and the metadata, with its tree if it is one.

    A state is a mapping from names to arrays, a tree, or a module of PyTorch, Paddle or Keras,
    whose names are those of `state_dict` or the paths of its variables. Raises as `named` does.
    """
    framework = framework_of(state)
    if framework is not None and (parts := torn.of(framework, state)):
        names = sorted({name for _, names in parts for name in names})
        raise errors.UsageError(
            "a failed load_into left old and new values in the module",
            expected="load them again, or `del module.mfload_torn` once their values are right",
            found=f"old or new: {', '.join(names[:8])}" + (", …" if len(names) > 8 else ""),
        )
    if framework == "keras":
        from mfload.trees.keras_modules import KerasModule

        return {each.path: each.value for each in KerasModule(state).variables}, metadata
    if framework is not None:
        return dict(state.state_dict()), metadata
    return named(state, metadata) if is_tree(state) else (state, metadata)


def is_tree(state: Any) -> bool:
    """Whether a state is more than a mapping from names to arrays."""
    if not isinstance(state, Mapping):
        return _children(state) is not None
    # One of each type; variables and boxes of Flax count as the array in them.
    kinds = {type(each): each for each in state.values()}
    found = (_children(each) for kind, each in kinds.items() if not hasattr(kind, "__dlpack__"))
    return any(pairs is not None and not _is_box(pairs) for pairs in found)


def processes(state: Any) -> tuple[int, ...]:
    """The processes that save it together; none if this process holds each array whole."""
    if "jax" not in sys.modules:
        return ()
    from mfload.trees import jax_trees

    ranks: set[int] = set()
    # Not by JAX, which a tree that holds itself leaves with too deep a stack for ever.
    seen: dict[int, Any] = {}
    left = [state]
    while left:
        value = left.pop()
        if isinstance(value, sys.modules["jax"].Array):
            ranks |= jax_trees.holders(value)
        elif type(value) not in (np.ndarray, *_PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            with contextlib.suppress(errors.UsageError):  # Told where leaves get their names.
                left += [each for _, each in _children(value) or ()]
    return tuple(sorted(ranks))


def named(state: Any, metadata: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays of a state by name, and the metadata with its tree.

    A shared array comes once, and typed PRNG keys as their data.

    Raises:
        UsageError: Two leaves have the same name, or the state holds itself, or a key or a node
            that can't be kept.
        UnsupportedArrayError: A leaf is neither an array nor a plain value, or none is an array.
    """
    if metadata is not None and structure.KEY in metadata:
        expected = "another name: the tree of what is saved has this one"
        raise errors.UsageError("invalid metadata", expected=expected, found=structure.KEY)
    walk = _OutlineWalk()
    try:
        text = structure.dumps(walk.node(state, ()))
    except RecursionError:
        raise errors.UsageError("the tree is nested too deep") from None
    if not walk.arrays:
        raise errors.UnsupportedArrayError(
            "no array in the tree, and numbers have no dtype: say which is meant, as in "
            "numpy.asarray(x, dtype='float32')",
            expected="an array",
            found=type(state).__name__,
        )
    return walk.arrays, {**(metadata or {}), structure.KEY: text}


class _OutlineWalk:
    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}  # Of all leaves, by name.
        # By id of a variable or a module: itself, and what it became.
        self._shared: dict[int, tuple[Any, Any]] = {}
        self._open: dict[int, tuple[str, ...]] = {}

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        """What becomes of a node or a leaf."""
        pairs = _children(value)
        if pairs is None:
            return self._leaf(value, path)
        key = id(value)
        if key in self._open:
            found = f"{'.'.join(path)} is {'.'.join(self._open[key]) or 'the state'}"
            raise errors.UsageError("the state holds itself", expected="a tree", found=found)
        if key in self._shared:
            return self._shared[key][1]
        self._check(value, pairs, path)
        self._open[key] = path
        if _is_box(pairs):
            made = self.node(pairs[0][1], path)
        else:
            made = {name: self.node(each, (*path, str(name))) for name, each in pairs}
        del self._open[key]
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return list(made.values()) if isinstance(value, list) else tuple(made.values())
        if not isinstance(value, _CONTAINERS):
            if not _is_box(pairs):  # Nodes in which JAX finds nothing are of no use to others.
                kept = {name for name, each in pairs if isinstance(each, _CONTAINERS)}
                made = {name: each for name, each in made.items() if each != {} or name in kept}
            self._shared[key] = value, made
        return made

    @staticmethod
    def _check(value: Any, pairs: list[tuple[Any, Any]], path: tuple[str, ...]) -> None:
        """Refuses what neither the tree nor the arrays can hold."""
        for key, _ in pairs:
            if key is not _BOXED and not isinstance(key, _KEYS):
                raise errors.UsageError(
                    "a key of the tree can't be kept in a checkpoint",
                    tensor=".".join((*path, str(key))),
                    expected="a string or a number",
                    found=type(key).__name__,
                )
        if not isinstance(value, _CONTAINERS):
            from mfload.trees import jax_trees

            if why := jax_trees.unsaved(value):
                where = ".".join(path) or None
                raise errors.UsageError(why, tensor=where, found=type(value).__name__)

    def _leaf(self, value: Any, path: tuple[str, ...]) -> Any:
        name = ".".join(path)
        if name in self._paths:
            first, second = (list(each) for each in (self._paths[name], path))
            raise errors.UsageError(
                "two leaves have the same name: their keys, joined by dots",
                tensor=name,
                found=f"{first} and {second}",
            )
        self._paths[name] = path
        if type(value) in _PLAIN:
            return value
        if not hasattr(value, "dtype") and not hasattr(value, "__dlpack__"):
            kind = type(value).__name__
            raise errors.UnsupportedArrayError(
                "a leaf of the tree can't be saved",
                tensor=name,
                expected="an array, a number, a string, bytes or None",
                found=kind,
            )
        self.arrays[name] = _key_data(value)
        return structure.TensorName(name)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a node, the key `_BOXED` if it is a box; None for a leaf."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))  # pyright: ignore
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if type(value) in _PLAIN or isinstance(value, type) or "jax" not in sys.modules:
        return None
    from mfload.trees import jax_trees

    below = jax_trees.children(value)
    return below and [(_BOXED if name is None else name, each) for name, each in below]


def _is_box(pairs: list[tuple[Any, Any]]) -> bool:
    return len(pairs) == 1 and pairs[0][0] is _BOXED


def _key_data(value: Any) -> Any:
    if "jax" not in sys.modules:
        return value
    from mfload.trees import jax_trees

    return jax_trees.key_data(value)
