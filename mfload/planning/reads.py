"""Reads: wanted bytes become segments, and neighbours in a file one block. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload.planning.blocks import LONG, Block, Costs, Segment
from mfload.planning.request import Request

if TYPE_CHECKING:
    from mfload.planning import boxes  # Whole tensors do without it.

# Segments of several buffers are read at once up to so many bytes. Beyond, a read of its own
# costs little, and one that has a single place needs no slot, whatever the engine.
_MIXED = 1 << 20


class Wanted(NamedTuple):
    """A request, its file offset if it lies there as it is wanted, and where its result goes."""

    request: Request
    contiguous: int | None
    buffer: int
    at: int


class Reads:
    """Takes what is wanted in file order, and makes blocks of it.

    Attributes:
        staged: Bytes of the longest block that must pass through a slot.
        decoding: Bytes that a reader holds for the block that takes most to decode.
    """

    def __init__(self, costs: Costs) -> None:
        self.staged = self.decoding = 0
        self._costs = costs
        self._gap = max(1, costs.merge_gap)
        self._blocks: list[Block] = []
        self._known: dict[Any, list[boxes.Cell]] = {}
        self._source = -1
        # Bytes that follow each other in the file and in memory: offset, bytes, buffer, place.
        self._run = (0, 0, -1, 0)
        # The current block: segments from `_start` to `_end`, which may reach `_most` bytes.
        self._group: list[Segment] = []
        self._start = self._end = self._most = self._wanted = 0
        self._slotted = False

    def run(self, source: int, offset: int, nbytes: int, buffer: int, at: int) -> None:
        """Takes the next bytes that go to one place as they are."""
        first, length, held, start = self._run
        follows = offset == first + length and at == start + length and buffer == held
        if follows and source == self._source:
            self._run = first, length + nbytes, held, start
        else:
            self._end_run(source)
            self._run = offset, nbytes, buffer, at

    def parts(self, wanted: Sequence[Wanted]) -> None:
        """Takes parts of one tensor; bytes that several want are read once, except with steps."""
        request, contiguous, buffer, at = wanted[0]
        if not request.info.simple:
            self._pieces(wanted)
            return
        if len(wanted) == 1 and contiguous is not None:
            source = request.info.pieces[0].source
            self.run(source, contiguous, request.nbytes, buffer, at)
            return
        together: list[Wanted] = []
        for each in wanted:
            selection = each.request.selection
            if selection is None or selection.simple:
                together.append(each)
            else:
                self._together([each])
        if together:
            self._together(together)

    def _pieces(self, wanted: Sequence[Wanted]) -> None:
        """Takes parts of a tensor that is not one raw range."""
        from mfload.planning import pieces  # Late: most tensors are.

        self._end_run(-1)
        for block in pieces.blocks(
            [(each.request, each.buffer, each.at) for each in wanted], self._costs
        ):
            if block.decode is not None:
                self.decoding = max(self.decoding, block.decode.held)
            elif block.staged:
                self.staged = max(self.staged, block.nbytes)
            self._blocks.append(block)

    def end(self) -> tuple[Block, ...]:
        """The blocks."""
        self._end_run(-1)
        return tuple(self._blocks)

    def _together(self, wanted: Sequence[Wanted]) -> None:
        piece = wanted[0].request.info.pieces[0]
        source, base = piece.source, piece.offset
        for offset, nbytes, asked, parts in self._cells([each.request for each in wanted]):
            if len(parts) == 1 and parts[0].copy is None:
                _, _, buffer, at = wanted[parts[0].request]
                self.run(source, base + offset, nbytes, buffer, at + parts[0].at)
                continue
            segments = [
                Segment(base + first, length, wanted[n].buffer, wanted[n].at + at, copy)
                for n, first, length, at, copy in parts
            ]
            self._end_run(source)
            self._add(base + offset, nbytes, asked, segments, slotted=True)

    def _cells(self, requests: Sequence[Request]) -> list[boxes.Cell]:
        """Cells of a tensor; layers of a model are alike, so they are kept."""
        from mfload.planning import boxes

        if any(request.checked for request in requests):
            # An error about a value names the tensor, so these are its own.
            return boxes.cells(requests, self._costs)
        info = requests[0].info
        asked = tuple((request.selection, request.dtype.name) for request in requests)
        key = info.dtype.name, info.shape, asked
        if key not in self._known:
            self._known[key] = boxes.cells(requests, self._costs)
        return self._known[key]

    def _end_run(self, source: int) -> None:
        """Adds the run to the blocks, cut at multiples of a block's size; turns to a source."""
        offset, nbytes, buffer, at = self._run
        self._run = (0, 0, -1, 0)
        end, limit = offset + nbytes, self._costs.block
        while offset < end:
            stop = end if nbytes <= limit else min(end, (offset // limit + 1) * limit)
            length = stop - offset
            self._add(offset, length, length, (Segment(offset, length, buffer, at),), slotted=False)
            offset, at = stop, at + length
        if source != self._source:
            self._end_block()
            self._source = source

    def _add(
        self, offset: int, nbytes: int, wanted: int, segments: Sequence[Segment], *, slotted: bool
    ) -> None:
        """Adds a range to the current block, or begins the next; a `slotted` one needs a slot."""
        most = self._most
        if slotted:
            most = min(most, self._costs.slot)
        elif self._group and segments[0].buffer != self._group[-1].buffer:
            most = min(most, _MIXED)
        joins = (
            bool(self._group)
            and 0 <= offset - self._end < self._gap
            and offset + nbytes - self._start <= most
        )
        if joins and slotted != self._slotted:
            # Long runs go straight to their places.
            plain = self._end - self._start if slotted else nbytes
            joins = plain < LONG
        if not joins:
            self._end_block()
            self._start = offset
            most = self._costs.slot if slotted else self._costs.block
        self._group += segments
        self._most, self._end = most, offset + nbytes
        self._wanted += wanted
        self._slotted |= slotted

    def _end_block(self) -> None:
        if self._group:
            nbytes, group = self._end - self._start, tuple(self._group)
            shared = self._wanted if self._slotted else None
            self.staged = max(self.staged, nbytes * self._slotted)
            self._blocks.append(Block(self._source, self._start, nbytes, group, shared))
        self._group, self._wanted, self._slotted = [], 0, False
