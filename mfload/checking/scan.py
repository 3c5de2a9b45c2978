"""Reads ranges of files and shows them to an observer, in bounded memory, as a load reads them.

A block without segments stays in the slot of its reader, where the observer hashes it, compares
it or writes it elsewhere. So the memory held is one slot a reader.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mfload.index import TensorInfo
from mfload.io import probes, route as routing
from mfload.io.route import Leg
from mfload.loading import execute
from mfload.options import LoadOptions
from mfload.planning.blocks import Block, Observer
from mfload.planning.planner import Plan
from mfload.sources.local import LocalFile

BLOCK = 4 << 20
"""Bytes a read. Slots of this size stay in a processor's cache until they are looked at."""

_MOST_THREADS = 8
# Reads past the page cache wait for the disk, not for a core.
_DIRECT_THREADS = 4

Advance = Callable[[int], None] | None


class Range(NamedTuple):
    """Bytes of one source."""

    source: int
    offset: int
    nbytes: int


def span(info: TensorInfo) -> Range:
    """The bytes of a tensor."""
    (piece,) = info.pieces
    return Range(piece.source, piece.offset, piece.nbytes)


def scan(
    sources: Sequence[LocalFile],
    ranges: Iterable[Range],
    observer: Observer,
    options: LoadOptions,
    advance: Advance = None,
    *,
    interleave: bool = False,
    block: int | None = BLOCK,
) -> tuple[str, ...]:
    """Shows an observer every byte of the ranges once, in the threads that read.

    Ranges of one file come in file order and don't overlap. A read takes at most `block` bytes;
    None: each range at once. `interleave` reads files in turns, for work that threads can't share
    within a file, such as its SHA-256. Returns notes.
    """
    by_file: dict[int, list[Range]] = {}
    for each in ranges:
        by_file.setdefault(each.source, []).append(each)
    sizes = {number: sum(part.nbytes for part in parts) for number, parts in by_file.items()}
    route = choose_route(sources, sizes, options)
    threads = options.threads or _threads(route.values())
    cuts = [_cut(parts, block) for parts in by_file.values()]
    blocks = tuple(_in_turns(cuts, threads) if interleave else itertools.chain(*cuts))
    notes = execute.run(
        Plan((), (), blocks, max((each.nbytes for each in blocks), default=0)),
        [],
        sources,
        [route.get(number) for number in range(len(sources))],
        threads=threads,
        deadline=options.deadline,
        advance=advance,
        observer=observer,
    )
    check_unchanged(sources, by_file, options)
    return notes


def choose_route(
    sources: Sequence[LocalFile], sizes: Mapping[int, int], options: LoadOptions
) -> dict[int, Leg]:
    """The engine of each file, given the bytes to read of it by number."""
    wanted = [(sources[number], nbytes) for number, nbytes in sizes.items()]
    choose = lambda: routing.choose(wanted, options.engine)  # noqa: E731
    return dict(zip(sizes, options.deadline.bound(choose, "opening the files"), strict=True))


def check_unchanged(
    sources: Sequence[LocalFile], numbers: Iterable[int], options: LoadOptions
) -> None:
    """Raises SourceChangedError if a file is no longer the one whose header was read."""
    for source in (sources[number] for number in numbers):
        options.deadline.bound(source.check, "looking at the files again", source.path)


def _threads(route: Iterable[Leg]) -> int:
    count = min(probes.cores(), _MOST_THREADS)
    return max(count, _DIRECT_THREADS) if any(leg.engine == "direct" for leg in route) else count


def _cut(parts: Iterable[Range], block: int | None) -> Iterator[Block]:
    """Ranges as reads, cut at offsets that are multiples of the block size."""
    for source, offset, nbytes in parts:
        end = offset + nbytes
        while offset < end:
            stop = end if block is None else min(end, (offset // block + 1) * block)
            yield Block(source, offset, stop - offset, ())
            offset = stop


def _in_turns(files: Iterable[Iterator[Block]], lanes: int) -> Iterator[Block]:
    """A block of each of `lanes` files in turn; when one ends, the next takes its lane."""
    waiting, running = collections.deque(files), collections.deque[Iterator[Block]]()
    while waiting or running:
        while waiting and len(running) < lanes:
            running.append(waiting.popleft())
        file = running.popleft()
        for block in itertools.islice(file, 1):
            yield block
            running.append(file)
