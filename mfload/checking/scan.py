"""Shows blocks of files to an observer, in bounded memory, as a load reads them.

A block without segments stays in the slot of its reader, where the observer hashes it, compares
it or writes it elsewhere. So the memory held is one slot a reader.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller

from mfload.index import Piece
from mfload.io import route as routing
from mfload.io.engine import Observer
from mfload.io.pread import SHOWN
from mfload.io.route import Leg
from mfload.load_options import LoadOptions
from mfload.loading import execute
from mfload.planning.blocks import Block
from mfload.planning.memory import too_small
from mfload.planning.plan import Plan
from mfload.report import human
from mfload.sources import together
from mfload.sources.base import Source

BLOCK = 1 << 20
"""Bytes a read. Two slots of this size stay in a core's cache until they are looked at."""

_CACHED = 0.95  # Of a file: what it lacks is read slower by a map than by a read.

Advance = Callable[[int], None] | None


def scan(
    sources: Sequence[Source],
    blocks: Sequence[Block],
    observer: Observer,
    options: LoadOptions,
    advance: Advance = None,
    route: dict[int, Leg] | None = None,
) -> tuple[str, ...]:
    """Shows an observer every block once, in the threads that read; returns notes.

    Blocks of one file come in file order and don't overlap. One of more than `SHOWN` bytes is
    shown in parts. Raises SourceChangedError if a file is no longer the one whose header was read.
    """
    blocks = [block for block in blocks if block.nbytes]
    sizes, largest = total_sizes(blocks), max((each.nbytes for each in blocks), default=0)
    route = route or choose_route(sources, sizes, options)
    direct = any(leg.direct for leg in route.values())
    concurrency = sources[0].costs.concurrency if sources else None
    usual = execute.reader_threads(direct, concurrency=concurrency)
    threads = readers(options, min(largest, SHOWN), usual)
    plan = Plan((), (), tuple(blocks), largest)
    given = plan, [], sources, route, threads, options.deadline, advance, observer
    notes, _ = execute.Transfer(*given).run()
    check_unchanged(sources, sizes, options)
    return notes


def readers(options: LoadOptions, block: int, usual: int = 1) -> int:
    """The number of threads that scan blocks of up to `block` bytes, within `max_host_overhead`.

    The page at each end of a slot, 16 KiB a thread at most, is not counted.
    Raises UsageError if there is no room for one, or for as many as are asked for.
    """
    count, limit = options.threads or usual, options.max_host_overhead
    if limit is None or not block:
        return count
    slots = 2 * block  # A block, and what it is compared with, or written from.
    if options.threads is None:
        count = max(1, min(count, limit // slots))
    if count * slots > limit:
        raise too_small("max_host_overhead", count * slots, limit)
    return count


def joined(ranges: Sequence[Piece], gap: int, most: int) -> Iterator[tuple[Block, list[int]]]:
    """Joins ranges that lie next to each other, in file order, to blocks of up to `most` bytes.

    Each block comes with the numbers of its ranges. Gaps of up to `gap` bytes are read over, and a
    longer range is a block of its own.
    """
    numbers: list[int] = []
    source = start = end = -1
    places = [piece.source << 64 | piece.offset for piece in ranges]
    for number in sorted(range(len(ranges)), key=places.__getitem__):
        piece = ranges[number]
        stop = piece.offset + piece.nbytes
        if piece.source == source and piece.offset - end <= gap and stop - start <= most:
            end = max(end, stop)
        else:
            if numbers:
                yield Block(source, start, end - start, ()), numbers
            numbers, source, start, end = [], piece.source, piece.offset, stop
        numbers.append(number)
    if numbers:
        yield Block(source, start, end - start, ()), numbers


def scan_ranges(
    sources: Sequence[Source],
    ranges: Sequence[Block],
    observer: Observer,
    options: LoadOptions,
    advance: Advance = None,
) -> tuple[str, ...]:
    """Shows an observer long ranges, each of which it must see in order (see `scan`).

    One of a file in the page cache stays whole, so that the thread that takes it never waits for
    another one, unless memory is limited. Others are cut to reads, so that the next ones are read
    while one is hashed.
    """
    route = choose_route(sources, total_sizes(ranges), options)

    def cached(number: int) -> bool:
        return (route[number].cached or 0) >= _CACHED  # Or unknown, as on some kernels.

    whole = set(filter(cached, route)) if options.max_host_overhead is None else set[int]()
    rows = [
        [part] if part.source in whole and part.nbytes > SHOWN else cut(part) for part in ranges
    ]
    return scan(sources, in_turns(rows, options), observer, options, advance, route)


def in_turns(rows: Iterable[list[Block]], options: LoadOptions) -> list[Block]:
    """Takes blocks from rows of them, each of a file or a part of one, in turns.

    As many rows at once as there may be threads: each hashes another one, since threads can't
    share the hash of a tensor or a file.
    """
    lanes = options.threads or execute.reader_threads(direct=True)
    files = sorted(rows, key=len, reverse=True)
    found: list[Block] = []
    for first in range(0, len(files), lanes):
        for row in itertools.zip_longest(*files[first : first + lanes]):
            found += filter(None, row)
    return found


def cut(part: Block) -> list[Block]:
    """A range cut at offsets that are multiples of the block size."""
    end = part.offset + part.nbytes
    inner = range((part.offset // BLOCK + 1) * BLOCK, end, BLOCK)
    edges = [part.offset, *inner, end] if part.nbytes else []
    return [Block(part.source, a, b - a, ()) for a, b in itertools.pairwise(edges)]


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


def check_unchanged(
    sources: Sequence[Source], numbers: Iterable[int], options: LoadOptions
) -> None:
    """Raises SourceChangedError if a file is no longer the one whose header was read."""
    look = partial(together, methodcaller("check"), [sources[number] for number in numbers])
    options.deadline.bound(look, "looking at the files again")


def throughput(nbytes: int, seconds: float) -> str:
    """Bytes that were read, the time and the speed, for people."""
    speed = nbytes / seconds / 2**30 if seconds else 0.0
    return f"{human(nbytes)} in {seconds:.3g} s, {speed:.2f} GiB/s"
