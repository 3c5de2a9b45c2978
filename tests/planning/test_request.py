"""Indices as people write them, turned into numbers; NumPy and safetensors are the measure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import samples
from hypothesis import assume, example, given, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import dtypes, errors
from mfload.index import Piece, TensorInfo
from mfload.loading import near
from mfload.planning.request import Request
from mfload.planning.slicing import Axis, Selection, boxed, laid, select, shape_of, slabs, strided
from mfload.stored import Encoding, Stored


def _info(shape: tuple[int, ...], dtype: str = "F32") -> TensorInfo:
    row = dtypes.TABLE[dtype]
    return TensorInfo("w", row, shape, (Piece(0, 64, row.size_of(shape) or 0),))


def _rebuild(shape: tuple[int, ...], selection: Selection | None) -> Any:
    """The elements that a selection takes, by their numbers."""
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    if selection is None:
        return grid
    picked = [[axis.start + n * axis.step for n in range(axis.size)] for axis in selection]
    taken = grid[np.ix_(*picked)] if picked else grid
    return taken.reshape([axis.size for axis in selection if not axis.drop])


@given(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6).flatmap(
    lambda shape: st.tuples(st.just(shape), hnp.basic_indices(shape, allow_ellipsis=True))
))  # fmt: skip
def test_a_selection_takes_what_numpy_takes(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    info = _info(shape)
    selection = select(info, index)
    expected = np.arange(int(np.prod(shape))).reshape(shape)[index]
    request = Request(info, info.dtype, selection)
    assert request.shape == expected.shape
    assert request.nbytes == expected.size * 4
    assert np.array_equal(_rebuild(shape, selection), expected)


def test_all_of_a_tensor_is_no_selection() -> None:
    for index in (..., (), slice(None), (slice(None), ...), (slice(0, 99), slice(-99, 7))):
        assert select(_info((5, 7)), index) is None
    assert select(_info(()), ()) is None
    assert select(_info((5, 7)), (slice(None, None, -1),)) == (Axis(4, 5, -1), Axis(0, 7))


class _One:
    """As torch's tensors of one element: an array that passes for an integer."""

    ndim = 1

    def __index__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "tensor([1])"


REFUSED: dict[str, Any] = {
    "tensor of one": _One(),
    "too many": (0, 0, 0),
    "out of range": 5,
    "far below": -6,
    "huge": 2**70,
    "two ellipses": (..., ...),
    "newaxis": None,
    "newaxis in a tuple": (None, 1),
    "bool": True,
    "numpy bool": np.True_,
    "bool in a tuple": (slice(None), False),
    "mask": np.ones(5, np.bool_),
    "list out of range": [0, 5],
    "list of booleans": [True, False],
    "list of floats": [0.0],
    "two lists": ([0, 1], [0, 1]),
    "array of two dims": np.array([[0, 1]]),
    "range": range(2),
    "string": "a",
    "float": 1.0,
    "step 0": slice(0, 4, 0),
    "slice of floats": slice(1.0, 3.0),
    "slice of strings": slice("a", "b"),
    "dict": {},
}


@pytest.mark.parametrize(
    "index",
    [[], [3], [0, 3], [3, 0], [-1, 0], [2, 2], [0, 1, 4], np.array([0, 2, 1]), (1, [6, 0, 1]),
     (slice(1, 4), [5, 0, 0, 3]), ([4, 0, 3], slice(None, None, -2)), ([1, 4, 0], 2),
     (..., [0, 6, 1])],
    ids=str,
)  # fmt: skip
def test_a_list_of_integers_takes_them_one_by_one(tmp_path: Path, index: Any) -> None:
    array = np.arange(35, dtype=np.int16).reshape(5, 7)
    path = samples.save(tmp_path / "a.safetensors", {"a": array, "b": array})
    with mfload.open(path) as opened:
        assert samples.same(opened.get_slice("a")[index], array[index])


@pytest.mark.parametrize(
    "index", [[0, 0, 0], ([0, -1], 0), ([-1, 0], slice(None), slice(2, 0, -1))]
)
def test_a_list_repeats_a_dim_of_length_one(tmp_path: Path, index: Any) -> None:
    array = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 4)
    path = samples.save(tmp_path / "a.safetensors", {"a": array})
    with mfload.open(path) as opened:
        assert samples.same(opened.get_slice("a")[index], array[index])


