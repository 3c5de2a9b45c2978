"""Reads ranges of files to look at them, in bounded memory, with what a load reads with.

Blocks without segments land in the slots of the readers and are shown to a witness: it hashes
them, compares them with another file, or writes them elsewhere. The memory held is a slot a reader.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.io import probes, route as routing
from mfload.loading import execute
from mfload.planning.blocks import Block, Observer
from mfload.planning.planner import Plan
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

_MOST_THREADS = 8
# Reads past the page cache wait for the disk, not for a core.
_DIRECT_THREADS = 4

BLOCK = 4 << 20
"""Bytes a read. Slots of this size stay in a processor's cache until they are looked at."""


class Range(NamedTuple):
    """Bytes of one source."""

    source: int
    offset: int
    nbytes: int


def look(
    sources: Sequence[LocalFile],
    ranges: Iterable[Range],
    observer: Observer,
    *,
    threads: int | None = None,
    engine: str = "auto",
    lanes: bool = False,
    deadline: Deadline | None = None,
    advance: Callable[[int], None] | None = None,
    block: int | None = BLOCK,
) -> tuple[str, ...]:
    """Shows a witness the bytes of ranges.

    Args:
        sources: The files, by number.
        ranges: What is to be read; those of one file in file order and without overlap.
        observer: Who is shown every byte once.
        threads: Readers at once; chosen where None.
        engine: "auto", "pread" or "direct".
        lanes: Whether several files are read in turns, for work that can't be shared out
            within a file, such as its SHA-256.
        deadline: When to give up.
        advance: Told of the bytes that came, in the calling thread.
        block: Bytes a read, at most; None to read the ranges as they are.

    Returns:
        What was decided on the way.

    Raises:
        SourceError: Bytes could not be had, or a file changed.
    """
    deadline = deadline or Deadline(None)
    wanted: dict[int, list[Range]] = {}
    for each in ranges:
        wanted.setdefault(each.source, []).append(each)
    used = [(sources[n], sum(part.nbytes for part in parts)) for n, parts in wanted.items()]
    legs = deadline.bound(lambda: routing.choose(used, engine), "opening the files")
    count = threads or workers(any(leg.engine == "direct" for leg in legs))
    queues = [_cut(parts, block) for parts in wanted.values()]
    blocks = tuple(_in_turns(queues, count) if lanes else _one_by_one(queues))
    route = dict(zip(wanted, legs, strict=True))
    notes = execute.run(
        Plan((), (), blocks, max((each.nbytes for each in blocks), default=0)),
        [],
        sources,
        [route.get(number) for number in range(len(sources))],
        threads=count,
        deadline=deadline,
        advance=advance,
        observer=observer,
    )
    for number in wanted:
        deadline.bound(sources[number].check, "looking at the files again", sources[number].path)
    return notes


def workers(direct: bool) -> int:
    """Readers at once where nobody says how many."""
    count = min(probes.cores(), _MOST_THREADS)
    return max(count, _DIRECT_THREADS) if direct else count


def _cut(parts: Iterable[Range], block: int | None) -> Iterator[Block]:
    """Ranges in reads, cut at offsets that are multiples of the block size."""
    for source, offset, nbytes in parts:
        end = offset + nbytes
        while offset < end:
            stop = end if block is None else min(end, (offset // block + 1) * block)
            yield Block(source, offset, stop - offset, ())
            offset = stop


def _one_by_one(queues: Iterable[Iterator[Block]]) -> Iterator[Block]:
    for queue in queues:
        yield from queue


def _in_turns(queues: Iterable[Iterator[Block]], lanes: int) -> Iterator[Block]:
    """A block of each of a few files in turn; as one ends, the next takes its lane."""
    waiting = collections.deque(queues)
    running: collections.deque[Iterator[Block]] = collections.deque()
    while waiting or running:
        while waiting and len(running) < lanes:
            running.append(waiting.popleft())
        queue = running.popleft()
        block = next(queue, None)
        if block is not None:
            yield block
            running.append(queue)
