"""The route: which engine takes each file on this machine now, and why.

The plan is the same on every machine; the route is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from mfload.io import buffers
from mfload.runtime import local_processes
from mfload.sources import at_once, check_engine
from mfload.sources.base import Source

_ON_DEVICES = ("pinned", "gds")
_WARM = 0.5
SMALL = 8 << 20
"""Bytes from which on it is worth asking the page cache."""
# A load may stay in the page cache if it takes at most this part of the available memory. The
# arrays take as much again, and what the cache holds of other files is of use, too.
_KEPT = 4
# Bytes of cold files from which on a trial while they are read is worth its time; and the part of
# them that others may come to.
TRIED, _BESIDE = 1 << 30, 16
_DIRECT = attrgetter("direct")


class Leg(NamedTuple):
    """The route of one file.

    Attributes:
        engine: "pread", "direct" or "mmap"; "pinned" or "gds" for what lands on a device.
        cached: Share of its pages in the page cache; None if the kernel does not say.
        direct: Whether it is read with O_DIRECT if it is read into host memory.
        cold: Whether most of it comes from a disk, and through the page cache.
        either: Whether a trial may show that it is better read with O_DIRECT.
        past_host: Whether what lands on a device does so without host memory.
    """

    file: str
    engine: str
    why: str
    cached: float | None = None
    direct: bool = False
    cold: bool = False
    either: bool = False
    past_host: bool = False


PastHost = Callable[[str, int | None], tuple[bool, str]]
"""Whether cuFile is to read a file onto devices, and why, in words.

