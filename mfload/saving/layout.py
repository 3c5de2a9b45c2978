"""Where everything of a safetensors file will lie, before a byte of it is written.

The header is padded with spaces, as the format allows, so that the data begins on a boundary that
suits maps and direct I/O. Tensors whose sizes are multiples of 64 bytes go first, then those of
32, and so on: no tensor then ends in a place where the next would not be aligned. The order within
a rank is the caller's, so a file that was loaded and is laid out again comes out the same.
"""

from __future__ import annotations

import collections
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from typing import NamedTuple, Protocol, TypeVar

from mfload import errors
from mfload.dtypes import DType
from mfload.formats.options import ALIGN, check_align, checked_metadata, encodable
from mfload.formats.safetensors import MAX_HEADER
from mfload.index import Piece, TensorInfo

_METADATA = "__metadata__"
_BEST = 64
_MAX_COUNT = 2**64 - 1
# Offsets of files are signed to the system.
_MAX_FILE = 2**63 - 1


class Entry(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: Its name.
        dtype: A row of the dtype table.
        shape: In elements of that dtype.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it will take.

        Raises:
            UnsupportedShapeError: No whole number of bytes, or more than the format can say.
        """
        dtype, shape = self.dtype, self.shape
        nbytes = dtype.size_of(shape)
        # Without a zero, no product on the way is larger than the last.
        if nbytes and nbytes <= _MAX_COUNT >> 6 and min(shape, default=0) >= 0:
            return nbytes
        count = 1
        for dim in shape:
            # In order, as readers multiply: what comes after a zero counts for nothing.
            count *= dim
            if not 0 <= count <= _MAX_COUNT:
                raise self._refused("a number of elements that fits 64 bits")
        if count * dtype.bits > _MAX_COUNT:
            raise self._refused("a size in bits that fits 64 bits")
        if nbytes is None:
            raise self._refused(f"a whole number of bytes of {dtype}")
        return nbytes

    def _refused(self, expected: str) -> errors.UnsupportedShapeError:
        shown = str(list(self.shape[:8]))
        return errors.UnsupportedShapeError(
            "no file can hold this shape", tensor=self.name, expected=expected, found=shown
        )


class Row(Protocol):
    """What a layout needs to know of a tensor: an `Entry`, or whatever says as much."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def dtype(self) -> DType:
        """A row of the dtype table."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes it will take."""
        ...


AnyRow = TypeVar("AnyRow", bound=Row)


class Layout(NamedTuple):
    """A file to be written.

    Attributes:
        header: Its first bytes: the length, the JSON and the spaces; the data begins after them.
        rows: Name, dtype, shape and bytes of each tensor, in file order.
        size: Bytes of the whole file.
    """

    header: bytes
    rows: list[tuple[str, DType, tuple[int, ...], int]]
    size: int

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Rows of an index, in file order, offsets counted from the start of the file."""
        found: list[TensorInfo] = []
        offset = len(self.header)
        for name, dtype, shape, nbytes in self.rows:
            found.append(TensorInfo(name, dtype, shape, (Piece(0, offset, nbytes),)))
            offset += nbytes
        return tuple(found)


def lay_out(
    entries: Iterable[Row], metadata: Mapping[str, str] | None = None, align: int = ALIGN
) -> Layout:
    """Lays out one file; pure.

    Args:
        entries: The tensors, in any order.
        metadata: Strings for the header's `__metadata__`; None for none.
        align: Multiple of which the data begins, in bytes: a power of two from 8 up.

    Returns:
        The layout; equal arguments give equal bytes.

    Raises:
        UsageError: A name or the metadata can't be written, a name is given twice, or the header
            grows beyond what readers take.
        UnsupportedShapeError: A shape has no whole number of bytes, or overflows.
    """
    align = check_align(align)
    parts: list[str] = []
    if metadata is not None:
        parts.append(f'"{_METADATA}":{_compact(checked_metadata(metadata))}')
    rows = [(row.name, row.dtype, row.shape, nbytes) for row, nbytes in _ranked(entries)]
    shapes: dict[tuple[str, tuple[int, ...]], str] = {}
    cursor = 0
    for name, dtype, shape, nbytes in rows:
        if type(name) is not str or not name.isascii() or name == _METADATA:
            _check_name(name)
        # By hand: a checkpoint may have hundreds of thousands, and few shapes.
        what = shapes.get((dtype.name, shape))
        if what is None:
            dims = ",".join(map(str, shape))
            what = f'"dtype":{_quoted(dtype.name)},"shape":[{dims}],"data_offsets"'
            shapes[dtype.name, shape] = what
        end = cursor + nbytes
        parts.append(f"{_quoted(name)}:{{{what}:[{cursor},{end}]}}")
        cursor = end
    _check_twice([row[0] for row in rows])
    text = f"{{{','.join(parts)}}}".encode()
    length = -(-(8 + len(text)) // align) * align - 8
    if length > MAX_HEADER:
        raise errors.UsageError(
            "the header would be over the cap of readers; several files (max_shard_size) would do",
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{length} bytes",
        )
    start = 8 + length
    if start + cursor > _MAX_FILE:
        raise errors.UsageError(
            "no file can be that large", expected=f"{_MAX_FILE} bytes", found=f"{start + cursor}"
        )
    return Layout(struct.pack("<Q", length) + text.ljust(length), rows, start + cursor)


def split(entries: Iterable[AnyRow], limit: int | None) -> list[list[AnyRow]]:
    """Spreads tensors over files, greedily; pure.

    They are ranked first, as they will lie in the files. So whoever loads the files and splits
    again, by the same limit, gets the same ones.

    Args:
        entries: The tensors.
        limit: Bytes of tensors a file, at most; a larger tensor gets a file of its own. None for
            one file.

    Returns:
        The tensors of each file; one empty list where there are none.
    """
    if limit is None:
        return [list(entries)]
    files: list[list[AnyRow]] = [[]]
    held = 0
    for entry, nbytes in _ranked(entries):
        if files[-1] and held + nbytes > limit:
            files.append([])
            held = 0
        files[-1].append(entry)
        held += nbytes
    return files


REPLACED = "mfload_replaced"
"""In the metadata of an index, while files of an old checkpoint are still to be removed: which."""


def index_json(placed: Mapping[str, str], total: int, replaced: Sequence[str] = ()) -> bytes:
    """The index beside the files of a checkpoint, as Hugging Face lays it out.

    Args:
        placed: The file of each tensor.
        total: Bytes of all tensors.
        replaced: Files of an old checkpoint that are still to be removed.

    Raises:
        UsageError: It grows beyond what readers take.
    """
    metadata: dict[str, object] = {"total_size": total}
    if replaced:
        metadata[REPLACED] = list(replaced)
    table = {"metadata": metadata, "weight_map": dict(sorted(placed.items()))}
    raw = (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
    if len(raw) > MAX_HEADER:
        raise errors.UsageError(
            "the index would be over the cap of readers",
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{len(raw)} bytes",
        )
    return raw


def _ranked(entries: Iterable[AnyRow]) -> list[tuple[AnyRow, int]]:
    """Entries with their sizes, in the order in which they will lie."""
    best: list[tuple[AnyRow, int]] = []
    ranks: dict[int, list[tuple[AnyRow, int]]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for entry in entries:
        if type(entry) is Entry:
            key = entry.dtype.name, entry.shape
            nbytes = sizes.get(key)
            if nbytes is None:
                nbytes = sizes[key] = entry.nbytes
        else:
            nbytes = entry.nbytes
        # The greatest power of two that divides the size; nothing at all fits everywhere.
        rank = nbytes & -nbytes if nbytes % _BEST else _BEST
        if rank == _BEST:
            best.append((entry, nbytes))
        else:
            ranks.setdefault(rank, []).append((entry, nbytes))
    return [*best, *(each for rank in sorted(ranks, reverse=True) for each in ranks[rank])]


def _check_twice(names: list[str]) -> None:
    if len({*names}) < len(names):
        ((twice, _),) = collections.Counter(names).most_common(1)
        raise errors.UsageError("a name is given twice", tensor=twice)


def _check_name(name: object) -> None:
    if name == _METADATA:
        raise errors.UsageError(
            "the format keeps this name for its metadata", tensor=_METADATA, expected="another name"
        )
    if not encodable(name):
        raise errors.UsageError(
            "no name for a tensor", expected="a string that UTF-8 can spell", found=repr(name)
        )


def _compact(value: dict[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
