"""`shardings=` for JAX: from what a user wrote to one sharding a tensor, checked against its shape.

JAX refuses what does not fit as well, mostly by a ValueError that knows no tensor. The errors here
say which tensor, which dim, and which axes of which sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mfload import errors
from mfload.errors import counted
from mfload.index import Box
from mfload.mesh import specs
from mfload.mesh.base import MeshArguments

Shape = tuple[int, ...]
_EXPECTED = "a Sharding, a PartitionSpec such as P('model'), or None"


def resolve(
    rows: Sequence[specs.Row], asked: MeshArguments, own: Callable[[int], Any] | None = None
) -> list[Any]:
    """One sharding a tensor, on devices (see `specs.resolve`)."""
    mesh = asked.mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        expected = "a jax.sharding.Mesh, such as jax.make_mesh((8,), ('model',)) makes"
        raise errors.UsageError("not a mesh", expected=expected, found=repr(mesh))
    if mesh is None:
        meshes = {each.mesh for each in given(asked.shardings) if isinstance(each, NamedSharding)}
        meshes = {each for each in meshes if isinstance(each, Mesh)}
        mesh = meshes.pop() if len(meshes) == 1 else None
    made: dict[Any, Any] = {}
    return specs.resolve(
        rows,
        asked,
        lambda row, spec: _on_devices(row.name, row.shape, spec, mesh, made),
        # A PartitionSpec is a tuple in the versions of JAX before 0.7.
        single=lambda each: isinstance(each, Sharding | PartitionSpec),
        expected=_EXPECTED,
        own=own,
    )


def given(shardings: Any) -> Iterator[Any]:
    """The Sharding objects inside `shardings=`."""
    if isinstance(shardings, Sharding):
        yield shardings
    elif isinstance(shardings, Mapping):
        for value in shardings.values():
            yield from given(value)
    elif isinstance(shardings, list | tuple) and not isinstance(shardings, PartitionSpec):
        for pair in shardings:
            if isinstance(pair, list | tuple) and len(pair) == 2:
                yield from given(pair[1])


def _on_devices(name: str, shape: Shape, spec: Any, mesh: Any, made: dict[Any, Any]) -> Any:
    """The sharding of a tensor; what is known of others is in `made`."""
    if (id(spec), shape) in made:
        return spec
    if isinstance(spec, Sharding) and not is_abstract(spec):
        check(name, shape, spec)
        made[id(spec), shape] = spec  # What is kept keeps its id.
        return spec
    kind = None
    if spec is None:
        spec = PartitionSpec()
    elif isinstance(spec, NamedSharding):
        kind, spec = spec.memory_kind, spec.spec
    elif not isinstance(spec, PartitionSpec):
        expected = f"{_EXPECTED} for {name!r}"
        raise errors.UsageError("not a sharding", expected=expected, found=repr(spec))
    if mesh is None:
        raise errors.UsageError(
            "nothing says on which devices the tensor is to lie",
            expected="mesh=, or a Sharding for each tensor",
            found=f"{spec} for {name!r}",
        )
    if (spec, kind, shape) not in made:
        _check_spec(name, shape, mesh, spec)
        made[spec, kind, shape] = NamedSharding(mesh, spec, memory_kind=kind)
    return made[spec, kind, shape]


def check(name: str, shape: Shape, sharding: Any) -> None:
    """Raises ShardingError if a sharding on devices does not fit a tensor."""
    if isinstance(sharding, NamedSharding):
        _check_spec(name, shape, sharding.mesh, sharding.spec)
    try:
        sharding.devices_indices_map(shape)
    except Exception as error:
        raise errors.ShardingError(
            "the sharding does not fit the tensor",
            tensor=name,
            expected=f"one for shape {list(shape)}",
            found=f"{sharding}: {str(error).splitlines()[0] if str(error) else type(error)}",
        ) from error


def _check_spec(name: str, shape: Shape, mesh: Any, spec: Any) -> None:
    sizes: dict[str, int] = dict(mesh.shape)
    for message, expected in _misfits(shape, sizes, mesh, spec):
        found = f"{spec} for shape {list(shape)} on a mesh of {_sizes(sizes)}"
        raise errors.ShardingError(message, tensor=name, expected=expected, found=found)


def _misfits(
    shape: Shape, sizes: Mapping[str, int], mesh: Any, spec: Any
) -> Iterator[tuple[str, str]]:
    """What is wrong with a spec, and what was expected."""
    # Axis types came with a later version of JAX than the oldest.
    if any(str(kind).endswith("Manual") for kind in getattr(mesh, "axis_types", None) or ()):
        yield "no array can live on a mesh with manual axes", "the mesh outside shard_map"
    if len(spec) > len(shape):
        entries = counted(len(spec), "entry", "entries")
        message = f"the spec has {entries} and the tensor {counted(len(shape), 'dim')}"
        yield message, f"at most {counted(len(shape), 'entry', 'entries')}"
    used: set[str] = set()
    for dim, part in enumerate(spec):
        if part is PartitionSpec.UNCONSTRAINED:
            yield f"dim {dim} is left unconstrained", "axes, or None"
        axes = () if part is None else part if isinstance(part, tuple) else (part,)
        for axis in axes:
            if axis not in sizes:
                yield f"the mesh has no axis {axis!r}", f"one of {', '.join(sizes)}"
            if axis in used:
                yield f"axis {axis!r} is used twice", "an axis once in a spec"
            used.add(axis)
        split = {axis: sizes[axis] for axis in axes}
        count = math.prod(split.values())
        if shape[dim] % count:
            message = f"{_sizes(split)} does not divide dim {dim} of {shape[dim]}"
            yield message, f"a multiple of {count} in dim {dim}, or a spec with None there"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items()) or "no axes"


def boxes(sharding: Any, shape: Shape) -> dict[Any, Box]:
    """The part of a tensor that each device holds, also those of other processes."""
    indices = sharding.devices_indices_map(shape)
    return {device: box_of(index, shape) for device, index in indices.items()}


def box_of(index: Sequence[slice], shape: Shape) -> Box:
    """The box of a shard, of which JAX tells the index."""
    return tuple(
        (part.start or 0, length if part.stop is None else part.stop)
        for part, length in zip(index, shape, strict=True)
    )


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding is over a mesh that has no devices."""
    return isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh)


def mesh_of(mesh: Any, shardings: Any) -> Any:
    """The user's mesh, else that of `jax.set_mesh` if no sharding brings devices of its own."""
    if mesh is not None or any(not is_abstract(each) for each in given(shardings)):
        return mesh
    find = getattr(jax.sharding, "get_mesh", None)
    try:
        found: Any = None if find is None else find()
    except ValueError:  # Inside jit, where nothing can be loaded either.
        return None
    return found if isinstance(found, Mesh) and not found.empty else None


def processes(mesh: Any, shardings: Any) -> tuple[int, ...]:
    """The processes whose devices the arguments name; all of them if none are named.

    Looks at nothing but the arguments and never raises: what is wrong with them is found later,
    where the error reaches the other processes.
    """
    devices: set[Any] = set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()
    for sharding in given(shardings):
        if not is_abstract(sharding):
            devices |= sharding.device_set
    # Without a mesh a function may name any devices.
    if not devices or (callable(shardings) and mesh is None):
        return tuple(range(jax.process_count()))
    return tuple(sorted({device.process_index for device in devices}))
