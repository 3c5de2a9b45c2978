"""The plan: from needs and declared costs to buffers, blocks and segments. Pure.

Two processes that see the same headers make the same plan. Nothing here opens a file or looks
at the machine; what depends on those (engine, page cache) is the route.

Where tensors land. The kernel's copy is several times slower when (destination - file offset)
mod 4096 is a small positive number, and adapters need each tensor on a multiple of some
alignment. So a tensor goes to the next position p with
p = file offset rounded down to its alignment (mod 4096): then the difference is zero or a small
negative number, and tensors that follow each other in the file follow each other in memory, so
one read fills them all. Small tensors only get their alignment: padding would outweigh them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mfload import runs
from mfload.io.blocks import Block, Copy, Costs, Segment
from mfload.placement import Need

BUFFER = 64 << 20
"""Bytes a buffer at most, so that no small tensor keeps much memory alive; a page that leads
to the place of the first comes on top."""

_PAGE = 4096
_SMALL = 64 << 10


class Place(NamedTuple):
    """Where a need's result lies.

    Attributes:
        need: What was asked for.
        buffer: Number of the buffer.
        at: First byte in the buffer.
    """

    need: Need
    buffer: int
    at: int


class BufferSpec(NamedTuple):
    """A buffer to be had.

    Attributes:
        nbytes: Length in bytes.
        source: The source to map, None for memory.
    """

    nbytes: int
    source: int | None = None


class Plan(NamedTuple):
    """What a load reads and where it lands.

    Attributes:
        places: A place for each need, in the order of the needs.
        buffers: The buffers to be had.
        blocks: The reads, in file order.
        staged: Bytes of the longest block that must pass through a slot, 0 for none.
    """

    places: tuple[Place, ...]
    buffers: tuple[BufferSpec, ...]
    blocks: tuple[Block, ...]
    staged: int

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays asked for."""
        return sum(place.need.nbytes for place in self.places)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the sources."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def wanted_bytes(self) -> int:
        """Bytes read that were asked for."""
        return sum(seg.wanted for block in self.blocks for seg in block.segments)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the result that lie in maps of the files."""
        mapped = {n for n, spec in enumerate(self.buffers) if spec.source is not None}
        return sum(place.need.nbytes for place in self.places if place.buffer in mapped)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory held for the result, padding counted in."""
        return sum(spec.nbytes for spec in self.buffers if spec.source is None)

    def tensors_of(self, block: Block) -> list[str]:
        """Names of the tensors that a block holds bytes of."""
        end = block.offset + block.nbytes
        return [
            place.need.info.name
            for place in self.places
            for piece in place.need.info.pieces
            if piece.source == block.source
            and piece.offset < end
            and piece.offset + piece.nbytes > block.offset
        ]


def make(
    needs: Sequence[Need],
    *,
    alignment: int | None = None,
    costs: Costs | None = None,
    separate: frozenset[int] = frozenset(),
    mapped: dict[int, int] | None = None,
) -> Plan:
    """Plans a load.

    Args:
        needs: What is wanted; a need may come twice.
        alignment: Bytes on which every tensor must lie; None for its element's size.
        costs: What the sources declare.
        separate: Positions of the needs that get a buffer each, beginning with the tensor: for
            memory that is not ours.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes. Only
            what is contiguous, unconverted and aligned in the file is; the rest is read.

    Returns:
        The plan.
    """
    costs = costs or Costs()
    layout = _Layout(alignment, mapped or {})
    joiner = _Joiner()
    places: list[Place | None] = [None] * len(needs)
    for number in sorted(range(len(needs)), key=lambda n: _file_order(needs[n])):
        need = needs[number]
        nbytes = need.nbytes
        contiguous = runs.contiguous(need)
        buffer, at = layout.place(need, nbytes, contiguous, alone=number in separate)
        places[number] = Place(need, buffer, at)
        if layout.is_map(buffer) or not nbytes:
            continue
        if contiguous is not None:
            joiner.add(need.info.pieces[0].source, contiguous, nbytes, buffer, at)
        else:
            for source, segment in runs.segments(need, buffer, at, costs):
                joiner.add(source, *segment)
    blocks = tuple(_blocks(joiner.end(), costs))
    return Plan(
        tuple(place for place in places if place is not None),
        layout.end(),
        blocks,
        max((block.nbytes for block in blocks if block.staged), default=0),
    )


def _file_order(need: Need) -> tuple[int, int]:
    piece = need.info.pieces[0]
    return piece.source, piece.offset


class _Layout:
    """Gives each need its buffer and position."""

    def __init__(self, alignment: int | None, mapped: dict[int, int]) -> None:
        self._specs: list[BufferSpec] = []
        self._alignment = alignment
        self._mapped = mapped
        self._maps: dict[int, int] = {}
        self._open = -1  # The buffer that still takes tensors.
        self._cursor = 0

    def place(
        self, need: Need, nbytes: int, contiguous: int | None, *, alone: bool
    ) -> tuple[int, int]:
        """Buffer and first byte."""
        if alone:
            return self._new(nbytes), 0
        piece = need.info.pieces[0]
        offset = piece.offset if contiguous is None else contiguous
        align = self._alignment or max(1, need.dtype.nbytes // need.dtype.elements)
        if self._mapped and contiguous is not None and offset % align == 0:
            mapped = self._map(piece.source)
            if mapped is not None:
                return mapped, offset
        at = self._next(nbytes, offset, align)
        if self._open < 0 or at + nbytes > BUFFER + _PAGE:
            self._close()
            self._open, self._cursor = self._new(0), 0
            at = self._next(nbytes, offset, align)
        self._cursor = at + nbytes
        return self._open, at

    def _next(self, nbytes: int, offset: int, align: int) -> int:
        if nbytes < _SMALL and self._cursor:
            # Follow the file where it leads to an aligned place; it mostly does.
            return -(-self._cursor // align) * align
        wanted = (offset // align * align) % _PAGE
        return self._cursor + (wanted - self._cursor) % _PAGE

    def _new(self, nbytes: int, source: int | None = None) -> int:
        self._specs.append(BufferSpec(nbytes, source))
        return len(self._specs) - 1

    def _map(self, source: int) -> int | None:
        if source in self._mapped and source not in self._maps:
            self._maps[source] = self._new(self._mapped[source], source)
        return self._maps.get(source)

    def is_map(self, buffer: int) -> bool:
        """Whether a buffer is a map of a file, which needs no reading."""
        return self._specs[buffer].source is not None

    def _close(self) -> None:
        if self._open >= 0:
            self._specs[self._open] = BufferSpec(self._cursor)

    def end(self) -> tuple[BufferSpec, ...]:
        """The buffers."""
        self._close()
        return tuple(self._specs)


class _Joiner:
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


def _blocks(segments: list[tuple[int, Segment]], costs: Costs) -> Iterator[Block]:
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
