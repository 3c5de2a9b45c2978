"""The vocabulary between the plan, which writes blocks, and the engines, which fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mfload.sources.base import Costs as Costs


class Copy(NamedTuple):
    """How a segment's elements get from a slot to their place when plain bytes won't do.

    Attributes:
        strides: Bytes between elements in the slot, for each dim; may be negative.
        start: Byte of the first element, counted from the segment's offset.
        target: Element type as delivered. If the two differ, values are converted.
        checked: Whether a value that the target can't hold stops the load.
        tensor: Its name, for the error of such a value.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    source: np.dtype[Any]
    target: np.dtype[Any]
    checked: bool = False
    tensor: str | None = None


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
    observer. `shared` are the bytes asked for, if segments may want the same ones.
    """

    source: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]
    shared: int | None = None

    @property
    def staged(self) -> bool:
        """Whether an engine must land the block in a slot before it can place it."""
        if self.shared is not None or not self.segments:
            return True
        return any(segment.copy is not None for segment in self.segments)

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
