"""JAX: arrays over mfload's buffers on CPU devices and NVIDIA GPUs, one copy to any other.

XLA on the CPU takes memory on 64-byte boundaries only. 64-bit types keep their width also where
`jax_enable_x64` is off: the values are exact, and JAX itself warns when a computation narrows
them.

XLA sets most of a GPU's memory aside for itself when it starts, and leaves little for buffers of
others. So there tensors land in memory of its own, where that is found to work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfload import dtypes, errors
from mfload.cuda import finding
from mfload.cuda.device import Device
from mfload.dlpack import View, capsule
from mfload.frameworks import base, giving, ground, jax_lending, private_api
from mfload.frameworks.base import Whose
from mfload.frameworks.jax_context import undisturbed
from mfload.frameworks.jax_devices import better, land_on, pool_of
from mfload.planning.requests import Request

OLDEST = "0.5.3"
_ALIGNMENT = 64
_LET_GO = 0.002  # Seconds in which other threads come to their turn.


class JaxAdapter(ground.Landing):
    """See `adapter.Adapter`.

    Args:
        device: The `jax.Device` the arrays go to.
        land: The same device, to land on it; None to copy arrays there from the host.
        notes: See `adapter.Adapter`.
    """

    name = "jax"
    alignment = _ALIGNMENT
    readonly_maps = False
    forms = base.forms(
        {
            name: row.numpy.name
            for name, row in dtypes.TABLE.items()
            if row.numpy is not None and hasattr(jnp, row.numpy.name)
        }
        # jnp.bool is spelled with an underscore in the versions before 0.4.34.
        | {"BOOL": "bool"},
        {"F4": "float4_e2m1fn"} if hasattr(jnp, "float4_e2m1fn") else None,
    )
    lendable = base.lendable(forms)

    def __init__(
        self, device: Any, land: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(land, notes)
        self._device = device
        self.on_host = device.platform == "cpu"
        # The way of views in host memory.
        self._take: Callable[[View], Any] = self._send
        if self.on_host:
            self._take = private_api.jax_capsule_importer(device) or self._take_public

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on the device (see `adapter.Adapter`).

        The first answer for a device takes a try on it (`seams.jax_lends_on`), also where it is
        for a plan alone: a plan says where a load would land.
        """
        return better([(self._device, land) for land in self.devices])

    def pool(self, number: int) -> base.Pool | None:
        """What XLA's allocator has of the device (see `adapter.Adapter`)."""
        return pool_of(self._device, self.devices[number])

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `jax.Array` for each view, in order."""
        made = [self.array(view) for view in views]
        if self.copied(views):
            let_go()
        return made

    def copied(self, views: Sequence[View]) -> bool:
        """Whether JAX made copies of any."""
        return any(
            view.dtype.elements > 1 or not (self.on_host or ground.on_device(view.memory))
            for view in views
        )

    def array(self, view: View) -> Any:
        """The `jax.Array` of one view; JAX may hold on to what it was copied from (`let_go`)."""
        take = self._take_public if ground.on_device(view.memory) else self._take
        if view.dtype.elements > 1:
            return self._unpack(view, take)
        return take(view)

    def _take_public(self, view: View) -> Any:
        with undisturbed():
            return jax.dlpack.from_dlpack(_OnDevice(view, self._device))

    def _send(self, view: View) -> Any:
        host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
        with undisturbed():
            return jax.block_until_ready(jax.device_put(host, self._device))

    def _unpack(self, view: View, take: Callable[[View], Any]) -> Any:
        """F4 takes a byte an element in JAX on the CPU: the one type that must be copied."""
        given = take(view.as_bytes()._replace(shape=(view.dtype.size_of(view.shape) or 0,)))
        with undisturbed():
            unpacked = given.view(jnp.float4_e2m1fn).reshape(view.shape)
            return jax.block_until_ready(unpacked)

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays in XLA's own memory, which a jitted function can take over (donation)."""
        land = self.devices[0] if self.devices else None
        return lend(requests, [(self._device, None, land)] * len(requests))


def lend(
    requests: Sequence[Request], spots: Sequence[tuple[Any, str | None, Device | None]]
) -> list[base.Lent]:
    """Arrays in XLA's own memory.

    Args:
        requests: What they are to hold.
        spots: For each the `jax.Device`, which of its memories (None for the default), and the
            device to land on; None for the host.

    Raises:
        MemoryLimitError: A device has no room for them.
    """
    wanted: list[jax_lending.Wanted] = []
    for request, (device, memory, _) in zip(requests, spots, strict=True):
        name, shape = base.lent_as(JaxAdapter.forms[request.dtype.name], request)
        wanted.append(jax_lending.Wanted(device, memory, name, shape))
    lent: list[base.Lent] = []
    for array, request, spot in zip(jax_lending.allocate(wanted), requests, spots, strict=True):
        address = array.unsafe_buffer_pointer() if request.nbytes else 0
        lent.append(base.Lent(array, base.memory_at(array, address, request.nbytes, spot[2])))
    return lent


