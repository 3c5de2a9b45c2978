"""The JSON of a Zarr array, version 2 or 3, checked as hostile input: what its chunks hold."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.formats import strict_json
from mfload.formats.strict_json import bad, brief

FILES = {2: ".zarray", 3: "zarr.json"}
"""The file of an array's JSON, by version."""

MAX_METADATA = 1 << 20
"""Bytes of an array's JSON."""

_MAX_RANK = 255
_V2_KIND = re.compile(r"([<>|])([biufc])(\d{1,2})")
_BY_NAME = {row.numpy_name: row for row in dtypes.KNOWN.values() if row.numpy_name is not None}
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_COMPRESSORS = ("zstd", "gzip", "zlib")

Coords = tuple[int, ...]


class Codecs(NamedTuple):
    """How the elements of a chunk became bytes.

    Attributes:
        order: The dims as they are stored, the one with the longest steps first.
        steps: Codecs that made bytes of bytes, in the order of encoding.
    """

    order: tuple[int, ...]
    big_endian: bool
    steps: tuple[str, ...]


class ShardingCodec(NamedTuple):
    """How a chunk is cut into inner ones."""

    chunk: tuple[int, ...]
    codecs: Codecs
    checked: bool  # Whether a CRC follows the index.
    at_end: bool


class Array(NamedTuple):
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
    codecs: Codecs
    sharding: ShardingCodec | None
    fill: Any
    separator: str
    prefix: str

    def bad(self, what: str, expected: object = None, found: object = None) -> errors.HeaderError:
        """An error of the array."""
        return bad(self.file, what, self.name, expected, found)


def parse(text: bytes, version: int, file: str, name: str) -> Array:
    """What the JSON of an array says.

    Raises HeaderError if it is malformed, or chunks are encoded in a way that mfload does not
    decode.
    """
    found: Any = strict_json.loads(text, file, "metadata of an array")
    reader = _Metadata(found, file, name)
    array = reader.version_2() if version == 2 else reader.version_3()
    if array.dtype.known:
        for each in (array.shape, array.chunk):
            if math.prod(filter(None, each)) * array.dtype.nbytes >= 1 << 63:
                raise array.bad("the array is too large", "below 2**63 bytes", brief(each))
    return array


def fill_bytes(array: Array) -> bytes:
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
            number = np.array(value, dtype.wide.numpy)
            if int(number.astype(dtype.numpy)) != value:  # One of 2 or 4 bits.
                raise ValueError
            made = number.tobytes()
        else:
            made = np.array(float(value), dtype.numpy).tobytes()
    except (ValueError, TypeError, OverflowError):
        raise array.bad("not a fill value", f"a value of {dtype}", brief(value)) from None
    return made


class _Metadata:
    """The JSON of an array, field by field."""

    def __init__(self, found: Any, file: str, name: str) -> None:
        self.file, self.name = file, name
        self.found = self.dict(found, "the metadata of an array")

    def bad(self, field: str, found: object, expected: object = None) -> errors.HeaderError:
        what = f"malformed {field}"
        return bad(self.file, what, self.name, expected, brief(found))

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

    def version_2(self) -> Array:
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
        codecs = Codecs(dims if order == "C" else dims[::-1], big, steps)
        separator = found.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise self.bad("dimension_separator", separator, ". | /")
        fill = found.get("fill_value")
        return Array(self.file, self.name, dtype, shape, chunk, codecs, None, fill, separator, "")

    def version_3(self) -> Array:
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
        return Array(
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
            raise bad(self.file, what, self.name, expected, brief(name))
        return name

    def codecs(
        self, value: Any, dtype: DType, chunk: Coords
    ) -> tuple[Codecs, ShardingCodec | None]:
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
            return Codecs(order, False, ()), self.sharding(how, dtype, chunk)
        if name != "bytes":
            raise self.bad("codecs", value, "transpose, then bytes or sharding_indexed")
        endian = how.get("endian", "little" if dtype.nbytes <= 1 else None)
        if endian not in ("little", "big"):
            raise self.bad("endian", endian, "little | big")
        big = endian == "big"
        steps = [each if each == "crc32c" else self.compressor(each) for each, _ in rest]
        if len(steps) - steps.count("crc32c") > 1:
            raise self.bad("codecs", steps, "one compressor")
        return Codecs(order, big, tuple(steps)), None

    def sharding(self, how: dict[str, Any], dtype: DType, chunk: Coords) -> ShardingCodec:
        inner = self.sizes(how.get("chunk_shape"), "chunk_shape", 1, len(chunk))
        if any(n % size for n, size in zip(chunk, inner, strict=True)):
            raise self.bad("chunk_shape", inner, f"that divides {brief(chunk)}")
        codecs, nested = self.codecs(how.get("codecs"), dtype, inner)
        if nested is not None:
            raise self.bad("codecs", "sharding_indexed", "no shards within shards")
        location = how.get("index_location", "end")
        found = how.get("index_codecs")
        index = [*map(self._index_codec, found)] if isinstance(found, list) else []
        if index not in (["bytes"], ["bytes", "crc32c"]) or location not in ("start", "end"):
            expected = "little-endian bytes, at most crc32c, at the start or the end"
            raise self.bad("index of a shard", (found, location), expected)
        return ShardingCodec(inner, codecs, len(index) == 2, location == "end")

    def _index_codec(self, value: Any) -> str:
        name, how = self.named(value, "index_codecs")
        return name if how.get("endian", "little") == "little" else "big-endian"
