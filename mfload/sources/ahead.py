"""A source that is waited for, of which runs of small pieces are fetched before they are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from mfload import errors
from mfload.runtime import Task, start
from mfload.sources.base import ClosedAtEnd, Handle, Source
from mfload.sources.memory import scatter

TOGETHER = 1 << 20
"""Bytes of a piece that is small."""

_AT_ONCE = 8  # Runs that are fetched while a load decodes what is in them,
_LATE = 8  # and those before them, of which a reader may still want something.


def runs_of(
    sources: Sequence[Source],
    pieces: Iterable[tuple[int, int, int]],
    most: int,
    gap: int | None = None,
) -> dict[int, list[tuple[int, int]]]:
    """Runs of small pieces that follow each other in sources that are waited for, by source.

    Args:
        pieces: Source, offset and bytes of each, in this order.
        most: Bytes of a run, at most; nor has it more than a block of the source.
        gap: Bytes that are read over, at most. Default: what the source says.
    """
    runs = dict[int, list[tuple[int, int]]]()
    for source, offset, nbytes in pieces:
        costs, file = sources[source].costs, sources[source].file
        if costs.concurrency is None or file is not None or not 0 < nbytes <= TOGETHER:
            continue
        mine, stop = runs.setdefault(source, []), offset + nbytes
        near = mine and offset < mine[-1][1] + (costs.merge_gap if gap is None else gap)
        if near and stop - mine[-1][0] <= min(costs.block, most):
            mine[-1] = mine[-1][0], max(stop, mine[-1][1])
        else:
            mine.append((offset, stop))
    return runs


def joined(sources: Sequence[Source], blocks: Iterable[Any]) -> list[Any]:
    """The sources of a load; pieces of them that are decoded one by one come in runs."""
    runs = runs_of(sources, _pieces(blocks), TOGETHER)
    return [
        AheadSource(each, runs[n], _AT_ONCE) if n in runs else each
        for n, each in enumerate(sources)
    ]


def requests_for(sources: Sequence[Source], blocks: Sequence[Any]) -> int:
    """How many requests a load sends for blocks of sources that are waited for."""
    far = [each.file is None and each.costs.concurrency is not None for each in sources]
    wanted = [block for block in blocks if far[block.source]]
    small = _pieces(block for block in wanted if block.nbytes <= TOGETHER)
    runs = runs_of(sources, small, TOGETHER)
    return sum(b.reads for b in wanted) - len(small) + sum(map(len, runs.values()))


def _pieces(blocks: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Source, offset and bytes of what is decoded, in order."""
    some = (each for each in blocks if each.decode is not None and each.nbytes)
    return sorted((each.source, each.offset, each.nbytes) for each in some)


class AheadSource:
    """A `Source` whose ranges are fetched in their order, each by one request.

    What reads within a range waits for it, and takes its bytes from memory. Two ranges are held at
    most: that of the tensor that was handed out last, and the next one; of loads, 16. All else is
    read from the source itself, also what a fetch did not get: the reader meets the error.

    Args:
        ranges: (start, stop) of each, in order.
        at_once: How many are fetched ahead of what threads read, in place of `advance`.
    """

    def __init__(self, source: Source, ranges: Sequence[tuple[int, int]], at_once: int = 0) -> None:
        self.source, self._ranges, self._at_once = source, ranges, at_once
        self._starts = list(map(itemgetter(0), ranges))
        self._held: dict[int, Task[Any] | None] = {}
        self._lock, self._last = threading.Lock(), -1

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # Not made yet.
            raise AttributeError(name)
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return AheadSource, (self.source, self._ranges)

    def advance(self, offset: int) -> None:
        """Has the range of an offset fetched, and the one behind it."""
        number = self._number(offset)
        if number is not None:
            self._hold(range(number, number + 2), number)

    def _follow(self, number: int) -> None:
        """The same for a range that one of several threads reads, and some behind the last one."""
        with self._lock:
            self._last = max(self._last, number)
            if number in (wanted := range(self._last - _LATE, self._last + self._at_once)):
                self._hold(wanted, number)

    def _hold(self, wanted: range, begin: int) -> None:
        held, known = self._held, range(len(self._ranges))
        some = [n for n in wanted if n in known and (n >= begin or n in held)]
        self._held = {n: held.get(n) or self._begun(n) for n in some}

    def _number(self, offset: int) -> int | None:
        number = bisect_right(self._starts, offset) - 1
        return number if number >= 0 and offset < self._ranges[number][1] else None

    def _begun(self, number: int) -> Task[Any] | None:
        with suppress(RuntimeError):  # The system gives no more threads.
            return start(partial(_fetched, self.source, *self._ranges[number]), "mfload-ahead")

    def find(self, offset: int, nbytes: int) -> Any:
        """A range of bytes, if it was fetched; in a fork it was not."""
        number = self._number(offset)
        if number is None or offset + nbytes > self._ranges[number][1]:
            return None
        if self._at_once:
            self._follow(number)
        fetch = self._held.get(number)
        if fetch is None:
            return None
        at = offset - self._starts[number]
        with suppress(OSError, errors.MfloadError):
            data = fetch.result()
            return None if data is None else data[at : at + nbytes]
        return None

    def open(self, flags: int = 0) -> AheadHandle:
        """Opens it for one thread (see `Source`)."""
        return AheadHandle(self, flags)


class AheadHandle(ClosedAtEnd):
    """Reads what was fetched, and the source for all else (see `Handle`)."""

    fd = -1

    def __init__(self, source: AheadSource, flags: int) -> None:
        self._source, self._flags = source, flags
        self._handle: Handle | None = None

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`)."""
        data = self._source.find(offset, sum(part.nbytes for part in vector))
        if data is not None:
            return scatter(data, vector)
        if self._handle is None:
            self._handle = self._source.source.open(self._flags)
        return self._handle.read(vector, offset, least)

    def close(self) -> None:
        """Closes it; more than once does nothing."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def _fetched(source: Source, start: int, stop: int) -> Any:
    data = np.empty(stop - start, np.uint8)
    with source.open() as handle:
        handle.read([data], start)
    return data
