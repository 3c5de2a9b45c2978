"""A sharding for each leaf of a target, from everything that has a say in it.

What `shardings=` says goes first, then the sharding that a leaf has, then the axes that Flax's
variables and boxes name, then the mesh, on which the leaf is replicated. Without a mesh a leaf
lies on the default device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mfload import errors
from mfload.mesh import jax_shardings as mesh_shardings
from mfload.trees import jax_trees
from mfload.trees.jax_trees import Axes
from mfload.trees.recipe import Leaf

Rules = Sequence[tuple[str, Any]] | None
"""Pairs of a logical axis and the axis, the axes or None of the mesh that it lies on."""


def resolve(
    leaves: Sequence[Leaf],
    mesh: Any,
    asked: Any,
    unmatched: str,
    rules: Any,
    notes: list[str],
    known: Sequence[str] = (),
    stored: Sequence[str] = (),
) -> list[Any]:
    """A sharding on devices for each leaf, checked against its shape.

    `known` are all names of the target, which rules of `asked` may be for; `stored` those in the
    checkpoint, which they do not go by. Of a leaf's names the first that a rule matches counts.
    """
    pairs = check_rules(rules)
    asked = _by_name(asked)
    mesh = _mesh(mesh, asked, leaves)
    alone = SingleDeviceSharding(_default_device()) if mesh is None and asked is None else None

    def own(number: int) -> Any:
        said = _own(leaves[number], mesh, pairs)
        return alone if said is None else said

    return mesh_shardings.resolve(
        [(leaf.name, leaf.shape) for leaf in leaves],
        mesh,
        asked,
        unmatched,
        infos=leaves,
        aliases=[leaf.names for leaf in leaves],
        own=own,
        notes=notes,
        known=known,
        others=stored,
    )


def processes(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> tuple[int, ...]:
    """The processes that take part in a load, by number; this one if nothing says.

    Leaves are None for an invalid target, which can't tell: then all of them.
    """
    silent = asked is None
    try:
        asked = _by_name(asked)
    except errors.MfloadError:
        asked = None
    mesh = _mesh(mesh, asked, leaves)
    own = [leaf.sharding for leaf in leaves or () if _has_devices(leaf)]
    if mesh is None and silent and not own:
        return mesh_shardings.processes(None, None) if leaves is None else (jax.process_index(),)
    if callable(asked) and mesh is None:
        return mesh_shardings.processes(None, asked)
    found = [*mesh_shardings.given(asked), *own]
    return mesh_shardings.processes(mesh, [("", each) for each in found])


def _mesh(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> Any:
    """The user's mesh, or that of `jax.set_mesh` if a leaf has no devices of its own."""
    if mesh is None and leaves and all(_has_devices(leaf) for leaf in leaves if leaf.held):
        return None
    return mesh_shardings.mesh_of(mesh, asked)


def _has_devices(leaf: Leaf) -> bool:
    return isinstance(leaf.sharding, Sharding) and not mesh_shardings.is_abstract(leaf.sharding)


def _default_device() -> Any:
    default = jax.config.jax_default_device  # pyright: ignore
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def _own(leaf: Leaf, mesh: Any, rules: Rules) -> Any:
    """What a leaf says of itself, if anything."""
    own = leaf.sharding
    abstract = mesh_shardings.is_abstract(own)
    # An abstract sharding that splits nothing is what tracing leaves behind on Auto axes.
    traced = abstract and all(part is None for part in tuple(own.spec))
    if own is not None and not (traced and leaf.axes is not None):
        if abstract and mesh is None:
            raise errors.ShardingError(
                "the leaf names axes of a mesh, and no mesh has devices for them",
                tensor=leaf.name,
                expected="mesh=, or a load inside jax.set_mesh(mesh)",
                found=str(own.spec),
            )
        return own
    found = None if leaf.axes is None else of_axes(leaf.name, leaf.axes, mesh, rules)
    return own if found is None and not abstract else found


def _by_name(asked: Any) -> Any:
    """A tree of shardings as a mapping from names; anything else as it is."""
    if asked is None or isinstance(asked, Sharding | PartitionSpec | list | tuple):
        return asked
    node = jax_trees.is_node(asked)
    if type(asked) is dict or (callable(asked) and not node):
        return asked
    if node or isinstance(asked, Mapping) or not jax.tree_util.all_leaves([asked]):
        return {leaf.name: leaf.value for leaf in jax_trees.take_apart(asked).leaves}
    return asked


# -- axes that variables and boxes of Flax name ----------------------------------------------


