"""A cache that does all but read: which keys it would read, in which reads, within which memory.

It is the cache itself, over a store that has no memory and counts reads. So what is found here is
what the cache will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from benchmarks.replay import Belady
from mfload.ondemand.background import Background, Work
from mfload.ondemand.policies import Lru
from mfload.ondemand.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mfload.io.buffers import Bytes
    from mfload.io.gather import Gather, ReadColumns
    from mfload.ondemand.cache import Numbers

C = TypeVar("C")


class _Counter:
    """A `Gather` that notes of each call how many reads it is for, and how many bytes."""

    def __init__(self, gather: Gather) -> None:
        self.name, self.why, self.unit = gather.name, gather.why, gather.unit
        self.batches: list[tuple[int, int]] = []

    def read(self, reads: ReadColumns) -> None:
        self.batches.append((len(reads), int(reads.nbytes.sum())))

    def stop(self) -> None:
        """Nothing is under way."""


class Later(Background):
    """Reads ahead when it is told to, as a thread does while its user computes."""

    def ask(self, cache: object, work: Work) -> None:
        """Notes work for a cache, in place of what it was asked for before."""
        self._asked[cache] = work

    def run(self) -> None:
        """Does what it was asked for last."""
        while self._asked:
            with suppress(Exception):  # Who uses the keys meets it again.
                self._asked.popitem()[1](lambda: False)


class RehearsalStore(Store):
    """A store without memory, which serves one cache after the other.

    Attributes:
        opened: What would read.
        gather: Counts reads instead.
    """

    opened: Gather
    later: Later

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.opened = self.gather

    def begin(self) -> None:
        """Forgets what it did for the cache before."""
        counter: Any = _Counter(self.opened)
        self.gather, self.allocated = counter, 0

    def memory(self, shapes: Sequence[tuple[int, int]], spans: Sequence[slice]) -> list[Bytes]:
        """Slots of one byte, of which arrays can be made that keep a lease."""
        return [np.empty((capacity, 1), np.uint8) for capacity, _ in shapes]

    def move(self, target: int, source: int, nbytes: int) -> None:
        """There is nothing to be moved."""

    def array(self, memory: Bytes, dtype: Any, shape: tuple[int, ...], at: int) -> Any:
        """What keeps the slot, as the array does; all its items are the slot's one byte."""
        return np.broadcast_to(memory.reshape(-1)[:1].reshape(()), shape)

    def background(self) -> Background:
        """Reads ahead when `Rehearsal.compute` is called."""
        self.later = Later()
        return self.later

    def close(self) -> None:
        """It stays open for the next cache; `end` closes it."""

    def end(self) -> None:
        """Closes the files."""
        self.opened.close()


class Rehearsal:
    """Makes caches of a class that read nothing.

    Attributes:
        store: What they share; it is there from the first cache on.
        resident: Bytes that the last cache would have read when it was made.
    """

    store: RehearsalStore | None = None
    resident = 0
    _how: Mapping[str, Any] | None = None

    def of(self, kind: type[C]) -> type[C]:
        """The class of caches that read nothing, for one of caches."""
        made: Any = type(kind.__name__, (kind,), {"_opens": staticmethod(self._open)})
        return made

    def _open(self, *given: Any, **more: Any) -> RehearsalStore:
        if self.store is None or self._how != more:
            self.close()
            self.store, self._how = RehearsalStore(*given, **more), more
        self.store.begin()
        return self.store

    @property
    def _noted(self) -> list[tuple[int, int]]:
        counter: Any = self.store and self.store.gather
        return counter.batches

    @property
    def batches(self) -> NDArray[np.int64]:
        """Of each call for reads since `start`: reads and bytes, int64[n, 2]."""
        return np.array(self._noted, np.int64).reshape(-1, 2)

    def start(self) -> None:
        """A cache was just made: no token counts what it read so far."""
        self.resident = int(self.batches[:, 1].sum())
        self._noted.clear()

    def compute(self) -> None:
        """Stands for a computation, during which is read ahead."""
        if self.store is not None:
            self.store.later.run()

    def close(self) -> None:
        """Closes the files."""
        if self.store is not None:
            self.store.end()


class _Recorder(Lru):
    """Notes requests."""

    def __init__(self, keys: int, capacity: int) -> None:
        super().__init__(keys, capacity)
        self.requests: list[Numbers] = []

    def use(self, keys: Numbers) -> None:
        super().use(keys)
        self.requests.append(keys)


class Optimum:
    """Belady's optimum as a policy, for requests that another cache was asked for before.

    `note` is the policy of that cache, `policy()` the one of a later cache.
    """

    def __init__(self) -> None:
        self._noted: list[_Recorder] = []

    def note(self, keys: int, capacity: int) -> Lru:
        """A policy that notes requests."""
        self._noted.append(_Recorder(keys, capacity))
        return self._noted[-1]

    def policy(self) -> Callable[[int, int], Lru]:
        """The optimum, for parts of a cache that are made in the same order."""
        noted = iter(self._noted)
        return lambda keys, capacity: Belady(keys, capacity, next(noted).requests)
