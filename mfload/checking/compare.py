"""Compares two checkpoints tensor by tensor, however each of them is sharded and ordered.

The left side is scanned in parts, and for each the same elements of the right side are read. Memory
held is a part of each side for each reader, and some 400 bytes for each part. A tensor that is not
one raw range on both sides is loaded whole on both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import errors, packed
from mfload.checking import numeric_diff
from mfload.checking.numeric_diff import NumericDiff
from mfload.checking.scan import Advance, check_unchanged, choose_route, scan, total_sizes
from mfload.index import TensorInfo
from mfload.io import buffers
from mfload.io.direct import DirectReader
from mfload.io.pread import PreadReader
from mfload.load_options import LoadOptions
from mfload.loading import execute
from mfload.planning.blocks import Block
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.sources.base import Source

PART = 4 << 20
"""Bytes of the larger of two parts that are compared at once."""

# Packed elements come in blocks of up to four: parts of so many begin and end with whole blocks.
_WHOLE = 8


class Pair(NamedTuple):
    """A tensor of both checkpoints that can be compared element by element.

    Both have one shape, and dtypes that are known; or one unknown dtype and as many bytes, which
    then count as its elements.
    """

    left: TensorInfo
    right: TensorInfo

    @property
    def simple(self) -> bool:
        """Whether both are one raw range."""
        return self.left.simple and self.right.simple

    @property
    def same_dtype(self) -> bool:
        """Whether equal values are equal bytes."""
        return self.left.dtype.name == self.right.dtype.name

    def parts(self) -> Iterator[tuple[int, Block, Block]]:
        """The first element of each part, and its bytes on either side."""
        bits = [element_bits(info) for info in self]
        count = self.left.nbytes * 8 // bits[0]
        step = max(_WHOLE, PART * 8 // max(bits) // _WHOLE * _WHOLE)
        for first in range(0, count, step):
            sides: list[Block] = []
            for info, width in zip(self, bits, strict=True):
                start, stop = first * width // 8, min(count, first + step) * width // 8
                piece = info.pieces[0]
                sides.append(Block(piece.source, piece.offset + start, stop - start, ()))
            yield first, sides[0], sides[1]


class Comparison:
    """Compares pairs of tensors, part by part (a `io.engine.Observer` of the left side).

    Attributes:
        first: First block of elements that differs, for each pair of one dtype that is not equal,
            by name: its number, and its bytes on either side.
        values: How far the values differ, for each pair that is not equal, by name.
    """

    def __init__(
        self,
        left: Sequence[Source],
        right: Sequence[Source],
        pairs: list[Pair],
        *,
        values: bool,
    ) -> None:
        self.pairs = pairs
        self.first: dict[str, tuple[int, bytes, bytes]] = {}
        self.values: dict[str, NumericDiff] = {}
        self.nbytes = sum(pair.left.nbytes for pair in pairs)
        self._left, self._right, self._by_value = left, right, values
        self._lock, self._mine = threading.Lock(), threading.local()
        # By the place of the left side. What is not one raw range on both sides comes on its own.
        self._apart = [pair for pair in pairs if not pair.simple]
        simple = (pair for pair in pairs if pair.simple)
        self._parts = {part[1]: (pair, *part) for pair in simple for part in pair.parts()}
        self._direct: set[int] = set()

    def run(self, options: LoadOptions, advance: Advance) -> tuple[str, ...]:
        """Reads both sides once; tells `advance` the bytes of the left one, returns notes."""
        sizes = total_sizes(right for *_, right in self._parts.values())
        route = choose_route(self._right, sizes, options)
        self._direct = {number for number, leg in route.items() if leg.engine == "direct"}
        notes = scan(self._left, sorted(self._parts), self, options, advance)
        check_unchanged(self._right, sizes, options)
        for pair in self._apart:
            left = _whole(self._left, pair.left, options)
            right = _whole(self._right, pair.right, options)
            for first, mine, other in pair.parts():
                here = left[mine.offset - pair.left.pieces[0].offset :][: mine.nbytes]
                there = right[other.offset - pair.right.pieces[0].offset :][: other.nbytes]
                self._compare(pair, first, here, there)
            if advance is not None:
                advance(pair.left.nbytes)
        return notes

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Compares a part with the same elements of the right side."""
        pair, element, _, right = self._parts[Block(source, offset, data.size, ())]
        self._compare(pair, element, data, self._read(right))

    def _compare(self, pair: Pair, element: int, data: Any, other: Any) -> None:
        name, dtype = pair.left.name, pair.left.dtype
        first, found = None, NumericDiff()
        if pair.same_dtype:
            word = np.uint64 if data.size % 8 == 0 else np.uint8
            if np.array_equal(data.view(word), other.view(word)):
                return
            differ = data != other
            before = element * element_bits(pair.left) // 8
            at, width = int(differ.argmax()), dtype.nbytes or 1
            start = at // width * width
            sides = (side[start : start + width].tobytes() for side in (data, other))
            first = (before + start) // width, *sides
            found = NumericDiff(int(differ.sum()), at=before + at)
        if self._by_value and dtype.known:
            found = numeric_diff.between(dtype, data, pair.right.dtype, other, element)
        with self._lock:
            self.values[name] = self.values.get(name, NumericDiff()).joined(found)
            if first is not None:
                self.first[name] = min(first, self.first.get(name, first))

    def _read(self, part: Block) -> Any:
        file = self._right[part.source]
        if not hasattr(self._mine, "slot"):
            self._mine.slot = buffers.WorkerSlot()
        try:
            # Opened for each part, so that nothing has to be closed under a reader that hangs.
            reader = DirectReader(file) if part.source in self._direct else PreadReader(file)
            try:
                return reader.fill(part, [], self._mine.slot)
            finally:
                reader.close()
        except OSError as error:
            raise errors.from_os(error, file.name, "read") from error

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


def _whole(sources: Sequence[Source], info: TensorInfo, options: LoadOptions) -> Any:
    """The bytes of a whole tensor in C order, however it is stored."""
    plan = make_plan([Request(info, info.dtype)], alignment=1)
    memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
    route = choose_route(sources, {each.source: each.nbytes for each in info.pieces}, options)
    threads = options.threads or execute.reader_threads(direct=True)
    execute.run(plan, memory, sources, route, threads=threads, deadline=options.deadline)
    _, buffer, at = plan.places[0]
    return memory[buffer][at : at + info.nbytes]


def element_bits(info: TensorInfo) -> int:
    """Bits of an element; an element of an unknown dtype is a byte."""
    return info.dtype.bits if info.dtype.known else 8


def place_of(info: TensorInfo, element: int) -> tuple[int, ...]:
    """The indices of an element, or the number of a byte of an unknown dtype."""
    if not info.dtype.known:
        return (element,)
    return tuple(int(n) for n in np.unravel_index(element, info.shape))
