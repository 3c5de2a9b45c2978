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
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from mfload import errors, sources
from mfload.dtypes import NARROW
from mfload.formats.crc32c import crc32c
from mfload.formats.ocdbt import Value
from mfload.formats.strict_json import bad, brief
from mfload.formats.zarr_metadata import (
    FILES,
    MAX_METADATA,
    Array,
    Codecs,
    Coords,
    ShardingCodec,
    fill_bytes,
    parse,
)
from mfload.index import Box, Piece, TensorInfo
from mfload.sources.base import Source
from mfload.sources.directories import Directory
from mfload.stored import Encoding, Stored

_ABSENT = (1 << 64) - 1
_NEAR = 64 << 10  # Bytes between indexes of shards that are read over, at most.
_NUMBER = re.compile(r"0|[1-9]\d{0,17}")


class ZarrStore:
    """Values by key, and the sources they lie in.

    Args:
        directory: Has the files of the values.
        files: Those that are open, by name.

    Attributes:
        sources: `files`, and those of the values that were asked for.
        first: The number of the first in pieces.
        missing: A line for the chunks that each array lacks, if its writer left none out; None if
            absent chunks hold the fill value.
    """

    missing: list[str] | None = None

    def __init__(
        self,
        directory: Directory,
        values: Mapping[str, Value],
        files: Mapping[str, Source],
        first: int,
    ) -> None:
        self.values, self.sources, self.first = values, [*files.values()], first
        self._directory = directory
        self._fetched: dict[tuple[int, int], bytes] = {}  # By number and place, what comes first.
        self._numbers = {name: number for number, name in enumerate(files)}
        self._keys = sorted(values)

    def arrays(self) -> Collection[str]:
        """Names of the arrays, by their metadata."""
        found = dict[str, None]()
        for key in self._keys:
            name, _, last = key.rpartition("/")
            if last in FILES.values():
                found[name] = None
        return found.keys()

    def below(self, name: str) -> Iterator[tuple[str, Value]]:
        """The values of an array, by what follows its name in their keys."""
        front = _front(name)
        start = bisect_left(self._keys, front)
        for key in itertools.islice(self._keys, start, None):
            if not key.startswith(front):
                break
            yield key[len(front) :], self.values[key]

    def ask_ahead(self, names: Iterable[str]) -> None:
        """Has the metadata of arrays that lie on a server read at once, and not one by one."""
        known = len(self.sources)
        for name in names:
            value = self.values[_metadata_key(self, name)[1]]
            if value.inline is None:
                self._number(value, name)
        sources.ask_ahead(each for each in self.sources[known:] if each.file is None)

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
        known = self._fetched.pop((number, value.offset + start), b"")
        if len(known) == stop - start:
            return known
        return self.sources[number].read(value.offset + start, stop - start)

    def fetch_ahead(self, wanted: Iterable[tuple[Value, int, int, str]]) -> None:
        """Has bytes of values that lie on servers (see `fetch`) come at once, and in few requests.

        A failure is met again where they are fetched.
        """
        ranges = list[tuple[int, int, int]]()
        for value, start, stop, name in wanted:
            if value.inline is None:
                ranges.append((self._number(value, name), value.offset + start, stop - start))
        if not any(self.sources[n].costs.concurrency and self.sources[n].file is None
                   for n in {n for n, *_ in ranges}):  # fmt: skip
            return
        from mfload.sources import ahead  # Late: files do without.

        runs = ahead.runs_of(self.sources, sorted(ranges), ahead.TOGETHER, gap=_NEAR)
        every = [(number, *run) for number, some in runs.items() for run in some]
        inside = {run: list[tuple[int, int]]() for run in every}
        starts = {number: [start for start, _ in some] for number, some in runs.items()}
        for number, place, nbytes in ranges:
            if number in runs and nbytes:
                at = bisect_right(starts[number], place) - 1
                inside[number, *runs[number][at]].append((place, nbytes))

        def fetch(run: tuple[int, int, int]) -> None:
            number, start, stop = run
            with suppress(errors.SourceError):
                data = self.sources[number].read(start, stop - start)
                for place, nbytes in inside[run]:
                    self._fetched[number, place] = data[place - start :][:nbytes]

        most = max((self.sources[number].costs.concurrency or 1 for number in runs), default=1)
        sources.at_once(fetch, every, most)

    def path(self, value: Value) -> str:
        """The path of the file of a value, for messages."""
        return f"{self._directory.name}/{value.file}"

    def _number(self, value: Value, name: str) -> int:
        number = self._numbers.get(value.file)
        if number is None:
            try:
                source = self._directory.file(value.file)
            except errors.SourceError as error:
                error.tensor = name
                raise
            source.keep(True)
            self.sources.append(source)
            number = self._numbers[value.file] = len(self.sources) - 1
        size = self.sources[number].size
        if value.offset + value.nbytes > size:
            what = "a chunk reaches out of its file: the file is truncated"
            end = errors.amount(value.offset + value.nbytes)
            raise bad(self.path(value), what, name, end, errors.amount(size))
        return number


def read(store: ZarrStore, names: Iterable[str]) -> list[TensorInfo]:
    """The tensors of arrays.

    Raises:
        HeaderError: The metadata, a range or the index of a shard is malformed; or chunks are
            encoded in a way that mfload does not decode.
        SourceError: A file of the store is missing.
    """
    found = [(array := _metadata(store, name), _present(store, array)) for name in names]
    store.fetch_ahead(
        (value, *_index_of(array.sharding, array, value), array.name)
        for array, present in found
        if array.sharding is not None and array.dtype.known
        for value in present.values()
    )
    return [_tensor(store, *each) for each in found]


