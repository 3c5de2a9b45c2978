"""Boxes: which part of a tensor holds a part of the same elements in another shape. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mfload.index import Box

Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> Shape:
    """Elements of a box in each dim."""
    return tuple(stop - start for start, stop in box)


def within(box: Box, outer: Box) -> Box:
    """A box counted from the start of one that holds it."""
    return tuple((a - begin, b - begin) for (a, b), (begin, _) in zip(box, outer, strict=True))


def cover(given: Shape, wanted: Shape, box: Box) -> tuple[Box, Box]:
    """What of a tensor is needed for a box of its reshaped form.

    Dims that a reshape merges or splits are looked at together, the others on their own. Where
    the elements of the box are no box of the given shape (half of each row of a flat tensor), the
    box is grown until they are.

    Args:
        given: Shape of the tensor.
        wanted: Shape it is given, of as many elements.
        box: The box of `wanted`.

    Returns:
        The box of `given`, and the box of `wanted`, at least `box`, that holds the same elements.
    """
    if 0 in sizes(box):
        if given:
            return ((0, 0),) * len(given), box
        return (), whole(wanted)
    inner: list[tuple[int, int]] = []
    grown: list[tuple[int, int]] = []
    for left, right in _groups(given, wanted):
        part, more = _grow(given[left], wanted[right], box[right])
        inner += part
        grown += more
    return tuple(inner), tuple(grown)


def _grow(given: Shape, wanted: Shape, box: Box) -> tuple[Box, Box]:
    while True:
        inner = _bound(wanted, given, box)
        again = _bound(given, wanted, inner)
        # Each holds all elements of the other, so they hold the same.
        if again == box:
            return inner, box
        box = again


def _groups(given: Shape, wanted: Shape) -> Iterator[tuple[slice, slice]]:
    """Runs of dims of both shapes that hold as many elements; none of the sizes is 0."""
    i = j = 0
    while i < len(given) or j < len(wanted):
        left, right = i, j
        i, j = min(i + 1, len(given)), min(j + 1, len(wanted))
        while (a := math.prod(given[left:i])) != (b := math.prod(wanted[right:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield slice(left, i), slice(right, j)


def _bound(given: Shape, wanted: Shape, box: Box) -> Box:
    """The smallest box of `wanted` that is sure to hold the elements of a box of `given`."""
    atoms = _atoms(given, wanted)
    if atoms is None:
        start, stop = _flat(given, box)
        return _spread(start, stop, wanted)
    fine: list[tuple[int, int]] = []
    for size, (start, stop), count in zip(given, box, _counts(given, atoms), strict=True):
        at = len(fine)
        assert math.prod(atoms[at : at + count]) == size
        fine += _spread(start, stop, atoms[at : at + count])
    found: list[tuple[int, int]] = []
    at = 0
    for count in _counts(wanted, atoms):
        found.append(_flat(atoms[at : at + count], tuple(fine[at : at + count])))
        at += count
    return tuple(found)


def _atoms(one: Shape, other: Shape) -> Shape | None:
    """Sizes of which the dims of both shapes are made, None where there are none such."""
    steps = sorted({*_strides(one), *_strides(other), math.prod(one)})
    ratios = [divmod(high, low) for low, high in itertools.pairwise(steps)]
    if any(rest for _, rest in ratios):
        return None
    return tuple(ratio for ratio, _ in reversed(ratios))


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def _counts(shape: Shape, atoms: Shape) -> list[int]:
    """How many atoms each dim is made of; a dim of one element has none."""
    counts: list[int] = []
    at = 0
    for size in shape:
        begin, product = at, 1
        while product < size:
            product *= atoms[at]
            at += 1
        counts.append(at - begin)
    return counts


def _flat(shape: Shape, box: Box) -> tuple[int, int]:
    """The stretch, in row-major order, from the first element of a box to its last."""
    low = high = 0
    for size, (start, stop) in zip(shape, box, strict=True):
        low = low * size + start
        high = high * size + stop - 1
    return low, high + 1


def _spread(start: int, stop: int, shape: Shape) -> Box:
    """The smallest box that holds a stretch of elements in row-major order."""
    first, last = _position(start, shape), _position(stop - 1, shape)
    box: list[tuple[int, int]] = []
    same = True
    for a, b, size in zip(first, last, shape, strict=True):
        box.append((a, b + 1) if same else (0, size))
        same = same and a == b
    return tuple(box)


def _position(index: int, shape: Shape) -> list[int]:
    position: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        position.append(at)
    return position[::-1]
