"""Transforms: how stored tensors become a leaf, as a small immutable program. Pure.

A transform is an expression over numbered tensors. The part of it that makes a box of the result
is a transform again, over boxes of the tensors, so that one representation serves from the key
map to the compiled function. It knows shapes and relative positions only: parts that are made
alike are equal, on whatever device, and share a compiled function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes
from mfload.index import Box

Shape = tuple[int, ...]
Reads = list[tuple[int, Box]]
"""Boxes to read, each with the number of its tensor; a part's `Take`s count them."""

# Dataclasses and not named tuples: two kinds of transform with equal fields must not be equal.


@dataclass(frozen=True, slots=True)
class Take:
    """A tensor, by its number, first converted to `dtype` if that is given."""

    number: int
    shape: Shape
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a transform."""

    of: Transform
    box: Box


@dataclass(frozen=True, slots=True)
class Permute:
    """Dims in another order."""

    of: Transform
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in another shape."""

    of: Transform
    shape: Shape


@dataclass(frozen=True, slots=True)
class Concat:
    """Transforms one after the other along a dim."""

    parts: tuple[Transform, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class Stack:
    """One transform of many groups of tensors, side by side along new dims."""

    of: Transform  # It numbers the tensors of the first group.
    width: int  # Tensors a group.
    counts: Shape  # Sizes of the new dims; groups are in row-major order.
    axes: tuple[int, ...]  # Where the new dims lie in the result.


@dataclass(frozen=True, slots=True)
class Convert:
    """Numbers scaled in the dtype `between`, if there is a scale, then rounded once to `dtype`."""

    of: Transform
    dtype: str
    scale: float | None = None
    between: str | None = None


Transform = Take | Slice | Permute | Reshape | Concat | Stack | Convert


def shape_of(transform: Transform) -> Shape:
    """Shape of what a transform makes."""
    match transform:
        case Take() | Reshape():
            return transform.shape
        case Slice(_, box):
            return sizes(box)
        case Convert(of):
            return shape_of(of)
        case Permute(of, axes):
            shape = shape_of(of)
            return tuple(shape[axis] for axis in axes)
        case Concat(parts, axis):
            shapes = [shape_of(part) for part in parts]
            total = sum(shape[axis] for shape in shapes)
            return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])
        case Stack(of, _, counts, axes):
            sized = list(shape_of(of))
            for axis, count in sorted(zip(axes, counts, strict=True)):
                sized.insert(axis, count)
            return tuple(sized)


def part(transform: Transform, box: Box, reads: Reads) -> Transform:
    """The transform that makes a box of the result; what it reads is added to `reads`."""
    match transform:
        case Take(number, _, dtype):
            reads.append((number, box))
            return Take(len(reads) - 1, sizes(box), dtype)
        case Slice(of, outer):
            moved = ((a + at, b + at) for (a, b), (at, _) in zip(box, outer, strict=True))
            return part(of, tuple(moved), reads)
        case Permute(of, axes):
            inner = tuple(dim for _, dim in sorted(zip(axes, box, strict=True)))
            return Permute(part(of, inner, reads), axes)
        case Reshape(of, shape):
            inner, grown = through_reshape(shape_of(of), shape, box)
            made = Reshape(part(of, inner, reads), sizes(grown))
            within = tuple((a - n, b - n) for (a, b), (n, _) in zip(box, grown, strict=True))
            return made if grown == box else Slice(made, within)
        case Concat(parts, axis):
            return _part_of_concat(parts, axis, box, reads)
        case Stack():
            return _part_of_stack(transform, box, reads)
        case Convert(of, dtype, scale, between):
            return Convert(part(of, box, reads), dtype, scale, between)


def _part_of_concat(parts: Sequence[Transform], axis: int, box: Box, reads: Reads) -> Transform:
    start, stop = box[axis]
    made: list[Transform] = []
    at = 0
    for number, each in enumerate(parts):
        size = shape_of(each)[axis]
        low, high = max(start - at, 0), min(stop - at, size)
        at += size
        last = number == len(parts) - 1 and not made
        if low < high or last:  # An empty stretch still needs a tensor.
            dim = (low, high) if low < high else (0, 0)
            made.append(part(each, (*box[:axis], dim, *box[axis + 1 :]), reads))
    return made[0] if len(made) == 1 else Concat(tuple(made), axis)


