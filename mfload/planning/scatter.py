"""Scatter: boxes of one tensor that are read together, each stored byte once. Pure.

The boxes' edges cut a dim into intervals; within one, the same boxes want every row. Rows that
all of them want whole are a run. Other rows are read as one span where little of it is unwanted,
and picked apart in memory while they are in the processor's cache; where they lie further apart,
or one alone is longer than a slot, the next dim is cut in the same way.

All of it is counted from the tensor's first byte, so tensors of one shape that are wanted in
the same boxes share the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mfload.planning.blocks import Copy, Costs
from mfload.planning.boxes import Folded, fold
from mfload.planning.requests import Request

# Runs at least this long go straight to their places: to plan and place one on its own costs
# about as much as to copy so many bytes out of a slot.
_LONG = 128 << 10


class Part(NamedTuple):
    """What one box takes of a cell.

    Attributes:
        offset: First byte of the range it takes, counted from the tensor's.
    """

    box: int
    offset: int
    nbytes: int
    at: int
    copy: Copy | None = None


class Cell(NamedTuple):
    """A range that is read at once, and who takes what of it.

    Attributes:
        wanted: How many of them any box wants.
        parts: In file order. A single one of plain bytes may be of any length.
    """

    offset: int
    nbytes: int
    wanted: int
    parts: tuple[Part, ...]


def is_box(request: Request) -> bool:
    """Whether a need is some of a tensor, without steps."""
    axes = request.selection
    return bool(request.nbytes) and (
        axes is None
        or all((axis.step == 1 and axis.picks is None) or axis.size == 1 for axis in axes)
    )


def cells(requests: Sequence[Request], costs: Costs) -> list[Cell]:
    """How boxes of one tensor are read together.

    Args:
        requests: They, as `is_box` lets them pass; two may be the same.

    Returns:
        Cells in file order; they don't overlap, and leave out whatever gap is long enough.
    """
    return _Tensor(requests, costs).cells(0, tuple(range(len(requests))))


class _Reach(NamedTuple):
    """Which bytes of a row its boxes want.

    Attributes:
        gap: The longest stretch between that nobody wants.
        run: The shortest stretch that the same boxes want; 0 where these are not just one.
    """

    start: int
    stop: int
    gap: int
    wanted: int
    run: int


Boxes = tuple[int, ...]


class _Tensor:
    """One tensor and its boxes; results for a set of boxes are kept, since rows repeat."""

    def __init__(self, requests: Sequence[Request], costs: Costs) -> None:
        self._gap = max(1, costs.merge_gap)
        self._limit = costs.slot
        self._lengths, self._strides, self._boxes = fold(requests)
        self._unit = self._strides[-1]
        self._cells: dict[tuple[int, Boxes], list[Cell]] = {}
        self._reaches: dict[tuple[int, Boxes], _Reach] = {}

    def cells(self, dim: int, boxes: Boxes) -> list[Cell]:
        """Cells of one row of the dim before, for boxes that want some of it.

        Offsets are counted from the row's first byte; places in the results from the first
        byte that this row fills.
        """
        known = self._cells.get((dim, boxes))
        if known is not None:
            return known
        found: list[Cell] = []
        for start, stop, here in self._intervals(dim, boxes):
            if self._whole(dim + 1, here):
                found += self._run(dim, start, stop, here)
            elif self._spans(dim, stop - start, here):
                found += self._rows(dim, start, stop, here)
            else:
                row = self.cells(dim + 1, here)
                for n in range(start, stop):
                    found += self._moved(row, dim, n)
        self._cells[dim, boxes] = found
        return found

    def _intervals(self, dim: int, boxes: Boxes) -> list[tuple[int, int, Boxes]]:
        """The dim cut at all edges, with the boxes that want each part, at least one."""
        if len(boxes) == 1:
            box = self._boxes[boxes[0]]
            return [(box.start[dim], box.stop[dim], boxes)]
        spans = [(n, self._boxes[n].start[dim], self._boxes[n].stop[dim]) for n in boxes]
        edges = sorted({edge for _, start, stop in spans for edge in (start, stop)})
        found: list[tuple[int, int, Boxes]] = []
        for low, high in itertools.pairwise(edges):
            here = tuple(n for n, start, stop in spans if start <= low and high <= stop)
            if here:
                found.append((low, high, here))
        return found

    def _whole(self, dim: int, boxes: Boxes) -> bool:
        """Whether the boxes want all of each row, from this dim on inwards."""
        lengths = self._lengths[dim:]
        zeros = (0,) * len(lengths)
        each = (self._boxes[n] for n in boxes)
        return all(box.stop[dim:] == lengths and box.start[dim:] == zeros for box in each)

    def _reach(self, dim: int, boxes: Boxes) -> _Reach:
        known = self._reaches.get((dim, boxes))
        if known is not None:
            return known
        stride = self._strides[dim]
        start = cursor = -1
        gap = wanted = 0
        run = self._lengths[dim] * stride
        for low, high, here in self._intervals(dim, boxes):
            count = high - low
            if self._whole(dim + 1, here):
                alone = len(here) == 1 and not self._boxes[here[0]].converts
                row = _Reach(0, count * stride, 0, count * stride, count * stride * alone)
                count = 1
            else:
                row = self._reach(dim + 1, here)
            first = low * stride + row.start
            if start < 0:
                start = first
            else:
                gap = max(gap, first - cursor)
            between = stride - (row.stop - row.start) if count > 1 else 0
            gap = max(gap, row.gap, between)
            wanted += count * row.wanted
            run = min(run, row.run)
            cursor = (low + count - 1) * stride + row.stop
        found = self._reaches[dim, boxes] = _Reach(start, cursor, gap, wanted, run)
        return found

    def _spans(self, dim: int, count: int, boxes: Boxes) -> bool:
        """Whether rows are read as spans and picked apart in memory."""
        row = self._reach(dim + 1, boxes)
        span = row.stop - row.start
        between = self._strides[dim] - span if count > 1 else 0
        return span <= self._limit and max(row.gap, between) < self._gap and row.run < _LONG

    def _run(self, dim: int, start: int, stop: int, boxes: Boxes) -> list[Cell]:
        """Bytes that lie together, for one box or several."""
        stride = self._strides[dim]
        alone = len(boxes) == 1 and not self._boxes[boxes[0]].converts
        first, end = start * stride, stop * stride
        step = end - first if alone else max(1, self._limit // self._unit) * self._unit
        found: list[Cell] = []
        for offset in range(first, end, step):
            nbytes = min(step, end - offset)
            parts: list[Part] = []
            for n in boxes:
                box = self._boxes[n]
                ahead = (offset - box.start[dim] * stride) // self._unit
                copy = None
                if box.converts:
                    copy = _copy(box, (nbytes // self._unit,), (self._unit,))
                parts.append(Part(n, offset, nbytes, ahead * box.target.itemsize, copy))
            found.append(Cell(offset, nbytes, nbytes, tuple(parts)))
        return found

    def _rows(self, dim: int, start: int, stop: int, boxes: Boxes) -> list[Cell]:
        """Rows whose spans are read at once, as many as fit in a slot."""
        stride = self._strides[dim]
        row = self._reach(dim + 1, boxes)
        step = (self._limit - (row.stop - row.start)) // stride + 1
        made: dict[int, list[Part]] = {}
        found: list[Cell] = []
        for first in range(start, stop, step):
            count = min(step, stop - first)
            if count not in made:
                parts = [self._part(n, dim, count) for n in boxes]
                made[count] = sorted(parts, key=lambda part: part.offset)
            nbytes = (count - 1) * stride + row.stop - row.start
            cell = Cell(row.start, nbytes, count * row.wanted, tuple(made[count]))
            found += self._moved([cell], dim, first)
        return found

    def _part(self, n: int, dim: int, count: int) -> Part:
        """What a box takes of rows of a dim, from the first row's first byte on."""
        box, strides = self._boxes[n], self._strides[dim:]
        start = sum(a * b for a, b in zip(box.start[dim + 1 :], strides[1:], strict=True))
        inner = tuple(map(int.__sub__, box.stop[dim + 1 :], box.start[dim + 1 :]))
        shape = (count, *inner)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        nbytes = last + self._unit
        copy = None
        if box.converts or nbytes != math.prod(shape) * self._unit:
            copy = _copy(box, shape, strides)
        return Part(n, start, nbytes, 0, copy)

    def _moved(self, row: list[Cell], dim: int, n: int) -> list[Cell]:
        """Cells of a row where it is row `n` of a dim."""
        ahead = n * self._strides[dim]
        return [
            Cell(
                cell.offset + ahead,
                cell.nbytes,
                cell.wanted,
                tuple(
                    Part(
                        part.box,
                        part.offset + ahead,
                        part.nbytes,
                        part.at + (n - self._boxes[part.box].start[dim]) * self._result(part, dim),
                        part.copy,
                    )
                    for part in cell.parts
                ),
            )
            for cell in row
        ]

    def _result(self, part: Part, dim: int) -> int:
        return self._boxes[part.box].rows[dim]


def _copy(box: Folded, shape: tuple[int, ...], strides: tuple[int, ...]) -> Copy:
    # Nobody asks whose bytes they are where no value can be wrong, so tensors can share it.
    name = box.request.info.name if box.converts else None
    return Copy(shape, strides, 0, box.stored, box.target, box.request.checked, name)
