"""Conversions have the bits of NumPy's `astype`, whatever is converted how."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mfload import dtypes, errors
from mfload.io import convert

DTYPES = [
    row.numpy
    for row in dtypes.TABLE.values()
    if row.numpy is not None and row.kind not in ("scale", "packed")
]
SMALL = [each for each in DTYPES if each.itemsize <= 2]
NARROW = [each for each in SMALL if each.kind in "fV"]


def as_type(source: Any, target: np.dtype[Any]) -> Any:
    with np.errstate(all="ignore"):
        return source.astype(target)


def same_bits(made: Any, wanted: Any) -> None:
    unit = f"u{made.itemsize}" if made.dtype.kind != "c" else "u4"
    differ = np.flatnonzero(made.reshape(-1).view(unit) != wanted.reshape(-1).view(unit))
    assert not differ.size, (differ[:4], made.reshape(-1)[differ[:4]])


def every(dtype: np.dtype[Any]) -> Any:
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def around_boundaries() -> Any:
    """Of float32 all numbers of 10 bits of fraction, those halfway between, and their neighbours.

    Between two of these any narrower float is one step: it rounds up or down all of them.
    """
    first = np.arange(1 << 19, dtype=np.uint32) << 13
    rest = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    return np.ravel(first[:, None] | rest).view(np.float32)


def in_range(numbers: Any, target: np.dtype[Any]) -> Any:
    """Without what becomes NaN or infinity, so that no block is left to `astype`."""
    wanted = as_type(numbers, target)
    with np.errstate(all="ignore"):
        return numbers[np.isfinite(wanted.astype(np.float32))]


@pytest.mark.parametrize("source", SMALL, ids=str)
def test_all_numbers_of_16_bits(source: np.dtype[Any]) -> None:
    numbers = np.resize(every(source), 1 << 16)
    if source.kind == "b":
        numbers = numbers & True
    for target in DTYPES:
        if target != source and target.kind not in "iub":
            made = np.empty(numbers.shape, target)
            convert.convert(numbers, made)
            same_bits(made, as_type(numbers, target))


@pytest.mark.parametrize("target", NARROW, ids=str)
def test_float32_around_all_boundaries(target: np.dtype[Any]) -> None:
    numbers = in_range(around_boundaries(), target)
    made = np.empty(numbers.shape, target)
    convert.convert(numbers, made)
    same_bits(made, as_type(numbers, target))


@pytest.mark.parametrize("target", NARROW, ids=str)
def test_blocks_with_nan_infinity_and_numbers_out_of_range(target: np.dtype[Any]) -> None:
    numbers = np.random.default_rng(1).standard_normal(4 * convert.BLOCK).astype(np.float32)
    odd = np.array([np.nan, np.inf, -np.inf, 465, 1e5, -1e6, 3.4e38, 1e-45, -0.0], np.float32)
    odd = np.append(odd, np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32))
    numbers[7 : 7 + odd.size] = odd
    numbers[-1] = np.nan
    made = np.empty(numbers.shape, target)
    convert.convert(numbers, made)
    same_bits(made, as_type(numbers, target))


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float8_e5m2"), ("float16", "float32"), (">f4", "float16")]
)
def test_any_strides_and_alignment(source: str, target: str) -> None:
    kinds = [np.dtype(getattr(ml_dtypes, name, name)) for name in (source, target)]
    plain = np.random.default_rng(2).standard_normal((70, 31, 90)).astype(kinds[0])
    raw = np.empty(plain.nbytes + 1, np.uint8)[1:].view(np.uint8)
    odd = np.ndarray(plain.shape, kinds[0], raw)
    odd[...] = plain
    views: list[Callable[[Any], Any]] = [
        lambda a: a,
        lambda a: a[::-1, :, ::2],
        lambda a: a.transpose(2, 0, 1),
        lambda a: a[:, 5:30, 3:],
    ]
    for cut, put in itertools.product(views, repeat=2):
        given = cut(odd)
        room = np.zeros([2 * n + 5 for n in given.shape], kinds[1])
        made = put(room)[tuple(slice(n) for n in given.shape)]
        if made.shape == given.shape:
            convert.convert(given, made)
            same_bits(np.ascontiguousarray(made), as_type(np.ascontiguousarray(given), kinds[1]))


def test_a_converter_is_used_where_it_agrees() -> None:
    """What a framework makes of NaN and of numbers out of range does not count."""
    called: list[int] = []
    hidden: list[int] = []

    def saturating(source: Any, target: Any) -> None:
        called.append(source.size)
        most = np.float32(448)
        numbers = np.clip(np.nan_to_num(source, nan=448), -most, most)
        target[...] = as_type(numbers, target.dtype)

    def hiding(source: Any, target: Any) -> None:
        hidden.append(source.size)
        numbers = np.where(np.abs(source) <= 448, source, np.float32(0))
        target[...] = as_type(numbers, target.dtype)

    def truncating(source: Any, target: Any) -> None:
        cut = (source.view(np.uint32) & np.uint32(0xFFF0_0000)).view(np.float32)
        target[...] = as_type(cut, target.dtype)

    def unable(source: Any, target: Any) -> None:
        raise RuntimeError("not implemented")

    target = np.dtype(ml_dtypes.float8_e4m3fn)
    numbers = np.random.default_rng(3).standard_normal(600_000).astype(np.float32)
    numbers[[5, 300_000]] = np.nan, 1e9
    made = np.empty(numbers.shape, target)
    for each in unable, truncating, hiding, saturating:
        made[...] = 0
        convert.convert(numbers, made, converter=each)
        same_bits(made, as_type(numbers, target))
    assert sum(called) > numbers.size > sum(hidden)


@pytest.mark.parametrize("value", [np.nan, np.inf, 128.0, -129.0, -1e9])
def test_one_value_out_of_range_is_found_wherever_it_is(value: float) -> None:
    for at in (0, 200_000, 399_999):
        numbers = np.zeros(400_000, np.float32)
        numbers[at] = value
        with pytest.raises(errors.LossyCastError) as info:
            convert.convert(numbers, np.empty(numbers.shape, np.int8), "w", checked=True)
        assert info.value.tensor == "w"
        assert info.value.found == str(np.float64(value)) or str(value) in str(info.value)


FINITE = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("target", FINITE)
def test_floats_without_infinity_take_what_fits_and_no_more(source: str, target: Any) -> None:
    given = np.dtype(getattr(ml_dtypes, source, source))
    most = float(ml_dtypes.finfo(target).max)
    near = min(most, 224) if source == "float8_e5m2" else most
    for size, numbers in itertools.product((9, 400_000), (near, -near, np.nan, 0.0)):
        whole = np.full(size, numbers).astype(given)
        made = np.empty(size, target)
        convert.convert(whole, made, "w", checked=True)
        same_bits(made, as_type(whole, made.dtype))
        for wrong in (np.inf, -np.inf, 5e4 if most < 500 else np.inf):
            whole[size // 2] = wrong
            with pytest.raises(errors.LossyCastError, match=f"expected: -{most:g} to {most:g}"):
                convert.convert(whole, made, "w", checked=True)


@pytest.mark.parametrize("target", [each for each in DTYPES if each.kind in "iub"], ids=str)
@pytest.mark.parametrize("source", [each for each in DTYPES if each.kind in "fV"], ids=str)
def test_numbers_that_fit_integers(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    low, high = (0, 1) if target.kind == "b" else (-8 * (target.kind == "i"), 8)
    numbers = np.random.default_rng(4).integers(low, high, 50_000, endpoint=True).astype(source)
    made = np.empty(numbers.shape, target)
    convert.convert(numbers, made, checked=True)
    same_bits(made, as_type(numbers, target))
