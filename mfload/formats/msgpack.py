"""Flax's msgpack files (`flax.serialization.to_bytes`), checked as hostile input.

A file is one msgpack value: maps and lists within each other, and leaves. Arrays are extensions of
type 1 around [shape, name of the dtype, bytes in C order]; NumPy scalars are the same with type 3,
and tensors without dims here. A complex number is an extension of type 2. An array of more than
1 GiB is a map, `{"__msgpack_chunked_array__": true, "shape": {"0": …}, "chunks": {"0": …}}`, of
flat parts. Flax drops the byte order of arrays: a big-endian one is read as Flax reads it, wrong.

The file is walked in windows; what arrays hold is passed over.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.formats import hints, structure
from mfload.formats.strict_json import bad, brief
from mfload.index import Columns, Piece, TensorInfo
from mfload.sources.base import Source
from mfload.stored import Encoding, Stored

MAX_DEPTH = 64
"""Maps and lists within each other."""

MAX_VALUES = 4_000_000
"""Keys, leaves, maps and lists of a file, of arrays their shapes too."""

MAX_BYTES = 100_000_000
"""Of strings, of bytes that are not an array's, and of names, which repeat the keys on their paths:
as many as a safetensors header may have."""

_WINDOW = 64 << 10
_GROWS = 4  # Times, from one window to the next.
_MAX_RANK = 255
_CHUNKED = "__msgpack_chunked_array__"
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">L", 0xCF: ">Q",
            0xD0: ">b", 0xD1: ">h", 0xD2: ">l", 0xD3: ">q"}  # fmt: skip
# The kind of a value, and how many bytes behind the code its length takes.
_SIZED = {0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xC7: ("ext", 1), 0xC8: ("ext", 2),
          0xC9: ("ext", 4), 0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
          0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}  # fmt: skip
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_FIRST = 5  # Bytes of an extension that tell most heads apart.
_DTYPES = {row.numpy_name: row for row in dtypes.KNOWN.values() if row.numpy_name is not None}


def recognise(head: bytes, name: str) -> bool:
    """Whether a file looks like one: a map that begins with a name, as far as its head goes."""
    if name.endswith(".msgpack"):
        return True
    # Maps of no, 1 to 15, and more entries; then strings.
    if not head[:1] or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    from mfload.sources.memory import MemorySource

    walk = _Walk(MemorySource(head), 0)
    try:
        walk.value()
    except errors.HeaderError:
        return walk.truncated and walk.names > 0
    return walk.at == len(head)


def read(file: Source, source: int = 0) -> tuple[Columns, dict[str, str] | None]:
    """The tensors of a file, in its order, and its tree; see `formats.base.Format`.

    Tensors have the keys on their path, joined by dots. A file that is one array gives it the
    file's name.
    """
    walk = _Walk(file, source)
    try:
        tree = walk.value()
        if walk.at != file.size:
            raise walk.bad(
                "bytes follow the value", errors.amount(walk.at), errors.amount(file.size)
            )
    except errors.HeaderError as error:
        raise hints.explain_file(error, file) from None
    names = walk.columns.names
    if len({*names}) < len(names):
        (name, _), *_ = Counter(names).most_common(1)
        both = " and ".join(str([*path]) for path in _paths(tree, name, ()))
        what = "two arrays have the same name: their keys, joined by dots"
        raise bad(file, what, name, None, both)
    return walk.columns, {structure.KEY: structure.dumps(tree)}


def _paths(value: Any, name: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Keys on the way to each array of a name."""
    if isinstance(value, dict | list):
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _paths(each, name, (*path, str(key)))
    elif isinstance(value, structure.TensorName) and value == name:
        yield path


class _Head(NamedTuple):
    """What stands before the bytes of an array, from the code of its extension on.

    Attributes:
        kind: Its number in the columns.
        nbytes: Of the array.
        values, strings: What is counted of it, see `MAX_VALUES` and `MAX_BYTES`.
    """

    raw: bytes
    kind: int
    nbytes: int
    values: int
    strings: int


