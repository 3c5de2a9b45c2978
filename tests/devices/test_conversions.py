"""The numbers that are tried find wrong roundings of every kind, and NaN alone may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices.fake import FakeDevice

from mfload.cuda import conversions
from mfload.dtypes import TABLE

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")


def through(middle: Any) -> Callable[[Any, Any], Any]:
    """Rounds twice."""
    return lambda given, target: given.astype(middle).astype(target)


def cut(given: Any, target: Any) -> Any:
    """Rounds towards zero."""
    wide = given.astype("f8")
    made = wide.astype(target)
    back = np.where(made == 0, made, np.nextafter(made, target.type(0)))
    return np.where(np.abs(made.astype("f8")) > np.abs(wide), back, made).astype(target)


def flushed(given: Any, target: Any) -> Any:
    """Takes subnormals for zero."""
    small = np.abs(given) < np.finfo(given.dtype).tiny
    return np.where(small, np.zeros(1, given.dtype), given).astype(target)


def signless(given: Any, target: Any) -> Any:
    """Loses the sign of zero."""
    return np.where(given == 0, np.zeros(1, given.dtype), given).astype(target)


def clipped(given: Any, target: Any) -> Any:
    """Makes the largest number of what is infinite."""
    made = given.astype(target)
    largest = np.finfo(target).max
    return np.where(np.isinf(made), np.copysign(largest, made), made).astype(target)


WRONG = [
    (F64, F16, through(F32)),
    (F64, F32, cut),
    (F32, F16, cut),
    (F32, F16, flushed),
    (F32, F64, flushed),
    (F64, F32, flushed),
    (F32, F16, signless),
    (F16, F32, signless),
    (F32, F16, clipped),
    (np.dtype("i8"), F32, through(F64)),
    (np.dtype("u8"), F64, through("i8")),
    (np.dtype("i8"), np.dtype("i4"), through(F64)),
    (np.dtype("u4"), F32, through("i4")),
]


@pytest.mark.parametrize(("source", "target", "wrong"), WRONG)
def test_wrong_kernels_are_found(source: Any, target: Any, wrong: Any) -> None:
    given = conversions.numbers(source)
    with np.errstate(all="ignore"):
        assert not conversions.same(wrong(given, target), given.astype(target))


@pytest.mark.parametrize("row", [row for row in TABLE.values() if row.numpy is not None], ids=str)
def test_numbers_are_of_their_type(row: Any) -> None:
    found = conversions.numbers(row.numpy)
    assert found.dtype == row.numpy
    if row.nbytes <= 2 and row.name != "BOOL":
        assert len(np.unique(found.view(f"u{row.nbytes}"))) == 1 << row.bits


@pytest.mark.parametrize("dtype", [F16, F32, F64, BF16])
def test_which_nan_is_nobodys_business(dtype: Any) -> None:
    one = np.array([1, np.nan, -0.0], dtype)
    bits = f"u{dtype.itemsize}"
    other = one.copy()
    other.view(bits)[1] ^= 1
    assert conversions.same(one, other)
    for place, value in ((0, np.nan), (1, 1), (2, 0)):
        other = one.copy()
        other[place] = value
        assert not conversions.same(one, other)
        assert not conversions.same(other, one)


def test_a_device_without_memory_says_no(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(total=1000)
    with caplog.at_level("INFO", "mfload"):
        assert not conversions.agrees(device, F32, F16)
    assert "fake:0 does not convert float32 to float16" in caplog.text
    device.assert_clean()


@pytest.mark.parametrize("verb", ["pin", "stream", "copy_in", "convert", "copy_out"])
def test_whatever_fails_is_a_no_and_leaves_nothing(verb: str) -> None:
    device = FakeDevice(fail={verb: 1})
    assert not conversions.agrees(device, F32, F16)
    device.assert_clean()
    assert conversions.agrees(device, F32, F16)
    device.assert_clean()
