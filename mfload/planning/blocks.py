"""The vocabulary between the plan, which writes blocks, and the engines, which fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfload.sources.base import Costs as Costs

if TYPE_CHECKING:
    from mfload.stored import Encoding

LONG = 128 << 10
"""Runs of so many bytes go straight to their places: to plan and place one on its own costs about
as much as to copy it out of a slot."""


class Copy(NamedTuple):
    """How a segment's elements get from a slot to their place when plain bytes won't do.

    Attributes:
        strides: Bytes between elements in the slot, for each dim; may be negative.
        start: Byte of the first element, counted from the segment's offset.
        target: Element type as delivered. If the two differ, values are converted.
        checked: Whether a value that the target can't hold stops the load.
        tensor: Its name, for the error of such a value.
        into: Bytes between elements in their place; may be negative. Default: C order.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    source: np.dtype[Any]
    target: np.dtype[Any]
    checked: bool = False
    tensor: str | None = None
    into: tuple[int, ...] | None = None


class Decode(NamedTuple):
    """How the bytes of a block become those that its segments are cut from.

    Attributes:
        tensor: Its name, for errors.
        encodings: What decodes them, step by step.
        fetched: Bytes that are fetched at once, at most.
        window: Bytes of memory for a segment that can't be decoded straight into its place.
        inline: The bytes, if the header held them.
    """

    tensor: str
    encodings: tuple[Encoding, ...]
    fetched: int
    window: int
    inline: bytes | None = None

    @property
    def held(self) -> int:
        """Bytes that a reader holds, at most, for what it fetches and for the window."""
        return (0 if self.inline is not None else self.fetched) + self.window


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

    @property
    def landed(self) -> int:
        """Bytes from `at` on that it fills; 0 if they lie apart."""
        copy = self.copy
        if copy is None:
            return self.nbytes
        return 0 if copy.into is not None else math.prod(copy.shape) * copy.target.itemsize


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

    def reach(self, count: int) -> int:
        """Bytes from the first of so many rows in a row to the end of the last."""
        return (count - 1) * self.stride + self.nbytes


class Block(NamedTuple):
    """One contiguous read and the segments it fills, in file order.

    Bytes that no segment covers are read over. A block without segments is one of a `Lot`.
    `shared` are the bytes asked for, if segments may want the same ones. With `decode`,
    segments are ranges of what the block is decoded to. With `rows` it is several reads, of
    `nbytes` together, and the rows are the first dim of each copy.
    """

    source: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]
    shared: int | None = None
    decode: Decode | None = None
    rows: Rows | None = None

    @property
    def reads(self) -> int:
        """Ranges of the source that are read for it."""
        rows = self.rows
        return 1 if rows is None else math.ceil(len(rows.numbers) / max(1, rows.together))

    @property
    def staged(self) -> bool:
        """Whether an engine must land the block in a slot before it can place it."""
        if self.shared is not None:
            return True
        return any(segment.copy is not None for segment in self.segments)

    @property
    def span(self) -> int:
        """Bytes of the source from the first that is read to the last."""
        rows = self.rows
        return self.nbytes if rows is None else rows.reach(max(rows.numbers) + 1)

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


class Lot(NamedTuple):
    """Blocks that one reader takes one after the other and hands to a place, such as a file.

    Blocks without segments are handed on in a slot, as they are stored, one by one. Those with
    segments fill memory of the reader, their buffer 0, which is handed on when all of it is there.

    Attributes:
        nbytes: What its progress counts.
        held: Bytes that its reader holds, at most.
        size: Bytes of the memory that segments fill.
        kept: Whether the first block stays in its slot while the others come in another one; they
            don't count for progress.
        tensor: The name of its tensor, for errors.
        key: What the place knows it by.
    """

    blocks: tuple[Block, ...]
    nbytes: int
    held: int
    size: int = 0
    kept: bool = False
    tensor: str | None = None
    key: Any = None

    @property
    def source(self) -> int:
        """The source of its first block."""
        return self.blocks[0].source


def stored(block: Block, memory: list[Any], landed: Any | None) -> Iterator[tuple[int, Any]]:
    """The bytes of a filled block as the source holds them, segment by segment."""
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
