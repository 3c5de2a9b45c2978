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
from mfload.frameworks import jax_adapter
from mfload.io import buffers
from mfload.runtime import Deadline

# Seconds between two looks at a collective that is under way, until a process that is gone is
# missed, to wait for JAX to release what was sent, and for a collective that others have left.
_TICK, _MISSED, _PATIENCE, _GRACE = 0.1, 0.3, 0.2, 2.0

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


# The one store of a client; there is another client after jax.distributed was started anew.
store_of = functools.lru_cache(maxsize=1)(JaxStore)


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
    """Swaps rows of `width` bytes between processes, which all call it equally often."""

    def __init__(self, ranks: Sequence[int], platform: str, width: int, deadline: Deadline) -> None:
        devices: dict[int, Any] = {}
        for device in sorted(jax.devices(platform), key=lambda device: device.id):
            devices.setdefault(device.process_index, device)
        self._devices = tuple(devices[rank] for rank in sorted(ranks))
        self._mine = devices[jax.process_index()]
        self._width, self._deadline = width, deadline
        self._sent: list[weakref.ref[Any]] = []

    @property
    def broken(self) -> bool:
        """Whether a swap was given up or failed, so that no collective is started any more."""
        return self._devices in _broken

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width), aligned so that JAX aliases it."""
        memory = buffers.allocate(len(self._devices) * self._width)
        self._sent.append(weakref.ref(memory))
        return memory.reshape(-1, self._width)

    def close(self) -> None:
        """Has JAX release the buffers, as far as nothing else holds them."""
        end = time.monotonic() + _PATIENCE
        while any(each() is not None for each in self._sent) and time.monotonic() < end:
            jax_adapter.collect_copied()

    def swap(self, rows: Any, check: Callable[[], object]) -> tuple[Any, KeyboardInterrupt | None]:
        """Sends a row to each process; returns a row from each, in the order of their ranks.

        Calls `check` while waiting, which may raise. Ctrl-C is returned if it came meanwhile; a
        second one is raised.
        """
        outcome: list[Any] = []

        def run() -> None:
            try:
                swap, sharding = _all_to_all(self._devices)
                sent, shape = jax.device_put(rows[None], self._mine), (len(rows), *rows.shape)
                whole = jax.make_array_from_single_device_arrays(shape, sharding, [sent])
                outcome.append(np.asarray(swap(whole).addressable_shards[0].data)[0])
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
                found = (str(outcome[0]).splitlines() or [""])[0][:300]
                message = "the exchange with the other processes broke off"
                raise errors.ProcessError(message, found=found) from outcome[0]
        except BaseException:
            _broken.add(self._devices)
            raise
        return outcome.pop(), interrupted

    def _wait(self, thread: threading.Thread, check: Callable[[], object]) -> None:
        thread.join(max(0.0, min(_TICK, self._deadline.left())))
        if thread.is_alive():
            if self._deadline.left() <= 0:
                raise self._deadline.error("exchanging bytes with the other processes")
            try:
                check()
            except errors.ProcessError:
                # A process whose swap ended may have failed since. Then this one ends as well, and
                # the collectives stay in step.
                thread.join(max(0.0, min(_GRACE, self._deadline.left())))
                if thread.is_alive():
                    raise


@functools.lru_cache(maxsize=16)
def _all_to_all(devices: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any]:
    """What swaps rows of (from, to, bytes), one collective for XLA, and the sharding of them."""
    sharding = NamedSharding(Mesh(np.array(devices), ("processes",)), PartitionSpec("processes"))
    return jax.jit(lambda rows: rows.swapaxes(0, 1), out_shardings=sharding), sharding
