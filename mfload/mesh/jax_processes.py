"""JAX in several processes: its key-value store, and bytes from one process to another.

Bytes travel by one collective, an all-to-all of uint8 over one device of each process, of one size
and compiled once. Some platforms reject some dtypes in collectives; all of them take uint8.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.frameworks import jax_adapter, private_api
from mfload.io import buffers
from mfload.runtime import Deadline

# Seconds between two looks at a collective that is under way, until a process that is gone is
# missed, and to wait for JAX to release what was sent.
_TICK, _MISSED, _PATIENCE = 0.1, 0.3, 0.2

# The devices whose collectives may be out of step: one of theirs was given up, or failed.
_broken: set[tuple[Any, ...]] = set()


class JaxStore:
    """The store of `jax.distributed`: short texts that all processes of a program read and write.

    `counts` holds the loads of each group of processes that this process took part in.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.counts: dict[str, int] = {}

    def put(self, key: str, text: str) -> None:
        """Writes a text, in place of an older one."""
        with _reachable():
            self.client.key_value_set(key, text, allow_overwrite=True)

    def first(self, key: str, text: str) -> str:
        """Writes a text if there is none; returns the one that is there, on every process."""
        with _reachable():
            try:
                self.client.key_value_set(key, text)
            except RuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise
                return self.client.blocking_key_value_get(key, 10_000)
            return text

    def under(self, prefix: str) -> dict[str, str]:
        """All texts whose keys begin with a prefix, which ends with a slash."""
        with _reachable():
            return dict(self.client.key_value_dir_get(prefix))

    def drop(self, prefix: str) -> None:
        """Removes all texts whose keys begin with a prefix."""
        with _reachable():
            self.client.key_value_delete(prefix)


_stores: list[JaxStore] = []


def store() -> JaxStore | None:
    """The store of this process; None if this version of JAX has none that mfload can use."""
    client = private_api.jax_store()
    if client is None:
        return None
    if not _stores or _stores[0].client is not client:
        _stores[:] = [JaxStore(client)]  # Another one after jax.distributed was started anew.
    return _stores[0]


@contextlib.contextmanager
def _reachable() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise errors.ProcessError(
            "the store of jax.distributed can't be reached: process 0 keeps it",
            found=str(error).splitlines()[0][:300],
        ) from error


class JaxLink:
    """Swaps rows of `width` bytes between processes, which all call it equally often.

    `devices` are one of each process, in the order of `ranks`, the numbers of the processes.
    """

    def __init__(self, devices: Sequence[Any], width: int, deadline: Deadline) -> None:
        self._devices = tuple(devices)
        self._deadline = deadline
        self._sent: list[weakref.ref[Any]] = []
        self._width = width
        self.ranks = tuple(device.process_index for device in devices)

    @property
    def broken(self) -> bool:
        """Whether a swap was given up or failed, so that no collective is started any more."""
        return self._devices in _broken

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width), aligned so that JAX aliases it."""
        memory = buffers.allocate(len(self.ranks) * self._width)
        self._sent.append(weakref.ref(memory))
        return memory.reshape(-1, self._width)

    def close(self) -> None:
        """Has JAX release the buffers, as far as nothing else holds them."""
        end = time.monotonic() + _PATIENCE
        while any(each() is not None for each in self._sent) and time.monotonic() < end:
            jax_adapter.collect_copied()

    def swap(self, rows: Any, check: Callable[[], None]) -> tuple[Any, KeyboardInterrupt | None]:
        """Sends a row to each process; returns a row from each.

        Calls `check` while waiting, which may raise. Ctrl-C is returned if it came meanwhile; a
        second one is raised.
        """
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(_all_to_all(self._devices, rows))
            except Exception as error:  # noqa: BLE001 - raised in the thread that loads
                outcome.append(error)

        # A collective can't be interrupted: one that hangs is left behind.
        thread = threading.Thread(target=run, name="mfload-swap", daemon=True)
        thread.start()
        interrupted: KeyboardInterrupt | None = None
        try:
            while thread.is_alive():
                try:
                    self._wait(thread, check)
                except KeyboardInterrupt as error:
                    if interrupted is not None:
                        raise
                    interrupted = error
            if isinstance(outcome[0], Exception):
                time.sleep(_MISSED)
                check()  # It knows by now which process is gone, if one is.
                raise errors.ProcessError(
                    "the exchange with the other processes broke off",
                    found=(str(outcome[0]).splitlines() or [""])[0][:300],
                ) from outcome[0]
        except BaseException:
            _broken.add(self._devices)
            raise
        return outcome.pop(), interrupted

    def _wait(self, thread: threading.Thread, check: Callable[[], None]) -> None:
        thread.join(max(0.0, min(_TICK, self._deadline.left())))
        if thread.is_alive():
            if self._deadline.left() <= 0:
                raise self._deadline.error("exchanging bytes with the other processes")
            check()


def link(ranks: Sequence[int], platform: str, width: int, deadline: Deadline) -> JaxLink:
    """A link over one device of each process."""
    chosen: dict[int, Any] = {}
    for device in sorted(jax.devices(platform), key=lambda device: device.id):
        chosen.setdefault(device.process_index, device)
    return JaxLink([chosen[rank] for rank in sorted(ranks)], width, deadline)


def _all_to_all(devices: tuple[Any, ...], rows: Any) -> Any:
    swap, sharding, mine = _compiled(devices)
    sent = jax.device_put(rows[None], mine)
    shape = (len(devices), *rows.shape)
    whole = jax.make_array_from_single_device_arrays(shape, sharding, [sent])
    return np.asarray(swap(whole).addressable_shards[0].data)[0]


@functools.lru_cache(maxsize=16)
def _compiled(devices: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any, Any]:
    mesh = Mesh(np.array(devices), ("processes",))
    spec = PartitionSpec("processes")

    def swap(rows: Any) -> Any:
        return jax.lax.all_to_all(rows[0], "processes", 0, 0)[None]

    # A function of jax since 0.6, of jax.experimental before.
    mapping = getattr(jax, "shard_map", None)
    if mapping is None:
        from jax.experimental.shard_map import shard_map as mapping  # pyright: ignore
    mapped = mapping(swap, mesh=mesh, in_specs=spec, out_specs=spec)  # pyright: ignore
    mine = next(each for each in devices if each.process_index == jax.process_index())
    return jax.jit(mapped), NamedSharding(mesh, spec), mine