def check_rules(given: object) -> Rules:
    """The value of `logical_axis_rules=` as pairs."""
    if given is None:
        return None
    pairs: Any = list(given.items()) if isinstance(given, Mapping) else given
    listed = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    wrong = [pair for pair in pairs if not _is_rule(pair)] if listed else [given]
    if wrong:
        expected = "[(logical axis, axis of the mesh or None), …]"
        message, found = "logical_axis_rules is invalid", repr(wrong[0])
        raise errors.UsageError(message, expected=expected, found=found)
    return [(name, tuple(on) if isinstance(on, list) else on) for name, on in pairs]


def of_axes(name: str, axes: Axes, mesh: Any, rules: Rules) -> Any:
    """The sharding that a box or a variable asks for; None without a mesh to shard on.

    Defaults: the box's own mesh, and its own rules or those of the context that Flax keeps.
    """
    names = axes.names
    if isinstance(names, Sharding):
        if not isinstance(names, NamedSharding):
            return names
        mesh, names = mesh or names.mesh, names.spec
    mesh = mesh if mesh is not None else axes.mesh
    if not isinstance(mesh, Mesh):
        return None
    names = getattr(names, "sharding", names)  # A Format has the sharding beside its layout.
    names = tuple(getattr(names, "spec", names))
    spmd = sys.modules.get("flax.core.spmd")
    around = None if spmd is None else spmd.get_logical_axis_rules() or None
    found = rules if rules is not None else axes.rules or around
    spec = _logical(name, names, found) if axes.logical else _renamed(names, found)
    seen: set[str] = set()
    for axis in _strings(spec):
        if axis not in mesh.axis_names:
            raise errors.ShardingError(
                f"the target names an axis that the mesh lacks{_axis_hint(axis, found)}",
                tensor=name,
                expected=f"one of {', '.join(map(str, mesh.axis_names))}",
                found=axis,
            )
        if axis in seen:
            message = f"the target names axis {axis!r} for two dims"
            raise errors.ShardingError(message, tensor=name, found=str(spec))
        seen.add(axis)
    return NamedSharding(mesh, spec)


def _logical(name: str, names: tuple[Any, ...], rules: Rules) -> Any:
    """As Linen does it: rules in order, each axis of the mesh for one dim at most."""
    if rules is None:
        raise errors.ShardingError(
            "the target names logical axes, and no rules say where they lie",
            tensor=name,
            expected="logical_axis_rules=[(logical axis, axis of the mesh), …]",
            found=str(names),
        )
    try:
        spec = sys.modules["flax.linen.spmd"].logical_to_mesh_axes(names, tuple(rules))
    except ValueError as error:
        raise errors.ShardingError(str(error), tensor=name, found=str(names)) from error
    return PartitionSpec() if spec is None else spec


def _renamed(names: tuple[Any, ...], rules: Rules) -> Any:
    """The same for names of which some may be axes of the mesh already, as in NNX."""
    rules = rules or ()
    ruled = {name for name, _ in rules}
    dims = [list(each) if isinstance(each, tuple | list) else [each] for each in names]
    places = [(parts, at) for parts in dims for at in range(len(parts))]
    waiting = [(parts, at, parts[at]) for parts, at in places if parts[at] in ruled]
    for parts, at, _ in waiting:
        parts[at] = None
    taken = set(_strings(part for parts in dims for part in parts))
    for name, on in rules:
        place = next((each for each in waiting if each[2] == name), None)
        if place is not None and taken.isdisjoint(_strings([on])):
            waiting.remove(place)
            place[0][place[1]] = on
            taken.update(_strings([on]))
    several = (isinstance(each, tuple | list) for each in names)
    pairs = zip(several, dims, strict=True)
    return PartitionSpec(*(tuple(_strings(parts)) if many else parts[0] for many, parts in pairs))


def _strings(parts: Iterable[Any]) -> Iterator[str]:
    """The axes that entries of a spec name."""
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, tuple):
            yield from _strings(part)


def _axis_hint(axis: str, rules: Rules) -> str:
    if not rules:
        return "; logical_axis_rules= says where logical axes lie"
    if any(axis in _strings([on]) for _, on in rules):
        return ""  # The rules name it themselves.
    return f"; add ({axis!r}, None) to logical_axis_rules"


def _is_rule(pair: object) -> bool:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        return False
    on = pair[1]
    every = on if isinstance(on, tuple | list) else () if on is None else (on,)
    return all(isinstance(axis, str) for axis in every)
