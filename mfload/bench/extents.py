"""Extents: the stretches of files that are measured, whole files or parts of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mfload.index import Index, TensorInfo

_GAP = 64 << 10
"""Bytes between two tensors that are read over rather than left out."""


class Extent(NamedTuple):
    """Bytes of one file.

    Attributes:
        path: The file.
        start: First byte.
        stop: The byte after the last.
    """

    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


def whole(paths: Iterable[str]) -> list[Extent]:
    """Files from their first byte to their last."""
    return [Extent(path, 0, os.stat(path).st_size) for path in paths]


def of_rows(index: Index, rows: Sequence[TensorInfo]) -> list[Extent]:
    """The stretches that hold these tensors, those that nearly touch joined.

    Args:
        index: The checkpoint's table.
        rows: Rows of it.

    Returns:
        Extents in the order of the files, then of their offsets.
    """
    spans = sorted(
        (piece.source, piece.offset, piece.offset + piece.nbytes)
        for row in rows
        for piece in row.pieces
        if piece.nbytes
    )
    joined: list[tuple[int, int, int]] = []
    for source, start, stop in spans:
        if joined and joined[-1][0] == source and start - joined[-1][2] <= _GAP:
            joined[-1] = (source, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((source, start, stop))
    return [Extent(index.files[source], start, stop) for source, start, stop in joined]


def paths_of(extents: Iterable[Extent]) -> list[str]:
    """The files, each once."""
    return list(dict.fromkeys(extent.path for extent in extents))


def total(extents: Iterable[Extent]) -> int:
    """Bytes of all."""
    return sum(extent.nbytes for extent in extents)
