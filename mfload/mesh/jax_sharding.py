"""Shardings of JAX in a form that no framework owns: shares of numbered devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from mfload.mesh import jax_boxes
from mfload.mesh.jax_boxes import check
from mfload.mesh.jax_rules import given, resolve
from mfload.planning.requests import Share

__all__ = ["Spot", "Spots", "check", "given", "processes", "rank", "resolve"]


class Spot(NamedTuple):
    """Where a shard lies.

    Attributes:
        device: The `jax.Device`.
        kind: Its memory; None for the one that arrays lie in by default.
    """

    device: Any
    kind: str | None


class Spots:
    """The spots of each process, numbered in the order in which they come up.

    Numbers are the same on every process where shares are asked for in the same order.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, dict[Spot, int]] = {}
        self._known: dict[tuple[Any, tuple[int, ...]], tuple[Share, ...]] = {}

    def shares(self, sharding: Any, shape: tuple[int, ...]) -> tuple[Share, ...]:
        """What each device holds of a tensor.

        Args:
            sharding: One that `check` lets pass.
            shape: The tensor's.

        Returns:
            A share for each device of the sharding, those of other processes too, in its order.
        """
        key = sharding, shape
        if key not in self._known:
            found = jax_boxes.boxes(sharding, shape).items()
            self._known[key] = tuple(
                Share(device.process_index, self._number(device, sharding.memory_kind), box)
                for device, box in found
            )
        return self._known[key]

    def _number(self, device: Any, kind: str | None) -> int:
        spot = Spot(device, None if kind == default_kind(device) else kind)
        numbers = self._numbers.setdefault(device.process_index, {})
        return numbers.setdefault(spot, len(numbers))

    def plain(self, sharding: Any) -> bool:
        """Whether arrays lie in the memory that is the default of their devices."""
        kind = sharding.memory_kind
        return kind is None or all(kind == default_kind(each) for each in sharding.device_set)

    def of(self, process: int) -> tuple[Spot, ...]:
        """The spots of a process, by number."""
        return tuple(self._numbers.get(process, ()))


def rank() -> int:
    """The number of the process that asks."""
    return jax.process_index()


def default_kind(device: Any) -> str | None:
    """The memory that arrays on a device lie in by default.

    Asks a device of this process, since those of others need not answer.
    """
    if device.process_index != jax.process_index():
        alike = [each for each in jax.local_devices() if each.platform == device.platform]
        if not alike:
            return None
        device = alike[0]
    return device.default_memory().kind


def around() -> Any:
    """The mesh that `jax.set_mesh` has set, None where there is none."""
    find = getattr(jax.sharding, "get_mesh", None)
    try:
        found: Any = None if find is None else find()
    except ValueError:  # Inside jit, where nothing can be loaded either.
        return None
    return found if isinstance(found, Mesh) and not found.empty else None


def mesh_of(mesh: Any, shardings: Any) -> Any:
    """The user's mesh, else that of `jax.set_mesh` where no sharding brings devices of its own."""
    if mesh is not None or any(not jax_boxes.is_abstract(each) for each in given(shardings)):
        return mesh
    return around()


def processes(mesh: Any, shardings: Any) -> tuple[int, ...]:
    """The processes that take part in a load, by their numbers; none where nothing tells.

    Looks at nothing but the arguments and raises nothing: what is wrong with them is found later,
    where an error reaches the other processes. Without a mesh a function may name any devices, and
    all processes take part.

    Args:
        mesh: As for `resolve`.
        shardings: As for `resolve`.
    """
    devices: set[Any] = set()
    if isinstance(mesh, Mesh):
        devices.update(mesh.devices.flat)
    for sharding in given(shardings):
        if not jax_boxes.is_abstract(sharding):
            devices |= sharding.device_set
    # A function's answers are not known before headers are read.
    if callable(shardings) and mesh is None:
        return tuple(range(jax.process_count()))
    return tuple(sorted({device.process_index for device in devices}))
