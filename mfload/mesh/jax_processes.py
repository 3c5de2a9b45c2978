"""JAX in several processes: its key-value store, and bytes from one process to another.

Bytes travel by one collective, an all-to-all of uint8 over one device of each process, of one or
two sizes and compiled once. Some platforms reject some dtypes in collectives; all take uint8.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View
from mfload.dtypes import TABLE
from mfload.frameworks import jax_adapter, private_api
from mfload.mesh.base import ReachedStore
from mfload.mesh.device_link import DeviceLink
from mfload.runtime import Deadline


class JaxStore(ReachedStore):
    """The store of `jax.distributed`: short texts that all of its processes read and write."""

    framework = "jax"

    def put(self, key: str, text: str) -> None:
        """Writes a text, in place of an older one."""
        self._reach(self._client.key_value_set, key, text, allow_overwrite=True)

    def first(self, key: str, text: str) -> str:
        """Writes a text if there is none; returns the one that is there, on every process."""
        try:
            self._reach(self._client.key_value_set, key, text)
        except errors.ProcessError as error:
            if "ALREADY_EXISTS" not in str(error.__cause__):
                raise
            return self._reach(self._client.blocking_key_value_get, key, 10_000)
        return text

    def texts(self, prefix: str, names: Sequence[str]) -> dict[str, str]:
        """The texts that are there of keys `prefix + name`, by name."""
        found = dict(self._reach(self._client.key_value_dir_get, prefix))
        return {name: found[prefix + name] for name in names if prefix + name in found}

    def drop(self, keys: Sequence[str]) -> None:
        """Removes texts."""
        for key in keys:
            self._reach(self._client.key_value_delete, key)


# The one store of a client; there is another client after jax.distributed was started anew.
store_of = functools.lru_cache(maxsize=1)(JaxStore)


class JaxLink(DeviceLink):
    """Swaps rows of `width` bytes by one collective of XLA."""

    def __init__(self, ranks: Sequence[int], platform: str, width: int, deadline: Deadline) -> None:
        devices: dict[int, Any] = {}
        for device in sorted(jax.devices(platform), key=lambda device: device.id):
            devices.setdefault(device.process_index, device)
        self._devices = tuple(devices[rank] for rank in sorted(ranks))
        self._mine = devices[jax.process_index()]
        self._sent: list[weakref.ref[Any]] = []
        super().__init__(self._devices, deadline, len(ranks), width)

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width), aligned so that JAX aliases it."""
        rows = super().buffer()
        self._sent.append(weakref.ref(rows.base))
        return rows

    def close(self) -> None:
        """Has JAX release the buffers, as far as nothing else holds them."""
        super().close()
        jax_adapter.wait_for_release(lambda: sum(each() is not None for each in self._sent), 0)

    def exchange(self, rows: Any) -> Any:
        """One collective (see `Link`)."""
        return np.asarray(self._swap(jax.device_put(rows[None], self._mine)))[0]

    def moves(self, device: Device) -> bool:
        """Whether it is the one that XLA's collectives of this process run on (see `Link`)."""
        return super().moves(device) and device.place[1] == self._mine.local_hardware_id

    def swap_there(self, room: DeviceBuffer) -> DeviceBuffer:
        """One collective on devices (see `DeviceLink`)."""
        shape = 1, len(self._devices), self._width
        adapter = jax_adapter.JaxAdapter(self._mine, room.device)
        sent = adapter.array(View("rows", TABLE["U8"], shape, room, 0))
        came = jax.block_until_ready(self._swap(sent))
        address = private_api.jax_address(came)
        return DeviceBuffer(room.device, address, room.nbytes, came, own=False)

    def _swap(self, sent: Any) -> Any:
        """Swaps rows of (1, to, bytes) on this process's device."""
        swap, sharding = _all_to_all(self._devices)
        shape = len(self._devices), *sent.shape[1:]
        whole = jax.make_array_from_single_device_arrays(shape, sharding, [sent])
        return swap(whole).addressable_shards[0].data


@functools.lru_cache(maxsize=16)
def _all_to_all(devices: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any]:
    """What swaps rows of (from, to, bytes), one collective for XLA, and the sharding of them."""
    sharding = NamedSharding(Mesh(np.array(devices), ("processes",)), PartitionSpec("processes"))
    return jax.jit(lambda rows: rows.swapaxes(0, 1), out_shardings=sharding), sharding
