"""JAX on several devices: arrays over mfload's buffers on each, and sharded arrays of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base, ground
from mfload.frameworks.base import Whose
from mfload.frameworks.jax_adapter import OLDEST, JaxAdapter, lend, let_go
from mfload.frameworks.jax_context import undisturbed
from mfload.frameworks.jax_devices import better, land_on, pool_of
from mfload.mesh.jax_sharding import Spot
from mfload.planning.requests import Request


class JaxMeshAdapter(ground.Landing):
    """See `adapter.Adapter`: an array is a tuple here, one for each device of a need.

    Args:
        spots: Devices of this process with the memory that arrays lie in; needs and views refer
            to them by number.
        land: Where arrays of a `jax.Device` land, with notes (see `jax_devices.land_on`).
    """

    name = JaxAdapter.name
    alignment = JaxAdapter.alignment
    readonly_maps = JaxAdapter.readonly_maps
    forms = JaxAdapter.forms
    lendable = JaxAdapter.lendable

    def __init__(
        self,
        spots: Sequence[Spot],
        land: Callable[[Any], tuple[Device | None, tuple[str, ...]]] = land_on,
    ) -> None:
        base.check_version("jax", jax.__version__, OLDEST)
        self._spots = spots
        self.on_host = all(spot.device.platform == "cpu" for spot in spots)
        self._single = {
            device: JaxAdapter(device, *land(device))
            for device in dict.fromkeys(spot.device for spot in spots)
        }
        found = {device: own.devices[0] for device, own in self._single.items() if own.devices}
        self._pairs = tuple(found.items())
        self._numbers = {device: number for number, device in enumerate(found)}
        super().__init__()
        self.devices: Sequence[Device] = tuple(found.values())
        self.notes = tuple(
            dict.fromkeys(note for own in self._single.values() for note in own.notes)
        )

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on all of the devices (see `JaxAdapter.landing`)."""
        return better(self._pairs)

    def pool(self, number: int) -> base.Pool | None:
        """What XLA's allocator has of a device (see `adapter.Adapter`)."""
        return pool_of(*self._pairs[number])

    def lands(self, request: Request) -> int | None:
        """The number of the device that a need lands on (see `adapter.Adapter`).

        Needs of several devices are taken apart before they land.
        """
        spot = self._spots[request.devices[0]] if request.devices else None
        return None if spot is None or spot.kind else self._numbers.get(spot.device)

    def copies(self, request: Request) -> bool:
        """Whether a need is copied out of mfload's memory (see `adapter.Placing`)."""
        if self.forms[request.dtype.name].how == "copy":
            return True
        return any(self._spots[n].device.platform != "cpu" for n in request.devices)

    def lends(self, request: Request) -> bool:
        """Whether a need must land in memory that JAX lends (see `adapter.Placing`)."""
        spots = [self._spots[n] for n in request.devices]
        return len(spots) == 1 and spots[0].kind is not None and not self.copies(request)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tuple of `jax.Array`s for each view, in order: one for each of its devices."""
        spots = self._spots
        made = [tuple(self._array(view, spots[n]) for n in view.devices) for view in views]
        if any(
            self._single[spots[n].device].copied([view]) for view in views for n in view.devices
        ):
            let_go()
        return made

    def _array(self, view: View, spot: Spot) -> Any:
        array = self._single[spot.device].array(view)
        if spot.kind is None:
            return array
        there = SingleDeviceSharding(spot.device, memory_kind=spot.kind)
        with undisturbed():
            return jax.block_until_ready(jax.device_put(array, there))

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays in XLA's own memory, one need for one device (see `JaxAdapter.lend`)."""
        spots = [self._spots[request.devices[0]] for request in requests]
        numbers = [self.lands(request) for request in requests]
        lands = [None if n is None else self.devices[n] for n in numbers]
        rows = [(spot.device, spot.kind, land) for spot, land in zip(spots, lands, strict=True)]
        return [base.Lent((array,), memory) for array, memory in lend(requests, rows)]


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
