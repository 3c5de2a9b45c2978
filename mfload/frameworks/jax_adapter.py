"""JAX: arrays over mfload's buffers on CPU devices and NVIDIA GPUs, one copy to any other.

XLA on the CPU takes memory on 64-byte boundaries only. 64-bit types keep their width also where
`jax_enable_x64` is off: the values are exact, and JAX itself warns when a computation narrows
them.

XLA sets most of a GPU's memory aside for itself when it starts, and leaves little for buffers of
others. So there buffers lie in memory of its own, where that is found to work; a view of one can be
donated.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mfload import errors
from mfload.dlpack import Capsules, View
from mfload.frameworks import base, jax_memory, private_api
from mfload.frameworks.jax_memory import NewArray, undisturbed
from mfload.frameworks.traits import TRAITS
from mfload.planning.request import Owner, Request

if TYPE_CHECKING:
    from mfload.cuda.device import Device
    from mfload.cuda.memory import DeviceBuffer

OLDEST = "0.5.3"
_TICK, _PATIENCE = 0.0005, 0.1  # Seconds in which other threads get their turn, and at most.


class JaxAdapter(base.Adapter):
    """Arrays on the `jax.Device` of `place` (see `base.Adapter`)."""

    name = "jax"
    allocates = True
    alignment = TRAITS["jax"].alignment
    forms = TRAITS["jax"].forms(functools.partial(hasattr, jnp))

    def __init__(
        self, place: Any, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(place, device, notes)
        self._uncommit: jax_memory.Uncommitter | None = None
        self.on_host = place.platform == "cpu"
        # Takes views in host memory.
        self.take: Callable[..., Any] = self._send
        if self.on_host:
            self.take = jax_memory.importer(place)

    def uncommitted(self) -> JaxAdapter:
        self._uncommit = jax_memory.Uncommitter()
        return self

    @functools.cached_property
    def _take_there(self) -> Callable[..., Any]:
        """Takes views in memory of the device."""
        return jax_memory.importer(self.place, self.devices[0])

    def owner(self, allocator: str) -> Owner:
        return "mfload"  # Buffers on the device are of XLA's memory (`allocator`), and not lent.

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        return jax_memory.Slabs(self.place, self.devices[number], sizes)

    def pool(self, number: int) -> base.Pool | None:
        return jax_memory.pool(self.place, self.devices[number])

    def wrap(self, views: Sequence[View]) -> list[Any]:
        views = list(views)  # Of columns, each pass makes the views anew.
        forms = map(self.forms.__getitem__, {view.dtype.name for view in views})
        if not any(form.how == "copy" for form in forms) and (
            self.on_host or all(map(base.on_device, views))
        ):
            take, export = self.take if self.on_host else self._take_there, Capsules()
            return self._arrays(lambda view: take(view, export), views)
        copied = [view.memory for view in views if self.copies(view)]
        before = references(copied)
        made = self._arrays(self.array, views)
        wait_for_release(lambda: references(copied), before)
        return made

    def _arrays(self, array: Callable[[View], Any], views: Sequence[View]) -> list[Any]:
        made = map(array, views)
        return list(made) if self._uncommit is None else self._uncommit.each(made, views)

    def copies(self, view: View) -> bool:
        """Whether `array` makes a copy of a view."""
        copied = self.forms[view.dtype.name].how == "copy"
        return copied or not (self.on_host or base.on_device(view))

    def array(self, view: View) -> Any:
        """The `jax.Array` of one view; JAX may hold what it was copied from a while."""
        take = self._take_there if self.devices and base.on_device(view) else self.take
        how, kind = self.forms[view.dtype.name]
        if how != "copy":
            return take(view)
        if view.dtype.elements == 1:
            given = take(view._replace(dtype=view.dtype.wide))
            with undisturbed():
                return jax.block_until_ready(given.astype(kind))
        # F4 takes a byte an element in JAX on the CPU: the one type that must be copied.
        given = take(view.as_bytes()._replace(shape=(view.dtype.size_of(view.shape) or 0,)))
        with undisturbed():
            return jax.block_until_ready(given.view(jnp.float4_e2m1fn).reshape(view.shape))

    def _send(self, view: View) -> Any:
        with undisturbed():
            return jax.block_until_ready(jax.device_put(base.host_array(view), self.place))

    def with_first(self, array: Any, dim: int) -> Any:
        with undisturbed():
            return jax.block_until_ready(jnp.moveaxis(array, dim, 0))

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        return lend(requests, [(self.place, None)] * len(requests), self._uncommit)


def lend(
    requests: Sequence[Request],
    places: Sequence[tuple[Any, str | None]],
    uncommit: jax_memory.Uncommitter | None = None,
) -> list[base.Lent]:
    """Arrays in XLA's own host memory, which a jitted function can take over (donation).

    A place is the `jax.Device`, and which of its memories (None for the default).
    """
    wanted = [
        NewArray(*place, *base.arrives(JaxAdapter.forms, request.dtype, request.shape))
        for request, place in zip(requests, places, strict=True)
    ]
    lent: list[base.Lent] = []
    for array, request in zip(jax_memory.allocate(wanted), requests, strict=True):
        if uncommit is not None:
            array = uncommit(array, request.dtype, request.shape)
        address = private_api.jax_address(array) if request.nbytes else 0
        lent.append(base.Lent(array, base.memory_at(array, address, request.nbytes)))
    return lent


def references(memory: Iterable[Any]) -> int:
    """How many there are to some objects, all together."""
    return sum(map(sys.getrefcount, memory))


def wait_for_release(held: Callable[[], int], before: int) -> None:
    """Has JAX free the memory that arrays were copied from, before the next batch of a load.

    It has when no more is `held` than before. JAX does so on threads of its own, which wait for the
    interpreter, and frees what NumPy arrays hold in its part of a collection only. A busy machine
    may take a while.
    """
    end = time.monotonic() + _PATIENCE
    while held() > before and time.monotonic() < end:
        time.sleep(_TICK)
        gc.collect(0)


def make(device: object) -> JaxAdapter:
    """The adapter for a device. Default: JAX's own, to which arrays are not committed."""
    base.check_version("jax", jax.__version__, OLDEST)
    if device is None:
        return make(default_device()).uncommitted()
    if isinstance(device, str):
        platform, number = base.split_device(device)
        try:
            there = jax.local_devices(backend=platform)
        except RuntimeError as error:
            raise base.no_device("JAX", device, str(error).splitlines()[0]) from error
        if number >= len(there):
            raise base.no_device("JAX", device, there)
        device = there[number]
    if not isinstance(device, jax.Device):
        raise errors.DeviceError(
            "not a device", expected="a jax.Device or its name", found=repr(device)
        )
    there, notes = jax_memory.find_device(device)
    if there is not None:
        jax_memory.begin_trial(device, there)  # Both while headers are read.
        jax_memory.begin_slab(device)
    return JaxAdapter(device, there, notes)


