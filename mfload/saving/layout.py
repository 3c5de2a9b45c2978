"""Where everything of a safetensors file will lie, before a byte of it is written.

The header is padded with spaces, as the format allows, so that the data begins on a boundary that
suits maps and direct I/O. Tensors whose sizes are multiples of 64 bytes go first, then those of
32, and so on: no tensor then ends in a place where the next would not be aligned. The order within
a rank is the caller's, so a file that was loaded and is laid out again comes out the same.
"""

from __future__ import annotations

import collections
import itertools
import json
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from typing import Any, NamedTuple, Protocol, TypeVar

from mfload import errors, options
from mfload.dtypes import DType
from mfload.formats.safetensors import MAX_HEADER
from mfload.formats.strict_json import encodable
from mfload.index import Piece, TensorInfo

ALIGN = 4096
"""Default multiple of which the data begins: a page, and a disk's sector."""
REPLACED = "mfload_replaced"
"""In the metadata of an index while names change: files that are still to be removed."""

_METADATA = "__metadata__"
_BEST = 64
_MAX_COUNT = 2**64 - 1
# Offsets of files are signed to the system.
_MAX_FILE = 2**63 - 1


class Row(Protocol):
    """What a layout needs to know of a tensor: `TensorInfo` and `TensorToSave` have it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> DType: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102


AnyRow = TypeVar("AnyRow", bound=Row)


class Layout(NamedTuple):
    """A file to be written.

    The data begins after `header`: the length, the JSON and the spaces. `rows` are name, dtype,
    shape and bytes of each tensor in file order; `size` is that of the whole file.
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
    """Lays out one file; equal arguments give equal bytes."""
    parts: list[str] = []
    if metadata is not None:
        parts.append(f'"{_METADATA}":{_metadata_json(metadata)}')
    rows = [(row.name, row.dtype, row.shape, row.nbytes) for row in _ranked(entries)]
    shapes: dict[tuple[str, tuple[int, ...]], str] = {}
    cursor = 0
    for name, dtype, shape, nbytes in rows:
        if type(name) is not str or not name.isascii() or name == _METADATA:
            _check_name(name)
        # By hand: a checkpoint may have hundreds of thousands of tensors, and few shapes.
        what = shapes.get((dtype.name, shape))
        if what is None:
            _check_shape(name, dtype, shape, nbytes)
            dims = ",".join(map(str, shape))
            what = f'"dtype":{_quoted(dtype.name)},"shape":[{dims}],"data_offsets"'
            shapes[dtype.name, shape] = what
        end = cursor + nbytes
        parts.append(f"{_quoted(name)}:{{{what}:[{cursor},{end}]}}")
        cursor = end
    names = [row[0] for row in rows]
    if len({*names}) < len(names):
        ((twice, _),) = collections.Counter(names).most_common(1)
        raise errors.UsageError("a name is given twice", tensor=twice)
    text = f"{{{','.join(parts)}}}".encode()
    length = -(-(8 + len(text)) // align) * align - 8
    if length > MAX_HEADER:
        raise errors.UsageError(
            "the header would be over the cap of readers; several files (max_shard_size) would do",
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{length} bytes",
        )
    size = 8 + length + cursor
    if size > _MAX_FILE:
        expected = f"at most {_MAX_FILE} bytes"
        raise errors.UsageError("the file would be too large", expected=expected, found=str(size))
    return Layout(struct.pack("<Q", length) + text.ljust(length), rows, size)


def split(entries: Iterable[AnyRow], limit: int | None) -> list[list[AnyRow]]:
    """Spreads tensors over files, greedily; pure.

    They are ranked first, as they will lie in the files, so loading the files and splitting again
    by the same limit gives the same ones. A tensor over the limit gets a file of its own.
    """
    if limit is None:
        return [list(entries)]
    files: list[list[AnyRow]] = [[]]
    held = 0
    for entry in _ranked(entries):
        if files[-1] and held + entry.nbytes > limit:
            files.append([])
            held = 0
        files[-1].append(entry)
        held += entry.nbytes
    return files


def index_json(placed: Mapping[str, str], total: int, replaced: Sequence[str] = ()) -> bytes:
    """The index beside the files of a checkpoint, as Hugging Face lays it out."""
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


def checked_align(align: object) -> int:
    """The argument `align=` in bytes: a power of two from 8 up, or a text such as "4KiB"."""
    value = _bytes_of(align)
    if not 8 <= value <= MAX_HEADER or value & (value - 1):
        expected = f"a power of two from 8 to {1 << (MAX_HEADER.bit_length() - 1)} (bytes)"
        raise errors.UsageError("invalid align", expected=expected, found=repr(align))
    return value


def shard_limit(size: object) -> int | None:
    """The argument `max_shard_size=` in bytes; None for no limit."""
    value = None if size is None else _bytes_of(size)
    if value is not None and value < 1:
        expected = 'bytes above 0, or a text such as "5GB" or "500MiB"'
        raise errors.UsageError("invalid max_shard_size", expected=expected, found=repr(size))
    return value


def _bytes_of(value: Any) -> int:
    """A number or text as bytes; 0 if it is neither."""
    try:
        found = options.size(value) if isinstance(value, str) else value
    except ValueError:  # UsageError, or more digits than Python converts.
        return 0
    return int(found) if hasattr(found, "__index__") and not isinstance(found, bool) else 0


def _metadata_json(metadata: Mapping[str, str]) -> str:
    wrong: list[object] = [metadata]
    if isinstance(metadata, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        wrong = [text for text in (*metadata.keys(), *metadata.values()) if not encodable(text)]
    if wrong:
        expected = "{str: str}, encodable as UTF-8"
        raise errors.UsageError("invalid metadata", expected=expected, found=repr(wrong[0]))
    return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _ranked(entries: Iterable[AnyRow]) -> list[AnyRow]:
    """Entries in the order in which they will lie."""
    best: list[AnyRow] = []
    ranks: dict[int, list[AnyRow]] = {}
    for entry in entries:
        nbytes = entry.nbytes
        # The greatest power of two that divides the size; an empty tensor fits everywhere.
        if nbytes % _BEST == 0:
            best.append(entry)
        else:
            ranks.setdefault(nbytes & -nbytes, []).append(entry)
    return [*best, *(each for rank in sorted(ranks, reverse=True) for each in ranks[rank])]


def _check_shape(name: str, dtype: DType, shape: tuple[int, ...], nbytes: int) -> None:
    # In order, as readers multiply: what comes after a zero counts for nothing.
    counts = [1, *itertools.accumulate(shape, operator.mul)]
    fits = (
        all(0 <= count <= _MAX_COUNT for count in counts) and counts[-1] * dtype.bits <= _MAX_COUNT
    )
    if not fits or (dtype.known and dtype.size_of(shape) != nbytes):
        raise errors.UnsupportedShapeError(
            "no file can hold this shape",
            tensor=name,
            expected=f"whole bytes of {dtype}, and a size that fits 64 bits",
            found=str(list(shape[:8])),
        )


def _check_name(name: object) -> None:
    if name == _METADATA:
        raise errors.UsageError(
            "the format keeps this name for its metadata", tensor=_METADATA, expected="another name"
        )
    if not encodable(name):
        raise errors.UsageError(
            "invalid tensor name", expected="a string that UTF-8 can encode", found=repr(name)
        )
