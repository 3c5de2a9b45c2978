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

from mfload import errors
from mfload.frameworks.jax_memory import undisturbed
from mfload.trees.transforms import Transform, evaluate, shape_of

Arrays = tuple[Any, ...]
Devices = tuple[Any, ...]

_DEVICE = "device"
_CACHED = 4096
_BOOL = (0, 1)  # A fraction is neither.


def run(transform: Transform, devices: Devices, rows: Sequence[Arrays]) -> list[Any]:
    """Makes an array on each of several devices, in memory of XLA's own; see `wait`.

    `rows` are the arrays on each device, alike in shapes and dtypes. The transform makes at least
    one element.
    """
    return _apart(_call(_compiled(transform, devices, _ranks(rows)), rows, devices), devices)


def empty(devices: Devices, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """An array of zeros on each device, to be filled by `put`."""
    if 0 in shape:  # XLA takes such for replicas.
        with undisturbed():
            nothing = np.zeros(shape, dtype)
            return [jax.device_put(nothing, device) for device in devices]
    return _apart(_call(_zeros(devices, shape, np.dtype(dtype)), [()], devices), devices)


def put(
    transform: Transform,
    devices: Devices,
    wholes: Sequence[Any],
    rows: Sequence[Arrays],
    start: tuple[int, ...],
) -> list[Any]:
    """Makes a part of an array on each of several devices, in the memory of the whole.

    The part begins at `start`. `wholes` are the arrays from `empty` or `put`; they are donated.
    """
    call = _compiled_put(transform, devices, _ranks(rows), wholes[0].ndim)
    at = np.asarray(start, np.int32)
    whole = _together(devices, [(each,) for each in wholes])
    return _apart(_call(functools.partial(call, *whole, at), rows, devices), devices)


def fits(devices: Devices, rows: Sequence[Arrays], low: int, high: int) -> list[Any]:
    """Whether an integer dtype from `low` to `high` holds all numbers, for each device."""
    return _apart(_call(_compiled_fits(devices, _ranks(rows), low, high), rows, devices), devices)


def wait(arrays: Sequence[Any]) -> None:
    """Waits until arrays are there, and what they were made of is no longer read."""
    try:
        jax.block_until_ready(list(arrays))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0]
        raise errors.MemoryLimitError("the device is out of memory", found=text) from error


def move(array: Any, sharding: Any) -> Any:
    """An array in the memory of its device that a sharding names, once it is there.

    JAX does not donate memory to another kind: let go of each array before the next is moved.
    """
    kind = sharding.memory_kind
    if kind is None or array.sharding.memory_kind == kind:
        return array
    with undisturbed():
        there = SingleDeviceSharding(array.device, memory_kind=kind)
        return jax.block_until_ready(jax.device_put(array, there))


def _ranks(rows: Sequence[Arrays]) -> tuple[int, ...]:
    return tuple(array.ndim for array in rows[0])


def _call(call: Callable[..., Any], rows: Sequence[Arrays], devices: Devices) -> Any:
    arrays = _together(devices, rows)
    with undisturbed():
        return call(*arrays)


def _together(devices: Devices, rows: Sequence[Arrays]) -> list[Any]:
    """Arrays of single devices as arrays that are split over all of them."""
    if len(devices) == 1:
        return list(rows[0])
    mesh = _mesh(devices)
    made: list[Any] = []
    with undisturbed():
        for parts in zip(*rows, strict=True):
            shape, sharding = _spread(mesh, parts[0].shape, parts[0].sharding.memory_kind)
            made.append(jax.make_array_from_single_device_arrays(shape, sharding, list(parts)))
    return made


def _spread(mesh: Any, shape: tuple[int, ...], kind: str | None) -> tuple[Any, Any]:
    """Shape and sharding of arrays of one shape put one after the other.

    A scalar can't be split: it passes for a replica, which is not compared.
    """
    sharding = NamedSharding(mesh, _spec(len(shape)), memory_kind=kind)
    return (shape[0] * mesh.size, *shape[1:]) if shape else shape, sharding


def _apart(array: Any, devices: Devices) -> list[Any]:
    if len(devices) == 1:
        return [array]
    if array.is_fully_replicated:  # Scalars pass for replicas, and JAX would give one for all.
        found = {shard.device: shard.data for shard in array.addressable_shards}
        return [found[device] for device in devices]
    # In the order of the mesh, which is that of the devices.
    return [array.addressable_data(n) for n in range(len(devices))]


@functools.lru_cache(maxsize=_CACHED)
def _compiled(transform: Transform, devices: Devices, ranks: tuple[int, ...]) -> Any:
    def body(*arrays: Any) -> Any:
        return evaluate(transform, arrays, jnp)

    return _jitted(body, devices, ranks, len(shape_of(transform)))


@functools.lru_cache(maxsize=_CACHED)
def _compiled_put(transform: Transform, devices: Devices, ranks: tuple[int, ...], rank: int) -> Any:
    def body(whole: Any, start: Any, *arrays: Any) -> Any:
        part = evaluate(transform, arrays, jnp)
        return jax.lax.dynamic_update_slice(whole, part, tuple(start[n] for n in range(rank)))

    return _jitted(body, devices, (rank, 0, *ranks), rank, donate_argnums=0)


@functools.lru_cache(maxsize=_CACHED)
def _compiled_fits(devices: Devices, ranks: tuple[int, ...], low: int, high: int) -> Any:
    def body(*arrays: Any) -> Any:
        return jnp.all(jnp.stack([_holds(array, low, high) for array in arrays]))

    return _jitted(body, devices, ranks, 0)


def _holds(value: Any, low: int, high: int) -> Any:
    if jnp.issubdtype(value.dtype, jnp.floating):
        wide = value.astype(jnp.float64)
        cut = jnp.trunc(wide)
        # high + 1 is a power of two, which every float holds; high itself may not be.
        inside = (cut >= float(low)) & (wide < float(high + 1))
        return jnp.all(inside & (cut == wide) if (low, high) == _BOOL else inside)
    if value.dtype == bool:
        return jnp.asarray(True)
    own = jnp.iinfo(value.dtype)
    least, most = max(low, int(own.min)), min(high, int(own.max))
    return jnp.all((value >= least) & (value <= most))


def _jitted(
    body: Callable[..., Any], devices: Devices, ranks: tuple[int, ...], rank: int, **options: Any
) -> Any:
    """A jitted function of arrays of these ranks, to one of the last."""
    if len(devices) > 1:
        specs, out, mesh = tuple(map(_spec, ranks)), _spec(rank), _mesh(devices)
        if hasattr(jax, "shard_map"):
            body = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        else:
            from jax.experimental.shard_map import shard_map

            body = shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_rep=False)
    return jax.jit(body, **options)


def _spec(rank: int) -> Any:
    return PartitionSpec(_DEVICE) if rank else PartitionSpec()


@functools.lru_cache(maxsize=_CACHED)
def _zeros(devices: Devices, shape: tuple[int, ...], dtype: Any) -> Any:
    if len(devices) == 1:
        there: Any = SingleDeviceSharding(devices[0])
    else:
        shape, there = _spread(_mesh(devices), shape, None)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=there)


@functools.lru_cache(maxsize=256)
def _mesh(devices: Devices) -> Any:
    """A mesh for these functions alone."""
    return Mesh(np.array(devices, object), (_DEVICE,))
