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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfload import dtypes, errors
from mfload.cuda import discovery
from mfload.cuda.device import Device
from mfload.dlpack import View, capsule
from mfload.frameworks import base, jax_memory, private_api
from mfload.frameworks.jax_memory import NewArray, undisturbed
from mfload.planning.requests import Owner, Request

OLDEST = "0.5.3"
_OTHER_THREADS = 0.002  # Seconds in which they get their turn.


class JaxAdapter(base.Adapter):
    """Arrays on one `jax.Device` (see `base.Adapter`)."""

    name = "jax"
    alignment = 64
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

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(device, notes)
        self._place = place
        self.on_host = place.platform == "cpu"
        # Takes views in host memory.
        self._take: Callable[[View], Any] = self._send
        if self.on_host:
            self._take = private_api.jax_capsule_importer(place) or self._import

    def owner(self, allocator: str) -> Owner:
        # The first answer for a device takes a try on it, also for a plan: that says where a load
        # would land.
        if allocator == "auto" and jax_memory.fillable(self._place, self.devices[0]):
            return "framework"
        return super().owner(allocator)

    def pool(self, number: int) -> base.Pool | None:
        return jax_memory.pool(self._place, self.devices[number])

    def wrap(self, views: Sequence[View]) -> list[Any]:
        made = [self.array(view) for view in views]
        if self.on_host:
            copied = any(view.dtype.elements > 1 for view in views)
        else:
            copied = any(self.copies(view) for view in views)
        if copied:
            collect_copied()
        return made

    def copies(self, view: View) -> bool:
        """Whether `array` makes a copy of a view."""
        there = self.on_host or base.on_device(view.memory)
        return view.dtype.elements > 1 or not there

    def array(self, view: View) -> Any:
        """The `jax.Array` of one view; JAX may hold what it was copied from (`collect_copied`)."""
        take = self._import if base.on_device(view.memory) else self._take
        if view.dtype.elements > 1:
            return self._unpack(view, take)
        return take(view)

    def _import(self, view: View) -> Any:
        with undisturbed():
            return jax.dlpack.from_dlpack(_OnDevice(view, self._place))

    def _send(self, view: View) -> Any:
        host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
        with undisturbed():
            return jax.block_until_ready(jax.device_put(host, self._place))

    def _unpack(self, view: View, take: Callable[[View], Any]) -> Any:
        """F4 takes a byte an element in JAX on the CPU: the one type that must be copied."""
        given = take(view.as_bytes()._replace(shape=(view.dtype.size_of(view.shape) or 0,)))
        with undisturbed():
            unpacked = given.view(jnp.float4_e2m1fn).reshape(view.shape)
            return jax.block_until_ready(unpacked)

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays in XLA's own memory, which a jitted function can take over (donation)."""
        there = self.devices[0] if self.devices else None
        return lend(requests, [(self._place, None, there)] * len(requests))


def lend(
    requests: Sequence[Request], places: Sequence[tuple[Any, str | None, Device | None]]
) -> list[base.Lent]:
    """Arrays in XLA's own memory.

    A place is the `jax.Device`, which of its memories (None for the default), and the same device
    to land on (None for the host).
    """
    wanted: list[NewArray] = []
    for request, (device, memory, _) in zip(requests, places, strict=True):
        name, shape = base.lent_as(JaxAdapter.forms[request.dtype.name], request)
        wanted.append(NewArray(device, memory, name, shape))
    lent: list[base.Lent] = []
    arrays = jax_memory.allocate(wanted)
    for array, request, (*_, there) in zip(arrays, requests, places, strict=True):
        address = private_api.jax_address(array) if request.nbytes else 0
        lent.append(base.Lent(array, base.memory_at(array, address, request.nbytes, there)))
    return lent


def collect_copied() -> None:
    """Has JAX free the memory that arrays were copied from, before the next batch of a load.

    JAX does so on threads of its own, which wait for the interpreter, and frees what NumPy arrays
    hold in its part of a collection only.
    """
    time.sleep(_OTHER_THREADS)
    gc.collect(0)


class _OnDevice:
    """A view as JAX's public import wants it: an object that names its device."""

    def __init__(self, view: View, device: Any) -> None:
        self._view = view
        # JAX looks for the number among this process's devices; `id` counts those of all.
        host = not base.on_device(view.memory)
        self._place = (1, device.local_hardware_id) if host else view.memory.device.place

    def __dlpack__(self, **_: object) -> Any:
        # Whatever stream is named: all that was written is there when a view is made.
        return capsule(self._view, device_id=self._place[1])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place


def make(device: object) -> JaxAdapter:
    """The adapter for a device."""
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
    if number >= len(there):
        raise base.no_device("JAX", device, there)
    return _at(there[number])


def _no_platform(platform: str, error: RuntimeError) -> str:
    """Why JAX has no devices of a kind; of NVIDIA's the driver knows more."""
    said = str(error).splitlines()[0]
    if platform in ("cuda", "gpu"):
        try:
            discovery.count()
        except errors.DeviceError as why:
            said = f"{said}; {why.found}"
    return said


def _at(device: Any) -> JaxAdapter:
    return JaxAdapter(device, *jax_memory.find_device(device))


def export(array: Any) -> base.Exported:
    """What is to be saved of a JAX array; one that is sharded is put together on the host."""
    base.refuse("jax", _refusals(array))
    row = base.row_of("jax", array.dtype.name)
    span = None
    devices = array.sharding.device_set
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        address = private_api.jax_address(array) if array.size else 0
        span = address, address + (row.size_of(array.shape) or 0)
    return base.Exported(row, array.shape, lambda: _gather(array), span)


def _refusals(array: Any) -> Iterator[tuple[bool, str, object]]:
    kind = type(array).__name__
    traced = isinstance(array, jax.core.Tracer)
    yield traced, "a tracer has no numbers; save outside jit, grad and vmap", kind
    shape = isinstance(array, jax.ShapeDtypeStruct)
    yield shape, "a shape without numbers; save the array that it stands for", kind
    yield not isinstance(array, jax.Array), "not an array; of a Ref, save ref[...]", kind
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        why = (
            "a typed PRNG key; save jax.random.key_data(key), and turn what is loaded into a key "
            f"with jax.random.wrap_key_data(data, impl={str(jax.random.key_impl(array))!r})"
        )
        yield True, why, array.dtype
    yield array.is_deleted(), "the array was deleted or donated", array.aval
    why = (
        "part of the array lies with other processes; replicate it first: "
        "jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)"
    )
    yield not (array.is_fully_addressable or array.is_fully_replicated), why, array.sharding


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
    if array.device.platform != "cpu" or base.ROWS[array.dtype.name].elements > 1:
        # Host copies that were let go of are freed by JAX in its part of a collection only.
        gc.collect(0)
    # An array keeps the copy that NumPy is given for as long as it lives: the one that does so
    # here is another over the same memory.
    return np.asarray(
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    )
