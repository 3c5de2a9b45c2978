"""Policies without a cache: what they would do with a list of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mfload.ondemand import policies

_NEVER = np.iinfo(np.int64).max


class Belady(policies.Lru):
    """Belady's optimum: what is needed last leaves first. It must know all requests beforehand."""

    def __init__(self, keys: int, capacity: int, trace: Sequence[Any]) -> None:
        super().__init__(keys, capacity)
        # Backwards: the next request after each that asks for its keys again.
        self._next = np.full(keys, _NEVER)
        self._after: list[Any] = []
        for number, asked in reversed(list(enumerate(trace))):
            self._after.append(self._next[asked])
            self._next[asked] = number
        self._after.reverse()

    def use(self, keys: Any) -> None:
        """The next request of the trace."""
        self._next[keys] = self._after[self.now]
        super().use(keys)

    def rank(self, keys: Any) -> Any:
        """How soon each is needed."""
        return -self._next[keys]


def replay(trace: Iterable[Any], capacity: int, policy: policies.Policy = "lru") -> Any:
    """For each request, how many of its keys are not there: int64[requests]."""
    requests = [np.unique(np.asarray(each, np.int64)) for each in trace]
    keys = 1 + max((int(each[-1]) for each in requests if each.size), default=0)
    chosen = policies.make(policy, keys, capacity)
    there, misses = np.zeros(keys, bool), np.zeros(len(requests), np.int64)
    for number, asked in enumerate(requests):
        chosen.use(asked)
        misses[number] = asked.size - np.count_nonzero(there[asked])
        there[asked] = False
        others = np.flatnonzero(there)
        there[chosen.expired(others)] = False
        there[chosen.victims(others, max(0, others.size + asked.size - capacity))] = False
        there[asked] = True
    return misses


def belady(trace: Iterable[Any], capacity: int) -> Any:
    """The fewest keys that any policy would have to read for these requests."""
    requests = [np.unique(np.asarray(each, np.int64)) for each in trace]
    return replay(requests, capacity, lambda keys, slots: Belady(keys, slots, requests))
