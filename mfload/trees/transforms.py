"""Transforms: how stored tensors become a leaf, as a short fixed pipeline. Pure.

What makes a box of the result is a transform again, over boxes of the tensors, so that one
representation serves from the key map to the compiled function. It knows shapes and relative
positions only: parts that are made alike are equal, on whatever device, and share a compilation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from mfload import dtypes
from mfload.index import Box
from mfload.planning.slicing import shape_of

Shape = tuple[int, ...]
Step = tuple[Literal["slice", "transpose", "reshape"], Any]
"""What is done with one tensor: a box is cut out, or dims are ordered, or given other sizes."""
Reads = list[tuple[int, Box]]
"""Boxes of tensors, each with the number of its tensor."""


class Branch(NamedTuple):
    """One tensor on its way to where several are joined."""

    shape: Shape
    steps: tuple[Step, ...] = ()

    @property
    def shapes(self) -> list[Shape]:
        """Its shape before each step, and after the last."""
        return list(itertools.accumulate(self.steps, _after, initial=self.shape))


class Transform(NamedTuple):
    """Tensors are joined, the results stacked and scaled, in this order.

    Tensors are numbered by their place in the stack, row-major, and in it by their branch.
    """

    branches: tuple[Branch, ...]  # The same for each place in the stack.
    axis: int = 0  # Along which branches are joined.
    counts: Shape = ()  # Sizes of the new dims of the stack.
    axes: Shape = ()  # Where these dims lie in the result.
    scale: float | None = None  # A factor, in the dtype of the tensors.
    dtype: str | None = None  # What products are rounded to.

    @property
    def plain(self) -> bool:
        """Whether it is one tensor as it lands."""
        return self == Transform((Branch(self.branches[0].shape),))

    def places(self, strides: Sequence[int]) -> list[tuple[int, Shape]] | None:
        """Where each tensor goes in a result with so many elements between neighbours in its dims.

        The first element, and the elements between neighbours in the tensor's dims, in the order of
        the tensors. None if strides can't say it: then the result is made of what has landed.
        """
        if self.scale is not None:
            return None
        inner = tuple(step for dim, step in enumerate(strides) if dim not in self.axes)
        joined: list[tuple[int, Shape]] = []
        start = 0
        for branch in self.branches:
            steps = _places_of_branch(branch, inner)
            if steps is None:
                return None
            joined.append((start, steps))
            if len(self.branches) > 1:
                start += branch.shapes[-1][self.axis] * inner[self.axis]
        outer = [strides[axis] for axis in self.axes]
        found: list[tuple[int, Shape]] = []
        for at in itertools.product(*map(range, self.counts)):
            first = sum(number * step for number, step in zip(at, outer, strict=True))
            found += [(first + start, steps) for start, steps in joined]
        return found

    @property
    def shape(self) -> Shape:
        """Of the result."""
        shapes = [branch.shapes[-1] for branch in self.branches]
        sized = list(shapes[0])
        if len(shapes) > 1:
            sized[self.axis] = sum(shape[self.axis] for shape in shapes)
        for axis, count in sorted(zip(self.axes, self.counts, strict=True)):
            sized.insert(axis, count)
        return tuple(sized)

    def part(self, box: Box) -> tuple[Transform, Reads]:
        """The transform that makes a box of the result, which is not empty, and what it reads."""
        place = [dim for at, dim in enumerate(box) if at not in self.axes]
        branches: list[Branch] = []
        needed: Reads = []
        begin = 0
        for number, branch in enumerate(self.branches):
            wanted = place.copy()
            if len(self.branches) > 1:
                (start, stop), size = place[self.axis], branch.shapes[-1][self.axis]
                low, high = max(start - begin, 0), min(stop - begin, size)
                begin += size
                if low >= high:
                    continue
                wanted[self.axis] = low, high
            some, inner = _part_of_branch(branch, tuple(wanted))
            branches.append(some)
            needed.append((number, inner))
        reads: Reads = []
        rows = [range(*box[axis]) for axis in self.axes]
        for at in itertools.product(*rows):
            group = 0
            for index, count in zip(at, self.counts, strict=True):
                group = group * count + index
            reads += [(group * len(self.branches) + number, inner) for number, inner in needed]
        axis = self.axis if len(branches) > 1 else 0
        made = self._replace(branches=tuple(branches), axis=axis, counts=tuple(map(len, rows)))
        return made, reads

    def evaluate(self, arrays: Sequence[Any], xp: Any) -> Any:
        """The result, with `numpy` or, also under jit, `jax.numpy`."""
        lead = 1 if self.counts else 0  # All groups of a stack are worked on at once.
        made: list[Any] = []
        for number, branch in enumerate(self.branches):
            value = arrays[number]
            if lead:
                value = xp.stack(list(arrays[number :: len(self.branches)]))
            for kind, how in branch.steps:
                if kind == "slice":
                    value = value[(slice(None),) * lead + tuple(slice(*dim) for dim in how)]
                elif kind == "transpose":
                    value = xp.transpose(value, (*range(lead), *(axis + lead for axis in how)))
                else:
                    value = xp.reshape(value, (*value.shape[:lead], *how))
            made.append(value)
        value = made[0] if len(made) == 1 else xp.concatenate(made, axis=self.axis + lead)
        if lead:
            value = xp.reshape(value, (*self.counts, *value.shape[1:]))
            value = xp.moveaxis(value, tuple(range(len(self.counts))), self.axes)
        if self.scale is not None and self.dtype is not None:
            value = value * xp.asarray(self.scale, dtype=value.dtype)
            value = value.astype(dtypes.TABLE[self.dtype].numpy)
        return value


def _after(shape: Shape, step: Step) -> Shape:
    kind, how = step
    if kind == "reshape":
        return how
    return shape_of(how) if kind == "slice" else tuple(shape[axis] for axis in how)


def _part_of_branch(branch: Branch, box: Box) -> tuple[Branch, Box]:
    """The branch that makes a box of what another makes, and the box of the tensor for it."""
    steps: list[Step] = []
    for (kind, how), shape in zip(branch.steps[::-1], branch.shapes[-2::-1], strict=True):
        if kind == "slice":
            box = tuple((a + at, b + at) for (a, b), (at, _) in zip(box, how, strict=True))
        elif kind == "transpose":
            box = tuple(dim for _, dim in sorted(zip(how, box, strict=True)))
            steps.append((kind, how))
        else:
            inner, grown = through_reshape(shape, how, box)
            if grown != box:
                within = ((a - n, b - n) for (a, b), (n, _) in zip(box, grown, strict=True))
                steps.append(("slice", tuple(within)))
            steps.append((kind, shape_of(grown)))
            box = inner
    return Branch(shape_of(box), tuple(reversed(steps))), box


def _places_of_branch(branch: Branch, strides: Shape) -> Shape | None:
    """Elements between neighbours of a tensor in a result with these strides, if these say it."""
    shapes = branch.shapes
    for number in reversed(range(len(branch.steps))):
        kind, how = branch.steps[number]
        if kind == "slice":  # It needs more of the tensor than has a place.
            return None
        if kind == "transpose":
            strides = tuple(step for _, step in sorted(zip(how, strides, strict=True)))
            continue
        found: Shape = ()
        for left, right in _groups(shapes[number], shapes[number + 1]):
            dims = zip(shapes[number + 1][right], strides[right], strict=True)
            sizes = [(size, step) for size, step in dims if size > 1]
            if any(a != size * step for (_, a), (size, step) in itertools.pairwise(sizes)):
                return None
            step = sizes[-1][1] if sizes else 1
            steps: list[int] = []
            for size in reversed(shapes[number][left]):
                steps.append(step)
                step *= size
            found += tuple(reversed(steps))
        strides = found
    return strides


def through_reshape(given: Shape, wanted: Shape, box: Box) -> tuple[Box, Box]:
    """What of a tensor is needed for a box, which is not empty, of its reshaped form.

    Returns a box of `given`, and the box of `wanted` with the same elements: `box`, grown where
    its elements are not a box of the tensor (half of each row of a flat one).
    """
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
