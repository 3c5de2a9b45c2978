"""JAX in several processes: how bytes get from one to another.

They pass through one collective of JAX's own: an all-to-all of uint8 over one device a process, of
one size, compiled once. Collectives reject some dtypes on some platforms; all of them take uint8.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.frameworks import jax_adapter
from mfload.io import buffers
from mfload.runtime import Deadline

# Seconds between two looks of the loading thread at a collective that is under way.
_TICK = 0.1
# Seconds to wait for JAX to let go of what was sent.
_PATIENCE = 0.2


class Standing(NamedTuple):
    """How far the swaps between some processes have come, as one of them knows.

    Attributes:
        begun: Swaps that it has begun.
        width: Bytes of a row of the last.
        broken: Whether one ended with an error, so that nobody knows who took part.
    """

    begun: int = 0
    width: int = 0
    broken: bool = False


class _Swaps:
    """The swaps over some devices.

    A collective meets those of the others in order, so that a link may begin only where all have
    begun as many, and none is under way.
    """

    def __init__(self) -> None:
        self.standing = Standing()
        self.last: threading.Thread | None = None


_swaps: dict[tuple[Any, ...], _Swaps] = collections.defaultdict(_Swaps)


class Link:
    """Swaps bytes between processes; every process calls it equally often, in the same order.

    Args:
        devices: One of each process that takes part, in the order of their numbers.
        width: Bytes to each process at a time.
        deadline: When to give up.
    """

    def __init__(self, devices: Sequence[Any], width: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._swaps = _swaps[tuple(devices)]
        self._sent: list[weakref.ref[Any]] = []
        self.ranks = tuple(device.process_index for device in devices)
        self._device = devices[self.ranks.index(jax.process_index())]
        self.width = width
        self._swap, self._sharding = _compiled(tuple(devices))

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width), aligned so that JAX aliases it."""
        memory = buffers.allocate(len(self.ranks) * self.width)
        self._sent.append(weakref.ref(memory))
        return memory.reshape(-1, self.width)

    def close(self) -> None:
        """Has JAX let go of the buffers, as far as nobody else holds them."""
        end = time.monotonic() + _PATIENCE
        while any(each() is not None for each in self._sent) and time.monotonic() < end:
            jax_adapter.let_go()

    def swap(self, send: Any) -> Callable[[Callable[[], None]], Any]:
        """Begins to send a row to each process, in the order of `ranks`.

        Args:
            send: From `buffer`, not to be written to before the swap has ended.

        Returns:
            A function that waits, with another to be called meanwhile, which may raise; it gives
            the rows that came, one from each process, uint8 (processes, width).
        """
        outcome: list[Any] = []
        swaps = self._swaps

        def run() -> None:
            try:
                outcome.append(self._collective(send))
            except Exception as error:  # noqa: BLE001 - raised in the thread that loads
                swaps.standing = swaps.standing._replace(broken=True)
                outcome.append(error)

        thread = threading.Thread(target=run, name="mfload-swap", daemon=True)
        swaps.standing = Standing(swaps.standing.begun + 1, self.width, swaps.standing.broken)
        swaps.last = thread
        thread.start()
        return lambda meanwhile: self._wait(thread, outcome, meanwhile)

    def catch_up(self, count: int, meanwhile: Callable[[], None]) -> None:
        """Takes part in a swap that others have begun and given up, or waits for it to end.

        Args:
            count: Swaps that some process has begun.
            meanwhile: Called while waiting; it may raise.
        """
        if self._swaps.standing.begun < count:
            self.swap(self.buffer())(meanwhile)
        elif self._swaps.last is not None:
            self._wait(self._swaps.last, [None], meanwhile)
        if self._swaps.standing.broken:
            raise errors.ProcessError("the exchange that was given up before ended with an error")

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
        chosen: dict[int, Any] = {}
        for device in sorted(jax.devices(platform), key=lambda device: device.id):
            chosen.setdefault(device.process_index, device)
        self._devices = tuple(chosen[rank] for rank in sorted(ranks))
        self._deadline = deadline
        self.platform = platform

    def standing(self) -> str:
        """What has been swapped so far, for the other processes."""
        return json.dumps(_swaps[self._devices].standing)

    def in_step(self, said: Mapping[int, str]) -> bool:
        """Whether processes of these standings can swap again; alike on all of them.

        A round begins once the one before has ended, so that one that is given up leaves some
        processes one swap ahead. The others can take part in it yet.
        """
        standings = _standings(said)
        first = max(standings)
        ahead = {each.width for each in standings if each.begun == first.begun}
        least = min(each.begun for each in standings)
        return not any(each.broken for each in standings) and (
            least == first.begun or (least == first.begun - 1 and len(ahead) == 1)
        )

    def open(self, width: int, said: Mapping[int, str], meanwhile: Callable[[], None]) -> Link:
        """A link with rows of `width` bytes, once what was given up before has ended.

        Args:
            width: Bytes of a row.
            said: The standings of all processes, by which they are in step.
            meanwhile: Called while waiting; it may raise.

        Raises:
            LoadTimeoutError: It does not end.
            ProcessError: It ends with an error.
        """
        first = max(_standings(said))
        if first.begun:
            before = Link(self._devices, first.width, self._deadline)
            before.catch_up(first.begun, meanwhile)
        return Link(self._devices, width, self._deadline)


def _standings(said: Mapping[int, str]) -> list[Standing]:
    return [Standing(*json.loads(text)) for text in said.values()]


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
