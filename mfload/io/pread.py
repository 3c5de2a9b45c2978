"""The buffered reader: `preadv` straight into place, through a slot where it must be."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mfload import errors
from mfload.io.buffers import PAGE, WorkerSlot
from mfload.planning.blocks import Block, Rows, Segment, cut
from mfload.sources.base import Source

IOV_MAX = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
"""Buffers that one vectored call takes: 1024 on Linux; POSIX promises 16."""

CONVERTERS: list[Callable[[Any, Any], None]] = []
"""Of frameworks that are loaded: fills one array with the numbers of another, both in C order."""

# To map less takes longer than to read it; and to map so much for each row, than to read the row.
_WORTH_MAPPING, _MOST_MAPPED = 256 << 10, 512 << 10


class PreadReader:
    """Reads blocks of one file through the page cache; used by one thread at a time.

    Opening it raises SourceError if the file can't be opened, or is no longer the same.

    Args:
        cold: Most of the file comes from a disk: rows that lie apart are asked for in advance.
        window: Bytes of rows, at most, that are copied out of the page cache itself, where the file
            is a local one; 0 for none.
    """

    def __init__(self, source: Source, *, cold: bool = False, window: int = 0) -> None:
        self._source, self._cold, self._window = source, cold and source.file is not None, window
        self._maps = window > 0 and source.file is not None
        self._file = source.open()

    def fill(self, block: Block, memory: list[Any], slot: WorkerSlot) -> Any | None:
        """Reads a block and puts every segment in its place.

        Returns the bytes of the block as stored, if they landed in the slot.
        """
        segments = block.segments
        if len(segments) == 1 and segments[0].copy is None:
            _, nbytes, buffer, at, _ = segments[0]
            if block.rows is None:
                self._file.read([memory[buffer][at : at + nbytes]], block.offset)
            elif not self._copied(block, memory):
                self._take_rows(block, block.rows, memory[buffer][at : at + nbytes])
            return None
        if block.staged:
            return None if self._copied(block, memory) else self._picked(block, memory, slot)
        # One vectored read for segments with gaps in the file, in memory, or both.
        sink: Any = None
        vector: list[Any] = []
        start = cursor = block.offset
        for segment in segments:
            if segment.offset > cursor:
                gap = segment.offset - cursor
                sink = slot.bytes(max(gap, PAGE)) if sink is None or sink.size < gap else sink
                vector.append(sink[:gap])
            vector.append(memory[segment.buffer][segment.at : segment.at + segment.nbytes])
            cursor = segment.offset + segment.nbytes
            if len(vector) > IOV_MAX - 2:
                self._file.read(vector, start)
                vector, start = [], cursor
        if vector:
            self._file.read(vector, start)
        return None

    def _picked(self, block: Block, memory: list[Any], slot: WorkerSlot) -> Any:
        """Picks a block apart in a slot; returns the bytes of it that landed last."""
        landed: Any = None
        for part in cut(block):
            landed = None  # A longer slot replaces this one.
            landed = self.land(part, slot)
            place(landed, part.offset, part, memory)
        return landed

    def _copied(self, block: Block, memory: list[Any]) -> bool:
        """Copies a block to its places out of a map of its range, if that is safe."""
        rows, nbytes = block.rows, block.span
        few = False
        if rows is not None and not rows.together:
            # A map would read from the disk what lies between.
            few = self._cold or nbytes > min(self._window, len(rows.numbers) * _MOST_MAPPED)
        if few or not self._maps or nbytes < _WORTH_MAPPING:
            return False
        if any(s.copy is not None and s.copy.source != s.copy.target for s in block.segments):
            return False  # A slot stays in the processor's cache while it is checked and converted.
        from mfload.io import mapped  # Late: most blocks lie in the file as they are wanted.

        self._maps = False
        with mapped.held_still(self._file.fd) as still, suppress(errors.MemoryLimitError):
            if still:
                window, at = mapped.map_range(self._source, block.offset, nbytes)
                if rows is None or rows.together:
                    place(window[at:], block.offset, block, memory)
                else:
                    _place_rows(window[at:], block, rows, memory)
                self._maps = True
        return self._maps

    def land(self, block: Block, slot: WorkerSlot) -> Any:
        """Reads a block into a slot, and returns its bytes there."""
        landed = slot.bytes(block.nbytes)[: block.nbytes]
        if block.rows is None:
            self._file.read([landed], block.offset)
        else:
            self._take_rows(block, block.rows, landed)
        return landed

    def _take_rows(self, block: Block, rows: Rows, memory: Any) -> None:
        """Reads rows that lie apart into memory, one behind the other."""
        nbytes, view, read = rows.nbytes, memoryview(memory), self._file.read
        starts = [block.offset + n * rows.stride for n in rows.numbers]
        if self._cold and hasattr(os, "posix_fadvise"):
            for start in starts:  # The disk reads them side by side.
                os.posix_fadvise(self._file.fd, start, nbytes, os.POSIX_FADV_WILLNEED)
        for k, start in enumerate(starts):
            read([view[k * nbytes : (k + 1) * nbytes]], start)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_ahead(sources: Sequence[Source]) -> list[Source]:
    """Has the kernel read ahead in files, of which all readers share one descriptor from now on.

    It reads ahead by what it sees of each descriptor: none of many on one file reads in sequence.
    Returns the sources that were not kept open before.
    """
    began = [source for source in sources if not getattr(source, "keeps", False)]
    for source in sources:
        source.keep(True)
        if hasattr(os, "posix_fadvise"):
            # Of very many files this one may not be kept.
            with source.open() as opened, suppress(OSError):
                os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return began


def place(landed: Any, origin: int, block: Block, memory: list[Any]) -> None:
    """Puts the segments of a block in their places; `landed` has the file's bytes from `origin` on.

    Raises LossyCastError if a value does not fit the dtype that it is to become.
    """
    for segment in block.segments:
        put(landed[segment.offset - origin :], segment, memory[segment.buffer], segment.at)


def _place_rows(window: Any, block: Block, rows: Rows, memory: list[Any]) -> None:
    """Puts rows that lie apart in their places; `window` begins with the first in the file."""
    from mfload.planning.steps import Copy  # Late: whole tensors do without it.

    count, opaque = len(rows.numbers), np.dtype(f"V{rows.nbytes}")
    for segment in block.segments:
        copy = segment.copy or Copy((count,), (rows.nbytes,), 0, opaque, opaque)
        back = copy.strides[0] < 0
        first = segment.offset - block.offset + copy.start - back * (count - 1) * rows.nbytes
        shape, strides = (max(rows.numbers) + 1, *copy.shape[1:]), (rows.stride, *copy.strides[1:])
        source: Any = np.ndarray(shape, copy.source, window, first, strides)
        if not isinstance(rows.numbers, range):
            source = source[rows.numbers]
        target = np.ndarray(copy.shape, copy.target, memory[segment.buffer], segment.at, copy.into)
        np.copyto(target, source[::-1] if back else source)


def put(landed: Any, segment: Segment, memory: Any, at: int) -> None:
    """Puts a segment, with whose bytes `landed` begins, into host memory (errors: see `place`)."""
    copy = segment.copy
    if copy is None:
        memory[at : at + segment.nbytes] = landed[: segment.nbytes]
        return
    source = np.ndarray(copy.shape, copy.source, landed, copy.start, copy.strides)
    target = np.ndarray(copy.shape, copy.target, memory, at, copy.into)
    if copy.source == copy.target:
        np.copyto(target, source)
        return
    from mfload.io import convert  # Late: most loads convert nothing.

    convert.convert(source, target, copy.tensor, checked=copy.checked, converters=CONVERTERS)
