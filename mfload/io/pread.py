"""The buffered reader: `preadv` straight into place, through a slot where it must be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mfload import errors
from mfload.io.buffers import PAGE, WorkerSlot
from mfload.planning.blocks import Block, Segment
from mfload.sources.base import Source

IOV_MAX = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
"""Buffers that one vectored call takes: 1024 on Linux; POSIX promises 16."""

# Elements of which the range is checked together.
_CHECKED = 1 << 16


class PreadReader:
    """Reads blocks of one file through the page cache; used by one thread at a time.

    Opening it raises SourceError if the file can't be opened, or is no longer the same.
    """

    def __init__(self, source: Source) -> None:
        self._file = source.open()

    def fill(self, block: Block, memory: list[Any], slot: WorkerSlot) -> Any | None:
        """Reads a block and puts every segment in its place.

        Returns the bytes of the block as stored, if they landed in the slot.
        """
        segments = block.segments
        if len(segments) == 1 and segments[0].copy is None:
            _, nbytes, buffer, at, _ = segments[0]
            self._file.read([memory[buffer][at : at + nbytes]], block.offset)
            return None
        if block.staged:
            landed = self.land(block, slot)
            place(landed, block.offset, block, memory)
            return landed
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

    def land(self, block: Block, slot: WorkerSlot) -> Any:
        """Reads a block into a slot, and returns its bytes there."""
        landed = slot.bytes(block.nbytes)[: block.nbytes]
        self._file.read([landed], block.offset)
        return landed

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_ahead(sources: Sequence[Source]) -> None:
    """Has the kernel read ahead in files, of which all readers share one descriptor from now on.

    It reads ahead by what it sees of each descriptor: none of many on one file reads in sequence.
    """
    for source in sources:
        source.keep(True)
        if hasattr(os, "posix_fadvise"):
            # Of very many files this one may not be kept.
            with source.open() as opened, suppress(OSError):
                os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def place(landed: Any, origin: int, block: Block, memory: list[Any]) -> None:
    """Puts the segments of a block in their places; `landed` has the file's bytes from `origin` on.

    Raises LossyCastError if a value does not fit the dtype that it is to become.
    """
    for segment in block.segments:
        put(landed[segment.offset - origin :], segment, memory[segment.buffer], segment.at)


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
    if copy.checked:
        _check_range(source, copy.target, copy.tensor)
    # Overflow to infinity or NaN is what a narrower float means, and warns in NumPy.
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def _check_range(source: Any, target: np.dtype[Any], tensor: str | None = None) -> None:
    """Stops a conversion to integers that would wrap, and of fractions to bool."""
    if target.kind not in "iub" or source.size == 0:
        return
    low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
    wrong: list[Any] = []
    if source.dtype.kind in "iub":
        wrong = [each for each in (source.min(), source.max()) if not low <= int(each) <= high]
    else:
        # In parts: as float64 a block may be eight times as large.
        parts: Any = np.nditer(
            source,
            flags=["external_loop", "buffered"],
            op_dtypes=[np.dtype(np.float64)],
            casting="unsafe",
            buffersize=_CHECKED,
        )
        for part in parts:
            whole = np.trunc(part)
            # As float64 `high` may be the number above. NaN compares as false.
            fits = (whole >= low) & (whole < float(high + 1))
            fits &= (whole == part) | (target.kind != "b")
            if not fits.all():
                wrong = [part[~fits][0]]
                break
    if wrong:
        raise errors.LossyCastError(
            "a value does not fit the dtype asked for",
            tensor=tensor,
            expected=f"{low} to {high} for {target}",
            found=wrong[0],
        )
