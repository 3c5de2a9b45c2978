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


@st.composite
def _rules(draw: st.DrawFn) -> tuple[transforms.Transform, list[np.ndarray]]:
    """Tensors that are split, ordered, reshaped, joined and stacked."""
    width, counts = draw(st.integers(1, 3)), draw(st.sampled_from([(), (2,), (2, 3)]))
    stored = draw(_shapes(draw(st.sampled_from([4, 6, 12, 24]))))
    branch = transforms.Branch(stored)
    for _ in range(draw(st.integers(0, 3))):
        shape = branch.shapes[-1]
        order = tuple(draw(st.permutations(range(len(shape)))))
        other = draw(_shapes(math.prod(stored)))
        step = draw(st.sampled_from([("transpose", order), ("reshape", other)]))
        branch = transforms.Branch(stored, (*branch.steps, step))
    rank = len(branch.shapes[-1])
    axis = draw(st.integers(0, rank - 1)) if rank else 0
    width = width if rank else 1
    axes = tuple(draw(st.permutations(range(rank + len(counts))))[: len(counts)])
    count = width * math.prod(counts)
    arrays = [np.arange(math.prod(stored)).reshape(stored) + 100 * n for n in range(count)]
    made = transforms.Transform((branch,) * width, axis if width > 1 else 0, counts, axes)
    return made, arrays


@settings(max_examples=400)
@given(data=st.data(), rule=_rules())
def test_each_tensor_of_a_box_has_its_place(
    data: st.DataObject, rule: tuple[transforms.Transform, list[np.ndarray]]
) -> None:
    transform, arrays = rule
    expected = transform.evaluate(arrays, np)
    starts = [data.draw(st.integers(0, size - 1)) for size in expected.shape]
    pairs = zip(starts, expected.shape, strict=True)
    box = tuple((start, data.draw(st.integers(start + 1, size))) for start, size in pairs)
    expected = expected[tuple(slice(*dim) for dim in box)]
    some, reads = transform.part(box)
    # In memory whose dims are in any order, with gaps.
    order = data.draw(st.permutations(range(expected.ndim)))
    memory = np.full([expected.shape[dim] + 1 for dim in order], -1)
    inner = memory[tuple(slice(0, expected.shape[dim]) for dim in order)]
    target = inner.transpose(np.argsort(order)) if order else inner
    steps = tuple(stride // memory.itemsize for stride in target.strides)
    places = some.places(steps)
    if places is None:
        assert any(kind != "transpose" for branch in some.branches for kind, _ in branch.steps)
        return
    flat = memory.reshape(-1)
    for (number, read), (at, strides) in zip(reads, places, strict=True):
        part = arrays[number][tuple(slice(*dim) for dim in read)]
        spots = at + sum(
            np.arange(size).reshape([-1 if n == dim else 1 for n in range(part.ndim)]) * step
            for dim, (size, step) in enumerate(zip(part.shape, strides, strict=True))
        )
        flat[spots] = part
    assert np.array_equal(target, expected)
    if order == list(range(expected.ndim)) and not any(
        kind == "slice" for branch in some.branches for kind, _ in branch.steps
    ):
        assert (memory == -1).sum() == memory.size - expected.size
