"""A trial inside a load of cold files: how many readers the disk likes, and by which way. Pure.

Disks differ: one is fastest with two readers, another with sixteen, and past the page cache it is
faster or slower than through it. What a load reads in its first moments by each way tells.
"""

from __future__ import annotations

from collections.abc import Generator

from mfload.runtime import NamedTuple

BEGIN = 4
"""Readers past the page cache to begin with."""
WORTH = 1.2
"""How many times as fast reads past the page cache must be where it was to keep the files."""
# What more or fewer readers must win, for still more or still fewer to be tried.
_GROWS = 1.05
# Where the fastest is faster by no more than this, fewer readers are preferred.
_ALIKE = 1.02
# A way is measured for so many seconds, and so many blocks of each reader, after as many blocks of
# each as it takes until only reads of this way are under way, and their slots are there.
_SECONDS, _BLOCKS, _SETTLING = 0.1, 5, 2
# Another way is tried if so many times the bytes of a measurement are left to gain from it.
_LEFT = 4


class Way(NamedTuple):
    """How files are read: with O_DIRECT or through the page cache, and by how many readers."""

    direct: bool
    readers: int


class Trial:
    """Which way a load reads, now and in the end, by what came so far.

    Args:
        nbytes: Bytes that are read in all.
        block: Bytes of the longest read.
        least: Readers past the page cache, at least.
        most: The same, at most.
        through: Readers through the page cache, if the load begins so and may go past it.

    Attributes:
        way: How the files are to be read from now on.
        speeds: Bytes a second of each way that was measured.
        over: Whether the way stays for the rest of the load.
    """

    def __init__(
        self, nbytes: int, block: int, least: int, most: int, through: int | None = None
    ) -> None:
        self.speeds: dict[Way, float] = {}
        self._left, self._block, self._through = nbytes, block, through
        self._search = _search(max(least, min(BEGIN, most)), least, most, through)
        self.way, self.over = next(self._search), False
        self._settling = self._unsettled(self.way)
        self._clock = self._seconds = 0.0
        self._nbytes = 0

    def resume(self, now: float) -> None:
        """Reading begins, or goes on after a pause."""
        self._clock = now

    def came(self, nbytes: int, now: float) -> None:
        """Counts bytes that are in place; may change the way."""
        self._left -= nbytes
        self._seconds += now - self._clock
        self._nbytes += nbytes
        self._clock = now
        if self.over:
            return
        if self._settling > 0:
            self._settling -= nbytes
            self._seconds = self._nbytes = 0
        elif self._seconds >= _SECONDS and self._nbytes >= _BLOCKS * self._block * self.way.readers:
            self.speeds[self.way] = self._nbytes / self._seconds
            self._next(self.way)

    def _next(self, before: Way) -> None:
        """Goes on to the next way to measure, or to the best one for the rest of the load."""
        try:
            self.way = self._search.send(self.speeds[before])
            self.over = self._left < _LEFT * self._nbytes
        except StopIteration:
            self.over = True
        if self.over:
            self.way = self._best()
        self._settling = max(self._unsettled(before), self._unsettled(self.way))
        self._seconds = self._nbytes = 0

    def _unsettled(self, way: Way) -> int:
        return _SETTLING * self._block * way.readers

    @property
    def gain(self) -> float | None:
        """How many times as fast reads past the page cache were; None if that was not tried."""
        past = [speed for way, speed in self.speeds.items() if way.direct]
        if self._through is None or not past:
            return None
        return max(past) / self.speeds[Way(False, self._through)]

    def _best(self) -> Way:
        if self._through is not None and (self.gain is None or self.gain < WORTH):
            return Way(False, self._through)
        past = {way: speed for way, speed in self.speeds.items() if way.direct}
        most = max(past.values())
        return min(way for way, speed in past.items() if speed * _ALIKE >= most)

    def __str__(self) -> str:
        """What was measured, for people."""
        tried = (
            f"{way.readers} {'past' if way.direct else 'through'} the page cache {speed / 1e9:.2f}"
            for way, speed in self.speeds.items()
        )
        return f"readers tried, GB/s: {', '.join(tried)}"


def _search(begin: int, least: int, most: int, through: int | None) -> Generator[Way, float, None]:
    """Gives ways to measure, and takes their speeds: more readers, or fewer, while that helps."""
    kept = 0.0
    if through is not None:
        kept = yield Way(False, through)
    first = yield Way(True, begin)
    if first < kept:
        return  # More readers are not expected to make up for that.
    for times in (2.0, 0.5):
        readers, speed = begin, first
        while (other := max(least, min(most, int(readers * times)))) != readers:
            found = yield Way(True, other)
            if found < speed * _GROWS:
                break
            readers, speed = other, found
        if readers != begin:
            return
