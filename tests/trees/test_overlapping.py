"""Tensors whose items share their memory, against NumPy's views."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from numpy.lib.stride_tricks import as_strided

from mfload.trees.modules import overlapping

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=3)


@given(DIMS)
def test_items_that_share_their_memory_are_found(dims: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dims], [step for _, step in dims]
    numbers = np.arange(200)
    view = as_strided(numbers[100:], shape, [step * numbers.itemsize for step in strides])
    if len(np.unique(view)) < view.size:
        assert "share their memory" in str(overlapping(shape, strides))


@given(st.data())
def test_views_of_an_array_are_taken(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    whole = np.empty(shape)
    view = whole.transpose(data.draw(st.permutations(range(len(shape)))))
    steps = data.draw(st.lists(st.sampled_from([1, 2, -1]), min_size=len(shape), max_size=4))
    view = view[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    strides = [step // whole.itemsize for step in view.strides]
    assert overlapping(view.shape, strides) is None
