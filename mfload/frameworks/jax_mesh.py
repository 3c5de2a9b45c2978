"""JAX on several devices: arrays over mfload's buffers on each, and sharded arrays of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import adapter
from mfload.frameworks.jax_adapter import OLDEST, JaxAdapter, let_go, undisturbed
from mfload.frameworks.jax_sharding import Spot
from mfload.placement import Need


class JaxMeshAdapter:
    """See `adapter.Adapter`: an array is a tuple here, one for each device of a need.

    Args:
        spots: Devices of this process with the memory that arrays lie in; needs and views refer
            to them by number.
    """

    name = JaxAdapter.name
    alignment = JaxAdapter.alignment
    readonly_maps = JaxAdapter.readonly_maps
    forms = JaxAdapter.forms
    lendable = JaxAdapter.lendable

    def __init__(self, spots: Sequence[Spot]) -> None:
        adapter.check_version("jax", jax.__version__, OLDEST)
        self._spots = spots
        self.on_host = all(spot.device.platform == "cpu" for spot in spots)
        self._single = {spot.device: JaxAdapter(spot.device) for spot in spots}

    def copies(self, need: Need) -> bool:
        """Whether a need is copied out of mfload's memory (see `adapter.Placing`)."""
        if self.forms[need.dtype.name].how == "copy":
            return True
        return any(self._spots[n].device.platform != "cpu" for n in need.devices)

    def lends(self, need: Need) -> bool:
        """Whether a need must land in memory that JAX lends (see `adapter.Placing`)."""
        spots = [self._spots[n] for n in need.devices]
        return len(spots) == 1 and spots[0].kind is not None and not self.copies(need)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tuple of `jax.Array`s for each view, in order: one for each of its devices."""
        spots = self._spots
        made = [tuple(self._array(view, spots[n]) for n in view.devices) for view in views]
        if not self.on_host or any(view.dtype.elements > 1 for view in views):
            let_go()
        return made

    def _array(self, view: View, spot: Spot) -> Any:
        array = self._single[spot.device].array(view)
        if spot.kind is None:
            return array
        there = SingleDeviceSharding(spot.device, memory_kind=spot.kind)
        with undisturbed():
            return jax.block_until_ready(jax.device_put(array, there))

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Arrays in XLA's own memory, one need for one device (see `JaxAdapter.lend`)."""
        waiting: dict[tuple[Any, ...], dict[Any, list[int]]] = {}
        for n, need in enumerate(needs):
            spot = self._spots[need.devices[0]]
            name, shape = adapter.lent_as(self.forms[need.dtype.name], need)
            same = waiting.setdefault((spot.kind, name, shape), {})
            same.setdefault(spot.device, []).append(n)
        lent: dict[int, adapter.Lent] = {}
        for (kind, name, shape), queues in waiting.items():
            for turn in range(max(map(len, queues.values()))):
                numbers = {d: queue[turn] for d, queue in queues.items() if turn < len(queue)}
                for device, array in zeros(tuple(numbers), kind, name, shape).items():
                    n = numbers[device]
                    nbytes = needs[n].nbytes
                    address = array.unsafe_buffer_pointer() if nbytes else 0
                    memory = adapter.memory_at(array, address, nbytes)
                    lent[n] = adapter.Lent((array,), memory)
        return [lent[n] for n in range(len(needs))]


def zeros(
    devices: tuple[Any, ...], kind: str | None, dtype: str, shape: tuple[int, ...]
) -> dict[Any, Any]:
    """New arrays in XLA's own memory, one on each device; compiled once for all of them.

    Args:
        devices: Devices of this process, of one platform.
        kind: Which of their memories, None for the default.
        dtype: JAX's name of it.
        shape: That of each array.
    """
    with undisturbed():
        made = jax.block_until_ready(_maker(devices, kind, dtype, shape)())
    return {shard.device: shard.data for shard in made.addressable_shards}


@functools.lru_cache(maxsize=1024)
def _maker(
    devices: tuple[Any, ...], kind: str | None, dtype: str, shape: tuple[int, ...]
) -> Callable[[], Any]:
    # A mesh for this alone, of which nothing is seen outside: replicas have memory of their own,
    # and one program makes them all.
    mesh = Mesh(np.array(devices, object), ("device",))
    there = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=there)


def assemble(
    shape: tuple[int, ...],
    sharding: Any,
    arrays: Mapping[Any, Any],
    dtype: Any = None,
) -> Any:
    """One sharded array of the arrays that lie on its devices.

    Args:
        shape: Of the whole.
        sharding: How it is split.
        arrays: By device: those of this process.
        dtype: Needed where this process has no device of it.

    Returns:
        A `jax.Array` over the same memory.
    """
    parts = list(arrays.values())
    with undisturbed():
        if parts:
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def arrives(dtype: DType, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the array that a tensor becomes in JAX.

    Args:
        dtype: Row of the dtype table that it is delivered in.
        shape: In elements.

    Returns:
        Those of the array: of uint8 with the last dim in bytes where JAX lacks the dtype.
    """
    form = JaxAdapter.forms[dtype.name]
    if form.how == "bytes":
        return dtype.storage_shape(shape), np.dtype(np.uint8)
    return shape, np.dtype(getattr(jnp, form.type, form.type))


def abstract(
    rows: Iterable[tuple[str, DType, tuple[int, ...]]], shardings: Iterable[Any]
) -> dict[str, Any]:
    """What arrays will be, without any.

    Args:
        rows: Name, dtype and shape in elements.
        shardings: One for each, None for none.

    Returns:
        A `jax.ShapeDtypeStruct` for each name.
    """
    made: dict[str, Any] = {}
    for (name, row, elements), sharding in zip(rows, shardings, strict=True):
        shape, dtype = arrives(row, elements)
        made[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return made
