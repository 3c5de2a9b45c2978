"""Cutting: tensors become slabs, stretches of a file that one process reads. Pure.

A slab is a run of rows of one dim at one place in all dims before it, and all of the dims after.
So the part of it that a box holds lies in one stretch of the box, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from mfload.index import Box, TensorInfo
from mfload.planning.requests import Request


def box_of(request: Request) -> Box | None:
    """The part of its tensor that a need is about; None for one with steps, which is no box."""
    if request.selection is None:
        return tuple((0, length) for length in request.info.shape)
    if any(axis.step != 1 and axis.size > 1 for axis in request.selection):
        return None
    return tuple((axis.start, axis.start + axis.size) for axis in request.selection)


def shape_of(box: Box) -> tuple[int, ...]:
    """Elements a dim."""
    return tuple(stop - start for start, stop in box)


def within(box: Box, other: Box) -> Box | None:
    """What two boxes have in common, None for nothing."""
    common: list[tuple[int, int]] = []
    for (start, stop), (other_start, other_stop) in zip(box, other, strict=True):
        first, last = max(start, other_start), min(stop, other_stop)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds them all."""
    axes = zip(*boxes, strict=True)
    return tuple((min(start for start, _ in axis), max(stop for _, stop in axis)) for axis in axes)


def slabs(info: TensorInfo, box: Box, limit: int) -> Iterator[Box]:
    """Cuts a box of a tensor into slabs, in file order.

    Args:
        info: The tensor.
        box: Not empty.
        limit: Stored bytes a slab at most; a single block of packed elements may be longer.
    """
    shape = shape_of(box)
    if (info.dtype.size_of(shape) or 0) <= limit:
        yield box
        return
    dim = next(n for n, length in enumerate(shape) if length > 1)
    # Elements that share a byte stay together.
    unit = info.dtype.elements if dim == len(shape) - 1 else 1
    row = info.dtype.size_of((unit, *shape[dim + 1 :])) or 0
    start, stop = box[dim]
    step = max(1, limit // row) * unit
    # All about as long: between short ones a reader would read over those of another.
    count = -(-(stop - start) // step)
    step = -(-(stop - start) // (count * unit)) * unit
    for first in range(start, stop, step):
        part = (*box[:dim], (first, min(stop, first + step)), *box[dim + 1 :])
        if row > limit and dim < len(shape) - 1:
            yield from slabs(info, part, limit)
        else:
            yield part


def apart(box: Box, parts: Sequence[Box], least: int) -> list[Box]:
    """Cuts a box where parts of it begin and end, along the dim that is cut first anyway.

    Args:
        box: Not empty.
        parts: Such as what each process wants of it.
        least: Elements a piece on average, below which the box stays whole.

    Returns:
        The pieces, in file order.
    """
    shape = shape_of(box)
    dim = next((n for n, length in enumerate(shape) if length > 1), None)
    if dim is None:
        return [box]
    ends = {end for part in parts for end in part[dim]} | set(box[dim])
    if math.prod(shape) < least * (len(ends) - 1):
        return [box]
    cuts = itertools.pairwise(sorted(ends))
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in cuts]


def offset_in(need_box: Box, part: Box) -> int:
    """Elements of a box before the first of a part of it."""
    at = 0
    for (start, stop), (first, _) in zip(need_box, part, strict=True):
        at = at * (stop - start) + first - start
    return at


def joined(one: Box, other: Box) -> Box | None:
    """Two boxes as one, where the second goes on where the first ends; None where not."""
    differ = [n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differ) != 1:
        return None
    dim = differ[0]
    if one[dim][1] != other[dim][0]:
        return None
    return (*one[:dim], (one[dim][0], other[dim][1]), *one[dim + 1 :])
