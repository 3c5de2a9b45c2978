"""The buffered reader: `preadv` straight into place, through a slot where it must be."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mfload import errors
from mfload.io.buffers import PAGE
from mfload.planning.blocks import Block, Segment, Slot
from mfload.sources.local import LocalFile, OpenFile

IOV_MAX = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
"""Buffers that one vectored call takes: 1024 on Linux; POSIX promises 16."""

# Elements of which the range is checked together.
_CHECKED = 1 << 16


class PreadReader:
    """Reads blocks of one file through the page cache (see `blocks.Reader`, `blocks.Lander`).

    Args:
        source: The file; it is open until `close`.

    Raises:
        SourceError: It can't be opened, or is no longer the same.
    """

    def __init__(self, source: LocalFile) -> None:
        self._file = OpenFile(source)

    def fill(self, block: Block, memory: list[Any], slot: Slot) -> Any | None:
        """Reads a block into its destinations."""
        segments = block.segments
        if len(segments) == 1 and segments[0].copy is None:
            segment = segments[0]
            target = memory[segment.buffer][segment.at : segment.at + segment.nbytes]
            self._file.read([target], block.offset)
        elif block.staged:
            landed = self.land(block, slot)
            place(landed, block.offset, block, memory)
            return landed
        else:
            self._scatter(block, memory, slot)
        return None

    def land(self, block: Block, slot: Slot) -> Any:
        """Reads a block into a slot."""
        landed = slot.bytes(block.nbytes)[: block.nbytes]
        self._file.read([landed], block.offset)
        return landed

    def _scatter(self, block: Block, memory: list[Any], slot: Slot) -> None:
        """One vectored read for segments with gaps in the file, in memory, or both."""
        sink: Any = None
        vector: list[Any] = []
        start = cursor = block.offset
        for segment in block.segments:
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

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def place(landed: Any, origin: int, block: Block, memory: list[Any]) -> None:
    """Puts the segments of a landed block where they belong.

    Args:
        landed: uint8 array with the bytes of the file from `origin` on.

    Raises:
        LossyCastError: A value does not fit the dtype it was to become.
    """
    for segment in block.segments:
        put(landed[segment.offset - origin :], segment, memory[segment.buffer], segment.at)


def put(landed: Any, segment: Segment, memory: Any, at: int) -> None:
    """Puts one segment somewhere in host memory.

    Args:
        landed: uint8 array that begins with the segment's bytes.

    Raises:
        LossyCastError: A value does not fit the dtype it was to become.
    """
    copy = segment.copy
    if copy is None:
        memory[at : at + segment.nbytes] = landed[: segment.nbytes]
        return
    source = np.ndarray(copy.shape, copy.source, landed, copy.start, copy.strides)
    target = np.ndarray(copy.shape, copy.target, memory, at)
    if copy.source == copy.target:
        np.copyto(target, source)
        return
    if copy.checked:
        _check_range(source, copy.target, copy.tensor)
    # Overflow to infinity or NaN is what a narrower float means, and warns in NumPy.
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def _check_range(source: Any, target: np.dtype[Any], tensor: str | None = None) -> None:
    """Stops a conversion to integers that would wrap."""
    if target.kind not in "iub" or source.size == 0:
        return
    low, high = _limits(source, target, tensor)
    limits = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
    if low < limits[0] or high > limits[1]:
        raise errors.LossyCastError(
            "a value does not fit the dtype asked for",
            tensor=tensor,
            expected=f"{limits[0]} to {limits[1]} for {target}",
            found=f"{low} to {high}",
        )


def _limits(source: Any, target: np.dtype[Any], tensor: str | None) -> tuple[int, int]:
    """The least and the greatest value as integers, fractions cut off."""
    if source.dtype.kind in "iub":
        return int(source.min()), int(source.max())
    low, high = float("inf"), float("-inf")
    # In parts: as float64 a block may be eight times as large.
    parts: Any = np.nditer(
        source,
        flags=["external_loop", "buffered"],
        op_dtypes=[np.dtype(np.float64)],
        casting="unsafe",
        buffersize=_CHECKED,
    )
    for part in parts:
        if not np.isfinite(part).all():
            raise errors.LossyCastError(
                f"cannot cast NaN or infinity to {target}", tensor=tensor, expected=str(target)
            )
        whole = np.trunc(part)
        if target.kind == "b" and (whole != part).any():
            raise errors.LossyCastError(
                "cannot cast a fraction to bool",
                tensor=tensor,
                expected="0 or 1",
                found=part[whole != part][0],
            )
        low, high = min(low, whole.min()), max(high, whole.max())
    return int(low), int(high)
