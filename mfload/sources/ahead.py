"""A source that is waited for, of which runs of small tensors are fetched before they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from mfload import errors
from mfload.runtime import Task, start
from mfload.sources.base import ClosedAtEnd, Handle, Source
from mfload.sources.memory import scatter


class AheadSource:
    """A `Source` whose ranges are fetched in their order, each by one request.

    What reads within a range waits for it, and takes its bytes from memory. Two ranges are held at
    most: that of the tensor that was handed out last, and the next one. All else is read from the
    source itself, also what a fetch did not get: the reader meets the error.

    Args:
        ranges: (start, stop) of each, in order.
    """

    def __init__(self, source: Source, ranges: Sequence[tuple[int, int]]) -> None:
        self.source, self._ranges = source, ranges
        self._starts = list(map(itemgetter(0), ranges))
        self._held: dict[int, Task[Any] | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # Not made yet.
            raise AttributeError(name)
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return AheadSource, (self.source, self._ranges)

    def advance(self, offset: int) -> None:
        """Has the range of an offset fetched, and the one behind it."""
        number = bisect_right(self._starts, offset) - 1
        if number >= 0 and offset < self._ranges[number][1]:
            wanted = range(number, min(number + 2, len(self._ranges)))
            held = self._held
            self._held = {n: held.get(n) or self._begun(n) for n in wanted}

    def _begun(self, number: int) -> Task[Any] | None:
        with suppress(RuntimeError):  # The system gives no more threads.
            return start(partial(_fetched, self.source, *self._ranges[number]), "mfload-ahead")

    def find(self, offset: int, nbytes: int) -> Any:
        """A range of bytes, if it was fetched; in a fork it was not."""
        number = bisect_right(self._starts, offset) - 1
        fetch = self._held.get(number)
        if fetch is None or offset + nbytes > self._ranges[number][1]:
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
