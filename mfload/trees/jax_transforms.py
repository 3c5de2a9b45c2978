"""Transforms on shards: jitted, on the devices where the shards landed, without any collective.

Devices whose arrays are alike (same transform, same shapes) run one compiled function together:
it takes their arrays as one array that is split over them, and each device works on its own part.
So what twelve layers on eight devices have in common is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mfload.frameworks.jax_memory import full_device, undisturbed
from mfload.trees.transforms import Transform

Devices = tuple[Any, ...]
Rows = Sequence[Sequence[Any]]
"""The arrays on each device, alike in shapes and dtypes."""

_DEVICE = "device"
_CACHED = 4096


def run(
    transform: Transform,
    devices: Devices,
    rows: Rows,
    wholes: Sequence[Any] = (),
    start: tuple[int, ...] = (),
) -> list[Any]:
    """Makes an array on each of several devices, in memory of XLA's own; see `wait`.

    With `wholes` it is made inside these, from `start` on: arrays from `empty` or `run`, which are
    donated.
    """
    with undisturbed():
        arrays = _together(devices, rows)
        if wholes:
            whole = _together(devices, [(each,) for each in wholes])
            arrays = [*whole, *map(np.int32, start), *arrays]
        ranks = tuple(array.ndim for array in arrays)
        return _apart(_compiled(transform, devices, ranks, bool(wholes))(*arrays), devices)


def empty(devices: Devices, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """An array of zeros on each device, to be filled by `run`."""
    with undisturbed():
        if 0 in shape:  # XLA takes such for replicas.
            return [jax.device_put(np.zeros(shape, dtype), device) for device in devices]
        return _apart(_zeros(devices, shape, np.dtype(dtype))(), devices)


def wait(arrays: Sequence[Any]) -> None:
    """Waits until arrays are there, and what they were made of is no longer read."""
    with full_device():
        jax.block_until_ready(list(arrays))


def _together(devices: Devices, rows: Rows) -> list[Any]:
    """Arrays of single devices as arrays that are split over all of them.

    A scalar can't be split: it passes for a replica, which is not compared.
    """
    if len(devices) == 1:
        return list(rows[0])
    made: list[Any] = []
    for parts in zip(*rows, strict=True):
        shape, sharding = _spread(devices, parts[0].shape, parts[0].sharding.memory_kind)
        made.append(jax.make_array_from_single_device_arrays(shape, sharding, list(parts)))
    return made


def _apart(array: Any, devices: Devices) -> list[Any]:
    if len(devices) == 1:
        return [array]
    found = {shard.device: shard.data for shard in array.addressable_shards}
    return [found[device] for device in devices]


def _spread(devices: Devices, shape: tuple[int, ...], kind: str | None) -> tuple[Any, Any]:
    """Shape and sharding of arrays of one shape put one after the other."""
    sharding = NamedSharding(_mesh(devices), _spec(len(shape)), memory_kind=kind)
    return (shape[0] * len(devices), *shape[1:]) if shape else shape, sharding


@functools.lru_cache(maxsize=_CACHED)
def _compiled(
    transform: Transform, devices: Devices, ranks: tuple[int, ...], inside: bool
) -> Callable[..., Any]:
    """A jitted function of arrays of these ranks, those of all devices together."""
    rank = len(transform.shape)

    def body(*arrays: Any) -> Any:
        if not inside:
            return transform.evaluate(arrays, jnp)
        part = transform.evaluate(arrays[1 + rank :], jnp)
        return jax.lax.dynamic_update_slice(arrays[0], part, arrays[1 : 1 + rank])

    call: Any = body
    if len(devices) > 1:
        shard_map, unchecked = _shard_map()
        specs, out = tuple(map(_spec, ranks)), _spec(rank)
        call = shard_map(body, mesh=_mesh(devices), in_specs=specs, out_specs=out, **unchecked)
    return jax.jit(call, donate_argnums=0 if inside else ())


def _shard_map() -> tuple[Any, dict[str, bool]]:
    """It, and how it is told that no result needs to be a replica."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map, {"check_vma": False}
    from jax.experimental.shard_map import shard_map

    return shard_map, {"check_rep": False}


@functools.lru_cache(maxsize=_CACHED)
def _zeros(devices: Devices, shape: tuple[int, ...], dtype: Any) -> Any:
    there: Any = SingleDeviceSharding(devices[0])
    if len(devices) > 1:
        shape, there = _spread(devices, shape, None)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=there)


def _spec(rank: int) -> Any:
    return PartitionSpec(_DEVICE) if rank else PartitionSpec()


@functools.lru_cache(maxsize=256)
def _mesh(devices: Devices) -> Any:
    """A mesh for these functions alone."""
    return Mesh(np.array(devices, object), (_DEVICE,))
