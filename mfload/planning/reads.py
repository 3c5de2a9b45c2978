"""Reads: requests with places become segments, and neighbours one read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mfload.index import TensorInfo
from mfload.planning import boxes, scatter
from mfload.planning.blocks import Block, Copy, Costs, Segment
from mfload.planning.requests import Request

# Segments of several buffers are read at once up to so many bytes. Beyond, a read of its own
# costs little, and one that has a single place needs no slot, whatever the engine.
_MIXED = 1 << 20


class Wanted(NamedTuple):
    """A request, where its bytes follow each other in the file (or None), and where they go."""

    request: Request
    nbytes: int
    contiguous: int | None
    buffer: int
    at: int


class Gathering:
    """Takes needs in file order, and makes blocks of them.

    Attributes:
        staged: Whether some of what was taken has to pass through a slot.
    """

    def __init__(self, costs: Costs) -> None:
        self.staged = False
        self._costs = costs
        self._held: list[Wanted] = []
        self._known: dict[Any, list[scatter.Cell]] = {}
        self._found: list[tuple[int, Segment | Block]] = []
        # Plain bytes that follow each other, or a range that is shared.
        self._source = -1
        self._run = (0, 0, -1, 0)
        self._file_end = self._memory_end = -1
        self._shared: list[Segment] = []
        self._shared_start = self._shared_end = self._shared_wanted = 0

    def add(self, wanted: Wanted) -> None:
        """Takes a need of a tensor that others may want as well; they follow each other."""
        held = self._held
        if held and not _same(held[0].request.info, wanted.request.info):
            self._flush()
        self._held.append(wanted)

    def alone(
        self, request: Request, nbytes: int, contiguous: int | None, buffer: int, at: int
    ) -> None:
        """Takes a need that shares no byte with another."""
        if contiguous is not None:
            self.join(request.info.pieces[0].source, contiguous, nbytes, buffer, at)
        elif request.dtype is request.info.dtype and scatter.is_box(request):
            self._together([Wanted(request, nbytes, contiguous, buffer, at)])
        else:
            for source, segment in boxes.segments(request, buffer, at, self._costs):
                self.join(source, *segment)

    def end(self) -> tuple[Block, ...]:
        """The blocks."""
        if self._held:
            self._flush()
        self._end_run()
        return tuple(blocks(self._found, self._costs))

    def _flush(self) -> None:
        held, self._held = self._held, []
        if len(held) == 1:
            self.alone(*held[0])
            return
        found: list[Wanted] = []
        for wanted in held:
            if scatter.is_box(wanted.request):
                found.append(wanted)
            else:
                self.alone(*wanted)
        if found:
            self._together(found)

    def _together(self, found: list[Wanted]) -> None:
        piece = found[0].request.info.pieces[0]
        source, base = piece.source, piece.offset
        for offset, nbytes, wanted, parts in self._cells([box.request for box in found]):
            if len(parts) == 1 and parts[0].copy is None:
                box = found[parts[0].box]
                at = box.at + parts[0].at
                self.join(source, base + offset, nbytes, box.buffer, at)
                continue
            segments = [
                Segment(base + first, length, found[n].buffer, found[n].at + at, copy)
                for n, first, length, at, copy in parts
            ]
            self.share(source, base + offset, nbytes, wanted, segments)

    def _cells(self, requests: list[Request]) -> list[scatter.Cell]:
        """Cells of a tensor; layers of a model are alike, so they are kept."""
        info = requests[0].info
        plain = all(request.dtype is info.dtype for request in requests)
        if not plain:
            # An error about a value names the tensor, so these are its own.
            return scatter.cells(requests, self._costs)
        key = info.dtype.name, info.shape, tuple(request.selection for request in requests)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = scatter.cells(requests, self._costs)
        return known

    def join(
        self,
        source: int,
        offset: int,
        nbytes: int,
        buffer: int,
        at: int,
        copy: Copy | None = None,
    ) -> None:
        """Takes the next segment; plain bytes that follow the last in file and memory join it."""
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
        self._end_run()
        if copy is not None:
            self.staged = True
            self._found.append((source, Segment(offset, nbytes, buffer, at, copy)))
            return
        self._source = source
        self._run = offset, nbytes, buffer, at
        self._file_end, self._memory_end = offset + nbytes, at + nbytes

    def share(
        self, source: int, offset: int, nbytes: int, wanted: int, segments: Iterable[Segment]
    ) -> None:
        """Takes the next range, no longer than a slot, whose bytes have several places.

        `wanted` of its bytes are asked for; `segments` say who takes what, in file order.
        """
        fits = (
            bool(self._shared)
            and source == self._source
            and 0 <= offset - self._shared_end < max(1, self._costs.merge_gap)
            and offset + nbytes - self._shared_start <= self._costs.slot
        )
        if not fits:
            self._end_run()
            self._source, self._shared_start = source, offset
        self.staged = True
        self._shared += segments
        self._shared_wanted += wanted
        self._shared_end = offset + nbytes

    def _end_run(self) -> None:
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
        plain = whole.copy is None and whole.nbytes > costs.block
        for segment in _split(whole, costs.block) if plain else (whole,):
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
    """Cuts plain bytes at file offsets that are multiples of the block size, as direct I/O likes.

    What has to be placed was made small enough before.
    """
    offset, end = segment.offset, segment.offset + segment.nbytes
    while offset < end:
        stop = min(end, (offset // limit + 1) * limit)
        yield Segment(offset, stop - offset, segment.buffer, segment.at + offset - segment.offset)
        offset = stop


def _same(one: TensorInfo, other: TensorInfo) -> bool:
    if one is other:
        return True
    alike = one.pieces[0] == other.pieces[0] and one.shape == other.shape
    return alike and one.dtype is other.dtype
