"""Extents: which bytes of a stored array hold what is wanted of it, and how they are read. Pure.

An array is stored in dims that go through its bytes, those with the longest steps first: all of a
raw tensor, a chunk, a view with strides of its own. The edges of all boxes that are wanted cut a
dim into intervals; within one, the same boxes want the same rows. Rows that they want whole are a
run. Other rows are one extent, however many they are: they are read as spans if little lies between
them, or each by itself, and picked apart in memory. Rows of which one is longer than a slot, or has
long gaps itself, are cut along the next dim in the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload.index import TensorInfo
from mfload.planning.blocks import LONG, Copy, Costs, Rows
from mfload.planning.request import Request
from mfload.planning.slicing import Axis, Selection

_NARROW = 64  # Bytes up to which a run is copied as one element.
# An extent has a row that is read by itself for each so many bytes that it may reach over, and no
# fewer than so many rows: readers share them, and those of a disk are smaller.
_APART, _LEAST_APART = 16 << 10, 256


class BoxCopy(NamedTuple):
    """What one box, by its number, takes of an extent: a range, and where in the result it goes.

    Offsets count from the array's first byte, so tensors of one shape can share the work.
    """

    box: int
    offset: int
    nbytes: int
    at: int
    copy: Copy | None = None


class Extent(NamedTuple):
    """A range that is read at once, and its parts in file order; `wanted` bytes of it are wanted.

    A single part without a copy may be of any length; other extents fit in a slot, or have rows.
    """

    offset: int
    nbytes: int
    wanted: int
    parts: tuple[BoxCopy, ...]
    rows: Rows | None = None


def contiguous(request: Request) -> int | None:
    """The file offset of a part that lies there as it is wanted; None for any other."""
    info, dtype, selection, *_ = request
    if dtype is not info.dtype or not info.simple:
        return None
    if selection is not None and selection.steps is not None:
        return None
    ahead = 0
    if selection is not None and request.nbytes:
        ahead, _ = _extent_of(selection, info)
    return None if ahead is None else info.pieces[0].offset + ahead


def span(request: Request) -> int:
    """Bytes of the file from the first that a request wants to the last."""
    info, _, selection, *_ = request
    if selection is None or not request.nbytes or not info.simple:
        return info.nbytes if selection is None else request.nbytes
    return _extent_of(selection, info)[1]


def _extent_of(selection: Selection, info: TensorInfo) -> tuple[int | None, int]:
    listed = any(axis.picks for axis in selection)  # Long, and seldom twice the same: not kept.
    extent = _extent.__wrapped__ if listed else _extent
    return extent(selection, info.shape, info.dtype.elements, info.dtype.nbytes)


@functools.lru_cache(4096)  # Layers of a model are alike.
def _extent(
    selection: Selection, shape: tuple[int, ...], elements: int, unit: int
) -> tuple[int | None, int]:
    """How far behind the tensor's first byte a contiguous part begins, and the span of any."""
    start, reach, ahead = 0, unit, True
    shape = (*shape[:-1], shape[-1] // elements)
    axes = stored_axes(selection, elements)
    for axis, stride in zip(axes, c_strides(shape, unit), strict=True):
        picks = axis.picks
        steps = max(picks) - min(picks) if picks else abs(axis.step) * (axis.size - 1)
        start, reach = start + axis.start * stride, reach + steps * stride
        ahead = ahead and not picks and axis.step > 0
    ahead = ahead and reach == math.prod(axis.size for axis in axes) * unit
    return start if ahead else None, reach


def of_tensor(requests: Sequence[Request], costs: Costs) -> list[Extent]:
    """How parts of one simple tensor are read: several without steps together, or any one."""
    info = requests[0].info
    shape = stored_shape(info)
    boxes: list[Wanted] = []
    for request in requests:
        axes = axes_of(request, shape)
        types = element_types(request)
        rows = places(request, axes, types[1].itemsize)
        boxes.append(Wanted(axes, rows, *types, request))
    return extents(shape, c_strides(shape, info.dtype.nbytes), boxes, costs)


def extents(
    lengths: Sequence[int], strides: Sequence[int], boxes: Sequence[Wanted], costs: Costs
) -> list[Extent]:
    """How boxes of a stored array are read: several without steps together, or any one.

    `strides` are the bytes between neighbours in each dim, the longest first. Extents come in the
    order of the bytes and don't overlap, except those of a list of integers.
    """
    return _Array(lengths, strides, boxes, costs).extents(0, tuple(range(len(boxes))))


def joined(parts: tuple[BoxCopy, ...], starts: Sequence[int]) -> tuple[BoxCopy, ...]:
    """Parts as one copy, if they lie at equal distances in the file and in memory.

    `starts` are the places of the results, by number of the request. One copy of many short rows
    takes a fraction of the time of many.
    """
    first, last, copy = parts[0], parts[-1], parts[0].copy
    places = [starts[part.box] + part.at for part in parts]
    if copy is None or len(parts) < 2 or any(part.copy != copy for part in parts):
        return parts
    step, pace = parts[1].offset - first.offset, places[1] - places[0]
    for n, (part, place) in enumerate(zip(parts, places, strict=True)):
        if (part.offset - first.offset, place - places[0]) != (n * step, n * pace):
            return parts
    into = copy.into or c_strides(copy.shape, copy.target.itemsize)
    shape, strides = (len(parts), *copy.shape), (step, *copy.strides)
    every = copy._replace(shape=shape, strides=strides, into=(pace, *into))
    reach = last.offset + last.nbytes - first.offset
    return (first._replace(nbytes=reach, copy=every),)


class Wanted(NamedTuple):
    """A box of a stored array, and where in a result it goes.

    Attributes:
        rows: Bytes of the result between two elements of each dim.
        stored: Element type as stored.
        target: Element type as delivered.
        request: For the checks of values and the errors of these.
        again: Dims that the array has no bytes for: the size, and the bytes of the result between
            two of the same.
    """

    axes: tuple[Axis, ...]
    rows: tuple[int, ...]
    stored: np.dtype[Any]
    target: np.dtype[Any]
    request: Request
    again: tuple[tuple[int, int], ...] = ()

    @property
    def converts(self) -> bool:
        """Whether values are converted."""
        return self.stored != self.target

    def packed(self) -> int:
        """From which dim on elements follow each other in the result."""
        ends = [axis.size * row for axis, row in zip(self.axes, self.rows, strict=True)]
        return len(ends) + 1 if self.again else _packed(self.rows, ends, self.target.itemsize)

    def copy(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        start: int = 0,
        into: tuple[int, ...] | None = None,
    ) -> Copy:
        """How some of its elements get from a slot to their places."""
        request = self.request
        # Without a name, tensors that are alike share the copy; only an error needs the name.
        name = request.info.name if request.checked else None
        checked = request.checked
        return Copy(shape, strides, start, self.stored, self.target, checked, name, into)


class _Reach(NamedTuple):
    """Which bytes of a row are wanted."""

    start: int
    stop: int
    gap: int  # The longest unwanted stretch between wanted ones.
    wanted: int
    run: int  # The shortest stretch that one box takes as it is stored; 0 if several do.


class _Array:
    """One array and its boxes; results for a set of boxes are kept, since rows repeat."""

    def __init__(
        self, lengths: Sequence[int], strides: Sequence[int], boxes: Sequence[Wanted], costs: Costs
    ) -> None:
        self._gap = max(1, costs.merge_gap)
        self._row_gap = max(1, self._gap if costs.row_gap is None else costs.row_gap)
        self._slot, self._span = costs.slot, max(costs.span, costs.slot)
        # Rows that a server is asked for are requests of their own, under way at once.
        self._apart = 1 if costs.concurrency else max(_LEAST_APART, self._span // _APART)
        self._unit = boxes[0].stored.itemsize
        self._lengths, self._strides, self._boxes = _fold(lengths, strides, boxes, self._unit)
        self._whole = tuple(Axis(0, length) for length in self._lengths)
        # From which dims on elements follow each other, in the array, and in each result.
        ends = [
            length * stride for length, stride in zip(self._lengths, self._strides, strict=True)
        ]
        self._packed = _packed(self._strides, ends, self._unit)
        self._placed = [box.packed() for box in self._boxes]
        self._extents: dict[tuple[int, tuple[int, ...]], list[Extent]] = {}
        self._reaches: dict[tuple[int, tuple[int, ...]], _Reach] = {}
        self._made: dict[tuple[int, tuple[int, ...], int, int], tuple[BoxCopy, ...]] = {}

    def extents(self, dim: int, boxes: tuple[int, ...]) -> list[Extent]:
        """Extents of one row of the dim before, for boxes that want some of it.

        Offsets count from the row's first byte; places in the results from the first byte that
        this row fills.
        """
        key = dim, boxes
        if key in self._extents:
            return self._extents[key]
        found: list[Extent] = []
        first = self._boxes[boxes[0]].axes[dim]
        if first.picks:
            if self._gathers(dim, boxes):
                found += self._rows(dim, first.picks, boxes)
            else:
                row = self._row(dim, boxes)
                for place, n in enumerate(first.picks):
                    found += self._moved(row, dim, n, place)
        else:
            for rows, here in self._intervals(dim, boxes):
                found += self._interval(dim, rows, here)
        self._extents[key] = found
        return found

    def _interval(self, dim: int, rows: range, boxes: tuple[int, ...]) -> list[Extent]:
        """Extents of rows that the same boxes want."""
        together = rows.step == 1 and self._boxes[boxes[0]].axes[dim].step > 0
        if together and self._takes_all(dim + 1, boxes):
            run = self._run(len(rows) * self._strides[dim], boxes)
            return self._moved(run, dim, rows[0])
        if self._gathers(dim, boxes):
            return self._rows(dim, rows, boxes)
        row = self._row(dim, boxes)
        return [each for n in rows for each in self._moved(row, dim, n)]

    def _row(self, dim: int, boxes: tuple[int, ...]) -> list[Extent]:
        """Extents of one row of a dim."""
        if self._takes_all(dim + 1, boxes):
            return self._run(self._strides[dim], boxes)
        return self.extents(dim + 1, boxes)

    def _intervals(self, dim: int, boxes: tuple[int, ...]) -> list[tuple[range, tuple[int, ...]]]:
        """Rows of a dim in file order, and the boxes that want them."""
        axes = [self._boxes[n].axes[dim] for n in boxes]
        if len(boxes) == 1:
            start, size, step, *_ = axes[0]
            rows = range(start, start + size * step, step)
            return [(rows if step > 0 else rows[::-1], boxes)]
        edges = sorted({edge for each in axes for edge in (each.start, each.start + each.size)})
        found: list[tuple[range, tuple[int, ...]]] = []
        for low, high in itertools.pairwise(edges):
            pairs = zip(boxes, axes, strict=True)
            here = tuple(n for n, a in pairs if a.start <= low and high <= a.start + a.size)
            if here:
                found.append((range(low, high), here))
        return found

    def _takes_all(self, dim: int, boxes: tuple[int, ...]) -> bool:
        """Whether the boxes want all of each row, from this dim on inwards."""
        whole = self._whole[dim:]
        if dim < self._packed:
            return False
        for n in boxes:  # noqa: SIM110 - takes half the time of a generator.
            if dim < self._placed[n] or self._boxes[n].axes[dim:] != whole:
                return False
        return True

    def _alone(self, boxes: tuple[int, ...]) -> bool:
        """Whether a single box takes bytes as they are stored."""
        return len(boxes) == 1 and not self._boxes[boxes[0]].converts

    def _reach(self, dim: int, boxes: tuple[int, ...]) -> _Reach:
        """What the boxes want of one row of the dim before."""
        key = dim, boxes
        if key in self._reaches:
            return self._reaches[key]
        alone = self._alone(boxes)
        if dim == len(self._strides):
            return _Reach(0, self._unit, 0, self._unit, self._unit if alone else 0)
        length = self._strides[dim - 1]
        if self._takes_all(dim, boxes):
            return _Reach(0, length, 0, length, length if alone else 0)
        stride = self._strides[dim]
        if picks := self._boxes[boxes[0]].axes[dim].picks:
            row, each = self._reach(dim + 1, boxes), sorted(set(picks))
            steps = (b - a for a, b in itertools.pairwise(each))
            gap = max(row.gap, max(steps, default=0) * stride - (row.stop - row.start))
            start, stop = each[0] * stride + row.start, each[-1] * stride + row.stop
            return _Reach(start, stop, gap, len(each) * row.wanted, row.run)
        start = cursor = -1
        gap = wanted = 0
        shortest = length
        for rows, here in self._intervals(dim, boxes):
            row = self._reach(dim + 1, here)
            first = rows[0] * stride + row.start
            if start < 0:
                start = cursor = first
            gap = max(gap, first - cursor, self._longest_gap(dim, rows, row))
            wanted += len(rows) * row.wanted
            joins = rows.step == 1 and row.run == stride
            shortest = min(shortest, row.run * len(rows) if joins else row.run)
            cursor = rows[-1] * stride + row.stop
        found = self._reaches[key] = _Reach(start, cursor, gap, wanted, shortest)
        return found

    def _longest_gap(self, dim: int, rows: range, row: _Reach) -> int:
        between = rows.step * self._strides[dim] - (row.stop - row.start)
        return max(row.gap, between) if len(rows) > 1 else row.gap

    def _gathers(self, dim: int, boxes: tuple[int, ...]) -> bool:
        """Whether a row of a dim is read at once, and short enough to pass through a slot."""
        row = self._reach(dim + 1, boxes)
        # What is left of the last dim are elements, which nothing else places.
        short = row.run < LONG or dim + 1 == len(self._strides)
        fits = row.stop - row.start <= self._slot and short
        return fits and row.gap < self._gap

    def _run(self, nbytes: int, boxes: tuple[int, ...]) -> list[Extent]:
        """Bytes that lie together, for one box or several."""
        unit = self._unit
        most = nbytes if self._alone(boxes) else max(1, self._slot // unit) * unit
        found: list[Extent] = []
        for offset in range(0, nbytes, most):
            length = min(most, nbytes - offset)
            parts: list[BoxCopy] = []
            for n in boxes:
                box = self._boxes[n]
                copy = box.copy((length // unit,), (unit,)) if box.converts else None
                parts.append(BoxCopy(n, offset, length, offset // unit * box.target.itemsize, copy))
            found.append(Extent(offset, length, length, tuple(parts)))
        return found

    def _rows(self, dim: int, rows: Sequence[int], boxes: tuple[int, ...]) -> list[Extent]:
        """Rows that pass through a slot: a range in file order, or the numbers of a list.

        They are read with what lies between them, if that is little, or each by itself.
        """
        row, stride, listed = self._reach(dim + 1, boxes), self._strides[dim], True
        reach, together = row.stop - row.start, 0
        most = min(self._slot // reach, self._apart)
        if isinstance(rows, range):
            stride, listed = stride * rows.step, False
            if self._longest_gap(dim, rows, row) < self._row_gap:
                together = (self._slot - reach) // stride + 1
                most = max(together, (self._span - reach) // stride + 1)
        found: list[Extent] = []
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            low, count = min(some), len(some)
            parts = self._parts(dim, boxes, count, stride if together else reach)
            reads = -(-count // together) if together else count
            nbytes = reads * reach + (count - reads) * stride
            numbers = [n - low for n in some] if listed else range(count)
            cut = Rows(numbers, stride, reach, together) if reads > 1 else None
            one = Extent(row.start, nbytes, count * row.wanted, parts, cut)
            found += self._moved([one], dim, low, first if listed else None)
        return found

    def _parts(
        self, dim: int, boxes: tuple[int, ...], count: int, pitch: int
    ) -> tuple[BoxCopy, ...]:
        """What boxes take of rows of a dim that land `pitch` bytes apart, counted from the first.

        In file order, and layers of blocks are alike, so they are kept.
        """
        key = dim, boxes, count, pitch
        if key not in self._made:
            parts: list[BoxCopy] = []
            for n in boxes:
                axes = self._boxes[n].axes
                listed = [d for d in range(dim + 1, len(axes)) if axes[d].picks]
                if not listed:
                    parts.append(self._part(n, dim, count, pitch))
                for d in listed:  # One at most: each number is a copy of its own.
                    for place, number in enumerate(axes[d].picks or ()):
                        box = self._boxes[n]._replace(
                            axes=(*axes[:d], Axis(number, 1), *axes[d + 1 :])
                        )
                        part = self._part(n, dim, count, pitch, box)
                        parts.append(part._replace(at=part.at + place * box.rows[d]))
            self._made[key] = tuple(sorted(parts, key=lambda part: part.offset))
        return self._made[key]

    def _part(
        self, n: int, dim: int, count: int, pitch: int, listed: Wanted | None = None
    ) -> BoxCopy:
        box, unit = listed or self._boxes[n], self._unit
        # A dim that is taken backwards ends in the result where it begins in the file.
        back = box.axes[dim].step < 0
        shape, steps = [count], [-pitch if back else pitch]
        offset, nbytes = 0, (count - 1) * pitch + unit
        start, at = (count - 1) * pitch * back, (1 - count) * box.rows[dim] * back
        for axis, stride in zip(box.axes[dim + 1 :], self._strides[dim + 1 :], strict=True):
            step, reach = axis.step * stride, (axis.size - 1) * abs(axis.step) * stride
            offset += axis.start * stride - (reach if step < 0 else 0)
            start += reach if step < 0 else 0
            nbytes += reach
            shape.append(axis.size)
            steps.append(step)
        into = box.rows[dim:]
        for size, pace in box.again:
            shape, steps, into = [*shape, size], [*steps, 0], (*into, pace)
        tight = c_strides(shape, box.target.itemsize)
        if all(a == b or n == 1 for a, b, n in zip(into, tight, shape, strict=True)):
            into = None
        copy = None
        size = math.prod(shape) * unit
        if into is not None or box.converts or min(steps) < 0 or nbytes != size:
            copy = box.copy(tuple(shape), tuple(steps), start, into)
            run, close = shape[-1] * unit, into is None or into[-1] == unit
            if not box.converts and len(shape) > 1 and steps[-1] == unit < run <= _NARROW and close:
                # NumPy copies short runs two to three times as fast as if they were elements.
                kind = np.dtype(f"V{run}")
                copy = copy._replace(
                    shape=copy.shape[:-1],
                    strides=copy.strides[:-1],
                    source=kind,
                    target=kind,
                    into=into and into[:-1],
                )
        return BoxCopy(n, offset, nbytes, at, copy)

    def _moved(
        self, extents: list[Extent], dim: int, n: int, place: int | None = None
    ) -> list[Extent]:
        """Extents of a row, moved to row `n` of a dim; `place` is its number in the results."""
        ahead = n * self._strides[dim]
        moved: list[Extent] = []
        for offset, nbytes, wanted, parts, rows in extents:
            there: list[BoxCopy] = []
            for number, first, length, at, copy in parts:
                box = self._boxes[number]
                axis = box.axes[dim]
                row = (n - axis.start) // axis.step if place is None else place
                there.append(BoxCopy(number, first + ahead, length, at + row * box.rows[dim], copy))
            moved.append(Extent(offset + ahead, nbytes, wanted, tuple(there), rows))
        return moved


def _packed(steps: Sequence[int], ends: Sequence[int], unit: int) -> int:
    """The first dim from which on the elements of rows follow each other; 1 at least."""
    dim = len(steps)
    if steps[-1] != unit:
        return dim + 1
    while dim > 1 and steps[dim - 2] == ends[dim - 1]:
        dim -= 1
    return dim


def _fold(
    lengths: Sequence[int], strides: Sequence[int], boxes: Sequence[Wanted], unit: int
) -> tuple[tuple[int, ...], tuple[int, ...], list[Wanted]]:
    """Folds dims that no box cuts into the dim before them, if they follow each other.

    Returns the lengths of the dims that are left, at least one, the bytes between their elements,
    and the boxes.
    """
    dims: list[tuple[int, int]] = []
    folded = [list[tuple[Axis, int]]() for _ in boxes]
    for dim, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        uncut = all(box.axes[dim] == Axis(0, length) for box in boxes)
        if uncut and length == 1:
            continue
        nests = uncut and bool(dims) and dims[-1][1] == length * stride
        for box, mine in zip(boxes, folded, strict=True):
            nests = nests and mine[-1][0].step == 1 and not mine[-1][0].picks
            nests = nests and mine[-1][1] == length * box.rows[dim]
        if nests:
            dims[-1] = dims[-1][0] * length, stride
            for box, mine in zip(boxes, folded, strict=True):
                axis, _ = mine[-1]
                mine[-1] = Axis(axis.start * length, axis.size * length), box.rows[dim]
        else:
            dims.append((length, stride))
            for box, mine in zip(boxes, folded, strict=True):
                mine.append((box.axes[dim], box.rows[dim]))
    if not dims:
        dims = [(1, unit)]
        folded = [[(Axis(0, 1), box.target.itemsize)] for box in boxes]
    made: list[Wanted] = []
    for box, mine in zip(boxes, folded, strict=True):
        axes, rows = zip(*mine, strict=True)
        made.append(box._replace(axes=axes, rows=rows))
    left, steps = zip(*dims, strict=True)
    return left, steps, made


def element_types(request: Request, *, swapped: bool = False) -> tuple[Any, Any]:
    """Types of an element as stored and as delivered; of bytes that are moved, one opaque type."""
    info = request.info
    stored, target = info.dtype.numpy, request.dtype.numpy
    if stored is None or target is None or (request.dtype is info.dtype and not swapped):
        # One type serves every dtype of that width.
        unit = info.dtype.nbytes
        opaque = np.dtype(f"V{unit}" if unit > 1 else np.uint8)
        return opaque, opaque
    return stored.newbyteorder(">") if swapped else stored, target


def axes_of(request: Request, shape: Sequence[int]) -> tuple[Axis, ...]:
    """What a request takes of a tensor of elements of whole bytes."""
    if request.selection is None:
        return tuple(Axis(0, length) for length in shape)
    return stored_axes(request.selection, request.info.dtype.elements)


def places(request: Request, axes: Sequence[Axis], unit: int) -> tuple[int, ...]:
    """Bytes of a result between neighbours in each dim of what a request takes."""
    steps = None if request.selection is None else request.selection.steps
    if steps is None:
        return c_strides([axis.size for axis in axes], unit)
    return tuple(step * unit for step in steps)


def stored_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor in elements of whole bytes: packed types count blocks."""
    dtype, shape = info.dtype, info.shape
    if dtype.elements == 1:
        return shape
    blocks, rest = divmod(shape[-1], dtype.elements)
    # Where blocks cross the ends of rows, only all of the tensor can be taken.
    return (info.nbytes // dtype.nbytes,) if rest else (*shape[:-1], blocks)


def stored_axes(selection: Sequence[Axis], block: int) -> tuple[Axis, ...]:
    """A selection in blocks of so many elements; a single element has no step."""
    axes = [
        Axis(start, size, 1 if size == 1 else step, picks=picks)
        for start, size, step, _, picks in selection
    ]
    if block > 1 and axes:
        # Of packed elements only whole blocks of the last dim can be selected.
        axes[-1] = Axis(axes[-1].start // block, axes[-1].size // block)
    return tuple(axes)


def c_strides(shape: Sequence[int], unit: int) -> tuple[int, ...]:
    """Bytes between neighbours in each dim of an array in C order, of elements of `unit` bytes."""
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= length
    return tuple(reversed(strides))
