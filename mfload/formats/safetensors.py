"""The safetensors header, read as if somebody had made it to hurt.

The file is: 8 bytes little-endian header length N, N bytes of JSON, then data up to the end of
the file. The JSON maps names to {"dtype", "shape", "data_offsets": [begin, end]} with offsets
counted from the start of the data, and "__metadata__" to strings. Every rule of the format's
reference reader holds here: tensors must tile the data without hole or overlap. Two choices
are ours: a name given twice is refused, and a dtype mfload does not know fails only the tensor
that has it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NoReturn

from mfload import dtypes, errors
from mfload.index import Piece, TensorInfo
from mfload.io.source import LocalFile

MAX_HEADER = 100_000_000
"""Longest header in bytes that the reference reader takes."""

_MAX_INT = 2**63 - 1


def read(file: LocalFile, source: int = 0) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """Reads one file's header.

    Args:
        file: The source.
        source: Its number in the index to be.

    Returns:
        The tensors in order of offset, and the metadata.

    Raises:
        HeaderError: The header breaks a rule of the format.
    """
    if file.size < 8:
        raise errors.HeaderError(
            "too short for a safetensors file",
            file=file.path,
            expected="8 bytes or more",
            found=f"{file.size} bytes",
        )
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER:
        raise errors.HeaderError(
            "header over the cap; is this a safetensors file?",
            file=file.path,
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{length} bytes",
        )
    if length > file.size - 8:
        raise errors.HeaderError(
            "the file ends within its header",
            file=file.path,
            expected=f"a header of {length} bytes",
            found=f"{file.size - 8} bytes after the length",
        )
    return parse(file.read(8, length), size=file.size, path=file.path, source=source)


def parse(
    raw: bytes, *, size: int, path: str = "<header>", source: int = 0
) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """Checks a header's JSON; pure.

    Args:
        raw: The JSON, without the eight bytes before it.
        size: Size of the whole file in bytes.
        path: For error messages.
        source: Number of the source in the index to be.

    Returns:
        The tensors in order of offset, and the metadata (None where there is none).

    Raises:
        HeaderError: The header breaks a rule of the format.
    """
    header = load_json(raw, path)
    if raw[:1] != b"{" or not isinstance(header, dict):
        raise errors.HeaderError("the header is no JSON object", file=path)
    metadata = _metadata(header.pop("__metadata__", None), path)
    data_start = 8 + len(raw)
    rows = [_row(name, entry, data_start, path, source) for name, entry in header.items()]
    rows.sort(key=lambda row: (row.pieces[0].offset, row.pieces[0].nbytes))
    cursor = data_start
    for row in rows:
        piece = row.pieces[0]
        if piece.offset != cursor:
            what = "overlaps the tensor before it" if piece.offset < cursor else "leaves a hole"
            raise errors.HeaderError(
                f"the tensor {what}",
                file=path,
                tensor=row.name,
                expected=f"data_offsets beginning at {cursor - data_start}",
                found=piece.offset - data_start,
            )
        cursor += piece.nbytes
    if cursor != size:
        what = "is truncated" if cursor > size else "has bytes past its last tensor"
        raise errors.HeaderError(
            f"the file {what}", file=path, expected=f"{cursor} bytes", found=f"{size} bytes"
        )
    return rows, metadata


def load_json(raw: bytes, path: str) -> Any:
    """Parses JSON as strictly as the format's reference reader does.

    Raises:
        HeaderError: Not UTF-8, not JSON, nested too deep, a name given twice, a number JSON
            has no word for.
    """
    options: dict[str, Any] = {}
    if b"-0" in raw:
        options["parse_int"] = _strict_int
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_reject, **options
        )
    except UnicodeDecodeError as error:
        raise errors.HeaderError("the header is not UTF-8", file=path, found=str(error)) from None
    except RecursionError:
        raise errors.HeaderError("the header is nested too deep", file=path) from None
    except _Refused as error:
        raise errors.HeaderError(error.reason, file=path, tensor=error.name) from None
    except ValueError as error:
        raise errors.HeaderError("the header is not JSON", file=path, found=str(error)) from None


class _Refused(Exception):
    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Refused("a name is given twice", name)
            seen.add(name)
    return table


def _reject(constant: str) -> NoReturn:
    raise _Refused(f"{constant} is no JSON number")


def _strict_int(text: str) -> int | float:
    # Minus zero is an integer to Python and none to readers of unsigned numbers.
    return -0.0 if text == "-0" else int(text)


def _metadata(entry: Any, path: str) -> dict[str, str] | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise errors.HeaderError("__metadata__ is no object", file=path, found=type(entry).__name__)
    for key, value in entry.items():
        _encodable(key, path)
        if not isinstance(value, str):
            raise errors.HeaderError(
                "__metadata__ holds something other than strings",
                file=path,
                expected=f"a string for {key!r}",
                found=type(value).__name__,
            )
        _encodable(value, path)
    return entry


def _encodable(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise errors.HeaderError("a lone surrogate in a string", file=path) from None


def _row(name: str, entry: Any, data_start: int, path: str, source: int) -> TensorInfo:
    _encodable(name, path)
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise errors.HeaderError(
            "malformed tensor entry",
            file=path,
            tensor=name,
            expected='{"dtype": …, "shape": […], "data_offsets": [begin, end]}',
            found=str(entry)[:200],
        ) from None
    # Booleans are integers to Python: compare types, not instances.
    if (
        type(dtype_name) is not str
        or type(shape) is not list
        or type(entry["data_offsets"]) is not list
    ):
        raise _bad(path, name, "dtype a string, shape and data_offsets lists", entry)
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number <= _MAX_INT:
            raise _bad(path, name, "whole numbers from 0 to 2^63-1", number)
    if end < begin:
        raise _bad(path, name, "data_offsets that end after they begin", [begin, end])
    dtype = dtypes.TABLE.get(dtype_name) or dtypes.lookup(dtype_name)
    if dtype.known:
        if math.prod(filter(None, shape)) * dtype.bits > _MAX_INT:
            raise _bad(path, name, "a size that fits 63 bits", shape)
        nbytes = dtype.size_of(shape)
        if nbytes is None:
            raise _bad(path, name, f"a whole number of bytes of {dtype}", shape)
        if nbytes != end - begin:
            raise _bad(path, name, f"{nbytes} bytes for {dtype} {shape}", f"{end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), (Piece(source, data_start + begin, end - begin),))


def _bad(path: str, name: str, expected: str, found: object) -> errors.HeaderError:
    return errors.HeaderError(
        "malformed tensor entry",
        file=path,
        tensor=name,
        expected=expected,
        found=str(found)[:200],
    )
