"""Pieces: how tensors are read that are not one raw range in C order. Pure.

Each part of a piece that a request wants is a copy between two strided arrays: elements of the
piece, in the order of its bytes, and their places in the result. It is cut where a cut bounds the
memory that it takes: raw bytes into blocks like any others, encoded ones into segments of one
block, which are taken one after the other from what it is decoded to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mfload.index import Box, Piece, TensorInfo
from mfload.planning import boxes
from mfload.planning.blocks import Block, Copy, Costs, Decode, Segment
from mfload.planning.request import Request
from mfload.planning.slicing import Axis
from mfload.stored import Stored

FETCHED = 1 << 20
"""Encoded bytes that a reader fetches at once, at most: they stay in the processor's cache."""

_WHOLE = Stored()
_ENDLESS = 1 << 62


Wanted = tuple[Request, int, int]
"""A request, and the buffer and the byte of it where its result goes."""


_Dims = tuple[tuple[int, int, int], ...]


class _Part(NamedTuple):
    """A copy between strided arrays, the dims with the longest steps in the piece first.

    `first` is a byte of the piece, `at` one of the result's buffer; each dim has its size and the
    bytes from one element to the next here and there.
    """

    first: int
    at: int
    dims: _Dims


def blocks(wanted: Sequence[Wanted], costs: Costs) -> Iterator[Block]:
    """The blocks that read what several requests want of one tensor.

    Piece by piece, and in the order of its bytes. Each byte is read once, unless requests take
    other steps, or strides lead through it twice.
    """
    info = wanted[0][0].info
    for piece in info.pieces:
        stored = piece.stored or _WHOLE
        encoded = bool(stored.encodings) or stored.inline is not None
        found: list[Segment] = []
        parts = [[*_parts(info, stored, each)] for each in wanted]
        spans = sorted(_span(part, info.dtype.nbytes) for each in parts for part in each)
        if not spans:
            continue
        gap = max(1, costs.merge_gap)
        if encoded or _close(parts, spans, info.dtype.nbytes):
            gap = _ENDLESS
        # Bytes that go to one place alone need no slot.
        straight = all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        run = costs.slot
        if straight:
            run = _ENDLESS if encoded else costs.block
        for each, mine in zip(wanted, parts, strict=True):
            cut = _Cut(each[0], stored, costs.slot, gap, run)
            for part in mine:
                found += cut.segments(part, each[1])
        found.sort(key=lambda segment: segment.offset)
        if not encoded:
            yield from _raw(piece, found, gap, costs)
            continue
        window = max(
            (each.nbytes for each in found if each.copy is not None or not straight), default=0
        )
        fetched, nbytes = min(FETCHED, costs.slot), piece.nbytes
        if stored.inline is not None:
            nbytes = 0
        decode = Decode(info.name, stored.encodings, fetched, window, stored.inline)
        yield Block(piece.source, piece.offset, nbytes, tuple(found), nbytes, decode)


def _raw(piece: Piece, segments: Sequence[Segment], gap: int, costs: Costs) -> Iterator[Block]:
    """Blocks of segments in file order; of those that lie together, or in one another."""
    group: list[Segment] = []
    end = 0

    def made() -> Block:
        start = group[0].offset
        shared = None
        if len(group) > 1 or group[0].copy is not None:
            shared = min(end - start, sum(segment.wanted for segment in group))
        return Block(piece.source, start, end - start, tuple(group), shared)

    for segment in segments:
        segment = segment._replace(offset=piece.offset + segment.offset)
        stop = segment.offset + segment.nbytes
        if group and (segment.offset - end >= gap or max(end, stop) - group[0].offset > costs.slot):
            yield made()
            group = []
        end = max(end, stop) if group else stop
        group.append(segment)
    if group:
        yield made()


def _close(parts: Sequence[Sequence[_Part]], spans: Sequence[tuple[int, int]], unit: int) -> bool:
    """Whether so much of a piece is wanted that it is read as one, whatever lies between."""
    counts = (math.prod(n for n, *_ in part.dims) for each in parts for part in each)
    return 2 * unit * sum(counts) >= max(stop for _, stop in spans) - spans[0][0]


def _parts(info: TensorInfo, stored: Stored, wanted: Wanted) -> Iterator[_Part]:
    """What a request wants of a piece."""
    request, _, at = wanted
    shape, unit = boxes.stored_shape(info), info.dtype.nbytes
    axes = tuple(Axis(0, length) for length in shape)
    if request.selection is not None:
        axes = boxes.stored_axes(request.selection, info.dtype.elements)
    rows = boxes.c_strides([axis.size for axis in axes], request.dtype.nbytes)
    for box, start, steps in _boxes(stored, shape):
        found = map(_within, axes, box)
        for chosen in itertools.product(*found):
            first, to = start, at
            dims: list[tuple[int, int, int]] = []
            for (k, axis), (low, _), step, row in zip(chosen, box, steps, rows, strict=True):
                step_here, step_there = axis.step * step, row
                first += (axis.start - low) * step
                to += k * row
                if step_here < 0:
                    first += (axis.size - 1) * step_here
                    to += (axis.size - 1) * step_there
                    step_here, step_there = -step_here, -step_there
                if axis.size > 1:
                    dims.append((axis.size, step_here * unit, step_there))
            yield _Part(first * unit, to, _folded(dims))


