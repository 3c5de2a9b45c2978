"""What the requests to a server know of each other: when one has stalled, and how fast they may go.

A request that waits far longer than others did is given up, and what is left of it is asked for
on another connection. There is one request for a byte at any time, so that no answer that comes
late can write into memory that was handed out.
"""

from __future__ import annotations

import time
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable

from mfload.runtime import forget_in_forks
from mfload.sources.client import Answer, Client, fill

PIECE = 1 << 20
"""Bytes that are waited for at once, and what a timeout may lose of what has come."""

# A request has stalled after so many times what 95 % of those before took for a piece, and so many
# seconds at least: with one second, 5 of 151 were given up on two cores that were overloaded.
_TIMES, _LEAST = 3.0, 2.0
_KNOWN, _KEPT = 8, 128  # Requests before which none is given up, and those that count.
_EACH, _SAVED = 20, 16  # One of so many requests may be asked again; and so many at once, at most.
_BURST = 0.05  # Seconds for which bandwidth that was not used may be used later.
_TURNS = 64  # Pieces a second, of limited bandwidth.


class SlowError(TimeoutError):
    """A request is given up, since another is expected to be faster."""


class Pace:
    """Bounds the bytes that threads take together: each waits until its turn begins.

    Args:
        rate: Bytes a second.
        clock: Seconds, which only grow.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.piece = min(PIECE, max(1, rate // _TURNS))
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._next, self._lock = clock(), allocate_lock()
        forget_in_forks(self)

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes, a piece at most, may be taken."""
        with self._lock:
            now = self._clock()
            begins = max(self._next, now - _BURST)
            self._next = begins + nbytes / self._rate
        if begins > now:
            self._sleep(begins - now)

    def forget(self) -> None:
        """In a fork, the lock may be that of a thread of the parent's."""
        self._lock = allocate_lock()


class Link:
    """The way to a server: its client, the pace of reads, and what is known of their times.

    Args:
        client: Asks the server.
        rate: Bytes a second, at most; loads of this process that give the same number share it.
    """

    def __init__(self, client: Client, rate: int | None = None) -> None:
        self.client, self.pace = client, None if rate is None else _pace(rate)
        self._longest = deque[float](maxlen=_KEPT)
        self._spare, self._lock = _EACH, allocate_lock()
        forget_in_forks(self)

    def patience(self) -> float | None:
        """Seconds for a piece after which a request has stalled; None if it is not known."""
        known = sorted(self._longest)
        return max(_LEAST, _TIMES * known[int(0.95 * len(known))]) if len(known) >= _KNOWN else None

    def watch(self) -> Watch:
        """What watches a request that begins."""
        with self._lock:
            self._spare = min(_SAVED * _EACH, self._spare + 1)
        return Watch(self)

    def spend(self) -> bool:
        """Whether one more request may be asked again: one, and 5 % of all."""
        with self._lock:
            if self._spare < _EACH:
                return False
            self._spare -= _EACH
            return True

    def add(self, seconds: float) -> None:
        """Takes the longest time that a request needed for a piece."""
        self._longest.append(seconds)

    def forget(self) -> None:
        """In a fork, the lock may be that of a thread of the parent's."""
        self._lock = allocate_lock()


class Watch:
    """Watches one request, and says when it is to be asked again."""

    def __init__(self, link: Link) -> None:
        self._link, self._since, self._longest = link, time.monotonic(), 0.0

    @property
    def expected(self) -> tuple[float, Callable[[], float]]:
        """Seconds after which a piece may be late, and what is called then."""
        return _LEAST, self.late

    def late(self) -> float:
        """Seconds that a piece has from now on; raises SlowError if it is to be asked for again."""
        took, patience = time.monotonic() - self._since, self._link.patience()
        if patience is None or took < patience:
            return _LEAST if patience is None else patience - took
        if self._link.spend():
            self._link.add(took)
            raise SlowError("others were faster")
        return _LEAST

    def receive(self, answer: Answer, views: deque[memoryview], nbytes: int) -> None:
        """Receives so many bytes into buffers (see `Answer.fill`)."""
        pace, timed = self._link.pace, answer.timed

        def read_into(memory: memoryview) -> int:
            if pace is not None:
                self._piece_came()
                pace.take(memory.nbytes)
                self._since = time.monotonic()
            timed.expect(*self.expected)
            got = answer.readinto(memory)
            self._piece_came()
            return got

        piece = PIECE if pace is None else pace.piece
        answer.check_filled(nbytes - fill(views, nbytes, read_into, piece))
        self._link.add(self._longest)

    def _piece_came(self) -> None:
        now = time.monotonic()
        self._longest, self._since = max(self._longest, now - self._since), now


_paces: weakref.WeakValueDictionary[int, Pace] = weakref.WeakValueDictionary()


def _pace(rate: int) -> Pace:
    return _paces.setdefault(rate, Pace(rate))
