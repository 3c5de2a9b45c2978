"""Zarr arrays, versions 2 and 3, checked as hostile input: keys and values become pieces.

An array is a grid of chunks, each the value of a key, and JSON beside them: `.zarray` or
`zarr.json`. Chunks at the edge of the grid are stored whole. A chunk that is absent holds the fill
value. With version 3 a chunk may be a shard: inner chunks, and an index of their ranges.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import dtypes, errors, sources
from mfload.dtypes import DType
from mfload.formats import strict_json
from mfload.formats.crc32c import crc32c
from mfload.formats.ocdbt import Value
from mfload.formats.strict_json import brief
from mfload.index import Box, Piece, TensorInfo
from mfload.sources.base import Source
from mfload.stored import Encoding, Stored

MAX_METADATA = 1 << 20
"""Bytes of an array's JSON."""

_FILES = {2: ".zarray", 3: "zarr.json"}
_MAX_RANK = 255
_ABSENT = (1 << 64) - 1
_V2_KIND = re.compile(r"([<>|])([biufc])(\d{1,2})")
_BY_NAME = {row.numpy_name: row for row in dtypes.TABLE.values() if row.numpy_name is not None}
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_COMPRESSORS = ("zstd", "gzip", "zlib")
_NUMBER = re.compile(r"0|[1-9]\d{0,17}")

Coords = tuple[int, ...]


class Store:
    """Values by key, and the sources they lie in.

    Attributes:
        sources: `files`, and those of the values that were asked for.
        first: The number of the first in pieces.
        missing: A line for the chunks that each array lacks, if its writer left none out; None if
            absent chunks hold the fill value.
    """

    missing: list[str] | None = None

    def __init__(self, values: Mapping[str, Value], files: Sequence[Source], first: int) -> None:
        self.values, self.sources, self.first = values, [*files], first
        self._numbers = {file.name: number for number, file in enumerate(files)}
        self._keys = sorted(values)

    def arrays(self) -> Collection[str]:
        """Names of the arrays, by their metadata."""
        found = dict[str, None]()
        for key in self._keys:
            name, _, last = key.rpartition("/")
            if last in _FILES.values():
                found[name] = None
        return found.keys()

    def below(self, name: str) -> Iterator[tuple[str, Value]]:
        """The values of an array, by what follows its name in their keys."""
        from bisect import bisect_left

        start = bisect_left(self._keys, f"{name}/")
        for key in itertools.islice(self._keys, start, bisect_left(self._keys, f"{name}0")):
            yield key[len(name) + 1 :], self.values[key]

    def piece(self, value: Value, stored: Stored, name: str) -> Piece:
        """The piece of a tensor that a value holds."""
        if value.inline is not None:
            return Piece(self.first, 0, 0, stored._replace(inline=value.inline))
        number = self._number(value, name)
        held = None if stored == Stored() else stored
        return Piece(self.first + number, value.offset, value.nbytes, held)

    def fetch(self, value: Value, start: int, stop: int, name: str) -> bytes:
        """Some bytes of a value."""
        if value.inline is not None:
            return value.inline[start:stop]
        number = self._number(value, name)
        return self.sources[number].read(value.offset + start, stop - start)

    def _number(self, value: Value, name: str) -> int:
        number = self._numbers.get(value.file)
        if number is None:
            try:
                source = sources.local_file(value.file)
            except errors.SourceError as error:
                error.tensor = name
                raise
            source.keep(True)
            self.sources.append(source)
            number = self._numbers[value.file] = len(self.sources) - 1
        size = self.sources[number].size
        if value.offset + value.nbytes > size:
            what = "a chunk reaches out of its file: the file is truncated"
            end = f"{value.offset + value.nbytes} bytes"
            raise _bad(what, value.file, name, end, f"{size} bytes")
        return number


class _Codecs(NamedTuple):
    """How the elements of a chunk became bytes.

    Attributes:
        order: The dims as they are stored, the one with the longest steps first.
        steps: Codecs that made bytes of bytes, in the order of encoding.
    """

    order: tuple[int, ...]
    big_endian: bool
    steps: tuple[str, ...]


class _Sharding(NamedTuple):
    """How a chunk is cut into inner ones."""

    chunk: tuple[int, ...]
    codecs: _Codecs
    checked: bool  # Whether a CRC follows the index.
    at_end: bool


