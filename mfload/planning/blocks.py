"""The vocabulary between the plan, which writes blocks, and the engines, which fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mfload.runtime import NamedTuple
from mfload.sources.base import Costs as Costs

if TYPE_CHECKING:
    from mfload.planning.steps import Copy, Decode

LONG = 128 << 10
"""Runs of so many bytes go straight to their places: to plan and place one on its own costs about
as much as to copy it out of a slot."""


class Segment(NamedTuple):
    """A contiguous byte range of a source and where it goes."""

    offset: int
    nbytes: int
    buffer: int
    at: int
    copy: Copy | None = None

    @property
    def wanted(self) -> int:
        """Bytes of it that were asked for: those of a copy may have gaps."""
        if self.copy is None:
            return self.nbytes
        return math.prod(self.copy.shape) * self.copy.source.itemsize


class Rows(NamedTuple):
    """Rows of a tensor, alike, of which the same bytes are read: arithmetic instead of objects.

    Attributes:
        numbers: Row n begins n strides behind the block's offset.
        nbytes: From the first byte that is read of a row to the last.
        together: How many are read at once with what lies between them, so that they fit in a slot.
            0: each is read by itself, and they land in the slot one right behind the other.
    """

    numbers: Sequence[int]
    stride: int
    nbytes: int
    together: int


class Block(NamedTuple):
    """One contiguous read and the segments it fills, in file order.

    Bytes that no segment covers are read over. A block without segments stays in the slot, for an
    observer. `shared` are the bytes asked for, if segments may want the same ones. With `decode`,
    segments are ranges of what the block is decoded to. With `rows` it is several reads, of
    `nbytes` together, and the rows are the first dim of each copy (see `cut`).
    """

    source: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]
    shared: int | None = None
    decode: Decode | None = None
    rows: Rows | None = None

    @property
    def staged(self) -> bool:
        """Whether an engine must land the block in a slot before it can place it."""
        if self.shared is not None or not self.segments:
            return True
        return any(segment.copy is not None for segment in self.segments)

    @property
    def span(self) -> int:
        """Bytes of the source from the first that is read to the last."""
        rows = self.rows
        return self.nbytes if rows is None else max(rows.numbers) * rows.stride + rows.nbytes

    @property
    def filled(self) -> int:
        """Its bytes, decoded: what its progress counts."""
        return self.nbytes if self.decode is None else sum(s.nbytes for s in self.segments)

    @property
    def wanted(self) -> int:
        """Bytes of it that were asked for, each counted once."""
        if self.shared is not None:
            return self.shared
        return sum(segment.wanted for segment in self.segments)


def cut(block: Block) -> Iterator[Block]:
    """The reads of a block: rows as many as fit in a slot together."""
    rows = block.rows
    if rows is None or not rows.together:
        yield block
        return
    count, stride = len(rows.numbers), rows.stride
    for first in range(0, count, rows.together):
        number = min(rows.together, count - first)
        segments = tuple(_some(each, count, first, number, stride) for each in block.segments)
        nbytes = (number - 1) * stride + rows.nbytes
        yield Block(block.source, block.offset + first * stride, nbytes, segments, block.shared)


def _some(segment: Segment, count: int, first: int, number: int, stride: int) -> Segment:
    """A segment of `count` rows as one of `number` of them."""
    offset, nbytes, buffer, at, copy = segment
    ahead, less = first * stride, (count - number) * stride
    if copy is None:
        at += ahead
    else:
        row, start = math.prod(copy.shape[1:]) * copy.target.itemsize, copy.start
        row = copy.into[0] if copy.into else row
        if copy.strides[0] > 0:
            at += first * row
        else:  # The last row in the file is the first in its place.
            at, start = at + (count - first - number) * row, start - less
        copy = copy._replace(shape=(number, *copy.shape[1:]), start=start)
    return Segment(offset + ahead, nbytes - less, buffer, at, copy)


def stored(block: Block, memory: list[Any], landed: Any | None) -> Iterator[tuple[int, Any]]:
    """The bytes of a filled block as the source holds them, segment by segment."""
    if landed is not None and not block.segments:
        yield block.offset, landed
    seen, rows = block.offset, block.rows
    if rows is not None:
        first = block.segments[0]
        data = memory[first.buffer][first.at :] if landed is None else landed
        for k, n in enumerate(rows.numbers):
            yield block.offset + n * rows.stride, data[k * rows.nbytes : (k + 1) * rows.nbytes]
        return
    for segment in block.segments:
        if landed is None:
            yield segment.offset, memory[segment.buffer][segment.at : segment.at + segment.nbytes]
            continue
        # What several segments want is shown once.
        start, seen = max(seen, segment.offset), max(seen, segment.offset + segment.nbytes)
        if start < seen:
            yield start, landed[start - block.offset : seen - block.offset]