Called with the path, and the bytes that the load reads from disk (they tell whether a probe is
worth its time; None if the user asked for cuFile).
"""


def choose(
    wanted: Sequence[tuple[Source, int]],
    engine: str,
    page_cache: str = "auto",
    past: PastHost | None = None,
    *,
    keeps: bool = True,
) -> tuple[Leg, ...]:
    """Chooses an engine for each file, which comes with the bytes that are to be read of it.

    Default: the page cache may keep what is read, if `page_cache` does not say otherwise. With
    `past` something lands on a device; the engines "pread" and "direct" say how the pinned stage
    reads.
    """
    inner, unit = engine, None
    if past is not None:
        inner, unit = "auto" if engine in _ON_DEVICES else engine, buffers.PAGE
    legs = _legs(wanted, inner, page_cache, unit)
    made = legs
    if (keeps or page_cache == "keep") and engine != "direct" and True in map(_DIRECT, legs):
        made = _next_load(legs, wanted, page_cache)
    if past is not None:
        cold = sum(nbytes for leg, (_, nbytes) in zip(legs, wanted, strict=True) if leg.direct)
        pairs = zip(legs, made, strict=True)
        made = [_onto_device(*pair, cold, engine, page_cache, past) for pair in pairs]
    for leg in made:
        _log(leg, engine, page_cache)
    return tuple(made)


def _next_load(legs: list[Leg], wanted: Sequence[tuple[Source, int]], page_cache: str) -> list[Leg]:
    """The legs, of which cold files are read through the page cache if it is to keep them."""
    if page_cache == "bypass":
        return legs
    keep, why = True, "page_cache='keep'"
    if page_cache == "auto":
        from mfload.io import probes
        from mfload.report import human

        nbytes, room = sum(each[1] for each in wanted), probes.memory_room(swap=False)
        keep, why = False, "not kept there: the available memory is unknown"
        if room is not None:
            keep = nbytes * _KEPT <= room[0]
            than = "kept there: at most" if keep else "not kept there: more than"
            why = f"{than} a quarter of the available {human(room[0])} ({human(nbytes)})"
    made: list[Leg] = []
    for leg in legs:
        if leg.direct:
            engine = "pread" if keep else "direct"
            why_not = f"{leg.why}, {why}"
            # Processes of one machine share what they read through the page cache.
            either = keep and page_cache == "auto" and local_processes() == 1
            leg = Leg(leg.file, engine, why_not, leg.cached, not keep, keep, either)
        made.append(leg)
    return made


def worth_a_trial(legs: Sequence[tuple[Leg, int]], later: int = 0) -> bool:
    """Whether files, with the bytes that are read of each, are to be tried while they are read.

    `later` bytes of files of which nothing is known yet follow. Warm ones among them, or those that
    cuFile reads, would say nothing about the others.
    """
    cold = beside = 0
    for leg, nbytes in legs:
        if (leg.direct or leg.cold) and leg.engine != "gds":
            cold += nbytes
        else:
            beside += nbytes
    return 0 < cold >= TRIED - later and beside * _BESIDE <= cold


def after_trial(leg: Leg, gain: float | None, direct: bool) -> Leg:
    """The leg of a file of which a trial has shown how many times as fast O_DIRECT is."""
    if gain is None or not leg.either:
        return leg
    why = f"{leg.why}; O_DIRECT was {gain:.2f} times as fast in a trial"
    if not direct:
        from mfload.io.trial import WORTH

        reason = "not worth the next load's" if gain <= WORTH else "with too little left to change"
        return leg._replace(why=f"{why}, {reason}")
    why = f"{why}, and took over: the next load reads the disk again"
    engine = "direct" if leg.engine == "pread" else leg.engine
    return Leg(leg.file, engine, why, leg.cached, direct=True)


def _log(leg: Leg, asked: str, page_cache: str) -> None:
    """Logs a choice as information, and a fall-back as a warning.

    The import of `logging` takes as long as a small load. A program that has not imported it has no
    handler that takes information.
    """
    missed = page_cache == "bypass" and not leg.direct and leg.engine != "gds"
    if leg.engine != asked or missed:
        # A pinned stage that reads as asked is no fall-back.
        as_asked = asked in ("pinned", "direct" if leg.direct else "pread")
        meant = not missed and (asked == "auto" or (leg.engine == "pinned" and as_asked))
        if not meant or "logging" in sys.modules:
            import logging

            level = logging.INFO if meant else logging.WARNING
            text = "%s: %s (%s)"
            logging.getLogger("mfload").log(level, text, leg.file, leg.engine, leg.why)


def _legs(
    wanted: Sequence[tuple[Source, int]], engine: str, page_cache: str, unit: int | None
) -> list[Leg]:
    """The leg of each file (see `_leg`); those of a network disk are opened at once."""
    found = dict[int, Leg]()

    def look(n: int) -> None:
        source, nbytes = wanted[n]
        leg, disk = _leg(source, nbytes, engine, page_cache, unit), getattr(source, "disk", None)
        found[n] = leg if disk is None else _over_network(leg, disk, engine, page_cache)

    # Of a server none is opened here.
    waits = [source.costs.concurrency or 1 for source, _ in wanted if source.file is not None]
    at_once(look, range(len(wanted)), min(waits, default=1))
    return [found[n] for n in range(len(wanted))]


def _over_network(leg: Leg, disk: Any, engine: str, page_cache: str) -> Leg:
    """The leg of a file on a network disk: what is not known to be cached is waited for."""
    why, direct = f"on {disk.name}: {leg.why}", leg.direct
    if leg.engine == "mmap":
        return leg._replace(why=f"{why}; slow there, since each page is waited for on its own")
    if direct and not disk.direct:
        if engine == "direct" or page_cache == "bypass":
            return leg._replace(why=f"{why}; {disk.name} may read slowly past the page cache")
        # A trial alone tells whether it does.
        either = page_cache == "auto" and local_processes() == 1
        why, direct = f"{why}, and O_DIRECT is not known to be good there", False
        leg = Leg(leg.file, "pread", why, leg.cached, either=either)
    cold = not direct and (leg.cached or 0) < _WARM
    return leg._replace(why=why, direct=direct, cold=cold)


def _leg(source: Source, nbytes: int, engine: str, page_cache: str, unit: int | None = None) -> Leg:
    """The leg of a file, with O_DIRECT wherever it is cold.

    `unit` is the most bytes to which direct reads may have to round.
    """
    if source.file is None:
        check_engine(source, engine)
        why = getattr(source, "why", "not a local file")  # A peer says more.
        return Leg(source.name, source.engine, why)
    bypass = page_cache == "bypass"
    if engine == "auto" and nbytes < SMALL and not bypass:
        # Not worth asking the cache, and small reads of one file should find it there again.
        return Leg(source.name, "pread", "small read")
    if engine in ("pread", "mmap"):
        return Leg(source.name, engine, "asked for")
    from mfload.io import probes  # Small reads ask the kernel nothing.

    with source.open() as opened:
        units = probes.direct_alignment(opened.fd)
        takes = units is not None and (unit is None or units[1] <= unit)
        if engine == "direct" or bypass:
            if takes:
                why = "asked for" if engine == "direct" else "page_cache='bypass'"
                return Leg(source.name, "direct", why, direct=True)
            asked = "direct asked for" if engine == "direct" else "page_cache='bypass'"
            return Leg(source.name, "pread", f"{asked}; the file takes no O_DIRECT")
        cached = probes.cached_share(opened.fd, source.size)
    why = "the kernel does not say what it caches"
    if cached is not None:
        why = f"{cached:.0%} in the page cache"
    if engine != "auto":
        why = f"{engine} asked for, and nothing lands on a device; {why}"
    if cached is None or cached >= _WARM:
        return Leg(source.name, "pread", why, cached)
    if not takes:
        return Leg(
            source.name, "pread", f"{why}, but the file takes no O_DIRECT", cached, cold=True
        )
    return Leg(source.name, "direct", why, cached, direct=True)


def _onto_device(
    leg: Leg, kept: Leg, cold: int, engine: str, page_cache: str, past: PastHost
) -> Leg:
    """The leg onto a device: past the host, if cuFile reads it so, or `kept`.

    Of all files, `cold` bytes are to come from disks.
    """
    why = f"{'O_DIRECT' if kept.direct else 'buffered'}: {kept.why}"
    # cuFile, where it is real, is preferred to both ways through the host.
    if engine == "gds" or (engine == "auto" and leg.direct and page_cache != "keep"):
        real, said = past(leg.file, None if engine == "gds" else cold)
        if real:
            return leg._replace(engine="gds", why=f"{leg.why}; {said}", past_host=True)
        why = f"{why}; {'gds asked for, but ' if engine == 'gds' else 'no gds: '}{said}"
    return kept._replace(engine="pinned", why=why)
