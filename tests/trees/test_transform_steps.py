"""Transforms: a box through a reshape is the same elements on both sides, and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mfload.index import Box
from mfload.trees import transforms

Shape = tuple[int, ...]


@st.composite
def _shapes(draw: st.DrawFn, total: int) -> Shape:
    shape: list[int] = []
    while total > 1:
        shape.append(draw(st.sampled_from([n for n in range(2, total + 1) if total % n == 0])))
        total //= shape[-1]
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


def _elements(shape: Shape, box: Box) -> list[int]:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(slice(*dim) for dim in box)].ravel().tolist()


@settings(max_examples=300)
@given(data=st.data(), total=st.sampled_from([1, 6, 12, 24, 36, 60]))
def test_both_boxes_hold_the_same_elements(data: st.DataObject, total: int) -> None:
    one, other = data.draw(_shapes(total)), data.draw(_shapes(total))
    starts = [data.draw(st.integers(0, size - 1)) for size in other]
    box = tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for start, size in zip(starts, other, strict=True)
    )
    inner, grown = transforms.through_reshape(one, other, box)
    assert all(c <= a and b <= d for (a, b), (c, d) in zip(box, grown, strict=True))
    # In the same order, so that a reshape of the one is the other.
    assert _elements(one, inner) == _elements(other, grown)


@pytest.mark.parametrize(
    ("one", "other", "box", "inner", "grown"),
    [
        ((32, 6), (4, 8, 6), ((1, 2), (0, 8), (2, 4)), ((8, 16), (2, 4)), None),
        ((32,), (4, 8), ((1, 3), (2, 4)), ((8, 24),), ((1, 3), (0, 8))),
        ((4, 8), (32,), ((8, 16),), ((1, 2), (0, 8)), None),
        ((4, 8), (32,), ((6, 10),), ((0, 2), (0, 8)), ((0, 16),)),
        ((4, 8), (32,), ((9, 10),), ((1, 2), (1, 2)), None),
        ((6, 4), (8, 3), ((0, 4), (0, 3)), ((0, 3), (0, 4)), None),
        ((6, 4), (4, 6), ((1, 2), (0, 6)), ((0, 3), (0, 4)), ((0, 2), (0, 6))),
        ((2, 3, 4), (6, 4), ((0, 3), (1, 2)), ((0, 1), (0, 3), (1, 2)), None),
        ((1, 5), (5, 1, 1), ((2, 4), (0, 1), (0, 1)), ((0, 1), (2, 4)), None),
        ((), (1, 1), ((0, 1), (0, 1)), (), None),
    ],
)
def test_which_boxes(one: Shape, other: Shape, box: Box, inner: Box, grown: Box | None) -> None:
    assert transforms.through_reshape(one, other, box) == (inner, grown or box)