class _Array(NamedTuple):
    """What the metadata of an array says.

    Attributes:
        separator: What stands between the numbers of a chunk in its key.
        prefix: What stands before them.
    """

    file: str
    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    codecs: _Codecs
    sharding: _Sharding | None
    fill: Any
    separator: str
    prefix: str

    def bad(self, what: str, expected: object = None, found: object = None) -> errors.HeaderError:
        return _bad(what, self.file, self.name, expected, found)


def read(store: Store, name: str) -> TensorInfo:
    """The tensor of an array.

    Raises:
        HeaderError: The metadata, a range or the index of a shard is malformed; or chunks are
            encoded in a way that mfload does not decode.
        SourceError: A file of the store is missing.
    """
    array = _metadata(store, name)
    dtype, shape, chunk = array.dtype, array.shape, array.chunk
    grid = tuple(-(-n // size) for n, size in zip(shape, chunk, strict=True))
    present: dict[Coords, Value] = {}
    for key, value in store.below(name):
        at = _coords(array, key)
        if at is not None and all(map(int.__lt__, at, grid)):
            present[at] = value
    pieces: list[Piece] = []
    if not dtype.known:  # Its chunks can be counted, not read.
        pieces += (store.piece(value, Stored(), name) for value in present.values())
    elif 0 not in shape:
        whole = tuple((0, n) for n in shape)
        for at, value in sorted(present.items()):
            box = _boxed(tuple((n, n + 1) for n in at), chunk, whole)
            if array.sharding is None:
                pieces.append(_chunk(store, array, array.codecs, chunk, box, value))
            else:
                pieces += _shard(store, array, array.sharding, box, value)
        pieces += _filled(store, array, sorted(present), grid, chunk, whole)
    return TensorInfo(name, dtype, shape, tuple(pieces) or (Piece(store.first, 0, 0),))


def _coords(array: _Array, key: str) -> Coords | None:
    """The place of a chunk in the grid, by what follows the array's name in its key."""
    if not array.shape:
        return () if key == (array.prefix or "0") else None
    if array.prefix:
        prefix, _, key = key.partition(array.separator)
        if prefix != array.prefix:
            return None
    numbers = key.split(array.separator)
    if len(numbers) != len(array.shape) or not all(map(_NUMBER.fullmatch, numbers)):
        return None
    return tuple(map(int, numbers))


def _boxed(cells: Box, size: Coords, within: Box) -> Box:
    """The elements of cells in a grid that fills a box, from its first corner on."""
    return tuple(
        (low + start * n, min(high, low + stop * n))
        for (start, stop), n, (low, high) in zip(cells, size, within, strict=True)
    )


def _chunk(
    store: Store, array: _Array, codecs: _Codecs, chunk: Coords, box: Box, value: Value
) -> Piece:
    """The piece of a chunk that holds a box."""
    made = [math.prod(chunk) * array.dtype.nbytes]
    for step in codecs.steps:
        made.append(made[-1] + 4 if step == "crc32c" else -1)
    if -1 not in made and made[-1] != value.nbytes:
        raise array.bad("a chunk has another size", f"{made[-1]} bytes", f"{value.nbytes} bytes")
    made[-1] = value.nbytes
    for at in reversed(range(1, len(made) - 1)):
        if made[at] == -1:
            made[at] = made[at + 1] - 4
    if min(made) < 0:
        raise array.bad("a chunk is truncated", "4 bytes or more", f"{value.nbytes} bytes")
    pairs = zip(codecs.steps, made, strict=False)
    encodings = tuple(Encoding(step, nbytes) for step, nbytes in reversed([*pairs]))
    strides = None
    if codecs.order != tuple(range(len(chunk))):
        steps, step = [1] * len(chunk), 1
        for dim in reversed(codecs.order):
            steps[dim], step = step, step * chunk[dim]
        strides = tuple(steps)
    extent = tuple(high - low for low, high in box)
    stored = Stored(
        box=None if extent == array.shape else box,
        chunk=None if extent == chunk or strides else chunk,
        strides=strides,
        big_endian=codecs.big_endian and array.dtype.bits > 8,
        encodings=encodings,
    )
    return store.piece(value, stored, array.name)


def _shard(
    store: Store, array: _Array, sharding: _Sharding, box: Box, value: Value
) -> Iterator[Piece]:
    """The pieces of the inner chunks of a shard that holds a box."""
    inner = sharding.chunk
    counts = [n // size for n, size in zip(array.chunk, inner, strict=True)]
    length = 16 * math.prod(counts)
    tail = 4 if sharding.checked else 0
    if length + tail > value.nbytes:
        what = "a shard is shorter than its index"
        raise array.bad(what, f"{length + tail} bytes or more", f"{value.nbytes} bytes")
    start = value.nbytes - length - tail if sharding.at_end else 0
    index = store.fetch(value, start, start + length + tail, array.name)
    if tail and crc32c(index[:length]).to_bytes(4, "little") != index[length:]:
        raise array.bad("the index of a shard is damaged", "its CRC-32C", index[length:].hex())
    ranges = struct.unpack(f"<{length // 8}Q", index[:length])
    grid = tuple(-(-(high - low) // n) for (low, high), n in zip(box, inner, strict=True))
    present: list[Coords] = []
    steps = [math.prod(counts[dim + 1 :]) for dim in range(len(counts))]
    for number in range(length // 16):
        offset, nbytes = ranges[2 * number : 2 * number + 2]
        if offset == nbytes == _ABSENT:
            continue
        at = tuple(number // step % count for step, count in zip(steps, counts, strict=True))
        if not all(map(int.__lt__, at, grid)):
            continue
        present.append(at)
        if offset + nbytes > value.nbytes:
            what = "an inner chunk reaches out of its shard"
            raise array.bad(what, f"{value.nbytes} bytes", f"{offset + nbytes} bytes")
        part = value._replace(offset=value.offset + offset, nbytes=nbytes)
        if value.inline is not None:
            part = part._replace(inline=value.inline[offset : offset + nbytes])
        cells = _boxed(tuple((n, n + 1) for n in at), inner, box)
        yield _chunk(store, array, sharding.codecs, inner, cells, part)
    yield from _filled(store, array, present, grid, inner, box)


def _filled(
    store: Store, array: _Array, present: list[Coords], grid: Coords, size: Coords, within: Box
) -> Iterator[Piece]:
    """The pieces of chunks that are absent, as few as there may be with so many present."""
    for cells in _absent(present, grid):
        box = _boxed(cells, size, within)
        if store.missing is not None:
            store.missing.append(f"{brief(array.name)}: no chunk for {box or 'its element'}")
            continue
        whole = tuple(high - low for low, high in box) == array.shape
        stored = Stored(box=None if whole else box, strides=(0,) * len(box))
        value = Value(array.file, 0, array.dtype.nbytes, _fill(array))
        yield store.piece(value, stored, array.name)


def _absent(present: list[Coords], grid: Coords) -> Iterator[Box]:
    """Boxes of a grid's cells that are not among those that are present, which are in order."""
    if not present:
        yield tuple((0, n) for n in grid)
    elif grid:
        rest, done = tuple((0, n) for n in grid[1:]), 0
        for row, cells in itertools.groupby(present, lambda at: at[0]):
            if done < row:
                yield ((done, row), *rest)
            for inner in _absent([at[1:] for at in cells], grid[1:]):
                yield ((row, row + 1), *inner)
            done = row + 1
        if done < grid[0]:
            yield ((done, grid[0]), *rest)


def _fill(array: _Array) -> bytes:
    """The bytes of an element of chunks that are absent."""
    dtype, value = array.dtype, array.fill
    if value is None:
        return bytes(dtype.nbytes)
    import numpy as np

    try:
        if isinstance(value, str) and value.startswith("0x"):  # The bits of a float.
            made = int(value, 16).to_bytes(dtype.nbytes, "little")
        elif dtype.kind == "complex":
            made = np.array(complex(*map(float, value)), dtype.numpy).tobytes()
        elif dtype.kind in ("bool", "int", "uint"):
            if not isinstance(value, int) or (dtype.kind == "bool" and value not in (0, 1)):
                raise ValueError
            made = np.array(value, dtype.numpy).tobytes()
        else:
            made = np.array(float(value), dtype.numpy).tobytes()
    except (ValueError, TypeError, OverflowError):
        raise array.bad("not a fill value", f"a value of {dtype}", brief(value)) from None
    return made


def _metadata(store: Store, name: str) -> _Array:
    """Reads and checks the JSON of an array."""
    version = next((n for n, file in _FILES.items() if f"{name}/{file}" in store.values), None)
    if version is None:
        raise KeyError(name)
    value = store.values[f"{name}/{_FILES[version]}"]
    if value.nbytes > MAX_METADATA:
        what = "the metadata of an array is over the limit"
        raise _bad(what, value.file, name, f"{MAX_METADATA} bytes", f"{value.nbytes} bytes")
    text = store.fetch(value, 0, value.nbytes, name)
    found: Any = strict_json.loads(text, value.file, "metadata of an array")
    reader = _Metadata(found, value.file, name)
    array = reader.version_2() if version == 2 else reader.version_3()
    if array.dtype.known:
        for each in (array.shape, array.chunk):
            if math.prod(filter(None, each)) * array.dtype.nbytes >= 1 << 63:
                raise array.bad("the array is too large", "below 2**63 bytes", brief(each))
    return array


class _Metadata:
    """The JSON of an array, field by field."""

    def __init__(self, found: Any, file: str, name: str) -> None:
        self.file, self.name = file, name
        self.found = self.dict(found, "the metadata of an array")

    def bad(self, field: str, found: object, expected: object = None) -> errors.HeaderError:
        what = f"malformed {field}"
        return _bad(what, self.file, self.name, expected, brief(found))

    def dict(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.bad(field, value, "an object")
        return value  # pyright: ignore[reportUnknownVariableType]

    def sizes(self, value: Any, field: str, least: int, rank: int | None = None) -> Coords:
        numbers = isinstance(value, list) and all(
            type(n) is int and least <= n < 1 << 63 for n in value
        )
        if not numbers or len(value) > _MAX_RANK or rank not in (None, len(value)):
            raise self.bad(field, value, f"{'' if rank is None else f'{rank} '}sizes of dims")
        return tuple(value)

    def version_2(self) -> _Array:
        found = self.found
        shape = self.sizes(found.get("shape"), "shape", 0)
        chunk = self.sizes(found.get("chunks"), "chunks", 1, len(shape))
        dtype, big = self.dtype_2(found.get("dtype"))
        if found.get("filters"):
            raise self.bad("filters", found["filters"], "none: mfload does not decode them")
        order = found.get("order", "C")
        if order not in ("C", "F"):
            raise self.bad("order", order, "C | F")
        steps: tuple[str, ...] = ()
        if found.get("compressor") is not None:
            steps = (self.compressor(self.dict(found["compressor"], "compressor").get("id")),)
        dims = tuple(range(len(shape)))
        codecs = _Codecs(dims if order == "C" else dims[::-1], big, steps)
        separator = found.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise self.bad("dimension_separator", separator, ". | /")
        fill = found.get("fill_value")
        return _Array(self.file, self.name, dtype, shape, chunk, codecs, None, fill, separator, "")

    def version_3(self) -> _Array:
        found = self.found
        if found.get("node_type") != "array" or found.get("storage_transformers"):
            raise self.bad("metadata of an array", found, "node_type array, no transformers")
        shape = self.sizes(found.get("shape"), "shape", 0)
        name, grid = self.named(found.get("chunk_grid"), "chunk_grid")
        if name != "regular":
            raise self.bad("chunk_grid", name, "regular")
        chunk = self.sizes(grid.get("chunk_shape"), "chunk_shape", 1, len(shape))
        encoding, more = self.named(found.get("chunk_key_encoding"), "chunk_key_encoding")
        if encoding not in ("default", "v2"):
            raise self.bad("chunk_key_encoding", encoding, "default | v2")
        separator = more.get("separator", "/" if encoding == "default" else ".")
        if separator not in (".", "/"):
            raise self.bad("separator", separator, ". | /")
        dtype = self.dtype(found.get("data_type"))
        codecs, sharding = self.codecs(found.get("codecs"), dtype, chunk)
        prefix, fill = "c" if encoding == "default" else "", found.get("fill_value")
        return _Array(
            self.file, self.name, dtype, shape, chunk, codecs, sharding, fill, separator, prefix
        )

    def named(self, value: Any, field: str) -> tuple[str, dict[str, Any]]:
        """An object of version 3: its name and its configuration."""
        if isinstance(value, str):
            return value, {}
        table = self.dict(value, field)
        name = table.get("name")
        if not isinstance(name, str):
            raise self.bad(field, value, "a name")
        return name, self.dict(table.get("configuration", {}), field)

    def dtype(self, name: Any) -> DType:
        if not isinstance(name, str) or not re.fullmatch(r"[\w<>|.\[\]]{1,99}", name):
            raise self.bad("dtype", name, "the name of one")
        return _BY_NAME.get(name) or dtypes.lookup(f"zarr {name}" if name in dtypes.TABLE else name)

    def dtype_2(self, name: Any) -> tuple[DType, bool]:
        """A dtype of version 2, such as <f4, and whether it is big-endian."""
        kind = _V2_KIND.fullmatch(name) if isinstance(name, str) else None
        if kind is None:
            return self.dtype(name), False
        order, letter, width = kind.groups()
        bits = "" if letter == "b" else str(8 * int(width))
        return self.dtype(_KINDS[letter] + bits), order == ">"

    def compressor(self, name: Any) -> str:
        if name not in _COMPRESSORS:
            what = "mfload can't decompress the chunks of the array"
            expected = " | ".join(_COMPRESSORS)
            raise _bad(what, self.file, self.name, expected, brief(name))
        return name

    def codecs(self, value: Any, dtype: DType, chunk: Coords) -> tuple[_Codecs, _Sharding | None]:
        """The codecs of a list, or what cuts chunks into inner ones."""
        if not isinstance(value, list) or not value:
            raise self.bad("codecs", value, "a list")
        chain = [self.named(each, "codecs") for each in value]
        order, big = tuple(range(len(chunk))), False
        if chain[0][0] == "transpose":
            given = chain.pop(0)[1].get("order")
            dims = self.sizes(given, "order of transpose", 0, len(chunk))
            if sorted(dims) != [*order]:
                raise self.bad("order of transpose", given)
            order = dims
        (name, how), *rest = chain or [("none", {})]
        if name == "sharding_indexed" and not rest and order == tuple(range(len(chunk))):
            return _Codecs(order, False, ()), self.sharding(how, dtype, chunk)
        if name != "bytes":
            raise self.bad("codecs", value, "transpose, then bytes or sharding_indexed")
        endian = how.get("endian", "little" if dtype.nbytes <= 1 else None)
        if endian not in ("little", "big"):
            raise self.bad("endian", endian, "little | big")
        big = endian == "big"
        steps = [each if each == "crc32c" else self.compressor(each) for each, _ in rest]
        if len(steps) - steps.count("crc32c") > 1:
            raise self.bad("codecs", steps, "one compressor")
        return _Codecs(order, big, tuple(steps)), None

    def sharding(self, how: dict[str, Any], dtype: DType, chunk: Coords) -> _Sharding:
        inner = self.sizes(how.get("chunk_shape"), "chunk_shape", 1, len(chunk))
        if any(n % size for n, size in zip(chunk, inner, strict=True)):
            raise self.bad("chunk_shape", inner, f"that divides {brief(chunk)}")
        codecs, nested = self.codecs(how.get("codecs"), dtype, inner)
        if nested is not None:
            raise self.bad("codecs", "sharding_indexed", "no shards within shards")
        location = how.get("index_location", "end")
        index = [*map(self._index_codec, how.get("index_codecs") or ())]
        if index not in (["bytes"], ["bytes", "crc32c"]) or location not in ("start", "end"):
            expected = "little-endian bytes, at most crc32c, at the start or the end"
            raise self.bad("index of a shard", (index, location), expected)
        return _Sharding(inner, codecs, len(index) == 2, location == "end")

    def _index_codec(self, value: Any) -> str:
        name, how = self.named(value, "index_codecs")
        return name if how.get("endian", "little") == "little" else "big-endian"


def _bad(
    what: str, file: str, name: str, expected: object = None, found: object = None
) -> errors.HeaderError:
    return errors.HeaderError(what, file=file, tensor=name, expected=expected, found=found)
