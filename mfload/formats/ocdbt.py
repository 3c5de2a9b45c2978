"""OCDBT, TensorStore's key-value store in which Orbax keeps arrays, checked as hostile input.

A store is a directory with `manifest.ocdbt` and data files, `d/…`. The manifest names the root of a
B-tree for each version; the newest one is read. A node is a range of a data file: leaves have keys,
and values of which short ones lie in the node, long ones in data files; inner nodes have the ranges
of other nodes. Manifests and nodes are framed alike, and numbers are varints where no width is
given:

    magic, 4 bytes; length of all, 8 bytes; version, 0; 0 raw or 1 zstd; body; CRC-32C, 4 bytes

A body has its numbers in columns. The names of the data files it refers to come first, as a table
in which each shares a prefix with the one before. Where a store joins those of several processes, a
path has a base (`ocdbt.process_0/`), to which the paths in nodes of that file are relative.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats.crc32c import crc32c
from mfload.formats.strict_json import brief
from mfload.sources.base import Source, read_whole
from mfload.sources.directories import Directory

MANIFEST = "manifest.ocdbt"

MAX_NODE = 100_000_000
"""Bytes of a manifest or a node, decoded; TensorStore's own limit unless a store sets another."""

MAX_NODES = 1 << 30
"""Bytes of all nodes together, decoded."""

MAX_KEYS = 4_000_000
"""Keys of a store."""

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_HEAD = 14  # The shortest frame has as many bytes before its checksum.
_PART = 1 << 20
# Entries of a node, for each byte that it takes, and bytes of their keys. Where 20,000 arrays are
# alike, a byte has 25 entries.
_FEW, _ENTRIES, _KEY = 4096, 64, 128


class Value(NamedTuple):
    """A value of a store: a range of a file, or bytes.

    Attributes:
        file: Name of the file in the directory; of a value in a node, where that lies.
        inline: The bytes, if they lie in a node.
    """

    file: str
    offset: int
    nbytes: int
    inline: bytes | None = None


class _Node(NamedTuple):
    """Where a node lies."""

    base: str
    path: str
    offset: int
    nbytes: int
    height: int
    prefix: bytes


def read(directory: Directory) -> tuple[dict[str, Value], dict[str, Source]]:
    """The keys and values of the newest version of a store, and the files that have its nodes.

    Values and files have their names in the directory.

    Raises:
        SourceError: A file of the store is missing or can't be read.
        HeaderError: The manifest or a node breaks a rule of the format, or its checksum is wrong.
        FrameworkMissingError: It is compressed, and the package zstandard is not installed.
    """
    manifest = _opened(directory, MANIFEST)
    found, files = dict[str, Value](), {MANIFEST: manifest}
    root = _root(manifest)
    if root is None:
        return found, files
    waiting, seen, budget, last = [root], set[tuple[str, int]](), MAX_NODES, b""
    while waiting:
        node = waiting.pop()
        where = node.base + node.path
        if where not in files:
            files[where] = _opened(directory, where)
        file = files[where]
        if (where, node.offset) in seen:
            raise _bad(file, "two nodes of the B-tree have the same child", None, node.offset)
        seen.add((where, node.offset))
        if node.offset + node.nbytes > file.size:
            end = errors.amount(node.offset + node.nbytes)
            raise _bad(file, "a node reaches out of the file", end, file.size)
        body = _body(file, file.read(node.offset, node.nbytes), _NODE_MAGIC)
        budget -= len(body.data)
        if budget < 0:
            raise _bad(file, "the nodes of the store are over the limit", errors.amount(MAX_NODES))
        height = body.byte()
        if height != node.height:
            raise _bad(file, "a node of the B-tree is at another height", node.height, height)
        paths = _paths(body)
        if height:
            waiting += reversed([*_children(body, node, paths)])
            continue
        for key, value in _values(body, node, paths, where):
            if key <= last and found:
                raise _bad(file, "the keys of the store are not in order", None, brief(key))
            last = key
            if len(found) == MAX_KEYS:
                raise _bad(file, "the store has too many keys", f"at most {MAX_KEYS}")
            try:
                found[key.decode()] = value
            except UnicodeDecodeError:
                raise _bad(file, "a key of the store is not UTF-8", None, brief(key)) from None
    return found, files


