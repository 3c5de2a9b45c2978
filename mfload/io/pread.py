"""The buffered reader: `preadv` straight into place, through a slot where it must be."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import buffers
from mfload.io.buffers import PAGE, WorkerSlot
from mfload.planning.blocks import Block, Copy, Rows, Segment
from mfload.sources.base import Source

SHOWN = 4 << 20
"""Bytes of a block that an observer sees at once; longer ones are shown in parts."""

FETCHED = 256 << 10
"""Bytes that the kernel is asked for at once: it leaves out what is more than a disk request."""

IOV_MAX = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
"""Buffers that one vectored call takes: 1024 on Linux; POSIX promises 16."""

CONVERTER: Callable[[Any, Any], None] | None = None
"""A loaded framework's: fills one array with the numbers of another, both in C order."""

_WORTH_POPULATING = 64 << 10  # Of memory in small pages, which is not mfload's.
_WORTH_MAPPING = 256 << 10  # To map less takes longer than to read it.
_ROWS_A_MAP = 96  # To read fewer rows that lie apart takes less time than to map them.
# Of a file that is mapped to be shown or converted, at once: long enough to be worth a map, and so
# short that a process that wants to write to the file waits for some milliseconds.
_WINDOW = 16 << 20


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
        self._map: Any = None
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
        """Picks a block apart in a slot; returns its bytes, if they landed there at once."""
        rows = block.rows
        if rows is None or not rows.together:
            landed = self.land(block, slot)
            place(landed, block.offset, block, memory)
            return landed
        for low, count, taken, places in rows.windows(rows.together):
            start, nbytes = block.offset + low * rows.stride, rows.reach(count)
            landed = self.land(Block(block.source, start, nbytes, ()), slot)
            _place_rows(landed, block, rows, taken, places, memory)
        return None

    def _copied(self, block: Block, memory: list[Any]) -> bool:
        """Copies a block to its places out of maps of its range, if that is safe."""
        rows, nbytes = block.rows, block.span
        few = False
        if rows is not None and not rows.together:
            # A map would read from the disk what lies between.
            most = min(self._window, nbytes)
            few = self._cold or len(rows.numbers) * most < _ROWS_A_MAP * nbytes
            if not isinstance(rows.numbers, range):  # Their places lie apart as well.
                copies = (segment.copy for segment in block.segments)
                few = few or any(each and each.source != each.target for each in copies)
        if few or not self._maps or nbytes < _WORTH_MAPPING:
            return False
        from mfload.io import mapped  # Late: most blocks lie in the file as they are wanted.

        self._maps = False
        self._map = self._map or mapped.Window(self._source, _WINDOW, cold=self._cold)
        with mapped.held_still(self._file.fd) as still, suppress(errors.MemoryLimitError):
            if still and rows is None:
                window, at = self._map.map_range(block.offset, nbytes)
                place(window[at:], block.offset, block, memory)
            elif still and rows is not None:
                most = max(1, (self._window - rows.nbytes) // rows.stride + 1)
                for low, count, taken, places in rows.windows(most):
                    start, nbytes = block.offset + low * rows.stride, rows.reach(count)
                    window, at = mapped.map_range(self._source, start, nbytes, cold=self._cold)
                    _place_rows(window[at:], block, rows, taken, places, memory)
            self._maps = still
        return self._maps

    def shown(self, block: Block, slot: WorkerSlot) -> Generator[tuple[int, Any]]:
        """The bytes of a block for an observer, with their offsets; each part until the next one.

        A block of more than `SHOWN` bytes is one of a file that the page cache holds. It is shown
        there, window by window; a window of a file that can't be held still is read.
        """
        from mfload.io import mapped  # Late: a load reads.

        end = block.offset + block.nbytes
        for start in range(block.offset, end, _WINDOW):
            stop, window = min(start + _WINDOW, end), None
            if block.nbytes > SHOWN:
                with mapped.held_still(self._file.fd) as still, suppress(errors.MemoryLimitError):
                    if still:
                        held = start, stop - start
                        window, at = mapped.map_range(self._source, *held, cold=self._cold)
                        yield start, window[at:]
            for at in range(start, stop if window is None else start, SHOWN):
                part = Block(block.source, at, min(SHOWN, stop - at), ())
                yield at, self.land(part, slot)

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


def prefetch(sources: Mapping[int, Source], blocks: Iterable[Block]) -> None:
    """Has the kernel fetch blocks of some sources into the page cache, and does not wait for it."""
    for block in blocks:
        if block.source in sources:
            with sources[block.source].open() as opened:
                fetch(opened.fd, range(block.offset, block.offset + block.span, FETCHED))


def fetch(fd: int, starts: range) -> None:
    """Has the kernel fetch `FETCHED` bytes of an open file from each start on; waits for none."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            for start in starts:
                os.posix_fadvise(fd, start, FETCHED, os.POSIX_FADV_WILLNEED)


def place(landed: Any, origin: int, block: Block, memory: list[Any]) -> None:
    """Puts the segments of a block in their places; `landed` has the file's bytes from `origin` on.

    Raises LossyCastError if a value does not fit the dtype that it is to become.
    """
    for segment in block.segments:
        put(landed[segment.offset - origin :], segment, memory[segment.buffer], segment.at)


def _place_rows(
    landed: Any, block: Block, rows: Rows, taken: Any, places: Any, memory: list[Any]
) -> None:
    """Puts rows in their places: of those that `landed` begins with, those that are `taken`."""
    count, opaque = len(rows.numbers), np.dtype(f"V{rows.nbytes}")
    for segment in block.segments:
        copy = segment.copy or Copy((count,), (rows.nbytes,), 0, opaque, opaque)
        # Backwards, the last row in the file is the first in its place.
        back = copy.strides[0] < 0
        first = segment.offset - block.offset + copy.start + back * (count - 1) * copy.strides[0]
        height = 1 + (landed.size - rows.nbytes) // rows.stride
        shape, strides = (height, *copy.shape[1:]), (rows.stride, *copy.strides[1:])
        source: Any = np.ndarray(shape, copy.source, landed, first, strides)[taken]
        target = np.ndarray(copy.shape, copy.target, memory[segment.buffer], segment.at, copy.into)
        target = target[::-1] if back else target
        if isinstance(places, slice):
            _copy(source, target[places], copy)
        else:
            target[places] = source


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
        np.copyto(target, source)
        return
    from mfload.io import convert  # Late: most loads convert nothing.

    convert.convert(source, target, copy.tensor, checked=copy.checked, converter=CONVERTER)
