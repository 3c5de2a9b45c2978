"""Programs on shards: jitted, on the devices where the shards landed, without any collective.

Devices whose arrays are alike (same program, same shapes) run one compiled function together: it
sees their arrays as one array that is split over them, and each works on its own part alone. So
what twelve layers on eight devices have in common is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mfload import errors
from mfload.frameworks.jax_adapter import undisturbed

Evaluate = Callable[[Any, Sequence[Any], Any], Any]
"""What a program does with arrays: (program, arrays, `jax.numpy`) → array."""

Arrays = tuple[Any, ...]
Devices = tuple[Any, ...]

_DEVICE = "device"
_CACHED = 4096
_BOOL = (0, 1)  # A fraction is neither.


class Transforms:
    """Runs programs on arrays that lie on single devices.

    Args:
        evaluate: What a program does; the same object for programs that mean the same, because
            compiled functions are kept by it.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def run(self, program: Hashable, devices: Devices, rows: Sequence[Arrays]) -> list[Any]:
        """Makes an array on each of several devices.

        Args:
            program: What to do; JAX compiles one for each program, shapes and devices.
            devices: The devices.
            rows: For each of them the arrays on it, alike in shapes and dtypes on all. What the
                program makes of them has elements.

        Returns:
            For each device an array in memory of XLA's own, perhaps not there before `wait`.
        """
        call = _compiled(self._evaluate, program, devices, _ranks(rows))
        return _apart(_call(call, _together(devices, rows)), devices)

    def empty(self, devices: Devices, shape: tuple[int, ...], dtype: Any) -> list[Any]:
        """An array of zeros on each device, to be filled by `put`."""
        if 0 in shape:  # XLA takes such for replicas.
            with undisturbed():
                nothing = np.zeros(shape, dtype)
                return [jax.device_put(nothing, device) for device in devices]
        call = _zeros(devices, shape, np.dtype(dtype))
        return _apart(_call(call, []), devices)

    def put(
        self,
        program: Hashable,
        devices: Devices,
        wholes: Sequence[Any],
        rows: Sequence[Arrays],
        start: tuple[int, ...],
    ) -> list[Any]:
        """Makes a part of an array on each of several devices, in the memory of the whole.

        Args:
            program: What makes the part.
            devices: The devices.
            wholes: For each of them the array that it is a part of, from `empty` or `put`; of no
                use afterwards.
            rows: For each device what the program works on.
            start: Where in the whole the part begins.

        Returns:
            The wholes, with the part in them.
        """
        call = _compiled_put(self._evaluate, program, devices, _ranks(rows), wholes[0].ndim)
        whole = _together(devices, [(each,) for each in wholes])
        at = np.asarray(start, np.int32)
        return _apart(_call(call, [*whole, at, *_together(devices, rows)]), devices)


def fits(devices: Devices, rows: Sequence[Arrays], low: int, high: int) -> list[Any]:
    """Whether an integer dtype holds all numbers of arrays.

    Args:
        devices: The devices.
        rows: For each of them the arrays on it, alike on all.
        low: The least that the dtype holds.
        high: The most.

    Returns:
        For each device an array of one bool.
    """
    call = _compiled_fits(devices, _ranks(rows), low, high)
    return _apart(_call(call, _together(devices, rows)), devices)


def wait(arrays: Sequence[Any]) -> None:
    """Waits until arrays are there, and what they were made of is no longer read.

    Raises:
        MemoryLimitError: A device has no room for them.
    """
    try:
        jax.block_until_ready(list(arrays))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0]
        raise errors.MemoryLimitError("no room on the device", found=text) from error


def in_default_memory(sharding: Any) -> Any:
    """A sharding in the memory that arrays lie in by default."""
    return sharding if sharding.memory_kind is None else sharding.with_memory_kind(None)


def move(array: Any, sharding: Any) -> Any:
    """An array in the memory of its device that a sharding names; itself where it lies there.

    What is moved is there, and no longer read: JAX gives no memory away to one of another kind,
    so whoever moves several lets go of each before the next.
    """
    kind = sharding.memory_kind
    if kind is None or array.sharding.memory_kind == kind:
        return array
    with undisturbed():
        there = SingleDeviceSharding(array.device, memory_kind=kind)
        return jax.block_until_ready(jax.device_put(array, there))


def _ranks(rows: Sequence[Arrays]) -> tuple[int, ...]:
    return tuple(array.ndim for array in rows[0])


