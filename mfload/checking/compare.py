"""Compares two checkpoints tensor by tensor, however each of them is sharded and ordered.

Both are read as one, the left side in file order: a lot is a block of it, with many small tensors
or a part of a large one, and the blocks with the same elements of the right side. Memory held is a
block of each side for each reader, and some 400 bytes for each part. A tensor that is not one raw
range on both sides lands from both, part by part, within `max_host_overhead`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import packed
from mfload.checking import numeric_diff, scan as scanning
from mfload.checking.numeric_diff import SAME, NumericDiff, Tolerance
from mfload.checking.scan import Advance, gap, scan
from mfload.index import Piece, TensorInfo
from mfload.loading import execute
from mfload.options import LoadOptions
from mfload.planning import lots
from mfload.planning.blocks import Lot
from mfload.planning.lots import joined
from mfload.planning.memory import Ledger
from mfload.sources.base import Source

# Packed elements come in blocks of up to four: parts of so many begin and end with whole blocks.
_WHOLE = 8
# Bytes that are compared sooner as `bytes` than by NumPy, whose calls take some microseconds.
_SMALL = 16 << 10
_PARTS = 3  # Of the overhead, for each reader: what lands of either side, and what reads it.


class Pair(NamedTuple):
    """A tensor of both checkpoints."""

    left: TensorInfo
    right: TensorInfo

    @property
    def simple(self) -> bool:
        """Whether both are one raw range."""
        return self.left.simple and self.right.simple

    @property
    def same_dtype(self) -> bool:
        """Whether equal values are equal bytes."""
        return self.left.dtype is self.right.dtype or self.left.dtype.name == self.right.dtype.name

    @property
    def comparable(self) -> bool:
        """Whether the elements can be compared. Those of an unknown dtype are bytes."""
        left, right = self
        if left.shape != right.shape:
            return False
        known = left.dtype.known and right.dtype.known
        return known or (self.same_dtype and self.simple and left.nbytes == right.nbytes)

    def step(self) -> int:
        """Elements of which the larger side has at most the bytes of a block."""
        most = max(element_bits(info) for info in self)
        return max(_WHOLE, scanning.BLOCK * 8 // most // _WHOLE * _WHOLE)

    def parts(self, first: int = 0, *sides: Piece) -> Iterator[PairRange]:
        """Parts, of which the larger side has at most the bytes of a block.

        `sides` are where the elements from `first` on lie. Default: where all of them are stored.
        """
        sides = sides or (self.left.pieces[0], self.right.pieces[0])
        bits = [element_bits(info) for info in self]
        count, step = sides[0].nbytes * 8 // bits[0], self.step()
        for start in range(0, count, step):
            cut: list[Piece] = []
            for piece, width in zip(sides, bits, strict=True):
                low, high = start * width // 8, min(count, start + step) * width // 8
                cut.append(Piece(piece.source, piece.offset + low, high - low))
            yield PairRange(self, first + start, *cut)


def pairs(left: Iterable[TensorInfo], right: Iterable[TensorInfo]) -> Iterator[Pair]:
    """The tensors whose names both sides have, in the order of the left one."""
    others = {info.name: info for info in right}
    return (Pair(info, other) for info in left if (other := others.get(info.name)) is not None)


class PairRange(NamedTuple):
    """Elements of a pair from `first` on, and where their bytes lie, in files or in memory."""

    pair: Pair
    first: int
    left: Piece
    right: Piece


class Comparison:
    """Compares the pairs of tensors that are comparable (an `io.engine.Place` of both sides).

    Attributes:
        first: First block of elements that differs, for each pair of one dtype that is not equal,
            by name: its number, and its bytes on either side.
        nbytes: Bytes of the left side; `read_bytes` are those of both.
        values: How far the values differ, for each pair that is not equal, by name.
    """

    def __init__(
        self,
        left: Sequence[Source],
        right: Sequence[Source],
        pairs: Iterable[Pair],
        *,
        values: bool,
        tolerance: Tolerance = (0.0, 0.0),
    ) -> None:
        self.pairs = [pair for pair in pairs if pair.comparable]
        self.first: dict[str, tuple[int, bytes, bytes]] = {}
        self.values: dict[str, NumericDiff] = {}
        self.nbytes = self.read_bytes = 0
        self._left, self._right, self._by_value = left, right, values
        self._tolerance, self._lock = tolerance, threading.Lock()
        self._parts: list[PairRange] = []
        self._apart: list[Pair] = []
        for pair in self.pairs:
            nbytes, others = pair.left.nbytes, pair.right.nbytes
            self.nbytes += nbytes
            self.read_bytes += nbytes + others
            if not pair.simple:
                self._apart.append(pair)
            elif 0 < nbytes <= scanning.BLOCK and others <= scanning.BLOCK:
                self._parts.append(PairRange(pair, 0, pair.left.pieces[0], pair.right.pieces[0]))
            else:
                self._parts += pair.parts()

    def run(self, options: LoadOptions, advance: Advance) -> tuple[str, ...]:
        """Reads both sides once; tells `advance` the bytes of the left one, returns notes."""
        both = [*self._left, *self._right]
        notes = scan(both, [*self._raw()], self, options, advance)
        apart = [lot for pair in self._apart for lot in self._landed(pair, options)]
        return notes + scan(both, apart, self, options, advance, shrinks=True)

    def _raw(self) -> Iterator[Lot]:
        """A block of the left side, and the blocks of the right one with its elements."""
        for mine, numbers in joined([p.left for p in self._parts], gap(self._left), scanning.BLOCK):
            some = list(map(self._parts.__getitem__, numbers))
            theirs = [*joined([p.right for p in some], gap(self._right), scanning.BLOCK)]
            blocks = [block._replace(source=block.source + len(self._left)) for block, _ in theirs]
            members = [[some[n] for n in each] for _, each in theirs]
            name = some[0].pair.left.name
            held = mine.nbytes + max(block.nbytes for block in blocks)
            yield Lot((mine, *blocks), mine.nbytes, held, kept=True, tensor=name, key=members)

    def _landed(self, pair: Pair, options: LoadOptions) -> Iterator[Lot]:
        """Parts of both sides that follow each other in C order.

        Raises MemoryLimitError for one that is larger than half the limit, and can't be cut.
        """
        ledger, bits = Ledger(options), [element_bits(info) for info in pair]
        readers = options.threads or execute.reader_threads(direct=False)
        most, shift = ledger.share(_PARTS * readers), len(self._left)
        pieces = (p._replace(source=p.source + shift) for p in pair.right.pieces)
        sides = pair.left, pair.right._replace(pieces=tuple(pieces))
        for first, stop in lots.ranges(pair, most, ledger.share(_PARTS)):
            left, right = (lots.parts(each, each.dtype, first, stop) for each in sides)
            ours, theirs = ((stop - first) * width // 8 for width in bits)
            what = f"a tensor that can't be compared in parts is larger than {ledger.name} allows"
            ledger.check(2 * max(ours, theirs), what, pair.left.name, "at least {}")
            part = PairRange(pair, first, Piece(0, 0, ours), Piece(0, ours, theirs))
            costs = self._left[0].costs._replace(span=most)
            yield lots.landed([*left, *right], ours, costs, key=part)

    def take(self, lot: Lot, number: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Compares what came of both sides."""
        if lot.kept:
            mine, other = lot.blocks[0].offset, lot.blocks[number].offset
            for part in lot.key[number - 1]:
                ours, theirs = _cut(data[0], part.left, mine), _cut(data[1], part.right, other)
                self._compare(part.pair, part.first, ours, theirs)
            return
        for part in lot.key.pair.parts(*lot.key[1:]):
            sides = (_cut(data, piece, 0) for piece in (part.left, part.right))
            self._compare(part.pair, part.first, *sides)

    def _compare(self, pair: Pair, element: int, data: Any, other: Any) -> None:
        same_dtype = pair.same_dtype
        if same_dtype and data.size <= _SMALL:
            if data.tobytes() == other.tobytes():
                return
        elif same_dtype:
            word = np.uint64 if data.size % 8 == 0 else np.uint8
            if np.array_equal(data.view(word), other.view(word)):
                return
        name, dtype = pair.left.name, pair.left.dtype
        first, found = None, SAME
        if same_dtype:
            differ = data != other
            before = element * element_bits(pair.left) // 8
            at, width = int(differ.argmax()), dtype.nbytes or 1
            start = at // width * width
            sides = (side[start : start + width].tobytes() for side in (data, other))
            first = (before + start) // width, *sides
            found = NumericDiff(int(differ.sum()), at=before + at)
        if self._by_value and dtype.known:
            given = dtype, data, pair.right.dtype, other, element
            found = numeric_diff.between(*given, self._tolerance)
        with self._lock:
            self.values[name] = self.values.get(name, SAME).joined(found)
            if first is not None:
                self.first[name] = min(first, self.first.get(name, first))

    def first_difference(self, info: TensorInfo) -> tuple[str, str, str]:
        """The place of the first element that differs, and its value on either side.

        Of packed elements it is the first of a block, and the values are those of the block.
        """
        block, *sides = self.first[info.name]
        dtype = info.dtype
        if not dtype.known:
            return f"byte {block}", f"0x{sides[0].hex()}", f"0x{sides[1].hex()}"
        texts: list[str] = []
        for side in sides:
            numbers = packed.unpack(np.frombuffer(side, np.uint8), dtype.name, (dtype.elements,))
            # With their bits, which the numbers may hide.
            texts.append(f"{' '.join(map(str, numbers))} (0x{side[::-1].hex()})")
        place = place_of(info, block * dtype.elements)
        return str(list(place)), texts[0], texts[1]


def _cut(data: Any, piece: Piece, origin: int) -> Any:
    """The bytes of a piece, given those of its source from `origin` on."""
    _, offset, nbytes, _ = piece
    return data[offset - origin : offset - origin + nbytes]


def element_bits(info: TensorInfo) -> int:
    """Bits of an element; an element of an unknown dtype is a byte."""
    return info.dtype.bits if info.dtype.known else 8


def place_of(info: TensorInfo, element: int) -> tuple[int, ...]:
    """The indices of an element, or the number of a byte of an unknown dtype."""
    if not info.dtype.known:
        return (element,)
    return tuple(int(n) for n in np.unravel_index(element, info.shape))
