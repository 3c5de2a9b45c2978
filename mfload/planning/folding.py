"""Folding: a tensor and its boxes in as few dims as the boxes need. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload.planning import ranges
from mfload.planning.requests import Request


class Folded(NamedTuple):
    """A box in the dims that are left when those that nobody cuts are folded away.

    Attributes:
        start: First element a dim.
        stop: The one behind the last, a dim.
        rows: Bytes of the result that lie between two elements of a dim.
        stored: Element type in the file.
        target: Element type of the result.
        request: The need.
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
    """Folds dims that nobody cuts into the dim before them.

    Args:
        requests: Boxes of one tensor.

    Returns:
        Lengths of the dims that are left, at least one, the bytes between their elements, and
        the boxes.
    """
    views = [ranges.bytewise(request) for request in requests]
    shape = ranges.stored_shape(requests[0].info)
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
    strides = _strides(lengths, unit)
    boxes: list[Folded] = []
    for request, mine in zip(requests, spans, strict=True):
        stored, target = ranges.element_types(request, unit)
        start, stop = tuple(a for a, _ in mine), tuple(b for _, b in mine)
        rows = _strides([b - a for a, b in mine], target.itemsize)
        boxes.append(Folded(start, stop, rows, stored, target, request))
    return tuple(lengths), strides, boxes


def _strides(lengths: Sequence[int], unit: int) -> tuple[int, ...]:
    back = itertools.accumulate(reversed(lengths[1:]), int.__mul__, initial=unit)
    return tuple(back)[::-1]
