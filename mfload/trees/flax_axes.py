"""Axes that Flax's boxes and variables name, as shardings on a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.trees.flax_trees import Axes

Rules = Sequence[tuple[str, Any]] | None
"""Pairs of a logical axis and the axis, the axes or None of the mesh that it lies on."""


def check_rules(given: object) -> Rules:
    """What `logical_axis_rules=` was given, as pairs.

    Raises:
        UsageError: It is no such thing.
    """
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    expected = "[(logical axis, axis of the mesh or None), …]"
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise errors.UsageError("logical_axis_rules", expected=expected, found=repr(given))
    for pair in pairs:
        fits = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        if not fits or not _is_axes(pair[1]):
            raise errors.UsageError("logical_axis_rules", expected=expected, found=repr(pair))
    return [(name, tuple(on) if isinstance(on, list) else on) for name, on in pairs]


def sharding(name: str, axes: Axes, mesh: Any, rules: Rules) -> Any:
    """The sharding that a box or a variable asks for.

    Args:
        name: The leaf.
        axes: The axes it names.
        mesh: The user's mesh, None for the box's own.
        rules: From logical axes to those of the mesh; None for those of the box or, where it has
            none, of the context that Flax keeps.

    Returns:
        A sharding, None where there is no mesh to shard on.

    Raises:
        ShardingError: An axis is none of the mesh's and no rule says what it is, or one is named
            for two dims.
    """
    names = axes.names
    if isinstance(names, jax.sharding.Sharding):
        if not isinstance(names, NamedSharding):
            return names
        mesh, names = mesh or names.mesh, names.spec
    mesh = mesh if mesh is not None else axes.mesh
    if not isinstance(mesh, Mesh):
        return None
    names = getattr(names, "sharding", names)  # A Format has the sharding beside its layout.
    names = tuple(getattr(names, "spec", names))
    found = rules if rules is not None else axes.rules or _rules_of_context()
    spec = _logical(name, names, found) if axes.logical else _renamed(names, found)
    _check(name, spec, mesh, found)
    return NamedSharding(mesh, spec)


def _rules_of_context() -> Rules:
    spmd = sys.modules.get("flax.core.spmd")
    return None if spmd is None else spmd.get_logical_axis_rules() or None


def _logical(name: str, names: tuple[Any, ...], rules: Rules) -> Any:
    """As Linen does it: rules in order, each axis of the mesh for one dim at most."""
    if rules is None:
        raise errors.ShardingError(
            "the target names logical axes, and no rules say where they lie",
            tensor=name,
            expected="logical_axis_rules=[(logical axis, axis of the mesh), …]",
            found=str(names),
        )
    spmd = sys.modules["flax.linen.spmd"]
    try:
        spec = spmd.logical_to_mesh_axes(names, tuple(rules))
    except ValueError as error:
        raise errors.ShardingError(str(error), tensor=name, found=str(names)) from error
    return spec if spec is not None else PartitionSpec()


def _renamed(names: tuple[Any, ...], rules: Rules) -> Any:
    """The same for names of which some may be axes of the mesh already, as in NNX."""
    rules = rules or ()
    ruled = {name for name, _ in rules}
    dims = [list(each) if isinstance(each, tuple | list) else [each] for each in names]
    waiting = {
        (dim, at): name
        for dim, parts in enumerate(dims)
        for at, name in enumerate(parts)
        if isinstance(name, str) and name in ruled
    }
    for dim, at in waiting:
        dims[dim][at] = None
    taken = {axis for parts in dims for axis in _strings(parts)}
    for name, on in rules:
        place = next((place for place, each in waiting.items() if each == name), None)
        if place is not None and taken.isdisjoint(_strings([on])):
            del waiting[place]
            dims[place[0]][place[1]] = on
            taken.update(_strings([on]))
    pairs = zip(names, dims, strict=True)
    return PartitionSpec(
        *(_joined(parts) if isinstance(each, tuple | list) else parts[0] for each, parts in pairs)
    )


def _joined(parts: Sequence[Any]) -> tuple[Any, ...]:
    """The axes of one dim, those that rules made several of among them."""
    flat = (part if isinstance(part, tuple) else (part,) for part in parts)
    return tuple(axis for some in flat for axis in some if axis is not None)


def _strings(parts: Iterable[Any]) -> Iterator[str]:
    """The axes that entries of a spec name."""
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, tuple):
            yield from _strings(part)


def _check(name: str, spec: Any, mesh: Any, rules: Rules) -> None:
    seen: set[str] = set()
    for axis in _strings(spec):
        if axis not in mesh.axis_names:
            raise errors.ShardingError(
                f"the target names an axis that the mesh lacks{_hint(axis, rules)}",
                tensor=name,
                expected=f"one of {', '.join(map(str, mesh.axis_names))}",
                found=axis,
            )
        if axis in seen:
            raise errors.ShardingError(
                f"the target names axis {axis!r} for two dims",
                tensor=name,
                expected="an axis of the mesh for one dim at most",
                found=str(spec),
            )
        seen.add(axis)


def _hint(axis: str, rules: Rules) -> str:
    if not rules:
        return "; logical_axis_rules= says where logical axes lie"
    if any(axis in _strings([on]) for _, on in rules):
        return ""  # The rules name it themselves.
    return f"; add ({axis!r}, None) to logical_axis_rules"


def _is_axes(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, str) for each in value)
    return value is None or isinstance(value, str)
