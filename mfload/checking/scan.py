"""Reads lots for a place that hashes, compares or writes them, in bounded memory.

The reads are those of a load: the same engines, threads, deadline and errors. What they are for
stays in the memory of a reader, where the place takes it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mfload.index import Piece
from mfload.io import route as routing
from mfload.io.engine import Place
from mfload.io.route import Leg
from mfload.loading import execute
from mfload.options import LoadOptions
from mfload.planning.blocks import Block, Lot
from mfload.planning.lots import cut, raw
from mfload.planning.memory import Ledger
from mfload.planning.plan import Plan
from mfload.report import human
from mfload.sources.base import Source

BLOCK = 1 << 20
"""Bytes a read. Two slots of this size stay in a core's cache until they are looked at."""
SHOWN = 4 << 20
"""Bytes a read of a long range that the page cache holds."""

_CACHED = 0.95  # Of a file: what it lacks is read slower by a map than by a read.

Advance = Callable[[int], None] | None


def scan(
    sources: Sequence[Source],
    lots: Sequence[Lot],
    place: Place,
    options: LoadOptions,
    advance: Advance = None,
    route: dict[int, Leg] | None = None,
    *,
    shrinks: bool = False,
) -> tuple[str, ...]:
    """Hands all lots to a place, in the threads that read; returns notes.

    With `shrinks`, fewer threads than are asked for read lots that are too large for the limit.
    Raises SourceChangedError if a file is no longer the one whose header was read.
    """
    if not lots:
        return ()
    blocks = [block for lot in lots for block in lot.blocks]
    sizes, held = total_sizes(blocks), max(lot.held for lot in lots)
    route = route or choose_route(sources, sizes, options)
    direct = any(leg.direct for leg in route.values())
    concurrency = sources[0].costs.concurrency if sources else None
    usual = execute.reader_threads(direct, concurrency=concurrency)
    threads = Ledger(options).readers(held, options.threads, usual, fewer=shrinks)
    made: Any = tuple(lots)
    plan = Plan((), (), made, 0)
    given = plan, [], sources, route, threads, options.deadline, advance
    notes, _ = execute.Transfer(*given, place=place).run()
    return notes


def scan_ranges(
    sources: Sequence[Source],
    ranges: Sequence[Block],
    place: Place,
    options: LoadOptions,
    advance: Advance = None,
) -> tuple[str, ...]:
    """Hands long ranges, each of which it must see in order, to a place (see `scan`).

    One of a file in the page cache is a single lot, so that the thread that takes it never waits
    for another one, unless memory is limited. Others are cut to reads, so that the next ones are
    read while one is hashed.
    """
    route = choose_route(sources, total_sizes(ranges), options)

    def cached(number: int) -> bool:
        return (route[number].cached or 0) >= _CACHED  # Or unknown, as on some kernels.

    whole = set(filter(cached, route)) if Ledger(options).given is None else set[int]()
    rows = [
        [raw(*cut(part, SHOWN))] if part.source in whole else list(map(raw, cut(part, BLOCK)))
        for part in ranges
        if part.nbytes
    ]
    return scan(sources, in_turns(rows, options), place, options, advance, route)


def in_turns(rows: Iterable[list[Lot]], options: LoadOptions) -> list[Lot]:
    """Takes lots from rows of them, each of a file or a part of one, in turns.

    As many rows at once as there may be threads: each hashes another one, since threads can't
    share the hash of a tensor or a file.
    """
    lanes = options.threads or execute.reader_threads(direct=True)
    files = sorted(rows, key=len, reverse=True)
    found: list[Lot] = []
    for first in range(0, len(files), lanes):
        for row in itertools.zip_longest(*files[first : first + lanes]):
            found += filter(None, row)
    return found


def gap(sources: Sequence[Source]) -> int:
    """Bytes that are cheaper read over than skipped."""
    return sources[0].costs.merge_gap if sources else 0


def total_sizes(ranges: Iterable[Block | Piece]) -> dict[int, int]:
    """The bytes to read of each source, by number."""
    sizes = collections.Counter[int]()
    for source, _, nbytes, *_ in ranges:
        sizes[source] += nbytes
    return sizes


def choose_route(
    sources: Sequence[Source], sizes: Mapping[int, int], options: LoadOptions
) -> dict[int, Leg]:
    """The engine of each file, given the bytes to read of it by number."""
    wanted = [(sources[number], nbytes) for number, nbytes in sizes.items()]
    choose = lambda: routing.choose(wanted, options.engine, options.page_cache)  # noqa: E731
    return dict(zip(sizes, options.deadline.bound(choose, "opening the files"), strict=True))


def throughput(nbytes: int, seconds: float) -> str:
    """Bytes that were read, the time and the speed, for people."""
    speed = nbytes / seconds / 2**30 if seconds else 0.0
    return f"{human(nbytes)} in {seconds:.3g} s, {speed:.2f} GiB/s"
