"""Compares two checkpoints tensor by tensor, however each of them is sharded and ordered.

The left side is scanned in file order, in blocks that hold many small tensors or a part of a large
one. For each block the same elements of the right side are read, neighbours together. Memory held
is a block of each side for each reader, and some 400 bytes for each part. A tensor that is not one
raw range on both sides is loaded on both in slabs, which together stay within `max_host_overhead`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mfload import errors, packed
from mfload.checking import numeric_diff, scan as scanning
from mfload.checking.numeric_diff import SAME, NumericDiff, Tolerance
from mfload.checking.scan import (
    Advance,
    check_unchanged,
    choose_route,
    gap,
    joined,
    scan,
    total_sizes,
)
from mfload.index import Piece, TensorInfo
from mfload.io import buffers
from mfload.io.direct import DirectReader
from mfload.io.pread import PreadReader
from mfload.load_options import OVERHEAD, LoadOptions
from mfload.loading import execute
from mfload.planning.blocks import Block, Costs
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed, slabs
from mfload.sources.base import Source

# Packed elements come in blocks of up to four: parts of so many begin and end with whole blocks.
_WHOLE = 8
# Bytes that are compared sooner as `bytes` than by NumPy, whose calls take some microseconds.
_SMALL = 16 << 10
_SLABS = 3  # What is read of a slab on either side, and what reads them.


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

    def parts(self) -> Iterator[Part]:
        """The pair in parts, the larger side of which has at most the bytes of a block."""
        bits = [element_bits(info) for info in self]
        count, step = self.left.nbytes * 8 // bits[0], self.step()
        for first in range(0, count, step):
            sides: list[Piece] = []
            for info, width in zip(self, bits, strict=True):
                start, stop = first * width // 8, min(count, first + step) * width // 8
                piece = info.pieces[0]
                sides.append(Piece(piece.source, piece.offset + start, stop - start))
            yield Part(self, first, *sides)


def pairs(left: Iterable[TensorInfo], right: Iterable[TensorInfo]) -> Iterator[Pair]:
    """The tensors whose names both sides have, in the order of the left one."""
    others = {info.name: info for info in right}
    return (Pair(info, other) for info in left if (other := others.get(info.name)) is not None)


class Part(NamedTuple):
    """Elements of a pair from `first` on, and where their bytes lie."""

    pair: Pair
    first: int
    left: Piece
    right: Piece


class Comparison:
    """Compares the pairs of tensors that are comparable (an `io.engine.Observer` of the left).

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
        self._tolerance = tolerance
        self._lock, self._mine = threading.Lock(), threading.local()
        self._parts: list[Part] = []
        self._apart: list[Pair] = []
        for pair in self.pairs:
            nbytes, others = pair.left.nbytes, pair.right.nbytes
            self.nbytes += nbytes
            self.read_bytes += nbytes + others
            if not pair.simple:
                self._apart.append(pair)
            elif 0 < nbytes <= scanning.BLOCK and others <= scanning.BLOCK:
                self._parts.append(Part(pair, 0, pair.left.pieces[0], pair.right.pieces[0]))
            else:
                self._parts += pair.parts()
        self._blocks: dict[Block, list[Part]] = {}  # Of the left side.
        self._direct: set[int] = set()
        self._under_way: dict[int, tuple[str, str]] = {}  # Reads of the right side, by thread.

    def run(self, options: LoadOptions, advance: Advance) -> tuple[str, ...]:
        """Reads both sides once; tells `advance` the bytes of the left one, returns notes."""
        sizes = total_sizes(part.right for part in self._parts)
        route = choose_route(self._right, sizes, options)
        self._direct = {number for number, leg in route.items() if leg.engine == "direct"}
        ranges = [part.left for part in self._parts]
        self._blocks = {
            block: [self._parts[n] for n in numbers]
            for block, numbers in joined(ranges, gap(self._left), scanning.BLOCK)
        }
        try:
            notes = scan(self._left, [*self._blocks], self, options, advance)
        except errors.LoadTimeoutError as error:
            for waited_for in [*self._under_way.values()][:1]:  # The scan knows the left side only.
                error.file, error.tensor = waited_for
            raise
        check_unchanged(self._right, sizes, options)
        for pair in self._apart:
            first, bits = 0, [element_bits(info) for info in pair]
            step = pair.step()
            for left, right in _slabs(pair, options.max_host_overhead):
                ours = _load(self._left, left, options)
                theirs = _load(self._right, right, options)
                count = ours.size * 8 // bits[0]
                for start in range(0, count, step):
                    stop = min(count, start + step)
                    cut = [slice(start * width // 8, stop * width // 8) for width in bits]
                    self._compare(pair, first + start, ours[cut[0]], theirs[cut[1]])
                first += count
                ours = theirs = None
                if advance is not None:
                    advance(left.nbytes)
        return notes

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Compares a block with the same elements of the right side."""
        parts = self._blocks[Block(source, offset, data.size, ())]
        if not hasattr(self._mine, "slot"):
            self._mine.slot = buffers.WorkerSlot()
        blocks = joined([part.right for part in parts], gap(self._right), scanning.BLOCK)
        for number, some in groupby(blocks, lambda each: each[0].source):
            file = self._right[number]
            try:
                # Opened here, so that nothing has to be closed under a reader that hangs.
                reader = DirectReader(file) if number in self._direct else PreadReader(file)
                with closing(reader):
                    for block, members in some:
                        me = threading.get_ident()
                        self._under_way[me] = file.name, parts[members[0]].pair.right.name
                        other = reader.land(block, self._mine.slot)
                        del self._under_way[me]
                        for part in map(parts.__getitem__, members):
                            mine = _cut(data, part.left, offset)
                            theirs = _cut(other, part.right, block.offset)
                            self._compare(part.pair, part.first, mine, theirs)
            except OSError as error:
                raise errors.from_os(error, file.name, "read") from error

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


def _slabs(pair: Pair, limit: int | None) -> Iterator[tuple[Request, Request]]:
    """The same parts of both sides, which follow each other in C order.

    Raises MemoryLimitError for one that is larger than half the limit, and can't be cut.
    """
    most = (OVERHEAD if limit is None else limit) // _SLABS
    # Boxes fit the chunks of the side that has some; a larger element makes them smaller.
    info = pair.right if pair.left.simple else pair.left
    nbytes = max(pair.left.nbytes, pair.right.nbytes)
    packed = max(info.dtype.elements for info in pair) > 1
    for box in [None] if packed else slabs(info, nbytes, most):
        sides = (
            Request(each, each.dtype, None if box is None else boxed(each, box)) for each in pair
        )
        left, right = sides
        if limit is not None and max(left.nbytes, right.nbytes) > limit // 2:
            raise errors.MemoryLimitError(
                "a tensor that can't be compared in parts is larger than max_host_overhead allows",
                tensor=left.info.name,
                expected=f"at least {errors.amount(2 * max(left.nbytes, right.nbytes), limit)}",
                found=errors.amount(limit, limit),
            )
        yield left, right


def _load(sources: Sequence[Source], request: Request, options: LoadOptions) -> Any:
    """The bytes of a part of a tensor in C order, however it is stored."""
    info, threads = request.info, options.threads or execute.reader_threads(direct=True)
    slots = options.max_host_overhead or OVERHEAD
    slot = max(buffers.PAGE, slots // _SLABS // threads // buffers.PAGE * buffers.PAGE)
    usual = Costs()
    costs = usual._replace(block=min(usual.block, slot), staged=min(usual.staged, slot))
    plan = make_plan([request], alignment=1, costs=costs)
    memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
    route = choose_route(sources, total_sizes(info.pieces), options)
    execute.Transfer(plan, memory, sources, route, threads, options.deadline).run()
    _, buffer, at = plan.places[0]
    return memory[buffer][at : at + request.nbytes]


def element_bits(info: TensorInfo) -> int:
    """Bits of an element; an element of an unknown dtype is a byte."""
    return info.dtype.bits if info.dtype.known else 8


def place_of(info: TensorInfo, element: int) -> tuple[int, ...]:
    """The indices of an element, or the number of a byte of an unknown dtype."""
    if not info.dtype.known:
        return (element,)
    return tuple(int(n) for n in np.unravel_index(element, info.shape))