def _call(call: Callable[..., Any], arrays: Sequence[Any]) -> Any:
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

    A scalar can't be: it passes for a replica, which nobody compares.
    """
    if not shape:
        return shape, NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    sharding = NamedSharding(mesh, PartitionSpec(_DEVICE), memory_kind=kind)
    return (shape[0] * mesh.size, *shape[1:]), sharding


def _apart(array: Any, devices: Devices) -> list[Any]:
    if len(devices) == 1:
        return [array]
    if array.is_fully_replicated:  # Scalars pass for replicas, and JAX would give one for all.
        found = {shard.device: shard.data for shard in array.addressable_shards}
        return [found[device] for device in devices]
    # In the order of the mesh, which is that of the devices.
    return [array.addressable_data(n) for n in range(len(devices))]


@functools.lru_cache(maxsize=_CACHED)
def _compiled(
    evaluate: Evaluate, program: Hashable, devices: Devices, ranks: tuple[int, ...]
) -> Callable[..., Any]:
    return _build(lambda *arrays: evaluate(program, arrays, jnp), devices, ranks, None)


@functools.lru_cache(maxsize=_CACHED)
def _compiled_fits(
    devices: Devices, ranks: tuple[int, ...], low: int, high: int
) -> Callable[..., Any]:
    def body(*arrays: Any) -> Any:
        return jnp.all(jnp.stack([_holds(array, low, high) for array in arrays]))

    return _build(body, devices, ranks, 0)


def _holds(value: Any, low: int, high: int) -> Any:
    if jnp.issubdtype(value.dtype, jnp.floating):
        wide = value.astype(jnp.float64)
        cut = jnp.trunc(wide)
        # high + 1 is a power of two, which every float holds; high itself may be none.
        inside = (cut >= float(low)) & (wide < float(high + 1))
        return jnp.all(inside & (cut == wide) if (low, high) == _BOOL else inside)
    if value.dtype == bool:
        return jnp.asarray(True)
    own = jnp.iinfo(value.dtype)
    least, most = max(low, int(own.min)), min(high, int(own.max))
    return jnp.all((value >= least) & (value <= most))


@functools.lru_cache(maxsize=_CACHED)
def _compiled_put(
    evaluate: Evaluate,
    program: Hashable,
    devices: Devices,
    ranks: tuple[int, ...],
    rank: int,
) -> Callable[..., Any]:
    def put(whole: Any, start: Any, *arrays: Any) -> Any:
        part = evaluate(program, arrays, jnp)
        return jax.lax.dynamic_update_slice(whole, part, tuple(start[n] for n in range(rank)))

    if len(devices) == 1:
        return jax.jit(put, donate_argnums=0)
    specs = (_spec(rank), PartitionSpec(), *map(_spec, ranks))
    return jax.jit(_mapped(put, devices, specs, _spec(rank)), donate_argnums=0)


def _build(
    body: Callable[..., Any], devices: Devices, ranks: tuple[int, ...], rank: int | None
) -> Callable[..., Any]:
    """A jitted function; `rank` is that of its result, None where the program says it."""
    if len(devices) == 1:
        return jax.jit(body)
    specs = tuple(map(_spec, ranks))

    def call(*arrays: Any) -> Any:
        # The rank of what a program makes is known once its arrays are.
        local = [
            jax.ShapeDtypeStruct(_share(each.shape, len(devices)), each.dtype) for each in arrays
        ]
        made = rank if rank is not None else jax.eval_shape(body, *local).ndim
        return _mapped(body, devices, specs, _spec(made))(*arrays)

    return jax.jit(call)


def _share(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (shape[0] // count, *shape[1:]) if shape else shape


def _spec(rank: int) -> Any:
    return PartitionSpec(_DEVICE) if rank else PartitionSpec()


def _mapped(
    body: Callable[..., Any], devices: Devices, specs: tuple[Any, ...], out: Any
) -> Callable[..., Any]:
    mesh = _mesh(devices)
    newer = getattr(jax, "shard_map", None)
    if newer is not None:
        return newer(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_rep=False)


@functools.lru_cache(maxsize=_CACHED)
def _zeros(devices: Devices, shape: tuple[int, ...], dtype: Any) -> Callable[..., Any]:
    if len(devices) == 1:
        there: Any = SingleDeviceSharding(devices[0])
        whole = shape
    else:
        whole, there = _spread(_mesh(devices), shape, None)
    return jax.jit(lambda: jnp.zeros(whole, dtype), out_shardings=there)


@functools.lru_cache(maxsize=256)
def _mesh(devices: Devices) -> Any:
    # A mesh for this alone, of which nothing is seen outside.
    return Mesh(np.array(devices, object), (_DEVICE,))
