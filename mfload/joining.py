"""Joining: segments that follow each other become one, and neighbours one read. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mfload.io.blocks import Block, Copy, Costs, Segment


class Joiner:
    """Makes one segment of plain bytes that follow each other in file and memory alike."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, Segment]] = []
        self._source = -1
        self._run = (0, 0, -1, 0)
        self._file_end = self._memory_end = -1

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
            self._segments.append((source, Segment(offset, nbytes, buffer, at, copy)))
            return
        self._source = source
        self._run = offset, nbytes, buffer, at
        self._file_end, self._memory_end = offset + nbytes, at + nbytes

    def _flush(self) -> None:
        if self._run[1]:
            self._segments.append((self._source, Segment(*self._run)))
        self._run = (0, 0, -1, 0)
        self._file_end = -1

    def end(self) -> list[tuple[int, Segment]]:
        """All segments, in the order in which they came."""
        self._flush()
        return self._segments


def blocks(segments: list[tuple[int, Segment]], costs: Costs) -> Iterator[Block]:
    """Groups segments into reads of at most `costs.block` bytes."""
    group: list[Segment] = []
    group_source = -1
    for source, whole in segments:
        for segment in _split(whole, costs.block):
            first = group[0].offset if group else 0
            last = group[-1].offset + group[-1].nbytes if group else 0
            fits = (
                bool(group)
                and source == group_source
                # One buffer a block: then a read that needs no placing needs no slot.
                and segment.buffer == group[-1].buffer
                and 0 <= segment.offset - last < costs.merge_gap
                and segment.offset + segment.nbytes - first <= costs.block
            )
            if group and not fits:
                yield _block(group_source, group)
                group = []
            group.append(segment)
            group_source = source
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
