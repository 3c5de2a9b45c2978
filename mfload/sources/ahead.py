"""A source that is waited for, of which runs of small tensors are fetched before they are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from mfload import errors
from mfload.sources.base import ClosedAtEnd, Handle, Source


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
        self._held: dict[int, _Fetch] = {}

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
            self._held = {n: held.get(n) or _Fetch(self.source, *self._ranges[n]) for n in wanted}

    def find(self, offset: int, nbytes: int) -> Any:
        """A range of bytes, if it was fetched."""
        number = bisect_right(self._starts, offset) - 1
        fetch = self._held.get(number)
        if fetch is None or offset + nbytes > self._ranges[number][1]:
            return None
        data = fetch.wait()
        at = offset - self._starts[number]
        return None if data is None else data[at : at + nbytes]

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
        nbytes = sum(part.nbytes for part in vector)
        data = self._source.find(offset, nbytes)
        if data is None:
            if self._handle is None:
                self._handle = self._source.source.open(self._flags)
            return self._handle.read(vector, offset, least)
        at = 0
        for part in vector:
            np.frombuffer(part, np.uint8)[:] = data[at : at + part.nbytes]
            at += part.nbytes
        return nbytes

    def close(self) -> None:
        """Closes it; more than once does nothing."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class _Fetch:
    """A range that a thread fetches."""

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self._data: Any = None

        def fetch() -> None:
            data = np.empty(stop - start, np.uint8)
            try:
                with source.open() as handle:
                    handle.read([data], start)
            except (OSError, errors.MfloadError):
                return
            self._data = data

        self._thread = threading.Thread(target=fetch, name="mfload-ahead", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # The system gives no more threads.
            self._thread = None

    def wait(self) -> Any:
        """The bytes; None if they did not come. In a forked child they don't."""
        if self._thread is not None:
            self._thread.join()
        return self._data
