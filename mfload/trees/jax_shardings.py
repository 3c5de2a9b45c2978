"""A sharding for each leaf of a target, from everything that has a say in it.

What `shardings=` says goes first, then the sharding that a leaf has, then the axes that Flax's
variables and boxes name, then the mesh, on which the leaf is replicated. Without a mesh a leaf
lies where the target's array does, else on the default device, and is not committed. NumPy's stay
NumPy's unless `shardings=` or the axes that they name say where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mfload import errors
from mfload.frameworks import jax_adapter
from mfload.frameworks.jax_memory import layout_of
from mfload.mesh import jax_specs
from mfload.mesh.base import MeshArguments
from mfload.mesh.specs import Row
from mfload.trees import jax_trees
from mfload.trees.jax_trees import NUMPY, Axes
from mfload.trees.recipe import Leaf

Rules = Sequence[tuple[str, Any]] | None
"""Pairs of a logical axis and the axis, the axes or None of the mesh that it lies on."""


class LeafPlace(NamedTuple):
    """Where a leaf lies, and how.

    Attributes:
        sharding: On devices; None for a leaf that stays NumPy's.
        committed: Whether it stays there in computations.
        form: A Format, which says in what order its elements lie on a device. Default: row-major.
    """

    sharding: Any
    committed: bool = True
    form: Any = None


def resolve(
    leaves: Sequence[Leaf], filled: Iterable[int], asked: MeshArguments, rules: Any
) -> list[LeafPlace]:
    """The place of each leaf that is filled; shardings are checked against the leaf's shape.

    Of a leaf's names the first that a rule of `shardings=` matches counts.
    """
    pairs = check_rules(rules)
    shardings = _by_name(asked.shardings)
    some = [leaves[number] for number in filled]
    mesh = _mesh(asked.mesh, shardings, some)
    # They are known again by what they are, not by what they are equal to.
    default = jax_adapter.default_device()
    nowhere, free = SingleDeviceSharding(default), {default: SingleDeviceSharding(default)}
    forms: dict[int, Any] = {}

    def own(number: int) -> Any:
        leaf = some[number]
        said = _own(leaf, mesh, pairs)
        if said is None:
            if mesh is not None or shardings is not None:
                return None
            array = isinstance(leaf.value, jax.Array)  # On one device, as it is not committed.
            (device,) = leaf.value.sharding.device_set if array else (default,)
            return free.get(device) or free.setdefault(device, SingleDeviceSharding(device))
        if said is NUMPY:
            return nowhere
        if leaf.sharding is said and (form := _form(leaf.value)) is not None:
            forms[number] = form
        return said

    known = (name for leaf in leaves for name in leaf.names)
    rows = [Row(leaf.name, leaf.shape, leaf.names, leaf) for leaf in some]
    asked = MeshArguments(mesh, shardings, asked.unmatched, known)
    chosen = jax_specs.resolve(rows, asked, own)
    places = {id(each): LeafPlace(each, committed=False) for each in free.values()}
    places[id(nowhere)] = LeafPlace(None)
    for number, form in forms.items():
        chosen[number] = LeafPlace(chosen[number], form=form)
    return [
        each if type(each) is LeafPlace else places.get(id(each)) or LeafPlace(each)
        for each in chosen
    ]


def processes(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> tuple[int, ...]:
    """The processes that take part in a load, by number; this one if nothing says.

    Leaves are None for an invalid target, which can't tell: then all of them.
    """
    try:
        named = _by_name(asked)
    except errors.MfloadError:
        named = None
    mesh = _mesh(mesh, named, leaves)
    every = {id(leaf.sharding): leaf.sharding for leaf in leaves or ()}
    own = [each for each in every.values() if _has_devices(each)]
    if mesh is None and asked is None and leaves is not None and not own:
        return (jax.process_index(),)
    if callable(named) and mesh is None:
        return jax_specs.processes(None, named)
    found = [*jax_specs.given(named), *own]
    return jax_specs.processes(mesh, [("", each) for each in found])


def _mesh(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> Any:
    """The user's mesh, or that of `jax.set_mesh` if a leaf has no devices of its own."""
    if mesh is None and leaves:
        every = {id(leaf.sharding): leaf.sharding for leaf in leaves if leaf.held}
        if all(each is NUMPY or _has_devices(each) for each in every.values()):
            return None
    return jax_specs.mesh_of(mesh, asked)


def _has_devices(sharding: Any) -> bool:
    return isinstance(sharding, Sharding) and not jax_specs.is_abstract(sharding)


