"""Compares two checkpoints tensor by tensor, however each of them is sharded and ordered.

The left side is scanned in parts, and for each the same elements of the right side are read. Memory
held is a part of each side for each reader, and some 400 bytes for each part.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import errors, packed
from mfload.checking import numeric_diff
from mfload.checking.numeric_diff import NumericDiff
from mfload.checking.scan import Advance, Range, check_unchanged, choose_route, scan, span
from mfload.index import TensorInfo
from mfload.io import buffers
from mfload.io.direct import DirectReader
from mfload.io.pread import PreadReader
from mfload.options import LoadOptions
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile

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
    def same_dtype(self) -> bool:
        """Whether equal values are equal bytes."""
        return self.left.dtype.name == self.right.dtype.name


class Comparison:
    """Compares pairs of tensors, part by part (a `planning.blocks.Observer` of the left side).

    Attributes:
        first: First byte that differs, for each pair of one dtype that is not equal, by name.
        values: How far the values lie apart, for each pair that is not equal, by name.
    """

    def __init__(
        self,
        left: Sequence[LocalFile],
        right: Sequence[LocalFile],
        pairs: list[Pair],
        *,
        values: bool,
    ) -> None:
        self.pairs = pairs
        self.first: dict[str, int] = {}
        self.values: dict[str, NumericDiff] = {}
        self.nbytes = sum(pair.left.nbytes for pair in pairs)
        self._left, self._right, self._by_value = left, right, values
        self._lock, self._mine = threading.Lock(), threading.local()
        self._parts = {part.left: part for pair in pairs for part in _parts(pair)}
        self._direct: set[int] = set()

    def run(self, options: LoadOptions, advance: Advance) -> tuple[str, ...]:
        """Reads both sides once; tells `advance` the bytes of the left one, returns notes."""
        sizes = Counter[int]()
        for part in self._parts.values():
            sizes[part.right.source] += part.right.nbytes
        route = choose_route(self._right, sizes, options)
        self._direct = {number for number, leg in route.items() if leg.engine == "direct"}
        notes = scan(self._left, sorted(self._parts), self, options, advance, block=None)
        check_unchanged(self._right, sizes, options)
        return notes

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Compares a part with the same elements of the right side."""
        pair, element, _, right = self._parts[Range(source, offset, data.size)]
        other = self._read(right)
        name, dtype = pair.left.name, pair.left.dtype
        byte, found = None, NumericDiff()
        if pair.same_dtype:
            word = np.uint64 if data.size % 8 == 0 else np.uint8
            if np.array_equal(data.view(word), other.view(word)):
                return
            differ = data != other
            at = int(differ.argmax())
            unit, width = _block(pair.left)
            byte = element // unit * width + at
            found = NumericDiff(int(differ.sum()), at=byte)
        if self._by_value and dtype.known:
            found = numeric_diff.between(dtype, data, pair.right.dtype, other, element)
        with self._lock:
            self.values[name] = self.values.get(name, NumericDiff()).joined(found)
            if byte is not None:
                self.first[name] = min(byte, self.first.get(name, byte))

    def _read(self, part: Range) -> Any:
        file = self._right[part.source]
        if not hasattr(self._mine, "slot"):
            self._mine.slot = buffers.WorkerSlot()
        try:
            # Opened for each part, so that nothing has to be closed under a reader that hangs.
            reader = DirectReader(file) if part.source in self._direct else PreadReader(file)
            try:
                return reader.fill(Block(*part, ()), [], self._mine.slot)
            finally:
                reader.close()
        except OSError as error:
            raise errors.from_os(error, file.path, "read") from error

    def first_difference(self, pair: Pair) -> tuple[str, str, str]:
        """The place of the first element that differs, and its value on either side."""
        unit, width = _block(pair.left)
        block = self.first[pair.left.name] // width
        ours, theirs = (
            _values(info, files[span(info).source].read(span(info).offset + block * width, width))
            for info, files in zip(pair, (self._left, self._right), strict=True)
        )
        within = next((n for n in range(unit) if ours[n] != theirs[n]), 0)
        place = place_of(pair.left, block * unit + within)
        shown = str(list(place)) if pair.left.dtype.known else f"byte {place[0]}"
        return shown, ours[within], theirs[within]


class _ComparedPart(NamedTuple):
    pair: Pair
    element: int
    left: Range
    right: Range


def _parts(pair: Pair) -> Iterator[_ComparedPart]:
    blocks = [_block(info) for info in pair]
    (unit, width), (other, breadth) = blocks
    count = pair.left.nbytes // width * unit
    step = max(_WHOLE, PART * unit * other // max(width * other, breadth * unit) // _WHOLE * _WHOLE)
    for first in range(0, count, step):
        sides: list[Range] = []
        for info, (elements, nbytes) in zip(pair, blocks, strict=True):
            start = first // elements * nbytes
            stop = -(-min(count, first + step) // elements) * nbytes
            source, offset, _ = span(info)
            sides.append(Range(source, offset + start, stop - start))
        yield _ComparedPart(pair, first, *sides)


def _block(info: TensorInfo) -> tuple[int, int]:
    """Elements and bytes of the smallest block; an element of an unknown dtype is a byte."""
    return (info.dtype.elements, info.dtype.nbytes) if info.dtype.known else (1, 1)


def place_of(info: TensorInfo, element: int) -> tuple[int, ...]:
    """The indices of an element, or the number of a byte of an unknown dtype."""
    if not info.dtype.known:
        return (element,)
    return tuple(int(n) for n in np.unravel_index(element, info.shape))


def _values(info: TensorInfo, raw: bytes) -> list[str]:
    """The elements of a smallest block, with their bits where the numbers may hide them."""
    bits = f"0x{raw[::-1].hex()}"
    if not info.dtype.known:
        return [bits]
    data = np.frombuffer(raw, np.uint8).copy()
    numbers = packed.unpack(data, info.dtype.name, (info.dtype.elements,))
    return [str(n) for n in numbers] if len(numbers) > 1 else [f"{numbers[0]!s} ({bits})"]
