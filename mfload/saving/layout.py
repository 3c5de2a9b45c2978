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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mfload import errors, options
from mfload.dtypes import DType
from mfload.formats.safetensors import MAX_HEADER
from mfload.formats.strict_json import encodable
from mfload.index import Piece, TensorInfo
from mfload.planning.memory import grouped

if TYPE_CHECKING:
    from mfload.saving.export import TensorToSave

AnyRow = TypeVar("AnyRow", "TensorInfo", "TensorToSave")

ALIGN = 4096
"""Default multiple of which the data begins: a page, and a disk's sector."""
REPLACED = "mfload_replaced"
"""In the metadata of an index while names change: files that are still to be removed."""

_METADATA = "__metadata__"
_BEST = 64
_MAX_COUNT = 2**64 - 1
# Offsets of files are signed to the system.
_MAX_FILE = 2**63 - 1


class FileLayout(NamedTuple):
    """A file to be written: its beginning, the tensors in file order, and its whole size.

    The data begins after `header`: the length, the JSON and the spaces.
    """

    header: bytes
    entries: Sequence[Any]
    size: int

    @property
    def tensors(self) -> list[TensorInfo]:
        """Rows of an index, in file order, offsets counted from the start of the file."""
        found: list[TensorInfo] = []
        offset = len(self.header)
        for row in self.entries:
            piece = Piece(0, offset, row.nbytes)
            found.append(TensorInfo(row.name, row.dtype, row.shape, (piece,)))
            offset += row.nbytes
        return found


def lay_out(
    entries: Iterable[AnyRow],
    metadata: Mapping[str, str] | None = None,
    align: int = ALIGN,
    *,
    ranked: bool = True,
) -> FileLayout:
    """Lays out one file; equal arguments give equal bytes. Unless `ranked`, in the given order."""
    rows = _ranked(entries) if ranked else list(entries)
    parts = [] if metadata is None else [f'"{_METADATA}":{_metadata_json(metadata)}']
    shapes: dict[tuple[str, tuple[int, ...]], str] = {}
    cursor = 0
    for row in rows:
        name, dtype, shape, nbytes = row.name, row.dtype, row.shape, row.nbytes
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
    if len({row.name for row in rows}) < len(rows):
        ((twice, _),) = collections.Counter(row.name for row in rows).most_common(1)
        raise errors.UsageError("a name is given twice", tensor=twice)
    text = f"{{{','.join(parts)}}}".encode()
    length = -(-(8 + len(text)) // align) * align - 8
    _check_size("header", length, MAX_HEADER, "; max_shard_size makes several files")
    size = 8 + length + cursor
    _check_size("file", size, _MAX_FILE)
    return FileLayout(struct.pack("<Q", length) + text.ljust(length), rows, size)


def split(
    entries: Iterable[AnyRow], limit: int | None, *, ranked: bool = True
) -> list[list[AnyRow]]:
    """Spreads tensors over files, greedily; pure.

    If `ranked`, they are ranked first, as they will lie in the files, so loading the files and
    splitting again by the same limit gives the same ones. A tensor over the limit gets a file of
    its own.
    """
    if limit is None:
        return [list(entries)]
    rows = _ranked(entries) if ranked else entries
    return [*grouped(rows, limit, operator.attrgetter("nbytes"))] or [[]]


def index_json(
    names: Iterable[str], layouts: Iterable[FileLayout], replaced: Sequence[str] = ()
) -> bytes:
    """The index beside files of these names, as Hugging Face lays it out."""
    rows = [(row, name) for name, made in zip(names, layouts, strict=True) for row in made.entries]
    metadata: dict[str, object] = {"total_size": sum(row.nbytes for row, _ in rows)}
    if replaced:
        metadata[REPLACED] = list(replaced)
    placed = sorted((row.name, name) for row, name in rows)
    table = {"metadata": metadata, "weight_map": dict(placed)}
    raw = (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
    _check_size("index", len(raw), MAX_HEADER)
    return raw


def checked_align(align: object) -> int:
    """The argument `align=` in bytes: a power of two from 8 up."""
    value = options.byte_count("align", align, 8)
    if value > MAX_HEADER or value & (value - 1):
        expected = f"a power of two from 8 to {1 << (MAX_HEADER.bit_length() - 1)} (bytes)"
        raise errors.UsageError("invalid align", expected=expected, found=repr(align))
    return value


def shard_limit(size: object) -> int | None:
    """The argument `max_shard_size=` in bytes; None for no limit."""
    return None if size is None else options.byte_count("max_shard_size", size, 1)


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
    ranks: dict[int, list[AnyRow]] = {_BEST: []}
    for entry in entries:
        nbytes = entry.nbytes
        # The greatest power of two that divides the size; an empty tensor fits everywhere.
        rank = nbytes & -nbytes if nbytes % _BEST else _BEST
        ranks.setdefault(rank, []).append(entry)
    return [entry for rank in sorted(ranks, reverse=True) for entry in ranks[rank]]


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
    if not encodable(name) or name == _METADATA:
        raise errors.UsageError(
            "invalid tensor name",
            expected=f"a string that UTF-8 can encode, other than {_METADATA}",
            found=repr(name),
        )


def _check_size(what: str, nbytes: int, most: int, advice: str = "") -> None:
    if nbytes > most:
        raise errors.UsageError(
            f"the {what} would be too large{advice}",
            expected=f"at most {errors.amount(most)}",
            found=errors.amount(nbytes),
        )
