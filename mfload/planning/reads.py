"""Joining: segments that follow each other become one, and neighbours one read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mfload.planning.blocks import Block, Copy, Costs, Segment

# Segments of several buffers are read at once up to so many bytes. Beyond, a read of its own
# costs little, and one that has a single place needs no slot, whatever the engine.
_MIXED = 1 << 20


class Joiner:
    """Makes one segment of plain bytes that follow each other in file and memory alike.

    Args:
        costs: What the source declares.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._found: list[tuple[int, Segment | Block]] = []
        self._source = -1
        self._run = (0, 0, -1, 0)
        self._file_end = self._memory_end = -1
        self._shared: list[Segment] = []
        self._shared_start = self._shared_end = self._shared_wanted = 0

    def add(
        self,
        source: int,
        offset: int,
        nbytes: int,
        buffer: int,
        at: int,
        copy: Copy | None = None,
    ) -> None:
        """Takes the next segment."""
        first, length, held, start = self._run
        if (
            offset == self._file_end
            and at == self._memory_end
            and copy is None
            and buffer == held
            and source == self._source
        ):
            self._run = first, length + nbytes, held, start
            self._file_end += nbytes
            self._memory_end += nbytes
            return
        self._flush()
        if copy is not None:
            self._found.append((source, Segment(offset, nbytes, buffer, at, copy)))
            return
        self._source = source
        self._run = offset, nbytes, buffer, at
        self._file_end, self._memory_end = offset + nbytes, at + nbytes

    def share(
        self, source: int, offset: int, nbytes: int, wanted: int, segments: Iterable[Segment]
    ) -> None:
        """Takes the next range whose bytes have several places, or have to be picked apart.

        Args:
            source: The source's number.
            offset: First byte.
            nbytes: Bytes, no more than a slot holds.
            wanted: How many of them anybody wants.
            segments: Who takes what, in file order.
        """
        fits = (
            bool(self._shared)
            and source == self._source
            and 0 <= offset - self._shared_end < max(1, self._costs.merge_gap)
            and offset + nbytes - self._shared_start <= self._costs.slot
        )
        if not fits:
            self._flush()
            self._source, self._shared_start = source, offset
        self._shared += segments
        self._shared_wanted += wanted
        self._shared_end = offset + nbytes

    def _flush(self) -> None:
        if self._run[1]:
            self._found.append((self._source, Segment(*self._run)))
            self._run = (0, 0, -1, 0)
            self._file_end = -1
        elif self._shared:
            start, end = self._shared_start, self._shared_end
            parts = tuple(self._shared)
            block = Block(self._source, start, end - start, parts, self._shared_wanted)
            self._found.append((self._source, block))
            self._shared, self._shared_wanted = [], 0

    def end(self) -> list[tuple[int, Segment | Block]]:
        """All segments and shared blocks, in the order in which they came."""
        self._flush()
        return self._found


def blocks(found: Iterable[tuple[int, Segment | Block]], costs: Costs) -> Iterator[Block]:
    """Groups segments into reads of at most `costs.block` bytes."""
    group: list[Segment] = []
    group_source = -1
    limit = costs.block
    for source, whole in found:
        if isinstance(whole, Block):
            if group:
                yield _block(group_source, group)
                group = []
            yield whole
            continue
        for segment in _split(whole, costs.block):
            most = limit if group else costs.block
            if segment.copy is not None:
                most = min(most, costs.slot)
            if group:
                last = group[-1]
                if segment.buffer != last.buffer:
                    most = min(most, _MIXED)
                if (
                    source == group_source
                    and 0 <= segment.offset - last.offset - last.nbytes < costs.merge_gap
                    and segment.offset + segment.nbytes - group[0].offset <= most
                ):
                    group.append(segment)
                    limit = most
                    continue
                yield _block(group_source, group)
                most = costs.block if segment.copy is None else costs.slot
            group, group_source, limit = [segment], source, most
    if group:
        yield _block(group_source, group)


def _block(source: int, group: list[Segment]) -> Block:
    first, last = group[0], group[-1]
    return Block(source, first.offset, last.offset + last.nbytes - first.offset, tuple(group))


def _split(segment: Segment, limit: int) -> Iterator[Segment]:
    """Cuts plain bytes at file offsets that are multiples of the block size.

    So all inner cuts suit direct I/O. What has to be placed was made small enough before.
    """
    if segment.copy is not None or segment.nbytes <= limit:
        yield segment
        return
    offset, end = segment.offset, segment.offset + segment.nbytes
    while offset < end:
        stop = min(end, (offset // limit + 1) * limit)
        yield Segment(offset, stop - offset, segment.buffer, segment.at + offset - segment.offset)
        offset = stop