def _opened(directory: Directory, name: str) -> Source:
    file = directory.file(name)
    file.keep(True)
    return file


def _root(manifest: Source) -> _Node | None:
    """The root of the newest version; None of an empty store."""
    whole = read_whole(manifest, MAX_NODE, "the manifest is over the limit")
    body = _body(manifest, whole, _MANIFEST_MAGIC)
    body.take(16)  # Of the store, at random.
    if body.varint():
        raise _bad(manifest, "mfload can't read a store with numbered manifests")
    body.varint()  # How long values in nodes may be, and nodes.
    body.varint()
    body.byte()  # Of the tree of versions.
    if body.varint() == 1:
        body.take(4)  # The level of compression.
    paths = _paths(body)
    count = body.count()
    body.varints(count)  # Generations.
    heights = body.take(count)
    ids, offsets, lengths, keys = (body.varints(count) for _ in range(4))
    if not count or not keys[-1]:
        return None
    base, path = body.pick(paths, ids[-1])
    return _Node(base, path, offsets[-1], lengths[-1], heights[-1], b"")


def _paths(body: _Body) -> list[tuple[str, str]]:
    """The data files that a body refers to: the base of each path, and the rest."""
    made: list[tuple[str, str]] = []
    for path, base in body.texts(body.count(), "malformed table of data files", more=True):
        parts = path.split(b"/")
        # Such as d/0123…, ocdbt.process_0/d/0123…; an empty store has an empty one.
        outside = b".." in parts or b"" in parts or any(each in path for each in b"\0\\:")
        if (outside and path) or base > len(path):
            raise _bad(body.file, "a data file of the store is outside it", None, brief(path))
        try:
            made.append((path[:base].decode(), path[base:].decode()))
        except UnicodeDecodeError:
            what = "the name of a file is not UTF-8"
            raise _bad(body.file, what, None, brief(path)) from None
    return made


def _keys(body: _Body, count: int, prefix: bytes, inner: bool) -> Iterator[tuple[bytes, int]]:
    """The keys of a node; of an inner one also how much of each all keys below it share."""
    left = limit = _KEY * body.most
    for key, common in body.texts(count, "malformed keys of a node", more=inner):
        left -= len(key) + len(prefix)
        if left < 0:
            what = "the keys of a node are over the limit"
            raise _bad(body.file, what, errors.amount(limit))
        yield prefix + key, common


def _children(body: _Body, node: _Node, paths: Sequence[tuple[str, str]]) -> Iterator[_Node]:
    count = body.count()
    keys = [*_keys(body, count, node.prefix, inner=True)]
    ids, offsets, lengths, *_ = (body.varints(count) for _ in range(6))
    body.end()
    for (key, shared), file, offset, length in zip(keys, ids, offsets, lengths, strict=True):
        if shared > len(key) - len(node.prefix):
            raise _bad(body.file, "malformed prefix of a child", None, shared)
        base, path = body.pick(paths, file)
        prefix = key[: len(node.prefix) + shared]
        yield _Node(node.base + base, path, offset, length, node.height - 1, prefix)


def _values(
    body: _Body, node: _Node, paths: Sequence[tuple[str, str]], where: str
) -> Iterator[tuple[bytes, Value]]:
    count = body.count()
    keys = [key for key, _ in _keys(body, count, node.prefix, inner=False)]
    lengths, kinds = body.varints(count), body.take(count)
    outside = kinds.count(1)
    if kinds.count(0) + outside != count:
        raise _bad(body.file, "malformed values of a node", "kinds 0 and 1", brief(kinds))
    ids, offsets = iter(body.varints(outside)), iter(body.varints(outside))
    # Values of one file share its name.
    whole = [node.base + base + path for base, path in paths]
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            yield key, Value(body.pick(whole, next(ids)), next(offsets), length)
        else:
            yield key, Value(where, node.offset, length, body.take(length))
    body.end()


