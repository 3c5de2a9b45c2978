"""Boxes: the file ranges that hold the part of a tensor that is wanted. Pure.

A selection is cut in two: outer dims, whose elements are read one by one, and inner dims,
whose span is read as one and picked apart in memory. The cut lies as far out as the gaps
within the span stay below what the source would rather read over than skip.

Boxes of one tensor that are read together are folded first: into as few dims as they need.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload.index import TensorInfo
from mfload.planning.blocks import Copy, Costs, Segment
from mfload.planning.requests import Axis, Request

_BYTE = np.dtype(np.uint8)


def contiguous(request: Request) -> int | None:
    """The file offset of a need that lies there as it is wanted, None for any other."""
    if request.dtype is not request.info.dtype:
        return None
    piece = request.info.pieces[0]
    if request.selection is None or request.nbytes == 0:
        return piece.offset
    shape = stored_shape(request.info)
    ahead = _ahead(_axes(request, shape), shape, request.info.dtype.nbytes)
    return None if ahead is None else piece.offset + ahead


@functools.lru_cache(4096)
def _ahead(axes: tuple[Axis, ...], shape: tuple[int, ...], unit: int) -> int | None:
    """How far behind the tensor's first byte a contiguous part begins; layers are alike."""
    strides = _strides(shape, unit)
    if (
        any(axis.picks for axis in axes)
        or _span(axes, strides, unit) != math.prod(axis.size for axis in axes) * unit
    ):
        return None
    if any(axis.step < 0 and axis.size > 1 for axis in axes):
        return None
    return _start(axes, strides)


def segments(request: Request, buffer: int, at: int, costs: Costs) -> Iterator[tuple[int, Segment]]:
    """The segments of a need, in file order where its steps are positive."""
    if request.nbytes == 0:
        return
    source = request.info.pieces[0].source
    offset = contiguous(request)
    if offset is not None:
        yield source, Segment(offset, request.nbytes, buffer, at)
        return
    axes, strides, unit = bytewise(request)
    stored, target = element_types(request, unit)
    base = request.info.pieces[0].offset
    cut = _cut(axes, strides, unit, costs)
    inner_count = math.prod(axis.size for axis in axes[cut:])
    rows = _rows_a_block(axes, strides, unit, cut, costs)
    plain = stored == target
    for outer in itertools.product(*(range(axis.size) for axis in axes[:cut])):
        origin = base + sum(
            axis.at(n) * stride for n, axis, stride in zip(outer, axes, strides, strict=False)
        )
        for part, inner in _chunks(axes[cut:], rows):
            start, span = _extent(inner, strides[cut:], unit)
            count = math.prod(axis.size for axis in inner)
            copy = None
            if not plain or span != count * unit or any(a.step < 0 for a in inner):
                copy = Copy(
                    tuple(axis.size for axis in inner),
                    tuple(a.step * s for a, s in zip(inner, strides[cut:], strict=True)),
                    _start(inner, strides[cut:]) - start,
                    stored,
                    target,
                    request.checked,
                    request.info.name,
                )
            done = part * inner_count // max(1, axes[cut].size) if cut < len(axes) else 0
            yield source, Segment(origin + start, span, buffer, at + done * target.itemsize, copy)
        at += inner_count * target.itemsize


def stored_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor in elements of whole bytes: packed types count blocks."""
    dtype, shape = info.dtype, info.shape
    if dtype.elements == 1:
        return shape
    blocks, rest = divmod(shape[-1], dtype.elements)
    # Where blocks go over the ends of rows, nothing but all of the tensor can be taken.
    return (info.nbytes // dtype.nbytes,) if rest else (*shape[:-1], blocks)


def bytewise(request: Request) -> tuple[tuple[Axis, ...], tuple[int, ...], int]:
    """Axes in the stored shape, byte strides and bytes an element."""
    shape, unit = stored_shape(request.info), request.info.dtype.nbytes
    return _axes(request, shape), _strides(shape, unit), unit


def _axes(request: Request, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    axes, block = request.selection, request.info.dtype.elements
    if not axes:
        return tuple(Axis(0, length) for length in shape)
    if block > 1:
        # A selection of packed elements is whole blocks of the last dim, checked before.
        last = axes[-1]
        return (*axes[:-1], Axis(last.start // block, last.size // block))
    return axes


def _strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= length
    return tuple(reversed(strides))


def element_types(request: Request, unit: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Element types as stored and as delivered; the same opaque one where nothing converts."""
    if request.dtype is request.info.dtype:
        # Bytes are moved, not numbers: one opaque type serves every dtype of that width.
        kind = np.dtype(f"V{unit}") if unit > 1 else _BYTE
        return kind, kind
    assert request.info.dtype.numpy is not None
    assert request.dtype.numpy is not None
    return request.info.dtype.numpy, request.dtype.numpy


