"""The safetensors header, checked as hostile input, and the index of shards.

The file is: 8 bytes little-endian header length N, N bytes of JSON, then data up to the end of
the file. The JSON maps names to {"dtype", "shape", "data_offsets": [begin, end]} with offsets
counted from the start of the data, and "__metadata__" to strings. Every rule of the format's
reference reader holds here: tensors must tile the data without hole or overlap. Two choices
are ours: a name given twice is refused, and a dtype mfload does not know fails only the tensor
that has it (docs/design/format-choices.md).

A header as the usual writers write it, with the fields in their order and without an escape in a
name, is matched by one regular expression and checked in columns. Any other, and whatever breaks a
rule, is parsed as JSON and checked row by row, which names the fault. Both take the same headers.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.formats import strict_json
from mfload.formats.strict_json import bad, brief
from mfload.index import Columns, Kind, TensorInfo
from mfload.sources.base import Source, read_whole

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER = 100_000_000
"""Longest header in bytes that the reference reader takes."""

_HEAD = 4096  # Bytes that are read at once; most headers of many shards are shorter.
_MAX_SIZE = 2**64 - 1
_FIELDS = ("dtype", "shape", "data_offsets")
_RANGE = operator.itemgetter(0, 1)  # Of what `_row` returns: offset and bytes.


def recognise(head: bytes, name: str) -> bool:
    """Whether a file looks like one of the format, by its first bytes and its name."""
    if name.endswith(SUFFIX):
        return True
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER


def read(file: Source, source: int = 0) -> tuple[Sequence[TensorInfo], dict[str, str] | None]:
    """Reads one file's header; returns the tensors in order of offset, and the metadata.

    `source` is the file's number in the index to be.

    Raises:
        HeaderError: The header breaks a rule of the format; says what the file seems to be.
    """
    try:
        return parse(_header(file), size=file.size, path=file.name, source=source)
    except errors.HeaderError as error:
        from mfload.formats import hints  # Here and elsewhere: only errors need it.

        raise hints.explain_file(error, file) from None


def read_index(source: Source) -> dict[str, Any]:
    """The JSON of an index; its `weight_map` gives the file of each tensor.

    Raises:
        SourceError: It can't be read.
        HeaderError: It is not an index.
    """
    raw = read_whole(source, MAX_HEADER, "the index is over the limit")
    try:
        table: Any = strict_json.loads(raw, source.name, "index")
    except errors.HeaderError as error:
        from mfload.formats import hints

        if b"{" in raw[:8]:  # It is an index, and the error says what is wrong with it.
            raise
        raise hints.explain_file(error, source) from None
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not {*map(type, weights.values())} <= {str}:
        expected = '{"weight_map": {name: file}}; or give the directory of the checkpoint'
        raise bad(source, "not a checkpoint index", None, expected, brief(table))
    return table


def count(file: Source) -> int:
    """How many tensors a header has, which is not checked: -1 if there is none to be read."""
    try:
        return _header(file).count(b'"data_offsets"')
    except errors.HeaderError:
        return -1


def _header(file: Source) -> bytes:
    if file.size < 8:
        raise _misfit(file, "too short for a safetensors file", "8 bytes or more", file.size)
    head = file.read(0, min(file.size, _HEAD))
    (length,) = struct.unpack("<Q", head[:8])
    if length > MAX_HEADER:
        what = "the header's length is over the format's limit; not a safetensors file"
        raise _misfit(file, what, f"at most {errors.amount(MAX_HEADER)}", length)
    if length > file.size - 8:
        most = errors.amount(file.size - 8)
        raise _misfit(file, "the file ends within its header", f"at most {most}", length)
    raw = head[8 : 8 + length]
    return raw if len(raw) == length else file.read(8, length)


def _misfit(file: Source, what: str, expected: str, found: int) -> errors.HeaderError:
    return bad(file, what, None, expected, errors.amount(found))


def parse(
    raw: bytes, *, size: int, path: str = "<header>", source: int = 0
) -> tuple[Sequence[TensorInfo], dict[str, str] | None]:
    """Checks a header's JSON, without the eight bytes before it (see `read`); pure.

    `size` is that of the whole file.
    """
    return _in_columns(raw, size, path, source) or _row_by_row(raw, size, path, source)


_COLUMNS = [slice(n, None, 5) for n in range(5)]
_FEW = 64  # Dims; the product of a million takes minutes.
_OFFSET = "0|[1-9][0-9]{0,17}+"  # Fits 64 bits.


@functools.cache
def _entry(gap: str) -> re.Pattern[str]:
    """The pattern of an entry and the comma behind it; with `gap` behind commas and colons."""
    colon, comma = f":{gap}", f",{gap}"
    return re.compile(
        rf'"([^"\\\x00-\x1f]*+)"{colon}\{{"dtype"{colon}'
        rf'"([A-Z0-9_]++"{comma}"shape"{colon}\[[0-9,{gap}]*+)'
        rf'\]{comma}"data_offsets"{colon}\[({_OFFSET}){comma}({_OFFSET})\]\}}{comma}'
    )


def _in_columns(
    raw: bytes, size: int, path: str, source: int
) -> tuple[Columns, dict[str, str] | None] | None:
    """What `parse` returns, of a plain header without a fault; None of any other."""
    try:
        text = raw.decode("utf-8")
        end, start, metadata = len(text.rstrip(" ")) - 1, 1, None
        gap = " " if text.startswith(" ", text.find('":') + 2) else ""
        opening = f'{{"__metadata__":{gap}{{'
        if text.startswith(opening):
            strings = text[len(opening) :].partition(f"}},{gap}")[0]
            start = len(opening) + len(strings) + 2 + len(gap)
            metadata = _strings(strings, gap, path)
    except (UnicodeDecodeError, errors.HeaderError):
        return None
    entry, entries = _entry(gap), text[start:end] + f",{gap}"
    if text[:1] != "{" or text[end:][:1] != "}" or not entry.match(entries):
        return None
    data_start = 8 + len(raw)
    # What is between the matches, and four groups of each. There must be nothing between them.
    parts = entry.split(entries)
    between, names, spelled, begins, ends = map(parts.__getitem__, _COLUMNS)
    if any(between):
        return None
    if begins[1:] != ends[:-1]:
        order = sorted(range(len(names)), key=lambda n: (int(begins[n]), int(ends[n])))
        names, spelled, begins, ends = (
            list(map(each.__getitem__, order)) for each in (names, spelled, begins, ends)
        )
        if begins[1:] != ends[:-1]:
            return None
    unique = set(names)
    if len(unique) < len(names) or "__metadata__" in unique or ends[-1] != str(size - data_start):
        return None
    positions: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    kind = array("q", map(positions.__getitem__, spelled))
    kinds: list[Kind] = []
    sizes: list[int] = []
    for each in positions:
        known = _kind(each, gap)
        if known is None:
            return None
        kinds.append(known)
        sizes.append(known[0].size_of(known[1]) or 0)
    nbytes = list(map(sizes.__getitem__, kind))
    offsets = list(itertools.accumulate(nbytes, initial=data_start))
    if offsets.pop() != size or offsets != list(map(data_start.__add__, map(int, begins))):
        return None
    places = array("q", [source]) * len(names), array("q", offsets), array("q", nbytes)
    return Columns(names, kinds, kind, *places), metadata


def _kind(spelled: str, gap: str) -> Kind | None:
    """Dtype and shape, of a text such as `F32","shape":[8,8`; None if anything is odd."""
    name, _, rest = spelled.partition('"')
    text = rest[rest.index("[") + 1 :]
    dtype, dims = dtypes.TABLE.get(name), text.split(f",{gap}") if text else []
    try:
        shape = tuple(map(int, dims))
    except ValueError:
        return None
    # No zero is before a dim.
    if dtype is None or len(dims) > _FEW or list(map(str, shape)) != dims:
        return None
    most = max((*shape, *itertools.accumulate(shape, operator.mul)), default=0)
    return (dtype, shape) if most <= _MAX_SIZE and dtype.size_of(shape) is not None else None


def _strings(text: str, gap: str, path: str) -> dict[str, str]:
    """The metadata, of what is between its braces (errors: see `read`)."""
    parts = text.split('"')
    found = dict(zip(parts[1::4], parts[3::4], strict=False))
    spelled = f",{gap}".join(f'"{key}":{gap}"{value}"' for key, value in found.items())
    if spelled == text and text.isprintable() and "\\" not in text:
        return found  # The import of `json` takes as long as a small load.
    metadata = strict_json.loads(b"{%b}" % text.encode(), path)
    _check_metadata(metadata, path)
    return metadata


def _row_by_row(
    raw: bytes, size: int, path: str, source: int
) -> tuple[Columns, dict[str, str] | None]:
    header = strict_json.loads(raw, path, loose="__metadata__")
    if not isinstance(header, dict):
        raise bad(path, "the header is not a JSON object", None, "{…}", brief(header))
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        _check_metadata(metadata, path)
    data_start = 8 + len(raw)
    rows: list[tuple[int, int, str, DType, tuple[int, ...]]] = []
    for name, entry in header.items():
        rows.append(_row(name, entry, data_start, path))
    rows.sort(key=_RANGE)
    names: list[str] = []
    kinds: list[Kind] = []
    numbers: dict[Any, int] = {}
    kind, offsets, sizes = array("q"), list[int](), list[int]()
    cursor = data_start
    for offset, nbytes, name, dtype, shape in rows:
        if offset != cursor:
            what = "overlaps the tensor before it" if offset < cursor else "leaves a hole"
            expected = f"data_offsets beginning at {cursor - data_start}"
            raise bad(path, f"the tensor {what}", name, expected, offset - data_start)
        cursor += nbytes
        # By name: to hash a dtype takes longer.
        number = numbers.setdefault((dtype.name, shape), len(numbers))
        if number == len(kinds):
            kinds.append((dtype, shape))
        names.append(name)
        kind.append(number)
        offsets.append(offset)
        sizes.append(nbytes)
    if cursor != size:
        missing = f"is truncated: {errors.amount(cursor - size)} of {cursor} are missing"
        what = missing if cursor > size else "has bytes past its last tensor"
        raise bad(path, f"the file {what}", None, errors.amount(cursor), errors.amount(size))
    # All within the file, so they fit 64 bits.
    places = array("q", [source]) * len(names), array("q", offsets), array("q", sizes)
    return Columns(names, kinds, kind, *places), metadata


def _check_metadata(entry: Any, path: str) -> None:
    wrong = [entry]
    if isinstance(entry, dict):
        wrong = [value for value in entry.values() if not isinstance(value, str)]
    if wrong:
        what = "__metadata__ holds something other than strings"
        raise bad(path, what, None, "{string: string}", brief(wrong[0]))


def _row(
    name: str, entry: Any, data_start: int, path: str
) -> tuple[int, int, str, DType, tuple[int, ...]]:
    """Offset in the file, bytes, name, dtype and shape of a tensor."""
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
    dtype = dtypes.lookup(dtype_name, dtypes.TABLE)
    # An unknown dtype has elements of no bytes: whatever it holds is taken on trust.
    if dtype.nbytes * count != nbytes * dtype.elements and dtype.known:
        whole, rest = divmod(dtype.nbytes * count, dtype.elements)
        wanted = (
            f"a whole number of bytes of {dtype}" if rest else f"{errors.amount(whole)} for {dtype}"
        )
        raise _bad(path, name, wanted, f"{brief(shape)} in {errors.amount(nbytes)}")
    return data_start + begin, nbytes, name, dtype, tuple(shape)


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
    found = found if isinstance(found, str) else brief(found)
    return bad(path, "malformed tensor entry", name, expected, found)
