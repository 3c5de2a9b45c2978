"""Steps: a tensor as an expression over stored ones, walked backwards. Pure.

Each step knows its shape, and which box of what it is made of a box of it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mfload.index import Box
from mfload.trees import geometry, programs
from mfload.trees.geometry import Shape
from mfload.trees.programs import Program

Found = list[tuple[int, Box]]
"""Boxes to read so far, each with the number of its tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor, by its number in a cell of the recipe."""

    number: int
    shape: Shape
    cast: str | None = None

    def pull(self, box: Box, found: Found) -> Program:
        """Notes the box."""
        found.append((self.number, box))
        return programs.Take(len(found) - 1, self.cast)


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch along one dim."""

    of: Step
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        """In elements."""
        shape = self.of.shape
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def pull(self, box: Box, found: Found) -> Program:
        """The same box, further on."""
        start, stop = box[self.axis]
        moved = (start + self.start, stop + self.start)
        return self.of.pull((*box[: self.axis], moved, *box[self.axis + 1 :]), found)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dims in another order."""

    of: Step
    axes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """In elements."""
        return tuple(self.of.shape[axis] for axis in self.axes)

    def pull(self, box: Box, found: Found) -> Program:
        """The box with its dims back in their order."""
        back = sorted(zip(self.axes, box, strict=True))
        inner = self.of.pull(tuple(dim for _, dim in back), found)
        return programs.Transposed(inner, self.axes)


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in another shape."""

    of: Step
    shape: Shape

    def pull(self, box: Box, found: Found) -> Program:
        """The smallest box that the reshaped one can be cut from."""
        inner, grown = geometry.cover(self.of.shape, self.shape, box)
        made: Program = self.of.pull(inner, found)
        made = programs.Reshaped(made, geometry.sizes(grown))
        return made if grown == box else programs.Sliced(made, geometry.within(box, grown))


@dataclass(frozen=True, slots=True)
class Concat:
    """Tensors one after the other along a dim."""

    parts: tuple[Step, ...]
    axis: int

    @property
    def shape(self) -> Shape:
        """In elements."""
        shape = self.parts[0].shape
        total = sum(part.shape[self.axis] for part in self.parts)
        return (*shape[: self.axis], total, *shape[self.axis + 1 :])

    def pull(self, box: Box, found: Found) -> Program:
        """The parts that the box meets."""
        made: list[Program] = []
        start, stop = box[self.axis]
        at = 0
        for part in self.parts:
            size = part.shape[self.axis]
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                made.append(part.pull(self._along(box, (low, high)), found))
            at += size
        if not made:
            return self.parts[0].pull(self._along(box, (0, 0)), found)
        return made[0] if len(made) == 1 else programs.Joined(tuple(made), self.axis)

    def _along(self, box: Box, dim: tuple[int, int]) -> Box:
        return (*box[: self.axis], dim, *box[self.axis + 1 :])


Step = Stored | Cut | Transpose | Reshape | Concat
