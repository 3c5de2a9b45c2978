"""The vocabulary between the plan, which writes blocks, and the engines, which fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from mfload.sources.base import Costs as Costs


class Copy(NamedTuple):
    """How a segment's elements get from a slot to their place when plain bytes won't do.

    Attributes:
        strides: Bytes between them in the slot, a dim; may be negative.
        start: Byte of the first element, counted from the segment's offset.
        target: Element type as delivered. Where the two differ, values are converted.
        checked: Whether a value that the target can't hold stops the load.
        tensor: Whose they are, for the error that says so.
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
        """Bytes of it that were asked for: those of a copy may lie apart."""
        if self.copy is None:
            return self.nbytes
        return math.prod(self.copy.shape) * self.copy.source.itemsize


class Block(NamedTuple):
    """One contiguous read and the segments it fills, in file order.

    Bytes of the range that no segment covers are read over. A block without any segment is
    read to be looked at: it stays in the slot, for a witness.

    Attributes:
        shared: Bytes asked for, where segments may want the same ones; None where each has
            its own.
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


class Reader(Protocol):
    """Fills blocks from one open source; used by one thread at a time."""

    def fill(self, block: Block, memory: list[Any], slot: Slot) -> Any | None:
        """Reads the block and puts every segment in its place.

        Returns:
            The bytes of the block as stored, where they landed in the slot; None where they
            lie in their places alone.
        """
        ...

    def close(self) -> None:
        """Gives back what the reader holds open."""
        ...


class Lander(Protocol):
    """Lands blocks of one open source in slots; used by one thread at a time."""

    def land(self, block: Block, slot: Slot) -> Any:
        """Reads the block.

        Returns:
            Its bytes as stored: a uint8 array over a part of the slot.
        """
        ...

    def close(self) -> None:
        """Gives back what the reader holds open."""
        ...


class Slot(Protocol):
    """Reused memory of one worker, made when first asked for."""

    def bytes(self, nbytes: int) -> Any:
        """A writable, page-aligned uint8 array of at least `nbytes`."""
        ...


class Observer(Protocol):
    """Sees the stored bytes of blocks right after they came, in the thread that read them."""

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Takes the next bytes.

        Every wanted byte of a source is shown once. Blocks are begun in the order in which they
        were submitted, and ended in any.

        Args:
            offset: Where in the source the bytes begin.
            stopped: Whether the work was given up: then nobody waits any longer.
        """
        ...


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