def _part_of_stack(stack: Stack, box: Box, reads: Reads) -> Transform:
    inner: Reads = []
    of = part(stack.of, tuple(d for at, d in enumerate(box) if at not in stack.axes), inner)
    # An empty stretch of a stack still needs a tensor, to be cut to nothing.
    rows = [range(a, b) if a < b else range(1) for a, b in (box[axis] for axis in stack.axes)]
    for place in itertools.product(*rows):
        group = 0
        for at, count in zip(place, stack.counts, strict=True):
            group = group * count + at
        reads += [(group * stack.width + number, each) for number, each in inner]
    made = Stack(of, len(inner), tuple(map(len, rows)), stack.axes)
    shape = sizes(box)
    return made if shape_of(made) == shape else Slice(made, tuple((0, size) for size in shape))


def evaluate(transform: Transform, arrays: Sequence[Any], xp: Any) -> Any:
    """The array that a transform makes of arrays, with `numpy` or, also under jit, `jax.numpy`."""
    return _value(transform, lambda take: _cast(arrays[take.number], take.dtype), 0, xp)


def _value(transform: Transform, fetch: Callable[[Take], Any], lead: int, xp: Any) -> Any:
    """The value of a transform on arrays that all have `lead` more dims in front."""
    if isinstance(transform, Take):
        return fetch(transform)
    if isinstance(transform, Concat):
        values = [_value(each, fetch, lead, xp) for each in transform.parts]
        return xp.concatenate(values, axis=transform.axis + lead)
    if isinstance(transform, Stack):
        return _stacked(transform, fetch, xp)
    value = _value(transform.of, fetch, lead, xp)
    match transform:
        case Slice(_, box):
            return value[(slice(None),) * lead + tuple(slice(a, b) for a, b in box)]
        case Permute(_, axes):
            return xp.transpose(value, (*range(lead), *(axis + lead for axis in axes)))
        case Reshape(_, shape):
            return xp.reshape(value, (*value.shape[:lead], *shape))
        case Convert(_, dtype, scale, between):
            if scale is not None:
                value = _cast(value, between)
                value = value * xp.asarray(scale, dtype=value.dtype)
            return _cast(value, dtype)


def _stacked(stack: Stack, fetch: Callable[[Take], Any], xp: Any) -> Any:
    """What is done with each group is done with all at once, on tensors stacked first."""
    count, new = math.prod(stack.counts), len(stack.counts)

    def together(take: Take) -> Any:
        numbers = range(take.number, count * stack.width, stack.width)
        return xp.stack([fetch(Take(n, take.shape, take.dtype)) for n in numbers])

    value = _value(stack.of, together, 1, xp)
    value = xp.reshape(value, (*stack.counts, *value.shape[1:]))
    order = list(range(new, value.ndim))
    for axis, at in sorted(zip(stack.axes, range(new), strict=True)):
        order.insert(axis, at)
    return value if order == sorted(order) else xp.transpose(value, order)


def _cast(array: Any, dtype: str | None) -> Any:
    if dtype is None:
        return array
    wanted = dtypes.TABLE[dtype].numpy
    return array if array.dtype == wanted else array.astype(wanted)


def sizes(box: Box) -> Shape:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box)


def through_reshape(given: Shape, wanted: Shape, box: Box) -> tuple[Box, Box]:
    """What of a tensor is needed for a box of its reshaped form.

    Returns a box of `given`, and the box of `wanted` with the same elements: `box`, grown where
    its elements are not a box of the tensor (half of each row of a flat one).
    """
    if 0 in sizes(box):
        return ((0, 0),) * len(given), box if given else tuple((0, size) for size in wanted)
    inner: Box = ()
    grown: Box = ()
    for left, right in _groups(given, wanted):
        piece = box[right]
        some = _hull(wanted[right], piece, given[left])
        while piece != (more := _hull(given[left], some, wanted[right])):
            piece = more
            some = _hull(wanted[right], piece, given[left])
        inner, grown = inner + some, grown + piece
    return inner, grown


def _groups(given: Shape, wanted: Shape) -> Iterator[tuple[slice, slice]]:
    """The shortest runs of dims of both shapes that hold as many elements, without empty dims."""
    i = j = 0
    while i < len(given) or j < len(wanted):
        left, right = i, j
        i, j = min(i + 1, len(given)), min(j + 1, len(wanted))
        while (a := math.prod(given[left:i])) != (b := math.prod(wanted[right:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield slice(left, i), slice(right, j)


def _hull(shape: Shape, box: Box, other: Shape) -> Box:
    """The smallest box of `other` with all elements from the first of a box to its last.

    In a group the boxes that both shapes have are such stretches, so that none is overlooked.
    """
    first = last = 0
    for size, (start, stop) in zip(shape, box, strict=True):
        first, last = first * size + start, last * size + stop - 1
    found: list[tuple[int, int]] = []
    for size in reversed(other):
        (first, low), (last, high) = divmod(first, size), divmod(last, size)
        found.append((low, high + 1) if first == last else (0, size))
    return tuple(reversed(found))
