"""Reads: wanted bytes become segments, and neighbours in a file one block. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload.planning.blocks import LONG, Block, Copy, Costs, Segment
from mfload.planning.request import Request

if TYPE_CHECKING:
    from mfload.planning import extents  # Whole tensors do without it.

# Segments of several buffers are read at once up to so many bytes. Beyond, a read of its own
# costs little, and one that has a single place needs no slot, whatever the engine.
_MIXED = 1 << 20
# So many runs at equal distances, and so short, are copied out of a slot in less time than each is
# placed: half of each of 10,000 tensors of 64 bytes loads in 15 ms instead of 28.
_SEVERAL, _SHORT = 8, 4 << 10
_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.


class Reads:
    """Takes what is wanted in file order, and makes blocks of it.

    Attributes:
        staged: Bytes of the longest block that must pass through a slot.
        decoding: Bytes that a reader holds for the block that takes most to decode.
    """

    def __init__(self, costs: Costs, known: dict[Any, list[extents.Extent]] | None = None) -> None:
        self.staged = self.decoding = 0
        self._costs = costs
        self._gap = max(1, costs.merge_gap)
        self._blocks: list[Block] = []
        self._known: dict[Any, list[extents.Extent]] = {} if known is None else known
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

    def runs(
        self,
        source: int,
        offset: int,
        nbytes: int,
        buffer: int,
        at: int,
        count: int,
        step: int,
        pace: int,
    ) -> None:
        """Takes so many runs at equal distances: the next is `step` ahead, its place `pace`."""
        gap, most = step - nbytes, self._costs.slot // max(1, step)
        if count < _SEVERAL or nbytes > _SHORT or not 0 <= gap < self._gap or not most:
            for n in range(count):
                self.run(source, offset + n * step, nbytes, buffer, at + n * pace)
            return
        self._end_run(source)
        kind, into = np.dtype(f"V{nbytes}"), None if pace == nbytes else (pace,)
        for first in range(0, count, most):
            some = min(most, count - first)
            start, reach = offset + first * step, (some - 1) * step + nbytes
            copy = Copy((some,), (step,), 0, kind, kind, into=into)
            segment = Segment(start, reach, buffer, at + first * pace, copy)
            self._add(start, reach, some * nbytes, [segment], slotted=True)

    def parts(
        self,
        wanted: Sequence[Request],
        offsets: Sequence[int | None],
        spots: Sequence[tuple[int, int]],
        kind: Any = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Takes parts of one tensor; bytes that several want are read once, except with steps.

        `offsets` are those in the file of parts that lie there as they are wanted, and `spots` say
        where results go: buffer and first byte. Tensors of one kind, unless it is None, share what
        is computed for the first of them; with `starts`, all of them are placed alike.
        """
        info = wanted[0].info
        if not info.simple:
            self._pieces(wanted, spots)
            return
        source, base, *_ = info.pieces[0]
        if len(wanted) == 1 and offsets[0] is not None:
            self.run(source, offsets[0], wanted[0].nbytes, *spots[0])
            return
        self._read(source, base, self._extents(wanted, kind, starts), spots)

    def _read(
        self,
        source: int,
        base: int,
        found: Iterable[extents.Extent],
        spots: Sequence[tuple[int, int]],
    ) -> None:
        """Takes extents of an array whose first byte is `base`."""
        for offset, nbytes, asked, parts, rows in found:
            plain = len(parts) == 1 and parts[0].copy is None
            if plain and rows is None:
                buffer, at = spots[parts[0].box]
                self.run(source, base + offset, nbytes, buffer, at + parts[0].at)
                continue
            segments: list[Segment] = []
            for n, first, length, ahead, copy in parts:
                buffer, at = spots[n]
                segments.append(_new(Segment, (base + first, length, buffer, at + ahead, copy)))
            self._end_run(source)
            if rows is None:
                self._add(base + offset, nbytes, asked, segments, slotted=True)
                continue
            self._end_block()
            shared = None if plain else asked
            block = Block(source, base + offset, nbytes, tuple(segments), shared, rows=rows)
            self._blocks.append(block)
            if not plain:
                held = rows.reach(rows.together) if rows.together else nbytes
                self.staged = max(self.staged, held)

    def _pieces(self, wanted: Sequence[Request], spots: Sequence[tuple[int, int]]) -> None:
        """Takes parts of a tensor that is not one raw range."""
        from mfload.planning import pieces  # Late: most tensors are.

        info = wanted[0].info
        for piece in info.pieces:
            found = pieces.parts(wanted, piece, self._costs)
            if not pieces.encoded(piece):
                self._read(piece.source, piece.offset, found, spots)
                continue
            self._end_run(-1)
            block = pieces.decoding(info, piece, [*found], spots, self._costs)
            if block is not None:
                self.decoding = max(self.decoding, block.decode.held if block.decode else 0)
                self._blocks.append(block)

    def end(self) -> tuple[Block, ...]:
        """The blocks."""
        self._end_run(-1)
        return tuple(self._blocks)

    def _extents(
        self, wanted: Sequence[Request], kind: Any, starts: Sequence[int] | None
    ) -> list[extents.Extent]:
        """Extents of a tensor: of each part with steps or lists, and of the others together."""
        if (known := self._known.get(kind)) is not None:
            return known
        from mfload.planning import extents

        if len(wanted) == 1 and kind is None:
            return extents.of_tensor(wanted, self._costs)
        simple = [n for n, r in enumerate(wanted) if r.selection is None or r.selection.simple]
        alone = [[n] for n in range(len(wanted)) if n not in simple]
        found: list[extents.Extent] = []
        for numbers in [*alone, simple] if simple else alone:
            for each in extents.of_tensor([wanted[n] for n in numbers], self._costs):
                parts = tuple([part._replace(box=numbers[part.box]) for part in each.parts])
                if starts is not None and kind is not None and each.rows is None:
                    parts = extents.joined(parts, starts)
                found.append(each._replace(parts=parts))
        if kind is not None:
            self._known[kind] = found
        return found

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


class NoReads(Reads):
    """Takes what `Reads` takes, and plans no reads."""

    def run(self, source: int, offset: int, nbytes: int, buffer: int, at: int) -> None:
        """Does nothing."""

    def runs(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def parts(self, *_: Any, **__: Any) -> None:
        """Does nothing."""
