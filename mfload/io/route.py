"""The route: which engine takes each file on this machine now, and why.

The plan is the same on every machine; the route is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mfload.io import buffers, probes
from mfload.sources.local import LocalFile, OpenFile

log = logging.getLogger("mfload")

_ON_DEVICES = ("pinned", "gds")
_WARM = 0.5
_SMALL = 8 << 20


class Leg(NamedTuple):
    """The route of one file.

    Attributes:
        engine: "pread", "direct" or "mmap"; "pinned" or "gds" for what lands on a device.
        cached: Share of its pages in the page cache; None if the kernel does not say.
        direct: Whether it is read with O_DIRECT if it is read into host memory.
    """

    file: str
    engine: str
    why: str
    cached: float | None = None
    direct: bool = False


PastHost = Callable[[str, int | None], tuple[bool, str]]
"""Whether cuFile is to read a file onto devices, and why, in words.

Called with the path, and the bytes that the load reads from disk (they tell whether a probe is
worth its time; None if the user asked for cuFile).
"""


def choose(wanted: Sequence[tuple[LocalFile, int]], engine: str) -> tuple[Leg, ...]:
    """Chooses an engine for each file, which comes with the bytes that are to be read of it."""
    legs: list[Leg] = []
    for source, nbytes in wanted:
        legs.append(_logged(_leg(source, nbytes, engine), engine))
    return tuple(legs)


def choose_onto_device(
    wanted: Sequence[tuple[LocalFile, int]], engine: str, past: PastHost
) -> tuple[Leg, ...]:
    """The same for files of which something lands on a device.

    The engines "pread" and "direct" say how the pinned stage reads.
    """
    inner = "auto" if engine in _ON_DEVICES else engine
    legs = [_leg(source, nbytes, inner, buffers.PAGE) for source, nbytes in wanted]
    cold = sum(nbytes for leg, (_, nbytes) in zip(legs, wanted, strict=True) if leg.direct)
    return tuple(_logged(_onto_device(leg, engine, cold, past), engine) for leg in legs)


def _logged(leg: Leg, asked: str) -> Leg:
    if leg.engine != asked:
        # A pinned stage that reads as asked is no fall-back.
        as_asked = asked in ("pinned", "direct" if leg.direct else "pread")
        meant = asked == "auto" or (leg.engine == "pinned" and as_asked)
        level = logging.INFO if meant else logging.WARNING
        log.log(level, "%s: %s (%s)", leg.file, leg.engine, leg.why)
    return leg


def _leg(source: LocalFile, nbytes: int, engine: str, unit: int | None = None) -> Leg:
    """The leg of a file; `unit` is the most bytes to which direct reads may have to round."""
    if engine == "auto" and nbytes < _SMALL:
        # Not worth asking the cache, and small reads of one file should find it there again.
        return Leg(source.path, "pread", "small read")
    if engine in ("pread", "mmap"):
        return Leg(source.path, engine, "asked for")
    with OpenFile(source) as opened:
        units = probes.direct_alignment(opened.fd)
        takes = units is not None and (unit is None or units[1] <= unit)
        if engine == "direct" and takes:
            return Leg(source.path, "direct", "asked for", direct=True)
        if engine == "direct":
            return Leg(source.path, "pread", "direct asked for; the file takes no O_DIRECT")
        cached = probes.cached_share(opened.fd, source.size)
    why = "the kernel does not say what it caches"
    if cached is not None:
        why = f"{cached:.0%} in the page cache"
    if engine != "auto":
        why = f"{engine} asked for, and nothing lands on a device; {why}"
    if cached is None or cached >= _WARM:
        return Leg(source.path, "pread", why, cached)
    if not takes:
        return Leg(source.path, "pread", f"{why}, but the file takes no O_DIRECT", cached)
    return Leg(source.path, "direct", why, cached, direct=True)


def _onto_device(leg: Leg, engine: str, cold: int, past: PastHost) -> Leg:
    why = f"{'O_DIRECT' if leg.direct else 'buffered'}: {leg.why}"
    if engine == "gds" or (engine == "auto" and leg.direct):
        real, said = past(leg.file, None if engine == "gds" else cold)
        if real:
            return leg._replace(engine="gds", why=f"{leg.why}; {said}")
        why = f"{why}; {'gds asked for, but ' if engine == 'gds' else 'no gds: '}{said}"
    return leg._replace(engine="pinned", why=why)
