"""When each thread of a load read, copied and waited, for `Report.timeline` and `Report.plot`.

Spans are recorded only for a load that has a report. A thread appends to a list of its own, so
that nothing is shared or locked; sources are wrapped so that every read of theirs is timed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

MOST = 1024
"""Spans of a thread that are kept; of more, neighbours are merged."""

LOAD = "load"
"""The thread that called: its spans are the stages of the load."""

_TOGETHER = 16  # Neighbours of which those of one kind become one span.


class Span(NamedTuple):
    """What a thread did for a while.

    Attributes:
        thread: "load" for the thread that called, whose spans are the stages; "reader 1", … for
            those that read; "copies 1", … for the copies onto devices that a reader began;
            "exchange" for what travels between processes.
        kind: A stage, or "read", "map" (rows that the kernel copied out of a map of a file),
            "copy" (into place, also with a conversion; onto a device), "decode", "check"
            (checksums), "wait" (for a copy onto a device), "exchange" (with other processes).
        start: Seconds, as `time.perf_counter()` counts them.
        stop: Seconds, likewise.
        nbytes: Bytes read, copied, decoded or received; 0 of other kinds.
        file: The file or URL concerned; "" if there is none, or several.
    """

    thread: str
    kind: str
    start: float
    stop: float
    nbytes: int = 0
    file: str = ""


_Row = tuple[str, float, float, int, str]
"""A span without its thread, as it is recorded."""


class Track:
    """The spans of one thread; sources are given by their numbers, -1 for none.

    `work` is what the thread does between the reads of a block: "copy", "decode", or "" for
    nothing that would be worth a span. `reads` counts the reads of a block.
    """

    __slots__ = ("_beside", "_files", "_last", "_rows", "reads", "thread", "work")

    def __init__(self, thread: str, files: Sequence[str]) -> None:
        self.thread, self.work, self.reads = thread, "", 0
        self._beside: Track | None = None
        self._files = [*files, ""]
        self._rows: list[_Row] = []
        self._last = perf_counter()

    def read(self, start: float, nbytes: int, source: int) -> None:
        """Records a read that is over now, and the work since the span before it."""
        if self.work:
            self._rows.append((self.work, self._last, start, 0, self._files[source]))
        self.reads += 1
        self.add("read", start, nbytes, source)

    def mark(self, kind: str, nbytes: int = 0, source: int = -1) -> None:
        """Records what was done since the span before, until now."""
        self.add(kind, self._last, nbytes, source)

    def add(self, kind: str, start: float, nbytes: int = 0, source: int = -1) -> None:
        """Records a span that ends now."""
        self._last = now = perf_counter()
        self._rows.append((kind, start, now, nbytes, self._files[source]))
        if len(self._rows) > MOST:
            self._rows = _merged(self._rows)

    def begin(self, work: str) -> None:
        """Begins a block: what was done since the span before is left out."""
        self.work, self.reads, self._last = work, 0, perf_counter()

    @property
    def beside(self) -> Track:
        """The copies that go on while the thread does something else."""
        if self._beside is None:
            self._beside = Track(self.thread.replace("reader", "copies"), self._files[:-1])
        return self._beside

    def spans(self) -> list[Span]:
        """What was recorded."""
        more = [] if self._beside is None else self._beside.spans()
        return [*(Span(self.thread, *row) for row in self._rows), *more]


class Recorder:
    """The tracks of one load, of files or URLs by number."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._tracks: list[Track] = []
        self._current: dict[int, Track] = {}

    def begin(self, thread: str) -> Track:
        """A track for what the current thread does from now on."""
        track = self._current[threading.get_ident()] = Track(thread, self._files)
        self._tracks.append(track)
        return track

    def exchanges(self) -> Track:
        """A track for what travels between processes."""
        self._tracks.append(Track("exchange", self._files))
        return self._tracks[-1]

    def watched(self, sources: Sequence[Any]) -> list[Any]:
        """The sources, whose reads are recorded for the thread that opens them."""
        return [_Source(source, number, self._current) for number, source in enumerate(sources)]

    def spans(self) -> list[Span]:
        """What was recorded in all threads."""
        return [span for track in tuple(self._tracks) for span in track.spans()]


class _Source:
    """A source whose handles time their reads."""

    def __init__(self, source: Any, number: int, current: dict[int, Track]) -> None:
        self._source, self._number, self._current = source, number, current

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def open(self, flags: int = 0) -> Any:
        handle = self._source.open(flags)
        track = self._current.get(threading.get_ident())
        return handle if track is None else _Handle(handle, track.read, self._number)


class _Handle:
    def __init__(self, handle: Any, record: Any, number: int) -> None:
        self._handle, self._record, self._number = handle, record, number
        self._read = handle.read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        start = perf_counter()
        nbytes = self._read(vector, offset, least)
        self._record(start, nbytes, self._number)
        return nbytes

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def _merged(rows: Sequence[_Row]) -> list[_Row]:
    """Fewer rows: neighbours of one kind as one. Sums stay exact, places shift a little."""
    made: list[_Row] = []
    for first in range(0, len(rows), _TOGETHER):
        group = rows[first : first + _TOGETHER]
        start = group[0][1]
        for kind in dict.fromkeys(row[0] for row in group):
            alike = [row for row in group if row[0] == kind]
            stop = start + sum(row[2] - row[1] for row in alike)
            files = {row[4] for row in alike}
            file = files.pop() if len(files) == 1 else ""
            made.append((kind, start, stop, sum(row[3] for row in alike), file))
            start = stop
    return made


def bounded(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans of several parts of a load by thread, at most `MOST` of each."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.thread, []).append(span)
    for thread, mine in found.items():
        mine.sort(key=attrgetter("start"))
        while len(mine) > MOST:
            mine = [Span(thread, *row) for row in _merged([span[1:] for span in mine])]
        found[thread] = mine
    return tuple(itertools.chain.from_iterable(found.values()))
