"""Loads that are tried again elsewhere, and loads whose arrays become a seed."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from mfload import errors, sources
from mfload.options import Options
from mfload.report import Report, cleared

Prefer = Literal["path", "fallback"]

_MISSED = (errors.SourceError, errors.FormatError, errors.ProcessError)
"""Errors of a place. Those of arguments, names and memory are the same elsewhere."""

_FINAL = (errors.SourceNotFoundError, errors.LoadTimeoutError)
"""After these no other seed is asked."""

_SEED = "mfload.peer.seed"
_TRIES = 3  # Of seeds that a planner names.
_LEAST = 0.1  # Seconds that a second place gets, however late it is.


class _One(Options):
    """The options of one attempt, which makes no others."""


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
        if not whole:
            what = "only a whole checkpoint as it is stored can be published"
            raise errors.UsageError(what, expected="no names= or dtype=, or publish=False")
        if not named:
            what = "publish=True needs the name of the model"
            expected = "a peer:// URL, with files as fallback=; or mfload.publish"
            raise errors.UsageError(what, expected=expected, found=_shown(path))
        importlib.import_module(_SEED).check(named[0], peer)
    how = _One(**{each.name: getattr(how, each.name) for each in dataclasses.fields(how)})
    limit = None if how.timeout is None else how.timeout / 2
    if peer is not None and peer.timeout is not None and _is_peer(places[0]):
        limit = peer.timeout if limit is None else min(limit, peer.timeout)
    try:
        first = how if fallback is None else dataclasses.replace(how, timeout=limit)
        found, note = _attempt(call, places[0], first, report), None
    except _MISSED as error:
        if fallback is None:
            raise
        found = None  # Beyond this block, so that what the error refers to is freed.
        note = f"{_shown(places[0])} failed, {_shown(places[1])} was loaded instead: {error}"
    if note is not None:
        left = how.timeout
        if left is not None:
            left = max(_LEAST, left - (time.monotonic() - start))
        logging.getLogger("mfload").warning("%s", note)
        found = _attempt(call, places[1], dataclasses.replace(how, timeout=left), report)
        if report is not None:
            report.notes = (note, *report.notes)
    if peer is not None and peer.publish:
        seed = importlib.import_module(_SEED).publish_loaded(
            found, named[0], peer, fell_back=not _is_peer(places[note is not None])
        )
        if report is not None:
            report.notes = (*report.notes, f"published at {seed.url}")
    return found


def _attempt(call: Callable[..., Any], place: Any, how: Options, report: Report | None) -> Any:
    """What one place holds. Of seeds that a planner names, others are asked if one fails."""
    named = isinstance(place, str) and place.startswith("peer:///")
    planned = named and how.peer is not None
    start, notes, first = time.monotonic(), [], None
    for left in reversed(range(_TRIES if planned else 1)):
        limit = how.timeout
        if limit is not None:
            limit = max(_LEAST, limit - (time.monotonic() - start))
        try:
            found = call(place, options=dataclasses.replace(how, timeout=limit))
        except _MISSED as error:
            if not left or isinstance(error, _FINAL):
                raise (first or error) from None
            first = first or error.with_traceback(None)
            notes.append(f"a seed failed, others were asked: {error}")
            continue
        if report is not None:
            report.notes = (*notes, *report.notes)
        return found
    raise AssertionError("unreachable")


def _is_peer(place: Any) -> bool:
    return isinstance(place, str) and place.startswith("peer://")


def _shown(place: Any) -> str:
    return sources.shown(place) or "the other source"