def let_go() -> None:
    """Has JAX let go of memory that arrays were copied from, before the next wave of a load.

    JAX does so on threads of its own, which wait for the interpreter, and frees what NumPy arrays
    hold in its part of a collection only.
    """
    time.sleep(_LET_GO)
    gc.collect(0)


class _OnDevice:
    """A view as JAX's public import wants it: an object that names its device."""

    def __init__(self, view: View, device: Any) -> None:
        self._view = view
        # JAX looks for the number among this process's devices; `id` counts those of all.
        host = not ground.on_device(view.memory)
        self._place = (1, device.local_hardware_id) if host else view.memory.device.place

    def __dlpack__(self, **_: object) -> Any:
        # Whatever stream is named: all that was written is there when a view is made.
        return capsule(self._view, device_id=self._place[1])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place


def make(device: object) -> JaxAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    base.check_version("jax", jax.__version__, OLDEST)
    if isinstance(device, jax.Device):
        return _at(device)
    if device is None:
        default = jax.config.jax_default_device  # pyright: ignore
        if isinstance(default, jax.Device):
            return _at(default)
        return _at(jax.local_devices(backend=default)[0])
    if not isinstance(device, str):
        raise errors.DeviceError(
            "not a device", expected="a jax.Device or its name", found=repr(device)
        )
    platform, number = base.split_device(device)
    try:
        there = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise base.no_device("JAX", device, _no_platform(platform, error)) from error
    if (number or 0) >= len(there):
        raise base.no_device("JAX", device, there)
    return _at(there[number or 0])


def _no_platform(platform: str, error: RuntimeError) -> str:
    """Why JAX has no devices of a kind; of NVIDIA's the driver knows more."""
    said = str(error).splitlines()[0]
    if platform in ("cuda", "gpu"):
        try:
            finding.count()
        except errors.DeviceError as why:
            said = f"{said}; {why.found}"
    return said


def _at(device: Any) -> JaxAdapter:
    return JaxAdapter(device, *land_on(device))


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a JAX array; one that is sharded is put together on the host.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    _refuse(name, array)
    row = giving.row_of("jax", name, array.dtype)
    span = None
    devices = array.sharding.device_set
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        address = array.unsafe_buffer_pointer() if array.size else 0
        span = address, address + (row.size_of(array.shape) or 0)
    return giving.late("jax", name, row, array.shape, lambda: _gather(array), span)


def _refuse(name: str, array: Any) -> None:
    for kind, why in (
        (jax.core.Tracer, "a tracer has no numbers; save outside jit, grad and vmap"),
        (jax.ShapeDtypeStruct, "a shape without numbers; save the array that it stands for"),
    ):
        if isinstance(array, kind):
            raise giving.refused("jax", name, why, type(array).__name__)
    if not isinstance(array, jax.Array):
        why = "not an array; of a Ref, save ref[...]"
        raise giving.refused("jax", name, why, type(array).__name__)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        why = "a key of random numbers is no array; save jax.random.key_data(key)"
        raise giving.refused("jax", name, why, array.dtype)
    if array.is_deleted():
        raise giving.refused("jax", name, "the array was deleted or donated", array.aval)
    if not (array.is_fully_addressable or array.is_fully_replicated):
        why = (
            "part of the array lies with other processes; replicate it first: "
            "jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)"
        )
        raise giving.refused("jax", name, why, array.sharding)


def _gather(array: Any) -> Any:
    """A JAX array as a NumPy array; every number is read from one device alone."""
    shards = array.addressable_shards
    if array.is_fully_replicated:
        return _on_host(shards[0].data)
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            whole[shard.index] = _on_host(shard.data)
    return whole


def _on_host(array: Any) -> Any:
    """An array of one device as a NumPy array, over its own memory if that is on the host."""
    if array.device.platform != "cpu" or giving.BY_NAME[array.dtype.name].elements > 1:
        # Host copies that were let go of are freed by JAX in its part of a collection only.
        gc.collect(0)
    # An array keeps the copy that NumPy is given for as long as it lives: the one that does so
    # here is another over the same memory.
    return np.asarray(
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    )