def _grid(array: Array) -> Coords:
    return tuple(-(-n // size) for n, size in zip(array.shape, array.chunk, strict=True))


def _present(store: ZarrStore, array: Array) -> dict[Coords, Value]:
    """The chunks that are stored, by their places in the grid."""
    grid, present = _grid(array), dict[Coords, Value]()
    for key, value in store.below(array.name):
        at = _coords(array, key)
        if at is not None and all(map(int.__lt__, at, grid)):
            present[at] = value
    return present


def _tensor(store: ZarrStore, array: Array, present: dict[Coords, Value]) -> TensorInfo:
    name, dtype, shape, chunk = array.name, array.dtype, array.shape, array.chunk
    grid, pieces = _grid(array), list[Piece]()
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


def _coords(array: Array, key: str) -> Coords | None:
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
    store: ZarrStore, array: Array, codecs: Codecs, chunk: Coords, box: Box, value: Value
) -> Piece:
    """The piece of a chunk that holds a box."""
    made = [math.prod(chunk) * array.dtype.nbytes]
    for step in codecs.steps:
        made.append(made[-1] + 4 if step == "crc32c" else -1)
    if -1 not in made and made[-1] != value.nbytes:
        raise array.bad(
            "a chunk has another size", errors.amount(made[-1]), errors.amount(value.nbytes)
        )
    made[-1] = value.nbytes
    for at in reversed(range(1, len(made) - 1)):
        if made[at] == -1:
            made[at] = made[at + 1] - 4
    if min(made) < 0:
        raise array.bad("a chunk is truncated", "4 bytes or more", errors.amount(value.nbytes))
    pairs = zip(codecs.steps, made, strict=False)
    encodings = tuple(Encoding(step, nbytes) for step, nbytes in reversed([*pairs]))
    if array.dtype.name in NARROW:
        encodings += (Encoding(array.dtype.name, made[0]),)
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
    store: ZarrStore, array: Array, sharding: ShardingCodec, box: Box, value: Value
) -> Iterator[Piece]:
    """The pieces of the inner chunks of a shard that holds a box."""
    inner = sharding.chunk
    counts = [n // size for n, size in zip(array.chunk, inner, strict=True)]
    length = 16 * math.prod(counts)
    tail = 4 if sharding.checked else 0
    start, stop = _index_of(sharding, array, value)
    if stop - start < length + tail:
        what = "a shard is shorter than its index"
        raise array.bad(
            what, f"{errors.amount(length + tail)} or more", errors.amount(value.nbytes)
        )
    index = store.fetch(value, start, stop, array.name)
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
            raise array.bad(what, errors.amount(value.nbytes), errors.amount(offset + nbytes))
        part = value._replace(offset=value.offset + offset, nbytes=nbytes)
        if value.inline is not None:
            part = part._replace(inline=value.inline[offset : offset + nbytes])
        cells = _boxed(tuple((n, n + 1) for n in at), inner, box)
        yield _chunk(store, array, sharding.codecs, inner, cells, part)
    yield from _filled(store, array, present, grid, inner, box)


def _index_of(sharding: ShardingCodec, array: Array, value: Value) -> tuple[int, int]:
    """Where the index of a shard lies in it; fewer bytes if the shard is shorter."""
    pairs = zip(array.chunk, sharding.chunk, strict=True)
    nbytes = 16 * math.prod(n // size for n, size in pairs) + (4 if sharding.checked else 0)
    nbytes = min(nbytes, value.nbytes)
    start = value.nbytes - nbytes if sharding.at_end else 0
    return start, start + nbytes


def _filled(
    store: ZarrStore, array: Array, present: list[Coords], grid: Coords, size: Coords, within: Box
) -> Iterator[Piece]:
    """The pieces of chunks that are absent, as few as there may be with so many present."""
    for cells in _absent(present, grid):
        box = _boxed(cells, size, within)
        if store.missing is not None:
            store.missing.append(f"{brief(array.name)}: no chunk for {box or 'its element'}")
            continue
        whole = tuple(high - low for low, high in box) == array.shape
        stored = Stored(box=None if whole else box, strides=(0,) * len(box))
        value = Value(array.file, 0, array.dtype.nbytes, fill_bytes(array))
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


def _front(name: str) -> str:
    """What the keys of an array begin with. A tree that is one array has it without a name."""
    return name and f"{name}/"


def _metadata_key(store: ZarrStore, name: str) -> tuple[int, str]:
    """The version of an array, and the key of its JSON."""
    keys = ((n, _front(name) + file) for n, file in FILES.items())
    return next(each for each in keys if each[1] in store.values)


def _metadata(store: ZarrStore, name: str) -> Array:
    """Reads and checks the JSON of an array."""
    version, key = _metadata_key(store, name)
    value = store.values[key]
    if value.nbytes > MAX_METADATA:
        what = "the metadata of an array is over the limit"
        raise bad(
            store.path(value), what, name, errors.amount(MAX_METADATA), errors.amount(value.nbytes)
        )
    text = store.fetch(value, 0, value.nbytes, name)
    return parse(text, version, store.path(value), name)
