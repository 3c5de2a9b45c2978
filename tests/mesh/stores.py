"""A key-value store and collectives in memory, and processes that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from devices.fake import FakeDevice

from mfload import errors
from mfload.mesh.device_link import DeviceLink
from mfload.mesh.link import Link
from mfload.runtime import Deadline


class Memory:
    """What the stores of all processes of a test share."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.lock = threading.Lock()


class MemoryStore:
    """See `base.KeyValueStore`.

    Args:
        memory: Shared with the other processes.
        before: Called before each look: it may wait, or raise.
    """

    def __init__(self, memory: Memory, before: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self.before = before
        self.counts: dict[str, int] = {}
        self.wrote: dict[str, list[str]] = {}

    def put(self, key: str, text: str) -> None:
        with self._memory.lock:
            self._memory.texts[key] = text

    def texts(self, prefix: str, names: Sequence[str]) -> dict[str, str]:
        self.before()
        with self._memory.lock:
            texts = self._memory.texts
            return {name: texts[prefix + name] for name in names if prefix + name in texts}

    def first(self, key: str, text: str) -> str:
        with self._memory.lock:
            return self._memory.texts.setdefault(key, text)

    def drop(self, keys: Sequence[str]) -> None:
        with self._memory.lock:
            for key in keys:
                self._memory.texts.pop(key, None)


class MemoryLink:
    """See `link.Link`: threads swap rows at a barrier.

    Args:
        rank: Of this process.
        ranks: All of them.
        width: Bytes of a row.
        shared: The same for all links of a test.
    """

    def __init__(self, rank: int, ranks: Sequence[int], width: int, shared: Swaps) -> None:
        self.ranks = tuple(sorted(ranks))
        self.broken = False
        self._rank, self._width, self._shared = rank, width, shared

    device = None
    room, view, part, copy = Link.room, Link.view, Link.part, Link.copy

    def buffer(self) -> Any:
        return np.zeros((len(self.ranks), self._width), np.uint8)

    def start(self, rows: Any, pieces: Any = None) -> None:
        self._rows, self._pieces = rows, pieces

    def finish(self, check: Callable[[], None]) -> tuple[Any, None]:
        check()
        try:
            if self._pieces is not None:
                return Link.swap(cast(Any, self), self._rows, self._pieces), None
            return self.exchange(self._rows), None
        except threading.BrokenBarrierError:
            self.broken = True
            raise errors.ProcessError("the exchange broke off") from None

    def exchange(self, rows: Any) -> Any:
        return self._shared.swap(self.ranks.index(self._rank), rows)

    def close(self) -> None:
        pass


class DirectLink(MemoryLink):
    """One that sends pieces from and to where they lie, and no more of rows than is asked for."""

    def exchange(self, rows: Any) -> Any:
        raise AssertionError("no more than pieces is to travel")

    def finish(self, check: Callable[[], None]) -> tuple[Any, None]:
        check()
        given, own = self._pieces, self.ranks.index(self._rank)
        sent: list[list[Any]] = []
        for number, row in enumerate(self._rows):
            parts = [part.copy() for n, _, part in given.sent if n == number]
            sent.append([row[: given.sizes[number]].copy(), *parts])
        came: list[Any] = []
        for number, (row, *parts) in enumerate(self._shared.swap(own, sent)):
            assert number == own or row.size == given.come[number]
            came.append(row)
            places = [place for n, _, place in given.taken if n == number]
            for place, part in zip(places, parts, strict=True):
                place[:] = part
        return came, None


class LinkOfDevices(DeviceLink):
    """One that swaps rows of simulated devices; results lie on the link's device and on another."""

    def __init__(self, rank: int, ranks: Sequence[int], width: int, shared: Swaps) -> None:
        super().__init__(("a test", rank), Deadline(30))
        self.ranks = tuple(sorted(ranks))
        self._rank, self._width, self._shared = rank, width, shared
        self.devices = [FakeDevice(name=f"fake:{n}", mode="mixed", seed=n) for n in range(2)]
        self.device, self.swaps = self.devices[0], 0

    def buffer(self) -> Any:
        return np.zeros((len(self.ranks), self._width), np.uint8)

    def result(self, number: int, nbytes: int) -> Any:
        """Memory for a result."""
        return self.devices[number % 2].allocate(nbytes)

    def exchange(self, rows: Any) -> Any:
        return self._shared.swap(self.ranks.index(self._rank), rows)

    def swap_there(self, room: Any) -> Any:
        self.swaps += 1
        rows = room.owner.bytes[: room.nbytes].reshape(-1, self._width)
        made = self.device.allocate(room.nbytes)
        made.owner.bytes[: room.nbytes] = self.exchange(rows).reshape(-1)
        return made


class Swaps:
    """Where the threads of a test swap."""

    def __init__(self, count: int, seconds: float = 10.0) -> None:
        self._barrier = threading.Barrier(count, timeout=seconds)
        self._rows: dict[int, Any] = {}

    def swap(self, number: int, rows: Any) -> Any:
        self._rows[number] = rows.copy()
        self._barrier.wait()
        came = [self._rows[n][number] for n in sorted(self._rows)]
        self._barrier.wait()
        return np.stack(came) if isinstance(rows, np.ndarray) else came


class Backend:
    """As much of a `base.MeshBackend` as processes agree by: threads are processes here."""

    def __init__(self, rank: int, store: MemoryStore | None, swaps: Swaps | None = None) -> None:
        self.rank = rank
        self._store, self._swaps = store, swaps

    def group(self) -> tuple[int, int]:
        return self.rank, 1000

    def store(self) -> MemoryStore | None:
        return self._store

    def link(self, ranks: Sequence[int], width: int, deadline: Any) -> MemoryLink:
        assert self._swaps is not None
        return MemoryLink(self.rank, ranks, width, self._swaps)


def all_at_once(acts: Sequence[Callable[[], Any]], seconds: float = 20.0) -> list[Any]:
    """Runs each in a thread; what each returned or raised.

    Raises:
        AssertionError: One hung.
    """
    outcomes: list[Any] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            outcomes[number] = acts[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "a process hangs"
    return outcomes
