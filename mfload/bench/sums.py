"""What touching must yield: a byte of every page of what is measured, added up while reading."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.bench.extents import Extent
from mfload.bench.touch import PAGE
from mfload.index import TensorInfo
from mfload.sources import local

_BLOCK = 16 << 20


class Sums(NamedTuple):
    """Sums of bytes 0, 4096, 8192, … of several stretches.

    Attributes:
        tensors: Each tensor counted from its own first byte.
        extents: Each extent counted from its own.
    """

    tensors: int
    extents: int


def read(files: Sequence[str], rows: Sequence[TensorInfo], extents: Sequence[Extent]) -> Sums:
    """Reads what is to be measured, block by block, and keeps none of it.

    Args:
        files: The checkpoint's, by number.
        rows: The tensors.
        extents: Stretches that hold them.

    Raises:
        SourceError: A read failed, or a file is shorter than it was.
    """
    spans: dict[str, list[tuple[int, int]]] = {path: [] for path in files}
    for row in rows:
        for piece in row.pieces:
            if piece.nbytes:
                spans[files[piece.source]].append((piece.offset, piece.offset + piece.nbytes))
    for each in spans.values():
        each.sort()
    tensors = whole = 0
    block = np.empty(_BLOCK, np.uint8)
    for extent in extents:
        inside = spans[extent.path]
        first = 0
        for at in range(extent.start, extent.stop, _BLOCK):
            got = block[: min(_BLOCK, extent.stop - at)]
            _fill(extent.path, at, got)
            whole += _sum(got, at, extent.start, extent.stop)
            while first < len(inside) and inside[first][1] <= at:
                first += 1
            for start, stop in inside[first:]:
                if start >= at + len(got):
                    break
                tensors += _sum(got, at, start, stop)
    return Sums(tensors, whole)


def _sum(block: Any, at: int, start: int, stop: int) -> int:
    """The part of a stretch's sum that lies in a block read from `at`."""
    skipped = -(-max(0, at - start) // PAGE) * PAGE
    return int(block[start + skipped - at : stop - at : PAGE].sum(dtype=np.uint64))


def _fill(path: str, at: int, into: Any) -> None:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(into):
                got = os.preadv(fd, [into[done:]], at + done)
                if not got:
                    raise local.shrunk(path, at + len(into), at + done)
                done += got
        finally:
            os.close(fd)
    except OSError as error:
        raise errors.from_os(error, path, "read") from error
