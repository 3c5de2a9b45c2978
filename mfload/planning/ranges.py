"""Runs: the file ranges that hold a need, and how their elements reach their place. Pure.

A selection is cut in two: outer dims, whose elements are read one by one, and inner dims,
whose span is read as one and picked apart in memory. The cut lies as far out as the gaps
within the span stay below what the source would rather read over than skip.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

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
    if _span(axes, strides, unit) != math.prod(axis.size for axis in axes) * unit:
        return None
    if any(axis.step < 0 and axis.size > 1 for axis in axes):
        return None
    return _start(axes, strides)


def segments(request: Request, buffer: int, at: int, costs: Costs) -> Iterator[tuple[int, Segment]]:
    """The segments of a need, in file order where its steps are positive.

    Args:
        request: What is wanted.
        buffer: Where its result lies.
        at: Where in the buffer.
        costs: What the source declares.

    Yields:
        The source's number and a segment.
    """
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
            (axis.start + n * axis.step) * stride
            for n, axis, stride in zip(outer, axes, strides, strict=False)
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