@pytest.mark.parametrize(
    ("index", "leads"),
    [
        ((slice(None), 2, ..., [0, 2]), 1),
        ((slice(None), [0, 2], ..., 2), 1),
        ((slice(None), 2, [0, 2]), 0),
        ((2, slice(None), [0, 2]), 1),
        (([0, 1, 4], slice(None), 1), 0),
        ((2, ..., [0, 2]), 1),
        ((slice(None), slice(None), [0, 2]), 0),
        ((..., [0, 2]), 0),
    ],
)
def test_a_list_apart_from_an_integer_leads_in_numpy(index: Any, leads: int) -> None:
    selection = select(_info((5, 7, 3)), index)
    assert selection is not None
    assert selection.leads == leads
    array = np.zeros((5, 7, 3))
    assert np.moveaxis(np.zeros(selection.shape), leads, 0).shape == array[index].shape


def test_two_lists_are_refused() -> None:
    with pytest.raises(errors.SliceError, match="one list of integers at most"):
        select(_info((5, 7, 3)), ([0, 1, 4], [0, 1, 2]))


@pytest.mark.parametrize("index", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_by_name(index: Any) -> None:
    with pytest.raises(errors.SliceError) as info:
        select(_info((5, 7)), index)
    assert info.value.tensor == "w"
    assert "[5, 7]" in str(info.value)
    assert info.value.found == repr(index)
    assert isinstance(info.value, IndexError)


def test_integers_of_other_kinds_are_integers() -> None:
    class Five:
        def __index__(self) -> int:
            return 5

    taken = (Axis(2, 1, 1, drop=True), Axis(5, 1, 1, drop=True))
    for index in ((2, 5), (np.int64(2), np.uint8(5)), (np.array(2), Five()), (-3, -2)):
        assert select(_info((5, 7)), index) == taken


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_packed_elements_are_taken_in_whole_blocks(dtype: str) -> None:
    block = dtypes.TABLE[dtype].elements
    info = _info((3, 4 * block), dtype)
    taken = select(info, (1, slice(block, 3 * block)))
    assert taken is not None
    assert Request(info, info.dtype, taken).nbytes == 2 * info.dtype.nbytes
    for last in (0, slice(1, block + 1), slice(0, block + 1), slice(0, 4 * block, 2)):
        with pytest.raises(errors.SliceError, match="whole blocks"):
            select(info, (slice(None), last))
    with pytest.raises(errors.SliceError, match="whole blocks"):
        select(_info((2 * block, 3), dtype), 0)


# What safetensors.safe_open's slices take, mfload's take to the same result; what they refuse,
# mfload takes as NumPy does or refuses with SliceError. (Booleans, which safetensors takes for
# 0 and 1, and the empty list, which it takes for all, are refused: see REFUSED.)
FORMS: list[Any] = [
    0, -1, 4, slice(1, 3), slice(0, 5, 2), ..., (..., 1), (1, ..., slice(0, 2)), (),
    (0, 0, 0), (0, 0, 0, ...), (slice(None), slice(None), 0), np.int64(2), np.array(1),
    slice(np.int64(1), np.int64(3)), (slice(None, None, 3), 2), (2, slice(3), slice(6, None)),
    slice(-3, -1), slice(0, 100), slice(3, 1), slice(4, 0, -1), slice(-(2**70), 2**70),
    5, -6, (0, 0, 0, 0), None, (None, 1), [0, 1], (slice(None), [0, 2]), np.array([0, 1]),
    1.0, "a", range(2), 2**70, slice(0, 4, 0), (..., ...),
]  # fmt: skip


@pytest.mark.parametrize("index", FORMS, ids=repr)
def test_slices_agree_with_safetensors_and_numpy(tmp_path: Path, index: Any) -> None:
    array = samples.numbers((5, 6, 7), np.float32)
    path = samples.save(tmp_path / "a.safetensors", {"a": array})
    with safetensors.safe_open(path, "np") as theirs:
        try:
            reference = theirs.get_slice("a")[index]
        except (Exception, SystemError):
            reference = None
    with mfload.open(path) as ours:
        try:
            found = ours.get_slice("a")[index]
        except errors.SliceError:
            found = None
    if reference is not None:
        assert found is not None
        assert samples.same(found, reference)
    if found is not None:
        assert samples.same(found, array[index])


@given(
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
    st.sampled_from(["U8", "F32", "F4"]),
    st.integers(1, 99),
    st.none() | st.integers(1, 7),
)
@example((2, 2, 1), "F4", 1, 1)  # Rows that share a byte, in chunks of one each.
def test_slabs_are_a_tensor_in_order(
    shape: tuple[int, ...], dtype: str, most: int, chunk: int | None
) -> None:
    assume(dtypes.TABLE[dtype].size_of(shape) is not None)
    info = _info(shape, dtype)
    if chunk is not None and shape:
        box = ((0, min(chunk, shape[0])), *((0, length) for length in shape[1:]))
        stored = Stored(box=box, encodings=(Encoding("zlib", 1),))
        info = info._replace(pieces=(Piece(0, 64, 1, stored),))
    numbers, least = list[int](), max(info.dtype.nbytes, info.nbytes if dtype == "F4" else 0)
    for box in slabs(info, info.nbytes, most):
        numbers += _rebuild(shape, boxed(info, box)).ravel().tolist()
        assert (info.dtype.size_of(shape_of(box)) or 0) <= max(most, least)
        if chunk and info.nbytes and shape and info.nbytes // shape[0] * chunk <= most:
            assert box[0][0] % min(chunk, shape[0]) == 0
    assert numbers == [*range(math.prod(shape))]


def test_what_lands_with_steps_is_not_taken_where_it_lies() -> None:
    piece = Piece(0, 0, 48, Stored(box=((0, 3), (0, 4))))
    info = TensorInfo("w", dtypes.TABLE["F32"], (6, 4), (piece,))
    part = strided(((0, 3), (0, 4)), (1, 3))
    request = Request(info, info.dtype, part, False, (3,))
    assert near.narrowed(request).selection is part
    assert near.narrowed(request._replace(selection=boxed(info, ((0, 3), (0, 4))))) != request


def _of(view: Any, whole: Any) -> Selection | None:
    unit, first = whole.itemsize, (view.ctypes.data - whole.ctypes.data) // whole.itemsize
    return laid(whole.shape, view.shape, tuple(step // unit for step in view.strides), first)


_VIEWS: list[tuple[Any, Any, Any]] = [
    (lambda x: x, [(0, 4, 1), (0, 6, 1), (0, 8, 1)], None),
    (lambda x: x[:, 2:5], [(0, 4, 1), (2, 3, 1), (0, 8, 1)], None),
    (lambda x: x[2, ::-2, None], [(2, 1, 1), (5, 3, -2), (0, 8, 1)], None),
    (lambda x: x.transpose(2, 0, 1)[1:3], [(0, 4, 1), (0, 6, 1), (1, 2, 1)], (6, 1, 24)),
    (lambda x: x.reshape(4, 2, 3, 8)[:, 1], [(0, 4, 1), (3, 3, 1), (0, 8, 1)], None),
    (lambda x: x.reshape(4, -1)[1:3], [(1, 2, 1), (0, 6, 1), (0, 8, 1)], None),
    (lambda x: x.reshape(-1)[48:56], [(1, 1, 1), (0, 1, 1), (0, 8, 1)], None),
    (lambda x: x.reshape(-1)[::2], [(0, 4, 1), (0, 6, 1), (0, 4, 2)], None),
    (lambda x: x.reshape(24, 8)[3:5].T, [(0, 1, 1), (3, 2, 1), (0, 8, 1)], (1, 1, 2)),
    (lambda x: x[..., ::2].swapaxes(1, 2)[:, 1:], [(0, 4, 1), (0, 6, 1), (2, 3, 2)], (18, 1, 6)),
    (lambda x: x.reshape(2, 2, 6, 8)[1], [(2, 2, 1), (0, 6, 1), (0, 8, 1)], None),
]  # fmt: skip


@pytest.mark.parametrize(("view", "axes", "steps"), _VIEWS)
def test_what_a_view_takes_of_each_dim(view: Any, axes: Any, steps: Any) -> None:
    whole = np.arange(4 * 6 * 8, dtype=np.int32).reshape(4, 6, 8)
    found = _of(view(whole), whole)
    assert found is not None
    assert [axis[:3] for axis in found] == axes
    assert found.steps == steps or all(
        axis.size == 1 or mine == other
        for axis, mine, other in zip(found, found.steps or (), steps or (), strict=True)
    )


@pytest.mark.parametrize("view", [
    lambda x: x.diagonal(), lambda x: x.reshape(-1)[44:60], lambda x: x[:0],
    lambda x: x.reshape(2, 2, 6, 8).swapaxes(0, 1), lambda x: x.reshape(-1)[::5],
    lambda x: np.broadcast_to(x, (3, *x.shape)),
    lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, 0),
])  # fmt: skip
def test_some_views_are_of_no_one_box(view: Any) -> None:
    whole = np.arange(4 * 6 * 8, dtype=np.int32).reshape(4, 6, 8)
    assert _of(view(whole), whole) is None
