"""JAX's meshes: devices by number, arrays on each of them, and sharded arrays of those."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mfload import errors
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base, jax_memory, private_api
from mfload.frameworks.jax_adapter import OLDEST, JaxAdapter, lend, references, wait_for_release
from mfload.frameworks.jax_memory import undisturbed
from mfload.frameworks.several import SeveralAdapter
from mfload.mesh import jax_processes, jax_specs, specs
from mfload.mesh.base import Backend, DeviceShare, MeshArguments, MeshBackend, Whole
from mfload.options import LoadOptions
from mfload.planning.request import Allocation, Request
from mfload.runtime import Deadline

Shape = tuple[int, ...]


class Spot(NamedTuple):
    """A device, and the kind of its memory; None for the one that arrays lie in by default."""

    device: Any
    kind: str | None


class JaxBackend(Backend):
    """JAX's meshes, for one load.

    Spots are numbered for each process in the order in which shares are asked for, so the numbers
    are the same on every process that asks in the same order. Requests refer to spots by number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spots: dict[int, dict[Spot, int]] = {self.rank: {}}  # Numbers, for each process.
        self._adapter: JaxMeshAdapter | None = None

    @staticmethod
    def group() -> tuple[int, int]:
        """The number of this process, and how many there are."""
        return jax.process_index(), jax.process_count()

    @staticmethod
    def processes(asked: MeshArguments) -> tuple[int, ...]:
        """The processes that take part in a load (see `jax_specs.processes`)."""
        mesh = jax_specs.mesh_of(asked.mesh, asked.shardings)
        return jax_specs.processes(mesh, asked.shardings)

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Any]:
        """A sharding for each whole tensor (see `jax_specs.resolve`)."""
        asked = asked._replace(mesh=jax_specs.mesh_of(asked.mesh, asked.shardings))
        made = jax_specs.resolve(specs.rows(requests), asked)
        for (info, dtype, *_), sharding in zip(requests, made, strict=True):
            if JaxAdapter.forms[dtype.name].how != "bytes":
                continue
            shape, _ = arrives(dtype, info.shape)
            try:  # What arrives as bytes has other dims than the tensor, to be divided as well.
                jax_specs.check(info.name, shape, sharding)
            except errors.ShardingError as error:
                raise errors.ShardingError(
                    f"elements of {info.dtype} share a byte, and arrive in shape {list(shape)}",
                    tensor=info.name,
                    expected=f"whole blocks of {info.dtype.elements} elements in each last dim",
                    found=f"{sharding} for shape {list(info.shape)}",
                ) from error
        return made

    def divided(self, sharding: Any, shape: Shape) -> Iterator[DeviceShare]:
        """The part of a tensor that each device holds, on all processes."""
        for device, box in jax_specs.boxes(sharding, shape).items():
            kind = sharding.memory_kind
            spot = Spot(device, None if kind == _default_kind(device) else kind)
            spots = self._spots.setdefault(device.process_index, {})
            yield DeviceShare(device.process_index, spots.setdefault(spot, len(spots)), box)

    def in_default_memory(self, sharding: Any) -> bool:
        """Whether arrays lie in the memory that is the default of their devices."""
        kind = sharding.memory_kind
        return kind is None or all(kind == _default_kind(each) for each in sharding.device_set)

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """Whether devices that hold the same part get memory of their own."""
        lent = options.allocator == "framework" or not self.in_default_memory(sharding)
        return lent and JaxAdapter.forms[dtype.name].how != "copy"

    def device(self, number: int) -> Any:
        """The `jax.Device` of a spot of this process."""
        return list(self._spots[self.rank])[number].device

    def platform(self) -> str:
        """The kind of this process's devices: "cpu", "gpu" or "tpu"."""
        devices = [spot.device for spot in self._spots[self.rank]] or jax.local_devices()
        return devices[0].platform

    def adapter(self, *, late: bool = False) -> JaxMeshAdapter:
        """The adapter of the spots numbered so far."""
        spots = list(self._spots[self.rank]) or [Spot(jax.local_devices()[0], None)]
        self._adapter = JaxMeshAdapter(spots, late=late)
        return self._adapter

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """A sharded array of those on this process's devices, for each tensor."""
        made: list[Any] = []
        construct = private_api.jax_constructor()

        takes: list[Any] = [] if self._adapter is None else self._adapter.takes
        # The first array of each kind, and its parts' numbers in the order of its devices.
        kinds: dict[Any, tuple[Any, list[int]]] = {}
        with undisturbed():
            for shape, dtype, sharding, parts in wholes:
                kind = shape, dtype.name, id(sharding), *parts
                if construct is not None and kind in kinds:
                    like, numbers = kinds[kind]
                    arrays = [
                        takes[n](part) if type(part := parts[n]) is View else part for n in numbers
                    ]
                    made.append(construct(like, arrays))
                    continue
                shape, numpy = arrives(dtype, shape)
                # Where this process has none of the devices, nothing else tells the dtype.
                told = {} if parts else {"dtype": numpy}
                arrays = [takes[n](p) if type(p) is View else p for n, p in parts.items()]
                like = jax.make_array_from_single_device_arrays(shape, sharding, arrays, **told)
                made.append(like)
                number_of = {self.device(number): number for number in parts}
                # With its sharding kept in the array, the id stays that one's.
                kinds[kind] = like, [number_of[each.device] for each in like.addressable_shards]
        return made

    def abstract(self, requests: Sequence[Request], shardings: Sequence[Any]) -> dict[str, Any]:
        """What the arrays of whole tensors will be, without any data."""
        made: dict[str, Any] = {}
        for request, sharding in zip(requests, shardings, strict=True):
            shape, dtype = arrives(request.dtype, request.info.shape)
            made[request.info.name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return made

    def store(self) -> jax_processes.JaxStore | None:
        """The key-value store of the program; None if this version of JAX has none."""
        client = private_api.jax_store()
        return None if client is None else jax_processes.store_of(client)

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> jax_processes.JaxLink:
        """A link between processes, with rows of `width` bytes."""
        return jax_processes.JaxLink(ranks, self.platform(), width, deadline)


def make() -> MeshBackend:
    """A backend for one load."""
    return JaxBackend()


def arrives(dtype: DType, shape: Shape) -> tuple[Shape, Any]:
    """Shape and NumPy dtype of the array that a tensor becomes in JAX.

    They are uint8 with the last dim in bytes where JAX lacks the dtype.
    """
    form = JaxAdapter.forms[dtype.name]
    if form.how == "bytes":
        return dtype.storage_shape(shape), np.dtype(np.uint8)
    return shape, np.dtype(getattr(jnp, form.type, form.type))


@functools.lru_cache(maxsize=4096)  # Asked for each device of each tensor.
def _default_kind(device: Any) -> str | None:
    # A device of this process is asked, since those of others need not answer.
    if device.process_index != jax.process_index():
        alike = [each for each in jax.local_devices() if each.platform == device.platform]
        if not alike:
            return None
        device = alike[0]
    return device.default_memory().kind


def moved(array: Any, kind: str | None) -> Any:
    """An array in another memory of its device, once it is there; None for where it lies.

    JAX does not donate memory to another kind: release each array before the next is moved.
    """
    if kind is None or array.sharding.memory_kind == kind:
        return array
    with undisturbed():
        there = SingleDeviceSharding(array.device, memory_kind=kind)
        return jax.block_until_ready(jax.device_put(array, there))


class JaxMeshAdapter(SeveralAdapter):
    """An adapter with one part a spot: an array is a tuple, one for each spot of a request.

    With `late`, what lies in host memory stays a view until `JaxBackend.assemble` takes it with the
    other parts of its tensor: then the arrays of single devices, which nothing else wants, are gone
    before those of the next tensor are made.
    """

    # Requests name their spots already.
    assign = base.Adapter.assign  # pyright: ignore[reportAssignmentType]
    results = base.Adapter.results  # pyright: ignore[reportAssignmentType]

    def __init__(self, spots: Sequence[Spot], *, late: bool = False) -> None:
        base.check_version("jax", jax.__version__, OLDEST)
        self._spots = spots
        devices = dict.fromkeys(spot.device for spot in spots)
        found = {each: JaxAdapter(each, *jax_memory.find_device(each)) for each in devices}
        self._adapters = [found[spot.device] for spot in spots]
        self._late = late
        # What takes views as they are, on spots in host memory.
        self.takes: list[Any] = [
            found[spot.device].take if spot.kind is None and found[spot.device].on_host else None
            for spot in spots
        ]
        super().__init__(self._adapters)

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
        made: list[tuple[Any, ...]] = []
        late, some = self._late, None in self.takes
        copied = [
            view.memory
            for view in views
            if self.forms[view.dtype.name].how == "copy"
            or (some and any(self._adapters[n].copies(view) for n in view.devices))
        ]
        before = references(copied)
        for view in views:
            arrays: list[Any] = []
            for number in view.devices:
                take = self.takes[number]
                if take is not None and self.forms[view.dtype.name].how != "copy":
                    arrays.append(view if late else take(view))
                    continue
                array = self._adapters[number].array(view)
                arrays.append(moved(array, self._spots[number].kind))
            made.append(tuple(arrays))
        wait_for_release(lambda: references(copied), before)
        return made

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays in XLA's own memory, one request for one device (see `jax_adapter.lend`)."""
        spots = [self._spots[request.devices[0]] for request in requests]
        return [base.Lent((each.array,), each.memory) for each in lend(requests, spots)]
