"""JAX in several processes: where they meet, and how bytes get from one to another.

Texts pass through the store of `jax.distributed`, bytes through one collective of JAX's own: an
all-to-all of uint8 over one device a process, of one size, compiled once. Collectives reject some
dtypes on some platforms; all of them take uint8.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.frameworks import seams
from mfload.io import buffers
from mfload.io.deadline import Deadline

# Seconds between two looks of the loading thread at a collective that is under way.
_TICK = 0.1
# Collectives that nobody waits for any more. While one hangs, the next would be taken for it.
_abandoned: list[threading.Thread] = []


class JaxBoard:
    """See `sharding.agreement.Board`.

    Args:
        store: Of `jax.distributed`.
    """

    def __init__(self, store: seams.JaxStore) -> None:
        self.store = store
        self.turns: dict[str, int] = {}
        self.kept: dict[str, int] = {}

    def post(self, key: str, text: str) -> None:
        """Puts a text there."""
        with _reaching():
            self.store.put(key, text)

    def look(self, prefix: str) -> dict[str, str]:
        """All texts under a prefix."""
        with _reaching():
            return self.store.under(prefix)

    def decide(self, key: str, text: str) -> str:
        """Puts a text where there is none; the one that was first."""
        with _reaching():
            return text if self.store.first(key, text) else self.store.get(key)

    def forget(self, prefix: str) -> None:
        """Takes away all texts under a prefix."""
        with _reaching():
            self.store.drop(prefix)


_boards: list[JaxBoard] = []


def board() -> JaxBoard | None:
    """The board of this process; None where processes are not joined.

    Raises:
        FrameworkVersionError: This version of JAX has no store for it.
    """
    store = seams.jax_store()
    if store is None:
        return None
    if not _boards or _boards[0].store.client is not store.client:
        _boards[:] = [JaxBoard(store)]
    return _boards[0]


@contextlib.contextmanager
def _reaching() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise errors.ProcessError(
            "the store of jax.distributed can't be reached: process 0 keeps it",
            found=str(error).splitlines()[0][:300],
        ) from error


class Link:
    """Swaps bytes between processes; every process calls it equally often, in the same order.

    Args:
        devices: Devices of all processes that take part; one of each process is used.
        rank: This process.
        width: Bytes to each process at a time.
        deadline: When to give up.

    Raises:
        ProcessError: An earlier exchange was given up half-way.
    """

    def __init__(self, devices: Iterable[Any], rank: int, width: int, deadline: Deadline) -> None:
        for thread in _abandoned:
            thread.join(_TICK)  # It may be about to end: the others took that turn meanwhile.
        if any(thread.is_alive() for thread in _abandoned):
            raise errors.ProcessError(
                "an earlier exchange was given up half-way, so that JAX's collectives are out of "
                "step; start the processes anew, or load with exchange='never'"
            )
        chosen: dict[int, Any] = {}
        for device in sorted(devices, key=lambda device: device.id):
            chosen.setdefault(device.process_index, device)
        self._device = chosen[rank]
        self._deadline = deadline
        self.ranks = tuple(sorted(chosen))
        self.width = width
        self._swap, self._sharding = _compiled(tuple(chosen[r] for r in self.ranks))

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width), aligned so that JAX aliases it."""
        return buffers.allocate(len(self.ranks) * self.width).reshape(-1, self.width)

    def swap(self, send: Any) -> Callable[[Callable[[], None]], Any]:
        """Begins to send a row to each process, in the order of `ranks`.

        Args:
            send: From `buffer`, not to be written to before the swap has ended.

        Returns:
            A function that waits, with another to be called meanwhile, which may raise; it gives
            the rows that came, one from each process, uint8 (processes, width).
        """
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(self._collective(send))
            except Exception as error:  # noqa: BLE001 - raised in the thread that loads
                outcome.append(error)

        thread = threading.Thread(target=run, name="mfload-swap", daemon=True)
        thread.start()

        def wait(meanwhile: Callable[[], None]) -> Any:
            try:
                return self._wait(thread, outcome, meanwhile)
            except BaseException:
                _abandoned[:] = [each for each in (*_abandoned, thread) if each.is_alive()]
                raise

        return wait

    def _wait(
        self, thread: threading.Thread, outcome: list[Any], meanwhile: Callable[[], None]
    ) -> Any:
        while True:
            thread.join(max(0.0, min(_TICK, self._deadline.left())))
            if not thread.is_alive():
                break
            if self._deadline.left() <= 0:
                raise self._deadline.error("exchanging bytes with the other processes")
            meanwhile()
        came = outcome.pop()
        if isinstance(came, Exception):
            raise errors.ProcessError(
                "the exchange with the other processes broke off",
                found=(str(came).splitlines() or [type(came).__name__])[0][:300],
            ) from came
        return came

    def _collective(self, send: Any) -> Any:
        count = len(self.ranks)
        mine = jax.device_put(send[None], self._device)
        whole = jax.make_array_from_single_device_arrays(
            (count, count, self.width), self._sharding, [mine]
        )
        out = self._swap(whole)
        return np.asarray(out.addressable_shards[0].data)[0]


class Links:
    """See `sharding.fetching.Links`.

    Args:
        ranks: The processes that take part.
        platform: Of the devices that the arrays go to.
        deadline: When to give up.
    """

    def __init__(self, ranks: Sequence[int], platform: str, deadline: Deadline) -> None:
        self._devices = [d for d in jax.devices(platform) if d.process_index in ranks]
        self._deadline = deadline
        self.platform = platform

    def open(self, width: int) -> Link:
        """A link with rows of `width` bytes."""
        return Link(self._devices, jax.process_index(), width, self._deadline)


@functools.lru_cache(maxsize=16)
def _compiled(devices: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any]:
    mesh = Mesh(np.array(devices), ("processes",))
    spec = PartitionSpec("processes")

    def swap(rows: Any) -> Any:
        return jax.lax.all_to_all(rows[0], "processes", 0, 0)[None]

    mapped = _shard_map(swap, mesh, spec)
    return jax.jit(mapped), NamedSharding(mesh, spec)


def _shard_map(function: Callable[[Any], Any], mesh: Any, spec: Any) -> Any:
    # A function of jax since 0.6, of jax.experimental before.
    mapping = getattr(jax, "shard_map", None)
    if mapping is None:
        from jax.experimental.shard_map import shard_map as mapping  # pyright: ignore
    return mapping(function, mesh=mesh, in_specs=spec, out_specs=spec)  # pyright: ignore