def default_device() -> Any:
    """The `jax.Device` that JAX puts new arrays on."""
    # A device, the name of a platform, or None.
    device: Any = jax.config.jax_default_device  # pyright: ignore
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def export(array: Any) -> base.Exported:
    """What is to be saved of a JAX array; one that is sharded is put together on the host."""
    base.refuse("jax", _refusal(array), array)
    row = base.row_of("jax", array.dtype.name)
    span = None
    devices = array.sharding.device_set
    on_host = next(iter(devices)).platform == "cpu"
    if len(devices) == 1 and on_host:
        address = private_api.jax_address(array) if array.size else 0
        span = address, address + (row.size_of(array.shape) or 0)
    # NumPy's view holds the memory: a jit that the array is donated to does not reuse it.
    frozen = on_host and array.is_fully_replicated
    return base.Exported(row, array.shape, lambda: _gather(array), span, frozen=frozen)


def _refusal(array: Any) -> str | None:
    """Why an array can't be saved, and what to save instead."""
    if isinstance(array, jax.core.Tracer):
        return "a tracer has no numbers; save outside jit, grad and vmap"
    if isinstance(array, jax.ShapeDtypeStruct):
        return "a shape without numbers; save the array that it stands for"
    if not isinstance(array, jax.Array):
        return "not an array; of a Ref, save ref[...]"
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return (
            "a typed PRNG key; save jax.random.key_data(key), and turn what is loaded into a key "
            f"with jax.random.wrap_key_data(data, impl={str(jax.random.key_impl(array))!r})"
        )
    if array.is_deleted():
        return "the array was deleted or donated"
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return (
            "part of the array lies with other processes; replicate it first: "
            "jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)"
        )
    return None


def _gather(array: Any) -> Any:
    """A JAX array as a NumPy array; every number is read from one device alone."""
    shards = array.addressable_shards
    if array.is_fully_replicated:
        return on_host(shards[0].data)
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            whole[shard.index] = on_host(shard.data)
    return whole


def on_host(array: Any) -> Any:
    """An array of one device as a NumPy array, over its own memory if that is on the host."""
    if array.device.platform != "cpu" or base.row_of("jax", array.dtype.name).elements > 1:
        # Host copies that were dropped are freed by JAX in its part of a collection only.
        gc.collect(0)
    # An array keeps the copy that NumPy is given for as long as it lives: the one that does so
    # here is another over the same memory.
    with jax.transfer_guard("allow"):
        return np.asarray(
            jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        )
