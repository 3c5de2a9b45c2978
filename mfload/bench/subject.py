"""What is measured: a checkpoint, or as many of its tensors as memory has room for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mfload import errors, trees
from mfload.bench import extents
from mfload.bench.extents import Extent
from mfload.formats import checkpoint
from mfload.index import Index, TensorInfo
from mfload.io import probes
from mfload.report import human
from mfload.trees import Names

_SHARE = 0.35
"""Of the memory left: the page cache holds the bytes once, and a loader may hold them twice."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What every loader and ceiling is given.

    Attributes:
        path: What a user gave.
        files: The files of it.
        extents: The bytes that a ceiling reads.
        nbytes: Bytes of tensor data.
        tensors: Number of tensors.
        names: The tensors, None for all.
        page_sum: Sum of bytes 0, 4096, … of each tensor, None where it is not known.
        file_sum: The same of each extent.
    """

    path: str | list[str]
    files: list[str]
    extents: list[Extent]
    nbytes: int
    tensors: int
    names: list[str] | None = None
    page_sum: int | None = None
    file_sum: int | None = None


class Chosen(NamedTuple):
    """A subject, and what was left out of it.

    Attributes:
        subject: What to measure.
        notes: What a user should hear: that not all is measured, and why.
        known: Whether what frameworks hold are the stored bytes, so that sums can be compared.
    """

    subject: Subject
    notes: list[str]
    known: bool


def choose(path: str | os.PathLike[str], names: Names, max_bytes: int) -> Chosen:
    """Reads the headers of a checkpoint and chooses what to measure of it.

    Args:
        path: A file, a directory, or an index.
        names: Which tensors, as for `mfload.load`.
        max_bytes: The most bytes of tensors to measure; less where memory has no room.

    Returns:
        The first tensors that fit, in the order of the files.

    Raises:
        MfloadError: The checkpoint can't be read, or no tensor fits.
    """
    index, _ = checkpoint.read(path)
    wanted = [row for row in trees.select(index, names) if row.dtype.known]
    unknown = len(trees.select(index, names)) - len(wanted)
    notes = [f"{unknown} tensors left out: mfload does not know their dtypes"] if unknown else []
    if not any(row.nbytes for row in wanted):
        raise errors.UsageError("nothing to measure: no tensor holds any bytes", file=path)
    room = probes.memory_room()
    limit, why = max_bytes, f"--max-bytes {human(max_bytes)}"
    if room is not None and room[0] * _SHARE < max_bytes:
        limit, why = int(room[0] * _SHARE), f"{human(room[0])} are left in the {room[1]}"
    rows = _fitting(wanted, limit)
    if not rows:
        raise errors.MemoryLimitError(
            "no tensor fits in what may be measured",
            file=path,
            expected=f"a tensor of at most {limit} bytes ({why})",
            found=f"{len(wanted)} tensors, the smallest of "
            f"{min((row.nbytes for row in wanted), default=0)} bytes",
        )
    nbytes = sum(row.nbytes for row in rows)
    if len(rows) < len(wanted):
        everything = sum(row.nbytes for row in wanted)
        notes.append(
            f"measured: {len(rows)} of {len(wanted)} tensors, {human(nbytes)} of "
            f"{human(everything)}, since {why}"
        )
    subject = _subject(path, index, rows, nbytes, everything=len(rows) == len(index))
    return Chosen(subject, notes, all(row.dtype.elements == 1 for row in rows))


def _fitting(rows: Sequence[TensorInfo], limit: int) -> list[TensorInfo]:
    """The first that fit; one too large is left out, those behind it are not."""
    found: list[TensorInfo] = []
    left = limit
    for row in rows:
        if row.nbytes <= left:
            found.append(row)
            left -= row.nbytes
    return found


def _subject(
    path: str | os.PathLike[str],
    index: Index,
    rows: Sequence[TensorInfo],
    nbytes: int,
    *,
    everything: bool,
) -> Subject:
    parts = extents.of_rows(index, rows)
    files = list(index.files) if everything else extents.paths_of(parts)
    names = None if everything else [row.name for row in rows]
    where = os.path.abspath(path)
    return Subject(where, files, parts, nbytes, len(rows), names)
