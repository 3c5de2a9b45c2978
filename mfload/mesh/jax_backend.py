"""JAX's meshes: devices by number, arrays on each of them, and sharded arrays of those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mfload import errors
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base, jax_memory
from mfload.frameworks.jax_adapter import OLDEST, JaxAdapter, collect_copied, lend
from mfload.frameworks.jax_memory import undisturbed
from mfload.frameworks.several import SeveralAdapter
from mfload.mesh import jax_processes, jax_shardings
from mfload.options import LoadOptions
from mfload.planning.memory import Allocation
from mfload.planning.requests import Request, Share
from mfload.runtime import Deadline

Shape = tuple[int, ...]


class Spot(NamedTuple):
    """Where a shard lies."""

    device: Any
    kind: str | None
    """The device's memory; None for the one that arrays lie in by default."""


class JaxBackend:
    """JAX's meshes, for one load.

    Spots are numbered for each process in the order in which shares are asked for, so the numbers
    are the same on every process that asks in the same order. Requests refer to spots by number.
    """

    def __init__(self) -> None:
        self.rank: int = jax.process_index()
        self.spots: list[Spot] = []
        """Those of this process, by number."""
        self._numbers: dict[int, dict[Spot, int]] = {}
        self._shares: dict[tuple[Any, Shape], tuple[Share, ...]] = {}

    def resolve(
        self,
        requests: Sequence[Request],
        mesh: Any,
        shardings: Any,
        unmatched: str,
        notes: list[str],
        known: Iterable[str],
    ) -> list[Any]:
        """A sharding for each whole tensor (see `jax_shardings.resolve`)."""
        made = jax_shardings.resolve(
            [(request.info.name, request.info.shape) for request in requests],
            jax_shardings.mesh_of(mesh, shardings),
            shardings,
            unmatched,
            infos=[request.info for request in requests],
            notes=notes,
            known=known,
        )
        for request, sharding in zip(requests, made, strict=True):
            if request.dtype.elements > 1:
                _check_bytes(request, sharding)
        return made

    def shares(self, sharding: Any, shape: Shape) -> tuple[Share, ...]:
        """The part of a tensor that each device holds, on all processes."""
        key = sharding, shape
        if key not in self._shares:
            boxes = jax_shardings.boxes(sharding, shape).items()
            self._shares[key] = tuple(
                Share(device.process_index, self._number(device, sharding.memory_kind), box)
                for device, box in boxes
            )
        return self._shares[key]

    def _number(self, device: Any, kind: str | None) -> int:
        spot = Spot(device, None if kind == _default_kind(device) else kind)
        numbers = self._numbers.setdefault(device.process_index, {})
        if spot not in numbers:
            numbers[spot] = len(numbers)
            if device.process_index == self.rank:
                self.spots.append(spot)
        return numbers[spot]

    def in_default_memory(self, sharding: Any) -> bool:
        """Whether arrays lie in the memory that is the default of their devices."""
        kind = sharding.memory_kind
        return kind is None or all(kind == _default_kind(each) for each in sharding.device_set)

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """Whether devices that hold the same part get memory of their own."""
        lent = options.allocator == "framework" or not self.in_default_memory(sharding)
        return lent and JaxAdapter.forms[dtype.name].how != "copy"

    def platform(self) -> str:
        """The kind of this process's devices: "cpu", "gpu" or "tpu"."""
        return (self.spots[0].device if self.spots else jax.local_devices()[0]).platform

    def device(self, number: int) -> Any:
        """The `jax.Device` of a spot."""
        return self.spots[number].device

    def adapter(self) -> JaxMeshAdapter:
        """The adapter of the spots numbered so far."""
        return JaxMeshAdapter(self.spots or [Spot(jax.local_devices()[0], None)])

    def assemble(self, shape: Shape, sharding: Any, arrays: Mapping[Any, Any], dtype: DType) -> Any:
        """One sharded array of those on this process's devices, by device."""
        whole, numpy = arrives(dtype, shape)
        parts = list(arrays.values())
        # Where this process has none of the devices, nothing else tells the dtype.
        told = {} if parts else {"dtype": numpy}
        with undisturbed():
            return jax.make_array_from_single_device_arrays(whole, sharding, parts, **told)

    def abstract(self, requests: Sequence[Request], shardings: Sequence[Any]) -> dict[str, Any]:
        """What the arrays of whole tensors will be, without any data."""
        made: dict[str, Any] = {}
        for request, sharding in zip(requests, shardings, strict=True):
            shape, dtype = arrives(request.dtype, request.info.shape)
            made[request.info.name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return made

    def store(self) -> jax_processes.JaxStore | None:
        """The key-value store of the program; None if this version of JAX has none."""
        return jax_processes.store()

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> jax_processes.JaxLink:
        """A link between processes, with rows of `width` bytes."""
        return jax_processes.link(ranks, self.platform(), width, deadline)

    @staticmethod
    def all_processes() -> tuple[int, ...]:
        """The processes of the program."""
        return tuple(range(jax.process_count()))

    @staticmethod
    def processes(mesh: Any, shardings: Any) -> tuple[int, ...]:
        """The processes that take part in a load (see `jax_shardings.processes`)."""
        return jax_shardings.processes(jax_shardings.mesh_of(mesh, shardings), shardings)


make = JaxBackend


def arrives(dtype: DType, shape: Shape) -> tuple[Shape, Any]:
    """Shape and NumPy dtype of the array that a tensor becomes in JAX.

    They are uint8 with the last dim in bytes where JAX lacks the dtype.
    """
    form = JaxAdapter.forms[dtype.name]
    if form.how == "bytes":
        return dtype.storage_shape(shape), np.dtype(np.uint8)
    return shape, np.dtype(getattr(jnp, form.type, form.type))


def _check_bytes(request: Request, sharding: Any) -> None:
    """What arrives as bytes has other dims than the tensor, which must be divided as well."""
    shape, _ = arrives(request.dtype, request.info.shape)
    try:
        jax_shardings.check(request.info.name, shape, sharding)
    except errors.ShardingError as error:
        raise errors.ShardingError(
            f"elements of {request.dtype} that share a byte can't be split like this: the tensor "
            f"arrives in shape {list(shape)}",
            tensor=request.info.name,
            expected=f"whole blocks of {request.dtype.elements} elements in the last dim of each",
            found=f"{sharding} for shape {list(request.info.shape)}",
        ) from error


def _default_kind(device: Any) -> str | None:
    # A device of this process is asked, since those of others need not answer.
    if device.process_index != jax.process_index():
        alike = [each for each in jax.local_devices() if each.platform == device.platform]
        if not alike:
            return None
        device = alike[0]
    return device.default_memory().kind


class JaxMeshAdapter(SeveralAdapter):
    """An adapter with one part a spot: an array is a tuple, one for each spot of a request.

    `land` gives the device to land on for a `jax.Device`, with notes.
    """

    # Requests name their spots already.
    assign = base.Adapter.assign  # pyright: ignore[reportAssignmentType]
    results = base.Adapter.results  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        spots: Sequence[Spot],
        land: Callable[[Any], tuple[Device | None, tuple[str, ...]]] = jax_memory.find_device,
    ) -> None:
        base.check_version("jax", jax.__version__, OLDEST)
        self._spots = spots
        self._single = {
            device: JaxAdapter(device, *land(device))
            for device in dict.fromkeys(spot.device for spot in spots)
        }
        super().__init__([self._single[spot.device] for spot in spots])

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        """Where a request lands (see `Adapter`).

        Requests of several devices are taken apart unless they land on the host.
        """
        spots = [self._spots[n] for n in request.devices]
        copied = self.forms[request.dtype.name].how == "copy"
        copied = copied or any(spot.device.platform != "cpu" for spot in spots)
        if spots and spots[0].kind is None:
            made = super().allocation(request._replace(devices=request.devices[:1]), options)
            return made if made.device is not None else made._replace(copied=copied)
        # Another memory than the device's default is JAX's to allocate.
        lent = len(spots) == 1 and not copied
        return Allocation(None, "framework" if lent else "mfload", copied)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tuple of `jax.Array`s for each view, one for each of its devices."""
        spots = self._spots
        made = [tuple(self._array(view, spots[n]) for n in view.devices) for view in views]
        if any(self._single[spots[n].device].copies(view) for view in views for n in view.devices):
            collect_copied()
        return made

    def _array(self, view: View, spot: Spot) -> Any:
        array = self._single[spot.device].array(view)
        if spot.kind is None:
            return array
        there = SingleDeviceSharding(spot.device, memory_kind=spot.kind)
        with undisturbed():
            return jax.block_until_ready(jax.device_put(array, there))

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays in XLA's own memory, one request for one device (see `JaxAdapter.lend`)."""
        rows: list[tuple[Any, str | None, Device | None]] = []
        for request in requests:
            device, kind = self._spots[request.devices[0]]
            found = () if kind else self._single[device].devices
            rows.append((device, kind, found[0] if found else None))
        return [base.Lent((array,), memory) for array, memory in lend(requests, rows)]