def _start(axes: tuple[Axis, ...], strides: tuple[int, ...]) -> int:
    return sum(axis.start * stride for axis, stride in zip(axes, strides, strict=True))


def _span(axes: tuple[Axis, ...], strides: tuple[int, ...], unit: int) -> int:
    reach = zip(axes, strides, strict=True)
    return sum((axis.size - 1) * abs(axis.step) * stride for axis, stride in reach) + unit


def _extent(axes: tuple[Axis, ...], strides: tuple[int, ...], unit: int) -> tuple[int, int]:
    """Lowest byte and length of the span that holds all elements."""
    low = sum(
        min(axis.start, axis.start + (axis.size - 1) * axis.step) * stride
        for axis, stride in zip(axes, strides, strict=True)
    )
    return low, _span(axes, strides, unit)


def _cut(axes: tuple[Axis, ...], strides: tuple[int, ...], unit: int, costs: Costs) -> int:
    """The first inner dim."""
    cut, span = len(axes), unit
    for dim in range(len(axes) - 1, -1, -1):
        axis, stride = axes[dim], strides[dim]
        if axis.picks:
            break
        if axis.size > 1 and abs(axis.step) * stride - span >= costs.merge_gap:
            break
        # A row of the dim that is longer than a slot has to be cut further in.
        if span > costs.slot:
            break
        span += (axis.size - 1) * abs(axis.step) * stride
        cut = dim
    return cut


def _rows_a_block(
    axes: tuple[Axis, ...], strides: tuple[int, ...], unit: int, cut: int, costs: Costs
) -> int:
    if cut == len(axes):
        return 1
    row = _span(axes[cut + 1 :], strides[cut + 1 :], unit)
    step = max(1, abs(axes[cut].step) * strides[cut])
    return max(1, (costs.slot - row) // step + 1)


def _chunks(inner: tuple[Axis, ...], rows: int) -> Iterator[tuple[int, tuple[Axis, ...]]]:
    """Cuts the first inner dim into parts of at most `rows`, with the row each begins at."""
    if not inner:
        yield 0, inner
        return
    first = inner[0]
    for part in range(0, first.size, rows):
        count = min(rows, first.size - part)
        yield part, (Axis(first.start + part * first.step, count, first.step), *inner[1:])


class Folded(NamedTuple):
    """A box in the dims that are left when uncut dims are folded away.

    Attributes:
        stop: The one behind the last, a dim.
        rows: Bytes of the result that lie between two elements of a dim.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    rows: tuple[int, ...]
    stored: np.dtype[Any]
    target: np.dtype[Any]
    request: Request

    @property
    def converts(self) -> bool:
        """Whether values are converted."""
        return self.stored != self.target


def fold(requests: Sequence[Request]) -> tuple[tuple[int, ...], tuple[int, ...], list[Folded]]:
    """Folds dims that no box cuts into the dim before them.

    Returns:
        Lengths of the dims that are left, at least one, the bytes between their elements, and
        the boxes.
    """
    views = [bytewise(request) for request in requests]
    shape = stored_shape(requests[0].info)
    unit = views[0][2]
    lengths: list[int] = [1]
    spans: list[list[tuple[int, int]]] = [[(0, 1)] for _ in requests]
    for dim, length in enumerate(shape):
        taken = [(axes[dim].start, axes[dim].start + axes[dim].size) for axes, _, _ in views]
        if all(each == (0, length) for each in taken) or lengths == [1]:
            # Rows that all want whole are longer elements of the dim before.
            whole = lengths == [1]
            lengths[-1] *= length
            for mine, each in zip(spans, taken, strict=True):
                mine[-1] = each if whole else (mine[-1][0] * length, mine[-1][1] * length)
        else:
            lengths.append(length)
            for mine, each in zip(spans, taken, strict=True):
                mine.append(each)
    strides = _strides(tuple(lengths), unit)
    boxes: list[Folded] = []
    for request, mine in zip(requests, spans, strict=True):
        stored, target = element_types(request, unit)
        start, stop = tuple(a for a, _ in mine), tuple(b for _, b in mine)
        rows = _strides(tuple(b - a for a, b in mine), target.itemsize)
        boxes.append(Folded(start, stop, rows, stored, target, request))
    return tuple(lengths), strides, boxes
