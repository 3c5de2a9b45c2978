"""Which part of a tensor each device holds under a `jax.sharding.Sharding`, checked beforehand.

JAX says that something does not fit, and mostly by a bare ValueError that knows no tensor. Here
it is said which tensor, which dim, and which axes of what sizes.
"""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.index import Box

Shape = tuple[int, ...]


def check(name: str, shape: Shape, sharding: Any) -> None:
    """Refuses a sharding that does not fit a tensor.

    Args:
        name: The tensor.
        shape: Its shape.
        sharding: On devices, not on an abstract mesh.

    Raises:
        ShardingError: It does not fit; says tensor, dim, axes and their sizes.
    """
    if isinstance(sharding, NamedSharding):
        check_spec(name, shape, sharding.mesh, sharding.spec)
        return
    try:
        sharding.devices_indices_map(shape)
    except Exception as error:
        raise errors.ShardingError(
            "the sharding does not fit the tensor",
            tensor=name,
            expected=f"one for shape {list(shape)}",
            found=f"{sharding}: {str(error).splitlines()[0] if str(error) else type(error)}",
        ) from error


def check_spec(name: str, shape: Shape, mesh: Any, spec: Any) -> None:
    """Refuses a PartitionSpec that does not fit a tensor on a mesh.

    Args:
        name: The tensor.
        shape: Its shape.
        mesh: The mesh.
        spec: What splits it.

    Raises:
        ShardingError: It does not fit; says tensor, dim, axes and their sizes.
    """

    def refuse(message: str, expected: object) -> errors.ShardingError:
        found = f"{spec} for shape {list(shape)} on a mesh of {_sizes(sizes)}"
        return errors.ShardingError(message, tensor=name, expected=expected, found=found)

    sizes: dict[str, int] = dict(mesh.shape)
    _check_types(refuse, mesh, spec)
    parts: tuple[Any, ...] = tuple(spec)
    if len(parts) > len(shape):
        raise refuse(
            f"the spec has {len(parts)} entries and the tensor {len(shape)} dims",
            f"at most {len(shape)} entries",
        )
    used: set[Any] = set()
    for dim, part in enumerate(parts):
        if part is PartitionSpec.UNCONSTRAINED:
            raise refuse(f"dim {dim} is left unconstrained", "axes, or None")
        axes = () if part is None else part if isinstance(part, tuple) else (part,)
        for axis in axes:
            if axis not in sizes:
                raise refuse(f"the mesh has no axis {axis!r}", f"one of {', '.join(sizes)}")
            if axis in used:
                raise refuse(f"axis {axis!r} is used twice", "an axis once in a spec")
            used.add(axis)
        count = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % count:
            raise refuse(
                f"{_sizes({axis: sizes[axis] for axis in axes})} does not divide dim {dim} "
                f"of {shape[dim]}",
                f"a multiple of {count} in dim {dim}",
            )


def _check_types(refuse: Any, mesh: Any, spec: Any) -> None:
    # Both came with later versions of JAX than the oldest.
    types = dict(zip(mesh.axis_names, getattr(mesh, "axis_types", None) or (), strict=False))
    manual = [axis for axis, kind in types.items() if str(kind).endswith("Manual")]
    if manual:
        raise refuse(
            f"no array can live on a mesh with manual axes ({', '.join(map(str, manual))})",
            "the mesh as it is outside shard_map",
        )
    if getattr(spec, "unreduced", None):
        raise refuse("stored numbers are sums already", "a spec without unreduced axes")


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items()) or "no axes"


def boxes(sharding: Any, shape: Shape) -> dict[Any, Box]:
    """The part of a tensor that each device holds, those of other processes too.

    Args:
        sharding: One that `check` lets pass.
        shape: The tensor's.

    Returns:
        A half-open (start, stop) for each dim, by device, in the order of the sharding.
    """
    found: dict[Any, Box] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        found[device] = tuple(
            (part.start or 0, length if part.stop is None else part.stop)
            for part, length in zip(index, shape, strict=True)
        )
    return found


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding is over a mesh that has no devices."""
    return isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh)
