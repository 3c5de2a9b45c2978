"""Loads that are tried again elsewhere, and loads whose arrays become a seed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from mfload import errors, sources
from mfload.loading.stream import Stream, continued
from mfload.options import Options
from mfload.peer_options import PeerOptions
from mfload.report import Report, cleared, human

Prefer = Literal["path", "fallback"]

_FINAL = (errors.SourceNotFoundError, errors.LoadTimeoutError)
"""After these no other seed is asked."""

_SEED = "mfload.peer.seed"
_TRIES = 3  # Of seeds that a planner names.
_LEAST = 0.1  # Seconds that a second place gets, however late it is.


class _One(Options):
    """The options of one attempt, which makes no others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noted(PeerOptions):
    """The options of one load that publishes, with the run and generation of what it read."""

    read: list[Any] = dataclasses.field(default_factory=list, repr=False)


def needed(fallback: object, options: Options | None) -> bool:
    """Whether a load is more than one attempt."""
    if isinstance(options, Options) and not isinstance(options, _One):
        peer = options.peer
        if peer is not None and (peer.publish or peer.planner is not None):
            return True
    return fallback is not None


def run(
    call: Callable[..., Any],
    path: Any,
    fallback: Any,
    prefer: str,
    options: Options | None,
    report: Report | None,
    *,
    whole: bool,
) -> Any:
    """What `call` loads from one of two places, with a note of what was wrong with the first.

    Where a planner names the seeds, and one fails, others are asked before the second place.

    The first gets half of the timeout, peers at most `PeerOptions.timeout`; the second, what is
    left. A second attempt begins with memory of its own: nothing that the first may still write to
    is used again.

    `whole`: the result is all of the checkpoint as it is stored, and may be published.
    """
    cleared(report)
    how = Options() if options is None else options
    if not isinstance(how, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        return call(path, options=how)  # It raises.
    if prefer not in ("path", "fallback"):
        errors.check_choice("prefer", prefer, ("path", "fallback"))
    places = [path] if fallback is None else [path, fallback]
    if prefer == "fallback":
        places.reverse()
    start, peer = time.monotonic(), how.peer
    named = [each for each in places if _is_peer(each)]
    if peer is not None and peer.publish:
        _check_publish(peer, named, path, whole)
        peer = _Noted(**_fields(peer))
    how = _One(**_fields(how, peer=peer))
    limit = None if how.timeout is None else how.timeout / 2
    if peer is not None and peer.timeout is not None and _is_peer(places[0]):
        limit = peer.timeout if limit is None else min(limit, peer.timeout)
    failed = _Failed(report)
    try:
        try:
            first = how if fallback is None else dataclasses.replace(how, timeout=limit)
            found, why = _attempt(call, places[0], first, failed), None
        except errors.OF_A_PLACE as error:
            if fallback is None:
                raise
            found, why = None, str(error)  # Of the error nothing more is kept.
        if why is not None:
            note = f"{_shown(places[0])} failed {failed.after()}, {_shown(places[1])} was "
            logging.getLogger("mfload").warning("%stried instead: %s", note, why)
            failed.notes.insert(0, f"{note}tried instead: {why}")
            rest = dataclasses.replace(how, timeout=_left(how.timeout, start))
            if isinstance(peer, _Noted):
                peer.read.clear()
            with errors.after(why):
                found = _attempt(call, places[1], rest, failed)
            number = failed.notes.index(f"{note}tried instead: {why}")
            failed.notes[number] = f"{note}loaded instead: {why}"
    except BaseException:
        if report is not None:
            report.clear()  # Of the last attempt.
        failed.tell()
        raise
    failed.tell()
    if isinstance(peer, _Noted):
        _publish(found, named[0], peer, report)
    return found


def again(call: Callable[..., Any], given: dict[str, Any], *, whole: bool = False) -> Any:
    """What a public function gives of one of two places (see `run`); `given` are its arguments."""
    names = given.get("names")
    if isinstance(names, Iterator):
        given["names"] = list(names)  # For each attempt.
    path, fallback, prefer, options = map(given.pop, ("path", "fallback", "prefer", "options"))

    def attempt(place: Any, options: Options) -> Any:
        return call(path=place, options=options, **given)

    return run(attempt, path, fallback, prefer, options, given.get("report"), whole=whole)


def stream(
    call: Callable[..., Stream[Any]],
    path: Any,
    fallback: Any,
    prefer: str,
    options: Options | None,
    report: Report | None,
) -> Stream[Any]:
    """What `call` streams from one of two places, and what that fails to give from the other.

    `call` takes the names that are left, after those that the first place gave.
    """
    opened: list[Any] = []

    def begin(place: Any, options: Options) -> Stream[Any]:
        opened.append(place)
        return call(place, options=options)

    first = run(begin, path, fallback, prefer, options, report, whole=False)
    one, other = (path, fallback) if prefer == "path" else (fallback, path)
    if opened[-1] is other:
        return first

    def go_on(left: Sequence[str], why: str) -> Stream[Any]:
        count = len(first.names) - len(left)
        note = f"{_shown(one)} failed after {errors.counted(count, 'tensor')}, the rest is from "
        note = f"{note}{_shown(other)}: {why}"
        logging.getLogger("mfload").warning("%s", note)
        rest = call(other, options=_One(**_fields(options or Options())), left=left)
        if report is not None:
            report.notes = (note, *report.notes)
        return rest

    return continued(first, go_on)


def _check_publish(peer: PeerOptions, named: Sequence[Any], path: Any, whole: bool) -> None:
    if not whole:
        what = "only a whole checkpoint as it is stored can be published"
        raise errors.UsageError(what, expected="no names= or dtype=, or publish=False")
    if not named:
        what = "publish=True needs the name of the model"
        expected = "a peer:// URL, with files as fallback=; or mfload.publish"
        raise errors.UsageError(what, expected=expected, found=_shown(path))
    importlib.import_module(_SEED).check(named[0], peer)


def _publish(found: Any, url: str, peer: _Noted, report: Report | None) -> None:
    begin = time.perf_counter()
    seed = importlib.import_module(_SEED).publish_loaded(found, url, peer, *peer.read)
    if report is not None:
        report.add_stage("publish", begin, time.perf_counter())
        report.notes = (*report.notes, f"published at {seed.url}")


class _Failed:
    """The attempts that failed, each of which filled the report until the next one emptied it.

    Attributes:
        notes: Why they failed.
    """

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._rows: list[tuple[Report, float, float, str]] = []
        self.notes: list[str] = []

    def add(self, start: float, place: Any) -> None:
        """Takes what an attempt that fails now has told; it began at `start`."""
        told = Report() if self._report is None else copy.copy(self._report)
        self._rows.append((told, start, time.perf_counter(), _shown(place)))

    def after(self) -> str:
        """After what they failed, for people."""
        seconds = sum(stop - start for _, start, stop, _ in self._rows)
        nbytes = sum(told.read_bytes for told, *_ in self._rows)
        return f"after {seconds:.3g} s" + (f" and {human(nbytes)} read" if nbytes else "")

    def tell(self) -> None:
        """Adds them to the report."""
        if self._report is not None:
            for row in self._rows:
                self._report.add_failed(*row)
            self._report.notes = (*self.notes, *self._report.notes)


def _left(seconds: float | None, start: float) -> float | None:
    """What is left of a timeout that began at `start`."""
    return None if seconds is None else max(_LEAST, seconds - (time.monotonic() - start))


def _attempt(call: Callable[..., Any], place: Any, how: Options, failed: _Failed) -> Any:
    """What one place holds. Of seeds that a planner names, others are asked if one fails."""
    named = isinstance(place, str) and place.startswith("peer:///")
    planned = named and how.peer is not None
    start, first = time.monotonic(), None
    for left in reversed(range(_TRIES if planned else 1)):
        begin = time.perf_counter()
        try:
            return call(place, options=dataclasses.replace(how, timeout=_left(how.timeout, start)))
        except errors.OF_A_PLACE as error:
            failed.add(begin, place)
            if not left or isinstance(error, _FINAL):
                raise (first or error) from None
            first = first or error.with_traceback(None)
            failed.notes.append(f"a seed failed, others were asked: {error}")
    raise AssertionError("unreachable")


def _fields(options: Any, **other: Any) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(options)]
    return {name: getattr(options, name) for name in names} | other


def _is_peer(place: Any) -> bool:
    return isinstance(place, str) and place.startswith("peer://")


def _shown(place: Any) -> str:
    if (one := sources.shown(place)) is not None:
        return one
    if isinstance(place, list | tuple) and place:
        first, *others = map(_shown, place)
        return f"{first} and {len(others)} more" if others else first
    return "bytes in memory" if isinstance(place, bytes | bytearray | memoryview) else "a source"