class _Body:
    """The body of a manifest or a node, which is read from its start on.

    Attributes:
        most: How many entries the bytes justify that it takes in the file.
    """

    def __init__(self, file: Source, data: bytes, stored: int) -> None:
        self.file, self.data, self._at = file, data, 0
        self.most = _FEW + _ENTRIES * stored

    def take(self, nbytes: int) -> bytes:
        at = self._at
        if nbytes > len(self.data) - at:
            raise _bad(self.file, "the bytes end within a node", f"{at + nbytes}", len(self.data))
        self._at = at + nbytes
        return self.data[at : at + nbytes]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise _bad(self.file, "malformed number in a node", "at most 64 bits")
        if value >> 64:
            raise _bad(self.file, "malformed number in a node", "at most 64 bits", value)
        return value

    def varints(self, count: int) -> Sequence[int]:
        ahead = self.data[self._at : self._at + count]
        if len(ahead) == count and ahead.isascii():  # A byte each.
            self._at += count
            return ahead
        return [self.varint() for _ in range(count)]

    def texts(self, count: int, wrong: str, *, more: bool) -> Iterator[tuple[bytes, int]]:
        """Texts of which each shares its beginning with the one before; `more`: and a number."""
        shared = [0, *self.varints(count - 1)] if count else []
        lengths = self.varints(count)
        numbers: Sequence[int] = self.varints(count) if more else bytes(count)
        text = b""
        for keep, length, number in zip(shared, lengths, numbers, strict=True):
            if keep > len(text):
                raise _bad(self.file, wrong, f"at most {len(text)}", keep)
            text = text[:keep] + self.take(length)
            yield text, number

    def count(self) -> int:
        """A number of entries; each takes a byte or more."""
        count = self.varint()
        if count > len(self.data) - self._at:
            raise _bad(self.file, "a node has fewer entries than it says", count)
        if count > self.most:
            raise _bad(self.file, "a node has too many entries for its size", self.most, count)
        return count

    def pick(self, choices: Sequence[Any], number: int) -> Any:
        if number >= len(choices):
            raise _bad(self.file, "a node refers to no data file", f"below {len(choices)}", number)
        return choices[number]

    def end(self) -> None:
        if self._at != len(self.data):
            raise _bad(self.file, "bytes follow a node", self._at, len(self.data))


def _body(file: Source, raw: bytes, magic: int) -> _Body:
    """Checks the frame of a manifest or a node, and decodes the rest."""
    what = "manifest" if magic == _MANIFEST_MAGIC else "node"
    if len(raw) < _HEAD + 4:
        least = f"{errors.amount(_HEAD + 4)} or more"
        raise _bad(file, f"the {what} is truncated", least, len(raw))
    given = int.from_bytes(raw[:4], "big"), int.from_bytes(raw[4:12], "little")
    if given != (magic, len(raw)):
        if given[0] == magic:
            raise _bad(file, f"the {what} has another length", errors.amount(given[1]), len(raw))
        raise _bad(file, f"no {what} of an OCDBT store", hex(magic), hex(given[0]))
    (checksum,) = struct.unpack("<L", raw[-4:])
    computed = crc32c(memoryview(raw)[:-4])
    if computed != checksum:
        raise _bad(file, f"the {what} is damaged", f"CRC-32C {checksum:08x}", f"{computed:08x}")
    version, method = raw[12], raw[13]
    if version or method > 1:
        found = f"{version}, compression {method}"
        raise _bad(file, f"unknown version of the {what}", "0, compression 0 or 1", found)
    data = raw[_HEAD:-4]
    return _Body(file, _inflated(file, data) if method else data, len(raw))


def _inflated(file: Source, data: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        what = "the store is compressed, and the package zstandard is not installed"
        raise errors.missing(what, "orbax", file=file.name) from None
    parts, left = list[bytes](), MAX_NODE
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(data)
        while part := reader.read(_PART):
            left -= len(part)
            if left < 0:
                raise _bad(file, "the node is over the limit", errors.amount(MAX_NODE))
            parts.append(part)
    except zstandard.ZstdError as error:
        raise _bad(file, "malformed zstd data of a node", None, str(error)) from None
    return b"".join(parts)


def _bad(file: Source, what: str, expected: object = None, found: object = None) -> Any:
    return errors.HeaderError(what, file=file.name, expected=expected, found=found)