def _boxes(stored: Stored, shape: tuple[int, ...]) -> Iterator[tuple[Box, int, Sequence[int]]]:
    """The boxes of a tensor that a piece holds: its first element of each, and their strides."""
    if stored.flat is None:
        # A tensor without dims has a box without any.
        box = stored.box or tuple((0, length) for length in shape)
        chunk = stored.chunk or tuple(high - low for low, high in box)
        yield box, stored.start, stored.strides or boxes.c_strides(chunk, 1)
        return
    steps = boxes.c_strides(shape, 1)
    begin, stop = stored.flat
    for box in _stretch(begin, stop, shape):
        first = sum(low * step for (low, _), step in zip(box, steps, strict=True))
        yield box, stored.start + first - begin, steps


def _stretch(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes that make up a range of elements in C order."""
    if not shape:
        yield from [()] * (stop - start)
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, inner = divmod(start, row)
        end = stop // row * row
        if inner or end <= start:
            end = min(stop, (first + 1) * row)
            for box in _stretch(inner, end - first * row, shape[1:]):
                yield ((first, first + 1), *box)
        else:
            yield ((first, end // row), *((0, length) for length in shape[1:]))
        start = end


def _within(axis: Axis, span: tuple[int, int]) -> list[tuple[int, Axis]]:
    """What an axis takes of a range of its dim: the place in the result, and the elements."""
    low, high = span
    if axis.picks is not None:
        return [(k, Axis(n, 1)) for k, n in enumerate(axis.picks) if low <= n < high]
    start, step = axis.start, axis.step
    # The first element that is not before the range, and the first that is behind it.
    bounds = (low, high) if step > 0 else (high - 1, low - 1)
    first, stop = (min(axis.size, max(0, -((start - bound) // step))) for bound in bounds)
    return [(first, Axis(start + first * step, stop - first, step))] if first < stop else []


def _folded(dims: list[tuple[int, int, int]]) -> _Dims:
    """Dims with the longest steps first; those that one step leads through are one."""
    made: list[tuple[int, int, int]] = []
    for n, step, there in sorted(dims, key=lambda dim: -dim[1]):
        if made and made[-1][1:] == (n * step, n * there):
            n *= made.pop()[0]
        made.append((n, step, there))
    return tuple(made)


class _Cut:
    """Cuts what a request wants of a piece into segments.

    None is longer than a slot, or than `run` if its bytes are taken as they are; none has a gap
    of `gap` bytes or more.
    """

    def __init__(self, request: Request, stored: Stored, slot: int, gap: int, run: int) -> None:
        dtype = request.info.dtype
        # Bytes are moved, not numbers, unless they change.
        opaque = np.dtype(f"V{dtype.nbytes}" if dtype.nbytes > 1 else np.uint8)
        self._source, self._target = opaque, opaque
        swapped = stored.big_endian and dtype.bits > 8
        source, target = dtype.numpy, request.dtype.numpy
        if source is not None and target is not None and (swapped or request.dtype is not dtype):
            self._source = source.newbyteorder(">") if swapped else source
            self._target = target
        self._unit, self._name, self._checked = dtype.nbytes, request.info.name, request.checked
        self._slot, self._gap, self._run = slot, gap, run

    def segments(self, part: _Part, buffer: int) -> Iterator[Segment]:
        """The segments of a part, in the order of the piece."""
        for each in self._cut(part):
            first, at, dims = each
            copy = None
            if not self._is_run(dims):
                sizes, steps, places = zip(*dims, strict=True) if dims else ((), (), ())
                types = self._source, self._target
                copy = Copy(sizes, steps, 0, *types, self._checked, self._name, places)
            start, stop = _span(each, self._unit)
            yield Segment(first, stop - start, buffer, at, copy)

    def _cut(self, part: _Part) -> Iterator[_Part]:
        first, at, dims = part
        most = self._run if self._is_run(dims) else self._slot
        start, stop = _span(part, self._unit)
        if stop - start <= most and self._widest(dims) < self._gap:
            yield part
            return
        (n, step, there), inner = dims[0], dims[1:]
        start, stop = _span(_Part(0, 0, inner), self._unit)
        count = 1
        if step - stop < self._gap and self._widest(inner) < self._gap:
            count = max(1, (most - max(stop, step)) // step + 1)
        # Cut where no request counts, so that blocks of several fit together.
        rows = count - first // step % count
        done = 0
        while done < n:
            rows = min(rows, n - done)
            rest = inner if rows == 1 else ((rows, step, there), *inner)
            yield from self._cut(_Part(first + done * step, at + done * there, rest))
            done, rows = done + rows, count

    def _is_run(self, dims: _Dims) -> bool:
        """Whether bytes lie in their place as they are stored."""
        unit = self._unit
        plain = self._source == self._target
        return plain and (not dims or (len(dims) == 1 and dims[0][1:] == (unit, unit)))

    def _widest(self, dims: _Dims) -> int:
        """The longest stretch between neighbours that is not wanted."""
        widest, reach = 0, self._unit
        for n, step, _ in reversed(dims):
            widest = max(widest, step - reach)
            reach += (n - 1) * step
        return widest


def _span(part: _Part, unit: int) -> tuple[int, int]:
    """The first byte of a part, and the end of its last element."""
    return part.first, part.first + unit + sum((n - 1) * step for n, step, _ in part.dims)
