"""The safetensors header, checked as hostile input.

The file is: 8 bytes little-endian header length N, N bytes of JSON, then data up to the end of
the file. The JSON maps names to {"dtype", "shape", "data_offsets": [begin, end]} with offsets
counted from the start of the data, and "__metadata__" to strings. Every rule of the format's
reference reader holds here: tensors must tile the data without hole or overlap. Two choices
are ours: a name given twice is refused, and a dtype mfload does not know fails only the tensor
that has it (docs/design/format-choices.md).
"""

from __future__ import annotations

import struct
from typing import Any

from mfload import dtypes, errors
from mfload.formats import hints, strict_json
from mfload.formats.strict_json import brief
from mfload.index import Piece, TensorInfo
from mfload.sources.local import LocalFile

MAX_HEADER = 100_000_000
"""Longest header in bytes that the reference reader takes."""

_MAX_SIZE = 2**64 - 1
_make: Any = tuple.__new__
_FIELDS = ("dtype", "shape", "data_offsets")


def read(file: LocalFile, source: int = 0) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """Reads one file's header; returns the tensors in order of offset, and the metadata.

    `source` is the file's number in the index to be.

    Raises:
        HeaderError: The header breaks a rule of the format; says what the file seems to be.
    """
    try:
        if file.size < 8:
            raise _misfit(file, "too short for a safetensors file", "8 bytes or more", file.size)
        (length,) = struct.unpack("<Q", file.read(0, 8))
        if length > MAX_HEADER:
            what = "the header's length is over the format's limit; not a safetensors file"
            raise _misfit(file, what, f"at most {MAX_HEADER} bytes", length)
        if length > file.size - 8:
            most = file.size - 8
            raise _misfit(file, "the file ends within its header", f"at most {most} bytes", length)
        return parse(file.read(8, length), size=file.size, path=file.path, source=source)
    except errors.HeaderError as error:
        raise hints.explain_file(error, file) from None


def _misfit(file: LocalFile, what: str, expected: str, found: int) -> errors.HeaderError:
    return errors.HeaderError(what, file=file.path, expected=expected, found=f"{found} bytes")


def parse(
    raw: bytes, *, size: int, path: str = "<header>", source: int = 0
) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """Checks a header's JSON, without the eight bytes before it (see `read`); pure.

    `size` is that of the whole file.
    """
    header = strict_json.loads(raw, path)
    if not isinstance(header, dict):
        raise errors.HeaderError(
            "the header is not a JSON object", file=path, expected="{…}", found=brief(header)
        )
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        _check_metadata(metadata, path)
    data_start = 8 + len(raw)
    rows = [_row(name, entry, data_start, path, source) for name, entry in header.items()]
    rows.sort(key=_range)
    cursor = data_start
    for row in rows:
        offset, nbytes = _range(row)
        if offset != cursor:
            what = "overlaps the tensor before it" if offset < cursor else "leaves a hole"
            raise errors.HeaderError(
                f"the tensor {what}",
                file=path,
                tensor=row.name,
                expected=f"data_offsets beginning at {cursor - data_start}",
                found=offset - data_start,
            )
        cursor += nbytes
    if cursor != size:
        missing = f"is truncated: {cursor - size} bytes of {cursor} are missing"
        what = missing if cursor > size else "has bytes past its last tensor"
        raise errors.HeaderError(
            f"the file {what}", file=path, expected=f"{cursor} bytes", found=f"{size} bytes"
        )
    return rows, metadata


def _range(row: TensorInfo) -> tuple[int, int]:
    return row[3][0][1:3]  # offset and nbytes of its one piece; by number, it is the hot loop


def _check_metadata(entry: Any, path: str) -> None:
    wrong = [entry]
    if isinstance(entry, dict):
        wrong = [value for value in entry.values() if not isinstance(value, str)]
    if wrong:
        raise errors.HeaderError(
            "__metadata__ holds something other than strings",
            file=path,
            expected="{string: string}",
            found=brief(wrong[0]),
        )


def _row(name: str, entry: Any, data_start: int, path: str, source: int) -> TensorInfo:
    # Types are compared, not instances: booleans are integers to Python.
    if type(entry) is not dict or len(entry) != 3:
        entry = _fields(name, entry, path)
    try:
        dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        begin, end = offsets
        if type(dtype_name) is not str:
            dtype_name = _variant(dtype_name)
    except (TypeError, KeyError, ValueError):
        raise _bad(path, name, _ENTRY, entry) from None
    if type(shape) is not list or type(offsets) is not list:
        raise _bad(path, name, "shape and data_offsets lists", entry)
    count = 1
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= _MAX_SIZE:
            raise _bad(path, name, "dims that are whole numbers from 0 to 2^64-1", dim)
        count *= dim
        # In order, so that what comes after a zero counts for nothing, and stopped at
        # once: the product of a million dims takes minutes.
        if count > _MAX_SIZE:
            raise _bad(path, name, "a size that fits 64 bits", shape)
    if type(begin) is not int or type(end) is not int or begin < 0:
        raise _bad(path, name, "data_offsets that are whole numbers", offsets)
    nbytes = end - begin
    if nbytes < 0:
        raise _bad(path, name, "data_offsets that end after they begin", offsets)
    dtype = dtypes.TABLE.get(dtype_name) or dtypes.lookup(dtype_name)
    # An unknown dtype has elements of no bytes: whatever it holds is taken on trust.
    if dtype.nbytes * count != nbytes * dtype.elements and dtype.known:
        whole, rest = divmod(dtype.nbytes * count, dtype.elements)
        wanted = f"a whole number of bytes of {dtype}" if rest else f"{whole} bytes for {dtype}"
        raise _bad(path, name, wanted, f"{brief(shape)} in {nbytes} bytes")
    # Made by `tuple.__new__`, since the named tuples' constructors take twice the time.
    piece = _make(Piece, (source, data_start + begin, nbytes))
    return _make(TensorInfo, (name, dtype, tuple(shape), (piece,)))


_ENTRY = '{"dtype": …, "shape": […], "data_offsets": [begin, end]}'


def _fields(name: str, entry: Any, path: str) -> Any:
    """An entry in a shape of its own.

    The reference reader passes over fields that it does not know, as long as they are JSON
    to it, and takes the three that it knows without their names too, as a list.
    """
    if type(entry) is list and len(entry) == 3:
        return dict(zip(_FIELDS, entry, strict=True))
    if type(entry) is not dict:
        raise _bad(path, name, _ENTRY, entry)
    strict_json.check(entry, path, outer=1)
    return entry


def _variant(spelled: Any) -> str:
    """A dtype that is not a string: to the reference reader {"F32": null} is "F32" too."""
    if type(spelled) is dict and list(spelled.values()) == [None]:
        return next(iter(spelled))
    raise TypeError


def _bad(path: str, name: str, expected: str, found: object) -> errors.HeaderError:
    return errors.HeaderError(
        "malformed tensor entry",
        file=path,
        tensor=name,
        expected=expected,
        found=found if isinstance(found, str) else brief(found),
    )
