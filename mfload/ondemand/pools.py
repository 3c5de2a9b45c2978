"""One budget for keys of several sizes: those of one size share the slots of a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.errors import counted
from mfload.io import buffers
from mfload.ondemand.cache import SlotCache, checked_wait, patience
from mfload.ondemand.store import RowPart, Slots, Store
from mfload.sources.base import ClosedAtEnd

if TYPE_CHECKING:
    from mfload.ondemand.background import Background
    from mfload.ondemand.cache import Lease, Numbers
    from mfload.ondemand.policies import Lru
    from mfload.ondemand.report import OndemandReport


class SlotPool(NamedTuple):
    """The slots of keys of one size, and the cache of them."""

    slots: Slots
    cache: SlotCache


class Caches(ClosedAtEnd):
    """Caches over one store within a budget, and the thread that reads ahead for them."""

    _store: Store
    _budget: int
    _background: Background

    def _caches(self) -> Iterable[SlotCache]:
        raise NotImplementedError

    def _how(self, what: str, wait: float) -> dict[str, Any]:
        """What all of the caches are made with."""
        made: dict[str, Any] = {"wait": wait, "what": what, "background": self._background}
        return made | {"timeout": self._store.timeout, "file": self._store.file}

    def report(self) -> OndemandReport:
        """What it did so far; keys are experts, layers or neurons."""
        made = self._store.report(self._budget)
        for each in self._caches():
            made.add(each.counts)
        return made

    def close(self) -> None:
        """Closes the files, once the reads under way are over; arrays live on.

        It waits for reads for 5 seconds at most, or the timeout. One that takes longer keeps the
        slots until it returns.
        """
        seconds = patience(self._store.timeout)
        end = time.monotonic() + seconds
        self._background.close(seconds)
        for each in self._caches():
            each.close(end)
        self._store.close()

    def __del__(self) -> None:
        if hasattr(self, "_background"):
            self._background.end()


class Pooled(ClosedAtEnd):
    """What reads its keys into pools."""

    _pools: Pools

    def report(self) -> OndemandReport:
        """What it did so far; keys are experts, layers or neurons."""
        return self._pools.report()

    def close(self) -> None:
        """Closes the files, once the reads under way are over; arrays live on.

        It waits for reads for 5 seconds at most, or the timeout. One that takes longer keeps the
        slots until it returns.
        """
        self._pools.close()


class Pools(Caches):
    """Caches for sets of keys, such as the experts of each layer.

    All slots are allocated here. The sizes get slots in proportion to the keys that they have.

    Args:
        store: It is closed with them.
        sets: The keys of each set, and the parts of each key.
        budget: Bytes. Default: what `least` keys need; of the largest, if `mixed`.
        make_policy: Makes one for a number of keys, a number of slots, and the set of each key,
            from 0 on.
        beside: Bytes of the budget that are for something else.
        least: Keys that are used at once.
        mixed: Whether keys of all sizes share slots of the largest, if each size can't have its
            own.
        what: What a key is, for messages.
        wait: See `SlotCache`.

    Raises:
        UsageError: `wait` is no time.
        MemoryLimitError: The budget is too small.
    """

    def __init__(
        self,
        store: Store,
        sets: Sequence[Sequence[Sequence[RowPart]]],
        budget: int | None,
        make_policy: Callable[[int, int, Numbers], Lru],
        *,
        beside: int = 0,
        least: int = 1,
        mixed: bool = False,
        what: str,
        wait: float,
    ) -> None:
        wait = checked_wait(wait)
        self._store, self._budget, self._what = store, budget or 0, what
        by_size: dict[int, list[int]] = {}
        for number, keys in enumerate(sets):
            size = max(sum(part.nbytes for part in parts) for parts in keys)
            by_size.setdefault(size, []).append(number)
        self._least = least
        needed: list[int] = []
        ways = ([*by_size.values()], [[*range(len(sets))]])[: 1 + mixed]
        for groups in ways[-1:] if budget is None else ways:
            slots = [
                Slots(store, [parts for number in each for parts in sets[number]])
                for each in groups
            ]
            self._sizes = [(len(each.parts), each.nbytes) for each in slots]
            # Arenas begin on pages.
            fixed = beside + buffers.PAGE * (len(slots) - 1)
            self._total = sum(keys * nbytes for keys, nbytes in self._sizes)
            needed.append(fixed + sum(min(keys, least) * nbytes for keys, nbytes in self._sizes))
            if budget is None or needed[-1] <= budget:
                break
        else:
            raise self._too_small(least, min(needed))
        self._least_budget = needed[-1]
        if budget is None:
            self._budget = budget = self._least_budget
        capacities = self._divide(budget - self._least_budget)
        chosen = [
            make_policy(keys, n, np.repeat(np.arange(len(each)), [len(sets[m]) for m in each]))
            for n, (keys, _), each in zip(capacities, self._sizes, groups, strict=True)
        ]
        arenas = store.arenas(
            [(n, nbytes) for n, (_, nbytes) in zip(capacities, self._sizes, strict=True)]
        )
        self._background = store.background()
        how = self._how(what, wait)
        self._pools = [
            SlotPool(each, SlotCache(each.fill, len(each.parts), [arena], policy, **how))
            for each, arena, policy in zip(slots, arenas, chosen, strict=True)
        ]
        self._of: dict[int, tuple[SlotPool, int]] = {}
        for pool, numbers in zip(self._pools, groups, strict=True):
            first = 0
            for number in numbers:
                self._of[number] = pool, first
                first += len(sets[number])

    def _divide(self, left: int) -> list[int]:
        """How many slots the keys of each size get, if so many bytes are left after the least."""
        made, rest = [min(keys, self._least) for keys, _ in self._sizes], left
        for even in (True, False):  # What is left in the end has room for a few more.
            for number, (keys, nbytes) in enumerate(self._sizes):
                fit = rest * keys // max(1, self._total) if even else left // max(1, nbytes)
                more = min(fit, keys - made[number])
                made[number], left = made[number] + more, left - more * nbytes
        return made

    def use(self, number: int, keys: Numbers) -> dict[int, Lease]:
        """A lease for each of some keys of a set (see `SlotCache.use`).

        Raises MemoryLimitError, with the budget that they need, if there are fewer slots.
        """
        (slots, cache), first = self._of[number]
        if keys.size > cache.capacity:
            more = (keys.size - self._least) * self._total
            raise self._too_small(keys.size, self._least_budget - -more // len(slots.parts))
        lease = cache.use(keys + first)
        return dict(zip((lease.keys - first).tolist(), lease.split(), strict=True))

    def arrays(self, number: int, lease: Lease) -> dict[str, Any]:
        """The arrays of the one key of a lease, by name; they keep the lease."""
        return self._of[number][0].slots.arrays(int(lease.keys[0]), lease.memory(0))

    def prefetch(self, wanted: Iterable[tuple[int, Numbers]], *, patient: bool = False) -> None:
        """Has a thread read keys of sets ahead (see `SlotCache.prefetch`)."""
        asked: dict[SlotCache, list[Numbers]] = {}
        for number, keys in wanted:
            (_, cache), first = self._of[number]
            asked.setdefault(cache, []).append(keys + first)
        for cache, keys in asked.items():
            cache.prefetch(np.concatenate(keys), patient=patient)

    def _caches(self) -> Iterable[SlotCache]:
        return (each.cache for each in self._pools)

    def _too_small(self, count: int, least: int) -> errors.MemoryLimitError:
        return errors.MemoryLimitError(
            f"the budget is too small for {counted(count, self._what)} at once",
            expected=f"at least {errors.amount(least, self._budget)}",
            found=errors.amount(self._budget, self._budget),
        )
