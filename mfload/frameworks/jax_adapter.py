"""JAX: arrays over mfload's buffers on CPU devices, one copy to any other.

XLA on the CPU takes memory on 64-byte boundaries only. 64-bit types keep their width also where
`jax_enable_x64` is off: the values are exact, and JAX itself warns when a computation narrows
them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfload import dtypes, errors
from mfload.dlpack import View, capsule
from mfload.frameworks import adapter, giving, seams
from mfload.placement import Need

OLDEST = "0.5.3"
_ALIGNMENT = 64
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
_LET_GO = 0.002  # Seconds in which other threads come to their turn.


class JaxAdapter:
    """See `adapter.Adapter`.

    Args:
        device: The `jax.Device` the arrays go to.
    """

    name = "jax"
    alignment = _ALIGNMENT
    readonly_maps = False
    forms = adapter.forms(
        {
            name: row.numpy.name
            for name, row in dtypes.TABLE.items()
            if row.numpy is not None and hasattr(jnp, row.numpy.name)
        }
        # jnp.bool is spelled with an underscore in the versions before 0.4.34.
        | {"BOOL": "bool"},
        {"F4": "float4_e2m1fn"} if hasattr(jnp, "float4_e2m1fn") else None,
    )
    lendable = adapter.lendable(forms)

    def __init__(self, device: Any) -> None:
        self._device = device
        self.on_host = device.platform == "cpu"
        self._take: Callable[[View], Any] = self._take_public
        if self.on_host:
            self._take = seams.jax_capsule_importer(device) or self._take_public

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `jax.Array` for each view, in order."""
        made = [self.array(view) for view in views]
        if not self.on_host or any(view.dtype.elements > 1 for view in views):
            let_go()
        return made

    def array(self, view: View) -> Any:
        """The `jax.Array` of one view; JAX may hold on to what it was copied from (`let_go`)."""
        if not self.on_host:
            with undisturbed():
                return self._send(view)
        return self._unpack(view) if view.dtype.elements > 1 else self._take(view)

    def _take_public(self, view: View) -> Any:
        with undisturbed():
            # JAX looks for the number among this process's devices; `id` counts those of all.
            return jax.dlpack.from_dlpack(_OnDevice(view, self._device.local_hardware_id))

    def _send(self, view: View) -> Any:
        if view.dtype.elements > 1:
            return self._unpack(view)
        host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
        return jax.block_until_ready(jax.device_put(host, self._device))

    def _unpack(self, view: View) -> Any:
        """F4 takes a byte an element in JAX on the CPU: the one type that must be copied."""
        flat = view.as_bytes()._replace(shape=(view.storage().size,))
        here, storage = self.on_host, flat.storage()
        given = self._take(flat) if here else jax.device_put(storage, self._device)
        with undisturbed():
            unpacked = given.view(jnp.float4_e2m1fn).reshape(view.shape)
            return jax.block_until_ready(unpacked)

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Arrays in XLA's own memory, which a jitted function can take over (donation)."""
        lent: list[adapter.Lent] = []
        with undisturbed():
            for need in needs:
                name, shape = adapter.lent_as(self.forms[need.dtype.name], need)
                array = jax.block_until_ready(_maker(self._device, shape, name)())
                address = array.unsafe_buffer_pointer() if need.nbytes else 0
                lent.append(adapter.Lent(array, adapter.memory_at(array, address, need.nbytes)))
        return lent


def let_go() -> None:
    """Has JAX let go of memory that arrays were copied from, before the next wave of a load.

    JAX does so on threads of its own, which wait for the interpreter, and frees what NumPy arrays
    hold in its part of a collection only.
    """
    time.sleep(_LET_GO)
    gc.collect(0)


@functools.lru_cache(maxsize=1024)
def _maker(device: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
    """A compiled function that gives new zeros with each call.

    jit's output is memory that XLA allocated; that of device_put on a NumPy array may not be.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


class _OnDevice:
    """A view as JAX's public import wants it: an object that names its device."""

    def __init__(self, view: View, device_id: int) -> None:
        self._view, self._id = view, device_id

    def __dlpack__(self, **_: object) -> Any:
        return capsule(self._view, device_id=self._id)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, self._id


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """A context in which nothing counts that users set for code of their own.

    64-bit types keep their width, and the mesh of `jax.set_mesh`, which refuses jitted functions
    on any other devices, is none.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_x64())
        if hasattr(jax, "set_mesh"):
            stack.enter_context(jax.set_mesh(_NO_MESH))
        yield


def _x64() -> contextlib.AbstractContextManager[Any]:
    # A context manager of jax since 0.8, of jax.experimental before.
    with contextlib.suppress(AttributeError):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore

    return enable_x64(True)


def make(device: object) -> JaxAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    adapter.check_version("jax", jax.__version__, OLDEST)
    if isinstance(device, jax.Device):
        return JaxAdapter(device)
    if device is None:
        default = jax.config.jax_default_device  # pyright: ignore
        if isinstance(default, jax.Device):
            return JaxAdapter(default)
        return JaxAdapter(jax.local_devices(backend=default)[0])
    if not isinstance(device, str):
        raise errors.DeviceError(
            "not a device", expected="a jax.Device or its name", found=repr(device)
        )
    platform, number = adapter.split_device(device)
    try:
        there = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise adapter.no_device("JAX", device, str(error).splitlines()[0]) from error
    if (number or 0) >= len(there):
        raise adapter.no_device("JAX", device, there)
    return JaxAdapter(there[number or 0])


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
