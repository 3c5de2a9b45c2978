"""The buffered reader: `preadv` straight into place, through a slot where it must be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mfload.io import buffers
from mfload.io.buffers import IOV_MAX, PAGE, WorkerSlot
from mfload.planning.blocks import Block, Copy, Rows, Segment
from mfload.sources import together
from mfload.sources.base import Source

FETCHED = 256 << 10
"""Bytes that the kernel is asked for at once: it leaves out what is more than a disk request."""

CONVERTER: Callable[[Any, Any], None] | None = None
"""A loaded framework's: fills one array with the numbers of another, both in C order."""

# Rows of a slot that are transposed at once: 4096 x 1024 float32 take 4 to 8 ms, and 25 without
# (two cores; 12 to 20 rows are alike, also of 1, 2 and 8 bytes).
_TILE = 16
_SHORT = 64 << 10  # Bytes of short rows at once: a call of NumPy takes as long as some thousand.
_WORTH_POPULATING = 64 << 10  # Of memory in small pages, which is not mfload's.
# To map rows that lie so far apart, or fewer, takes more time than to read them.
_APART, _ROWS_A_MAP = 32 << 10, 96


class PreadReader:
    """Reads blocks of one file through the page cache; used by one thread at a time.

    Opening it raises SourceError if the file can't be opened, or is no longer the same.

    Args:
        cold: Most of the file comes from a disk: rows that lie apart are asked for in advance.
    """

    def __init__(self, source: Source, *, cold: bool = False) -> None:
        self._source, self._cold = source, cold and source.file is not None
        self._maps = source.file is not None and not cold
        self._file = source.open()

    def fill(self, block: Block, memory: list[Any], slot: WorkerSlot) -> Any | None:
        """Reads a block and puts every segment in its place.

        Returns the bytes of the block as stored, if they landed in the slot.
        """
        segments = block.segments
        if block.nbytes >= _WORTH_POPULATING * len(segments):
            for segment in segments:
                into = memory[segment.buffer]
                if not buffers.is_own(into):
                    buffers.populate(into[segment.at : segment.at + segment.landed])
        if len(segments) == 1 and segments[0].copy is None:
            _, nbytes, buffer, at, _ = segments[0]
            if block.rows is None:
                self._file.read([memory[buffer][at : at + nbytes]], block.offset)
            else:
                self._take_rows(block, block.rows, memory[buffer][at : at + nbytes])
            return None
        if block.staged:
            return self._picked(block, memory, slot)
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
        """Picks a block apart in a slot; returns its bytes, if they landed there at once."""
        rows = block.rows
        if rows is None or not rows.together:
            landed = self.land(block, slot)
            place(landed, block.offset, block, memory)
            return landed
        for first in range(0, len(rows.numbers), rows.together):
            count = min(rows.together, len(rows.numbers) - first)
            start, nbytes = block.offset + first * rows.stride, rows.reach(count)
            landed = self.land(Block(block.source, start, nbytes, ()), slot)
            _place_rows(landed, block, rows, slice(first, first + count), memory)
        return None

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
        if self._maps and block.span < _APART * len(rows.numbers) >= _APART * _ROWS_A_MAP:
            from mfload.io import mapped  # Late: most loads take no rows.

            starts = block.offset + np.asarray(rows.numbers) * rows.stride
            self._maps = mapped.take_rows(self._source, starts, memory.reshape(-1, nbytes))
            if self._maps:
                return
        starts = [block.offset + n * rows.stride for n in rows.numbers]
        if self._cold:
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

    def ahead(source: Source) -> None:
        source.keep(True)
        # Of very many files this one may not be kept.
        with source.open() as opened, suppress(OSError):
            os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    together(ahead, sources)  # A network disk takes time to open each.
    return began


def prefetch(sources: Mapping[int, Source], blocks: Iterable[Block]) -> None:
    """Has the kernel fetch blocks of some sources into the page cache, and does not wait for it."""
    for block in blocks:
        if block.source in sources:
            with sources[block.source].open() as opened:
                fetch(opened.fd, range(block.offset, block.offset + block.span, FETCHED))


def fetch(fd: int, starts: range) -> None:
    """Has the kernel fetch `FETCHED` bytes of an open file from each start on; waits for none."""
    with suppress(OSError):
        for start in starts:
            os.posix_fadvise(fd, start, FETCHED, os.POSIX_FADV_WILLNEED)


def place(landed: Any, origin: int, block: Block, memory: list[Any]) -> None:
    """Puts the segments of a block in their places; `landed` has the file's bytes from `origin` on.

    Raises LossyCastError if a value does not fit the dtype that it is to become.
    """
    for segment in block.segments:
        put(landed[segment.offset - origin :], segment, memory[segment.buffer], segment.at)


def _place_rows(landed: Any, block: Block, rows: Rows, places: slice, memory: list[Any]) -> None:
    """Puts rows that lie in a slot as in the file in their places among all."""
    count, opaque = len(rows.numbers), np.dtype(f"V{rows.nbytes}")
    for segment in block.segments:
        copy = segment.copy or Copy((count,), (rows.nbytes,), 0, opaque, opaque)
        # Backwards, the last row in the file is the first in its place.
        back = copy.strides[0] < 0
        first = segment.offset - block.offset + copy.start + back * (count - 1) * copy.strides[0]
        shape = (places.stop - places.start, *copy.shape[1:])
        strides = (rows.stride, *copy.strides[1:])
        source = np.ndarray(shape, copy.source, landed, first, strides)
        target = np.ndarray(copy.shape, copy.target, memory[segment.buffer], segment.at, copy.into)
        _copy(source, (target[::-1] if back else target)[places], copy)


def put(landed: Any, segment: Segment, memory: Any, at: int) -> None:
    """Puts a segment, with whose bytes `landed` begins, into host memory (errors: see `place`)."""
    copy = segment.copy
    if copy is None:
        memory[at : at + segment.nbytes] = landed[: segment.nbytes]
        return
    source = np.ndarray(copy.shape, copy.source, landed, copy.start, copy.strides)
    _copy(source, np.ndarray(copy.shape, copy.target, memory, at, copy.into), copy)


def _copy(source: Any, target: Any, copy: Copy) -> None:
    if copy.source == copy.target:
        if target.ndim < 2 or target.strides[0] >= target.strides[-1]:
            np.copyto(target, source)
            return
        rows = len(target)
        tile = max(_TILE, _SHORT * rows // max(1, target.nbytes))
        for first in range(0, rows, tile):
            np.copyto(target[first : first + tile], source[first : first + tile])
        return
    from mfload.io import convert  # Late: most loads convert nothing.

    convert.convert(source, target, copy.tensor, checked=copy.checked, converter=CONVERTER)
