"""The route: which engine takes each file on this machine now, and why.

The plan is the same on every machine; the route is not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mfload import errors, spelling
from mfload.io import probes
from mfload.io.source import LocalFile, OpenFile

EngineName = Literal["auto", "mmap", "pread", "direct"]
ENGINES = ("auto", "mmap", "pread", "direct")

log = logging.getLogger("mfload")

_WARM = 0.5
_SMALL = 8 << 20


class Leg(NamedTuple):
    """The route of one file.

    Attributes:
        file: Its path.
        engine: "pread", "direct" or "mmap".
        why: The reason, for people.
        cached: Share of its pages in the page cache, None where the kernel does not say.
    """

    file: str
    engine: str
    why: str
    cached: float | None


def choose(wanted: Sequence[tuple[LocalFile, int]], engine: str) -> tuple[Leg, ...]:
    """Chooses an engine for each file.

    Args:
        wanted: The files, with the bytes that are to be read of each.
        engine: A name, or "auto".

    Returns:
        A leg for each file.

    Raises:
        UsageError: There is no such engine.
    """
    if engine not in ENGINES:
        meant = spelling.meant(engine, ENGINES)
        raise errors.UsageError(
            f"unknown engine{meant}", expected=" | ".join(ENGINES), found=engine
        )
    return tuple(_logged(_leg(source, nbytes, engine), engine) for source, nbytes in wanted)


def _logged(leg: Leg, asked: str) -> Leg:
    if leg.engine != asked:
        level = logging.INFO if asked == "auto" else logging.WARNING
        log.log(level, "%s: %s (%s)", leg.file, leg.engine, leg.why)
    return leg


def _leg(source: LocalFile, nbytes: int, engine: str) -> Leg:
    if engine == "auto" and nbytes < _SMALL:
        # Not worth a look at the cache; and what is read bit by bit had better stay in it.
        return Leg(source.path, "pread", "small read", None)
    if engine in ("pread", "mmap"):
        return Leg(source.path, engine, "asked for", None)
    with OpenFile(source) as opened:
        takes = probes.direct_alignment(opened.fd) is not None
        if engine == "direct":
            if takes:
                return Leg(source.path, engine, "asked for", None)
            why = "direct asked for; the file takes no O_DIRECT"
            return Leg(source.path, "pread", why, None)
        cached = probes.cached_share(opened.fd, source.size)
    if cached is None:
        return Leg(source.path, "pread", "the kernel does not say what it caches", cached)
    share = f"{cached:.0%} in the page cache"
    if cached >= _WARM:
        return Leg(source.path, "pread", share, cached)
    if not takes:
        return Leg(source.path, "pread", f"{share}, but the file takes no O_DIRECT", cached)
    return Leg(source.path, "direct", share, cached)
