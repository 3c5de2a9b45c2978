"""Pieces: how tensors are stored that are not one raw range in C order, as strided arrays. Pure.

Each box of a piece is an array with steps of its own, and what a request takes of it is a box of
that, with its places in the result. So raw bytes are read as those of any other tensor (see
`extents`); what encoded ones are decoded to is taken in parts of one block, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mfload.index import Box, Piece, TensorInfo
from mfload.planning import extents
from mfload.planning.blocks import Block, Costs, Decode, Segment
from mfload.planning.extents import Extent, Wanted
from mfload.planning.request import Request
from mfload.planning.slicing import Axis, boxes_between
from mfload.stored import Stored

FETCHED = 1 << 20
"""Encoded bytes that a reader fetches at once, at most: they stay in the processor's cache."""

_WHOLE = Stored()
_ENDLESS = 1 << 62


class _PieceBox(NamedTuple):
    """A box of a piece: the byte of its first element, and its dims, those with long steps first.

    Attributes:
        order: The tensor's dim of each; negative ones are walked backwards.
        again: The tensor's dims that there are no bytes for.
    """

    first: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]
    back: tuple[bool, ...]
    again: tuple[int, ...]


def parts(requests: Sequence[Request], piece: Piece, costs: Costs) -> Iterator[Extent]:
    """The extents of what requests take of a piece; the parts of each have their numbers.

    Offsets count from the piece's first byte, decoded.
    """
    info, stored = requests[0].info, piece.stored or _WHOLE
    if encoded(piece):
        costs = costs._replace(merge_gap=_ENDLESS, row_gap=None, span=0, concurrency=None)
    shape, unit = extents.stored_shape(info), info.dtype.nbytes
    every = [extents.axes_of(request, shape) for request in requests]
    swapped = stored.big_endian and info.dtype.bits > 8
    for box, start, steps in _boxes(stored, shape):
        array = _array(box, start, steps, unit)
        together = list[tuple[int, int, Wanted]]()
        for number, (request, axes) in enumerate(zip(requests, every, strict=True)):
            types = extents.element_types(request, swapped=swapped)
            for at, wanted in _taken(request, axes, box, array, types):
                one = number, at, wanted
                if any(axis.step != 1 for axis in wanted.axes) or wanted.again:
                    yield from _numbered([one], array, costs)
                else:
                    together.append(one)
        if together:
            yield from _numbered(together, array, costs)


def _numbered(
    wanted: Sequence[tuple[int, int, Wanted]], array: _PieceBox, costs: Costs
) -> Iterator[Extent]:
    given = array.lengths, array.strides, [each for _, _, each in wanted]
    for each in extents.extents(*given, costs):
        made: list[extents.BoxCopy] = []
        for box, offset, nbytes, at, copy in each.parts:
            number, ahead, _ = wanted[box]
            made.append(extents.BoxCopy(number, offset + array.first, nbytes, at + ahead, copy))
        yield each._replace(offset=each.offset + array.first, parts=tuple(made))


def encoded(piece: Piece) -> bool:
    """Whether what a piece holds is not in the source as it is."""
    stored = piece.stored or _WHOLE
    return bool(stored.encodings) or stored.inline is not None


def decoding(
    info: TensorInfo,
    piece: Piece,
    found: Sequence[Extent],
    spots: Sequence[tuple[int, int]],
    costs: Costs,
) -> Block | None:
    """The block that decodes a piece: the parts of its extents, in the order of its bytes."""
    stored = piece.stored or _WHOLE
    segments = [
        Segment(offset, nbytes, spots[n][0], spots[n][1] + at, copy)
        for each in found
        for n, offset, nbytes, at, copy in each.parts
    ]
    if not segments:
        return None
    segments.sort(key=lambda each: each.offset)
    ends = [each.offset + each.nbytes for each in segments]
    # Bytes that go to one place alone need no room.
    straight = all(end <= each.offset for end, each in zip(ends, segments[1:], strict=False))
    window = [each.nbytes for each in segments if each.copy is not None or not straight]
    fetched, nbytes = min(FETCHED, costs.slot), piece.nbytes
    if stored.inline is not None:
        nbytes = 0
    decode = Decode(info.name, stored.encodings, fetched, max(window, default=0), stored.inline)
    return Block(piece.source, piece.offset, nbytes, tuple(segments), nbytes, decode)


def _array(box: Box, start: int, steps: Sequence[int], unit: int) -> _PieceBox:
    dims = list[tuple[int, int, int, bool]]()
    again: list[int] = []
    for dim, ((low, high), step) in enumerate(zip(box, steps, strict=True)):
        length = high - low
        if step == 0 and length != 1:
            again.append(dim)
            continue
        if step < 0:
            start += (length - 1) * step
        dims.append((abs(step), length, dim, step < 0))
    dims.sort(key=lambda each: (-each[0], each[2]))
    strides, lengths, order, back = zip(*dims, strict=True) if dims else ((), (), (), ())
    return _PieceBox(
        start * unit, lengths, tuple(step * unit for step in strides), order, back, tuple(again)
    )


def _taken(
    request: Request, axes: Sequence[Axis], box: Box, array: _PieceBox, types: tuple[Any, Any]
) -> Iterator[tuple[int, Wanted]]:
    """What a request takes of a box: the first byte in the result, and boxes of the array."""
    rows = extents.places(request, axes, types[1].itemsize)
    for chosen in itertools.product(*map(_within, axes, box)):
        at = sum(k * row for (k, _), row in zip(chosen, rows, strict=True))
        taken, paces = list[Axis](), list[int]()
        for dim, back, length in zip(array.order, array.back, array.lengths, strict=True):
            (_, axis), (low, _) = chosen[dim], box[dim]
            start, step = axis.start - low, axis.step
            if back:
                start, step = length - 1 - start, -step
            taken.append(Axis(start, axis.size, 1 if axis.size == 1 else step))
            paces.append(rows[dim])
        again = [(chosen[dim][1].size, rows[dim]) for dim in array.again]
        again = tuple(each for each in again if each[0] != 1)
        yield at, Wanted(tuple(taken), tuple(paces), *types, request, again)


def _boxes(stored: Stored, shape: tuple[int, ...]) -> Iterator[tuple[Box, int, Sequence[int]]]:
    """The boxes of a tensor that a piece holds: its first element of each, and their strides."""
    if stored.flat is None:
        # A tensor without dims has a box without any.
        box = stored.box or tuple((0, length) for length in shape)
        chunk = stored.chunk or tuple(high - low for low, high in box)
        yield box, stored.start, stored.strides or extents.c_strides(chunk, 1)
        return
    steps = extents.c_strides(shape, 1)
    begin, stop = stored.flat
    for box in boxes_between(begin, stop, shape):
        first = sum(low * step for (low, _), step in zip(box, steps, strict=True))
        yield box, stored.start + first - begin, steps


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
