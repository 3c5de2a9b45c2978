"""A trial inside a load of cold files: how many readers the disk likes, and by which way. Pure.

Disks differ: one is fastest with two readers, another with sixteen, and past the page cache it is
faster or slower than through it. So a load measures each way with the first bytes that it reads.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

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
_SECONDS, _BLOCKS, _SETTLING = 0.1, 4, 2
# Another way is tried if so many times the bytes of a measurement are left to gain from it.
_LEFT = 4
_HOW = {True: " past the page cache", False: " through the page cache"}


T = TypeVar("T")


class ReadWay(NamedTuple):
    """How files are read: with O_DIRECT or through the page cache, and by how many readers."""

    direct: bool
    readers: int


_Search = Generator[ReadWay, float, T]


class Trial:
    """Which way a load reads, now and in the end, by what came so far.

    Args:
        nbytes: Bytes that are read in all.
        block: Bytes of the longest read.
        least: Readers, at least.
        most: Readers past the page cache, at most.
        through: Readers through the page cache, at most, if the load begins so.
        past: Whether it may go past the page cache.
        begin: Readers to begin with.
        files: Whether files are read, and not a server.

    Attributes:
        way: How the files are to be read from now on.
        speeds: Bytes a second of each way that was measured.
        over: Whether the way stays for the rest of the load.
    """

    def __init__(
        self,
        nbytes: int,
        block: int,
        least: int,
        most: int,
        through: int | None = None,
        past: bool = True,
        *,
        begin: int = BEGIN,
        files: bool = True,
    ) -> None:
        self.speeds: dict[ReadWay, float] = {}
        self._left, self._block, self._files = nbytes, block, files
        self._search = _search(max(least, min(begin, most)), least, most, through, past)
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
            self._next(self.way, self._nbytes / self._seconds)

    def _next(self, before: ReadWay, speed: float) -> None:
        """Goes on to the next way to measure, or to the best one for the rest of the load."""
        self.speeds[before] = max(speed, self.speeds.get(before, 0.0))
        through = self._speed(False)
        try:
            self.way = self._search.send(speed)
            if self._left < _LEFT * self._nbytes:  # Too little is left to change the way for.
                self.way, self.over = self._fastest(direct=not through), True
        except StopIteration:
            direct = self._speed(True) > through * WORTH
            self.way, self.over = self._fastest(direct), True
        self._settling = max(self._unsettled(before), self._unsettled(self.way))
        self._seconds = self._nbytes = 0

    def _unsettled(self, way: ReadWay) -> int:
        return _SETTLING * self._block * way.readers

    @property
    def gain(self) -> float | None:
        """How many times as fast reads past the page cache were; None if one way was not tried."""
        past, through = self._speed(True), self._speed(False)
        return past / through if past and through else None

    def _speed(self, direct: bool) -> float:
        return max((speed for way, speed in self.speeds.items() if way.direct == direct), default=0)

    def _fastest(self, direct: bool) -> ReadWay:
        """Of numbers that are about as fast, the fewest readers."""
        fast = self._speed(direct) / _ALIKE
        ways = (way for way, speed in self.speeds.items() if speed >= fast)
        return min(way for way in ways if way.direct == direct)

    def __str__(self) -> str:
        """What was measured, for people."""
        tried = (
            f"{way.readers}{_HOW[way.direct] * self._files} {speed / 1e9:.2f}"
            for way, speed in self.speeds.items()
        )
        return f"readers tried, GB/s: {', '.join(tried)}"


def _search(first: int, least: int, most: int, through: int | None, past: bool) -> _Search[None]:
    """Gives ways to measure, and takes their speeds, until the best ones are among them."""
    kept = 0.0
    start = ReadWay(False, min(first, through or first))
    if through is not None:
        kept = yield start
    if past:
        speed = yield ReadWay(True, first)
        if speed >= kept:  # Else other numbers are not expected to make up for that.
            speed = yield from _climb(ReadWay(True, first), speed, least, most)
            if speed >= kept * WORTH and (through is None or speed >= WORTH * (yield start)):
                return
    if through is not None:
        yield from _climb(start, kept, min(least, through), through)


def _climb(way: ReadWay, speed: float, least: int, most: int) -> _Search[float]:
    """Tries more readers, or else fewer, while that helps; returns the best speed."""
    for times in (2.0, 0.5):
        readers = way.readers
        while (other := max(least, min(most, int(readers * times)))) != readers:
            found = yield way._replace(readers=other)
            if found < speed * _GROWS:
                break
            readers, speed = other, found
        if readers != way.readers:
            break
    return speed
