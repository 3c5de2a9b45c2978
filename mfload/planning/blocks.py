"""The vocabulary between the plan, which writes blocks, and the engines, which fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Block(NamedTuple):
    """One contiguous read and the segments it fills, in file order.

    Bytes that no segment covers are read over. A block without segments stays in the slot, for an
    observer. `shared` are the bytes asked for, if segments may want the same ones. With `decode`,
    segments are ranges of what the block is decoded to.
    """

    source: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]
    shared: int | None = None
    decode: Decode | None = None

    @property
    def staged(self) -> bool:
        """Whether an engine must land the block in a slot before it can place it."""
        if self.shared is not None or not self.segments:
            return True
        return any(segment.copy is not None for segment in self.segments)

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


def stored(block: Block, memory: list[Any], landed: Any | None) -> Iterator[tuple[int, Any]]:
    """The bytes of a filled block as the source holds them, segment by segment."""
    if landed is not None and not block.segments:
        yield block.offset, landed
    seen = block.offset
    for segment in block.segments:
        if landed is None:
            yield segment.offset, memory[segment.buffer][segment.at : segment.at + segment.nbytes]
            continue
        # What several segments want is shown once.
        start, seen = max(seen, segment.offset), max(seen, segment.offset + segment.nbytes)
        if start < seen:
            yield start, landed[start - block.offset : seen - block.offset]