class _Walk:
    """Reads values one after the other.

    Attributes:
        at: Where the next begins.
        columns: The arrays, so far.
        names: How many keys are strings, so far.
        truncated: Whether the bytes end within a value.
    """

    truncated = False

    def __init__(self, file: Source, source: int) -> None:
        self._file, self._source = file, source
        # The end of what is walked, the file or an extension, and which of them it is.
        self.at, self._end, self._inside = 0, file.size, False
        self._window, self._start = b"", 0
        self._path: list[str] = []
        name = os.path.basename(file.name.partition("?")[0])
        self._top = name.removesuffix(".msgpack") or "array"
        self.columns = Columns()
        self.names = self._values = self._bytes = 0
        self._heads: dict[bytes, _Head] = {}  # By their first bytes.

    def bad(self, what: str, expected: object = None, found: object = None) -> errors.HeaderError:
        """The error for what is wrong at the value that is being read."""
        return bad(self._file, what, ".".join(self._path)[:1000] or None, expected, found)

    def _pass(self, nbytes: int) -> int:
        """Goes past bytes; returns where they begin."""
        if nbytes > self._end - self.at:
            what = "the file is truncated"
            if self._inside:
                what = "a value reaches out of its extension"
            end = errors.amount(self.at + nbytes)
            self.truncated = True
            raise self.bad(what, end, errors.amount(self._end))
        self.at += nbytes
        return self.at - nbytes

    def _take(self, nbytes: int) -> bytes:
        offset = self._pass(nbytes)
        if not self._start <= offset <= self.at <= self._start + len(self._window):
            length, costs = max(nbytes, _WINDOW), self._file.costs
            gap = offset - self._start - len(self._window)
            # A round trip for each small array takes longer than to read over some of them.
            if costs.concurrency is not None and gap < costs.merge_gap:
                length = max(length, min(costs.block, _GROWS * len(self._window)))
            length = min(length, self._file.size - offset)
            self._window, self._start = self._file.read(offset, length), offset
        return self._window[offset - self._start : self.at - self._start]

    def _count(self, nbytes: int) -> None:
        """Counts bytes that are kept beside the arrays."""
        self._bytes += nbytes
        if self._bytes > MAX_BYTES:
            what = "strings, bytes and names beside the arrays are over the limit"
            raise self.bad(what, f"at most {errors.amount(MAX_BYTES)}", errors.amount(self._bytes))

    def _text(self, nbytes: int) -> bytes:
        self._count(nbytes)
        return self._take(nbytes)

    def _head(self) -> tuple[str, Any]:
        """The kind of the next value; then the value of a number or a constant, or a length."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.bad("the file has too many values", f"at most {MAX_VALUES}")
        code = self._take(1)[0]
        if code <= 0x7F or code >= 0xE0:
            return "value", code if code <= 0x7F else code - 0x100
        if code <= 0xBF:
            if code >= 0xA0:
                return "str", code & 0x1F
            return ("map" if code <= 0x8F else "list"), code & 0x0F
        if code in _CONSTANTS:
            return "value", _CONSTANTS[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            return "value", struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if code in _FIXED_EXT:
            return "ext", _FIXED_EXT[code]
        if code not in _SIZED:
            raise self.bad("not msgpack", "the code of a type", hex(code))
        kind, width = _SIZED[code]
        return kind, int.from_bytes(self._take(width), "big")

    def value(self) -> Any:
        """The next value; the names of arrays for them."""
        begin = self.at, self._values, self._bytes
        kind, given = self._head()
        if kind == "value":
            return given
        if kind == "bin":
            return self._text(given)
        if kind == "str":
            return self._string(given)
        if kind == "ext":
            return self._extension(given, *begin)
        if len(self._path) >= MAX_DEPTH:
            raise self.bad("the values are nested too deep", f"at most {MAX_DEPTH} levels")
        if kind == "map":
            return self._map(given)
        made: list[Any] = []
        for number in range(given):
            self._path.append(str(number))
            made.append(self.value())
            self._path.pop()
        return made

    def _string(self, nbytes: int) -> str:
        raw = self._text(nbytes)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.bad("a string is not UTF-8", None, brief(raw)) from None

    def _map(self, count: int) -> Any:
        made: dict[str | int, Any] = {}
        first = len(self.columns)
        while len(made) < count:
            self._take_alike(made, count)
            if len(made) == count:
                break
            key = self.value()
            if type(key) not in (str, int):
                raise self.bad("a key is neither a string nor an integer", None, brief(key))
            if key in made:
                raise self.bad("a key is given twice", None, brief(key))
            self.names += isinstance(key, str)
            self._path.append(str(key))
            made[key] = self.value()
            self._path.pop()
        return self._joined(made, first) if _CHUNKED in made else made

    def _take_alike(self, made: dict[str | int, Any], count: int) -> None:
        """Takes entries as long as they are names of arrays whose heads were met.

        Ends at the first that is anything else or wrong, and at the end of the window.
        """
        if self._inside or len(self._path) + 1 >= MAX_DEPTH:
            return
        window, start, columns, source = self._window, self._start, self.columns, self._source
        at, end = self.at - start, self._end - start
        if 0 <= at < len(window):
            stop = at + 1 + (window[at] & 0x1F)
            if window[stop : stop + _FIRST] not in self._heads:
                return  # A map, say; what is below takes as long as to read it.
        prefix, make = "".join(f"{key}." for key in self._path), structure.TensorName
        add_name, add_kind, add_source = (
            columns.names.append,
            columns.kind.append,
            columns.sources.append,
        )
        add_offset, add_nbytes = columns.offsets.append, columns.nbytes.append
        raw, kind, nbytes, more, also = head = _Head(b"", 0, 0, 0, 0)
        while 0 <= at < len(window) and len(made) < count:
            first = at + 1
            stop = first + (window[at] & 0x1F)
            if not raw or not window.startswith(raw, stop):
                head = self._heads.get(window[stop : stop + _FIRST], head)
                raw, kind, nbytes, more, also = head
                if not raw or not window.startswith(raw, stop):
                    break
            key, begin = window[first:stop], stop + len(raw)
            if not (0xA0 <= window[at] <= 0xBF and key.isascii()) or begin + nbytes > end:
                break
            name, values = key.decode(), self._values + more
            strings = self._bytes + also + len(prefix) + 2 * len(key)
            if name in made or values > MAX_VALUES or strings > MAX_BYTES:
                break
            self._values, self._bytes, at = values, strings, begin + nbytes
            whole = prefix + name
            made[name] = make(whole)
            add_name(whole)
            add_kind(kind)
            add_source(source)
            add_offset(start + begin)
            add_nbytes(nbytes)
            self.names += 1
        self.at = start + at

    def _extension(self, nbytes: int, begin: int, values: int, strings: int) -> Any:
        (kind,) = struct.unpack("b", self._take(1))
        if self._inside:
            raise self.bad("an extension lies in another")
        self._pass(nbytes)  # Checks that there are so many.
        self.at -= nbytes
        self._inside, self._end = True, self.at + nbytes
        if kind in (_ARRAY, _SCALAR):
            made = self._array(scalar=kind == _SCALAR)
        elif kind == _COMPLEX:
            parts = self.value()
            if not (isinstance(parts, list) and [*map(type, parts)] == [float, float]):
                raise self.bad("not a complex number", "[real, imaginary]", brief(parts))
            made = complex(*parts)
        else:
            known = "1 (array), 2 (complex) or 3 (NumPy scalar)"
            raise self.bad("an extension that Flax does not write", known, kind)
        if self.at != self._end:
            what = "bytes follow the value in its extension"
            raise self.bad(what, errors.amount(self.at), errors.amount(self._end))
        self._inside, self._end = False, self._file.size
        if isinstance(made, structure.TensorName) and begin >= self._start:
            kind, size = self.columns.kind[-1], self.columns.nbytes[-1]
            if len(self.columns) - 1 not in self.columns.others:
                raw = self._window[begin - self._start : self.at - size - self._start]
                counts = self._values - values, self._bytes - strings - len(made)
                self._heads[raw[:_FIRST]] = _Head(raw, kind, size, *counts)
        return made

    def _array(self, *, scalar: bool) -> structure.TensorName:
        if self._head() != ("list", 3):
            raise self.bad("not an array", "[shape, dtype, bytes]")
        shape = self._shape(self.value())
        name = self.value()
        if not isinstance(name, str) or not 0 < len(name) < 100 or name in dtypes.TABLE:
            raise self.bad("not the name of a dtype", "a name of NumPy's", brief(name))
        dtype = _DTYPES.get(name) or dtypes.lookup(name)
        kind, nbytes = self._head()
        if kind not in ("bin", "str"):
            raise self.bad("not an array", "bytes behind the shape and the dtype", kind)
        if (dtype.known and dtype.size_of(shape) != nbytes) or (scalar and shape):
            what = "the bytes of the array do not fit its shape"
            expected = "no dims" if scalar and shape else errors.amount(dtype.size_of(shape))
            raise self.bad(what, expected, f"{errors.amount(nbytes)}, {brief(shape)} of {name}")
        stored = None
        if name in dtypes.NARROW and nbytes:
            stored = Stored(encodings=(Encoding(name, nbytes),))
        return self._leaf(dtype, shape, (Piece(self._source, self._pass(nbytes), nbytes, stored),))

    def _leaf(
        self, dtype: DType, shape: tuple[int, ...], pieces: tuple[Piece, ...]
    ) -> structure.TensorName:
        """Adds an array, named by the keys on its path."""
        name = ".".join(self._path) if self._path else self._top
        self._count(len(name))
        self.columns.extend(Columns.of([TensorInfo(name, dtype, shape, pieces)]))
        return structure.TensorName(name)

    def _shape(self, dims: Any) -> tuple[int, ...]:
        sizes = isinstance(dims, list) and all(type(n) is int and n >= 0 for n in dims)
        if not sizes or len(dims) > _MAX_RANK or math.prod(filter(None, dims)) >= 1 << 63:
            raise self.bad("not the shape of an array", "sizes of dims", brief(dims))
        return tuple(dims)

    def _joined(self, parts: dict[Any, Any], first: int) -> structure.TensorName:
        """The array of which a map holds flat parts, the columns from `first` on."""
        what, expected = "malformed chunked array", "shape and chunks, by '0', '1', …"
        if parts.keys() != {_CHUNKED, "shape", "chunks"}:
            raise self.bad(what, expected, brief(list(parts)))
        shape = self._shape(self._numbered(parts["shape"]))
        chunks = self._numbered(parts["chunks"])
        if not chunks or not all(isinstance(each, structure.TensorName) for each in chunks):
            raise self.bad(what, "chunks that are arrays", brief(chunks))
        rows = {row.name: row for row in self.columns.shorten(first)}
        chunks = [rows[name] for name in chunks]
        dtype, pieces, start = chunks[0].dtype, list[Piece](), 0
        for each in chunks:
            if each.dtype != dtype or len(each.shape) != 1:
                found = f"{list(each.shape)} of {each.dtype}"
                raise self.bad(what, f"chunks of one dim and of {dtype}", found)
            stop = start + each.shape[0]
            if start < stop:
                for piece in each.pieces:
                    stored = (piece.stored or Stored())._replace(flat=(start, stop))
                    pieces.append(piece._replace(stored=stored))
            start = stop
        if start != math.prod(shape):
            found = f"{errors.counted(start, 'element')} for shape {brief(shape)}"
            raise self.bad(what, "as many elements as the shape", found)
        return self._leaf(dtype, shape, tuple(pieces) or chunks[0].pieces)

    def _numbered(self, parts: Any) -> list[Any]:
        """The values of a map from "0", "1", … in order."""
        numbers = [str(number) for number in range(len(parts))] if isinstance(parts, dict) else []
        if not isinstance(parts, dict) or parts.keys() != {*numbers}:
            raise self.bad("malformed chunked array", "keys '0', '1', …", brief(parts))
        return [parts[number] for number in numbers]