def _own(leaf: Leaf, mesh: Any, rules: Rules) -> Any:
    """What a leaf says of itself, if anything."""
    own = leaf.sharding
    if own is None or own is NUMPY:
        said = None if leaf.axes is None else of_axes(leaf.name, leaf.axes, mesh, rules)
        return own if said is None else said
    abstract = jax_specs.is_abstract(own)
    # An abstract sharding that splits nothing is what tracing leaves behind on Auto axes.
    traced = abstract and all(part is None for part in tuple(own.spec))
    if traced and leaf.axes is not None:
        return of_axes(leaf.name, leaf.axes, mesh, rules)
    if traced and mesh is None:
        return None
    if abstract and mesh is None:
        raise errors.ShardingError(
            "the leaf names axes of a mesh, and no mesh has devices for them",
            tensor=leaf.name,
            expected="mesh=, or a load inside jax.set_mesh(mesh)",
            found=str(own.spec),
        )
    return own


def _form(value: Any) -> Any:
    """The Format of a shape without numbers that asks for a layout; None for any other leaf."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return None
    form: Any = getattr(value, "format", None) or getattr(value, "layout", None)
    return form if layout_of(form) is not None else None


def _by_name(asked: Any) -> Any:
    """A tree of shardings as a mapping from names; anything else as it is."""
    node = jax_trees.is_node(asked)
    plain = isinstance(asked, Sharding | PartitionSpec | list | tuple) or type(asked) is dict
    if asked is None or plain or (callable(asked) and not node):
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
    found: list[tuple[str, Any]] = []
    for pair in pairs if isinstance(pairs, list | tuple) else [given]:
        match pair:
            case [str() as name, None | str() as on]:
                found.append((name, on))
            case [str() as name, list() | tuple() as on] if all(isinstance(a, str) for a in on):
                found.append((name, tuple(on)))
            case _:
                raise errors.UsageError(
                    "logical_axis_rules is invalid",
                    expected="[(logical axis, axis of the mesh or None), …]",
                    found=repr(pair),
                )
    return found


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
    if rules is None:
        spmd = sys.modules.get("flax.core.spmd")
        rules = axes.rules or (None if spmd is None else spmd.get_logical_axis_rules() or None)
    if axes.logical and rules is None:
        raise errors.ShardingError(
            "the target names logical axes, and no rules say where they lie",
            tensor=name,
            expected="logical_axis_rules=[(logical axis, axis of the mesh), …]",
            found=str(names),
        )
    spec = _spec(names, rules or (), logical=axes.logical)
    found = list(_strings(spec))
    for axis in found:
        if axis not in mesh.axis_names:
            hint = f"; add ({axis!r}, None) to logical_axis_rules"
            if not rules:
                hint = "; logical_axis_rules= says where logical axes lie"
            elif axis in _strings(on for _, on in rules):
                hint = ""
            raise errors.ShardingError(
                f"the target names an axis that the mesh lacks{hint}",
                tensor=name,
                expected=f"one of {', '.join(map(str, mesh.axis_names))}",
                found=axis,
            )
        if found.count(axis) > 1:
            message = f"the target names axis {axis!r} for two dims"
            raise errors.ShardingError(message, tensor=name, found=str(spec))
    return NamedSharding(mesh, spec)


def _spec(names: Sequence[Any], rules: Sequence[tuple[str, Any]], *, logical: bool) -> Any:
    """Where axes lie: rules in order, each axis of the mesh for one dim at most, as in Linen.

    Names without a rule are axes of the mesh already, as in NNX, unless all are `logical`.
    """
    ruled = {name for name, _ in rules}
    flat: list[Any] = []
    for each in names:
        flat += each if isinstance(each, tuple | list) else [each]
    found = [
        None if isinstance(part, str) and (logical or part in ruled) else part for part in flat
    ]
    waiting = [part if part in ruled else None for part in flat]
    for name, on in rules:
        if name in waiting and set(_strings([on])).isdisjoint(_strings(found)):
            at = waiting.index(name)
            found[at], waiting[at] = on, None
    rest = iter(found)
    dims: list[Any] = []
    for each in names:
        if isinstance(each, tuple | list):
            dims.append(tuple(_strings([next(rest) for _ in each])))
        else:
            dims.append(next(rest))
    return PartitionSpec(*dims)


def _strings(parts: Iterable[Any]) -> Iterator[str]:
    """The axes that entries of a spec name."""
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, tuple):
            yield from _strings(part)
