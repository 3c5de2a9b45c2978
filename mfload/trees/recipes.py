"""Recipes: which boxes of which stored tensors make a box of a target. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.trees import geometry, programs
from mfload.trees.geometry import Shape
from mfload.trees.programs import Program
from mfload.trees.steps import Found, Step, Stored


class Aim(NamedTuple):
    """One leaf of a target.

    Attributes:
        name: Its path in the target.
        shape: In elements.
        dtype: What it holds, None where any will do.
        optional: Whether it may stay as it is where the checkpoint lacks it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType | None
    optional: bool = False


class Source(NamedTuple):
    """A box of a stored tensor, and the dtype that it lands in."""

    info: TensorInfo
    box: Box
    dtype: DType


class Pull(NamedTuple):
    """What a box of a target takes: what to read, and what to do with it."""

    sources: tuple[Source, ...]
    program: Program


class Conversion(NamedTuple):
    """What happens to the numbers, last of all."""

    scale: float | None
    between: DType
    dtype: DType


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a target is made.

    Attributes:
        aim: The target.
        dtype: What its elements will be.
        each: What is done with the tensors of a cell.
        cells: The tensors of each cell; one cell where nothing is stacked, else row-major.
        counts: Sizes of the dims that stacking makes.
        axes: Where these dims lie in the target.
        conversion: What happens to the numbers, None for nothing.
        checked: Whether the conversion may meet values that its result can't hold (a float or a
            wide integer, cast to an integer because a rule says so).
        landed: What all tensors are converted to while they land, None where they land as stored.
    """

    aim: Aim
    dtype: DType
    each: Step
    cells: tuple[tuple[TensorInfo, ...], ...]
    counts: Shape = ()
    axes: tuple[int, ...] = ()
    conversion: Conversion | None = None
    checked: bool = False
    landed: DType | None = None

    @property
    def plain(self) -> bool:
        """Whether it is one stored tensor as it lands."""
        return not self.axes and isinstance(self.each, Stored) and self.conversion is None

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """The stored tensors it takes."""
        return itertools.chain.from_iterable(self.cells)

    @property
    def shape(self) -> Shape:
        """In elements."""
        shape = list(self.each.shape)
        for axis, count in sorted(zip(self.axes, self.counts, strict=True)):
            shape.insert(axis, count)
        return tuple(shape)

    def pull(self, box: Box) -> Pull:
        """What a box of the target takes.

        Args:
            box: Half-open (start, stop) for each dim of the target.

        Returns:
            The boxes to read and the program that makes the wanted one of them. Only what the
            box needs is read, except where a reshape leaves no box of exactly these elements.
        """
        found: Found = []
        old = tuple(dim for at, dim in enumerate(box) if at not in self.axes)
        made = self.each.pull(old, found)
        cells: Sequence[tuple[TensorInfo, ...]] = self.cells
        if self.axes:
            # An empty stretch of a stack still needs a tensor, to be cut to nothing.
            rows = [range(a, b) if a < b else range(1) for a, b in (box[n] for n in self.axes)]
            cells = [self.cells[_number(at, self.counts)] for at in itertools.product(*rows)]
            made = programs.Stacked(made, len(found), tuple(map(len, rows)), self.axes)
            if any(box[axis][0] >= box[axis][1] for axis in self.axes):
                made = programs.Sliced(made, tuple((0, size) for size in geometry.sizes(box)))
        if self.conversion is not None:
            scale, between, dtype = self.conversion
            made = programs.Converted(made, scale, between.name, dtype.name)
        sources = tuple(
            Source(info, part, self.landed or info.dtype)
            for cell in cells
            for info, part in ((cell[number], part) for number, part in found)
        )
        return Pull(sources, made)


def _number(at: Sequence[int], counts: Shape) -> int:
    number = 0
    for index, count in zip(at, counts, strict=True):
        number = number * count + index
    return number
