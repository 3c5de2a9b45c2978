"""`mfload.unpack`: every byte, against the definition of each number."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

import mfload
from mfload import dtypes, errors


def value(code: int, exponents: int, mantissas: int) -> float:
    """A small float by its definition in the OCP microscaling specification: no infinities."""
    sign = -1.0 if code >> (exponents + mantissas) else 1.0
    exponent = code >> mantissas & (1 << exponents) - 1
    fraction = (code & (1 << mantissas) - 1) / (1 << mantissas)
    bias = (1 << exponents - 1) - 1
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias)
    return sign * math.ldexp(1 + fraction, exponent - bias)


def test_every_byte_of_f4() -> None:
    stored = np.arange(256, dtype=np.uint8)
    found = mfload.unpack(stored, "F4", (512,))
    assert found.dtype == ml_dtypes.float4_e2m1fn
    wanted = [value(code, 2, 1) for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert found.astype(np.float32).tolist() == wanted
    assert np.signbit(found.astype(np.float32)).tolist() == [
        math.copysign(1, x) < 0 for x in wanted
    ]


@pytest.mark.parametrize(("dtype", "exponents"), [("F6_E2M3", 2), ("F6_E3M2", 3)])
def test_every_three_bytes_of_f6(dtype: str, exponents: int) -> None:
    # All 2^24 words of four elements, one after another.
    words = np.arange(1 << 24, dtype="<u4")
    stored = words.view(np.uint8).reshape(-1, 4)[:, :3]
    found = mfload.unpack(stored, dtype, (1 << 24, 4))
    assert found.dtype == np.dtype(getattr(ml_dtypes, dtypes.TABLE[dtype].aliases[0]))
    for place in range(4):
        assert np.array_equal(found.view(np.uint8)[:, place], words >> 6 * place & 63)
    first = found[:64, 0].astype(np.float32)
    assert first.tolist() == [value(code, exponents, 5 - exponents) for code in range(64)]


@given(raw=st.binary(min_size=0, max_size=60), dtype=st.sampled_from(["F4", "F6_E2M3", "F6_E3M2"]))
def test_elements_follow_each_other_bit_by_bit(raw: bytes, dtype: str) -> None:
    bits = {"F4": 4}.get(dtype, 6)
    raw = raw[: len(raw) // 3 * 3]
    number = int.from_bytes(raw, "little")
    count = len(raw) * 8 // bits
    wanted = [number >> bits * n & (1 << bits) - 1 for n in range(count)]
    found = mfload.unpack(np.frombuffer(raw, np.uint8), dtype, (count,))
    assert found.view(np.uint8).tolist() == wanted


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F4", (0,)), ("F4", (3, 0)), ("F6_E2M3", (0, 4)), ("U16", (0, 2))]
)
def test_nothing_unpacks_to_nothing(dtype: str, shape: tuple[int, ...]) -> None:
    assert mfload.unpack(np.empty(0, np.uint8), dtype, shape).shape == shape


@pytest.mark.parametrize("name", [n for n, row in dtypes.TABLE.items() if row.numpy is not None])
def test_bytes_of_whole_elements_are_viewed(name: str) -> None:
    row = dtypes.TABLE[name]
    stored = np.zeros((3, row.nbytes), np.uint8)
    found = mfload.unpack(stored, name, (3, 1))
    assert found.dtype == row.numpy
    assert found.shape == (3, 1)
    stored[1, 0] = 1
    assert found.view(np.uint8)[1, 0] == 1


def test_scalars_and_dtypes_by_other_names() -> None:
    assert mfload.unpack(np.array([1, 2], np.uint8), np.uint16, ()).item() == 513
    assert mfload.unpack(np.array([0x21], np.uint8), ml_dtypes.float4_e2m1fn, [2]).shape == (2,)
    rows = np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2]
    assert mfload.unpack(rows, "F4", (4, 6)).view(np.uint8)[1].tolist() == [6, 0, 8, 0, 10, 0]


@pytest.mark.parametrize(
    ("nbytes", "dtype", "shape"),
    [(3, "F4", (4,)), (4, "F6_E2M3", (4,)), (3, "F4", (3, 1)), (2, "F4", (-4,)), (8, "U16", (3,))],
)
def test_bytes_that_are_not_the_tensor(nbytes: int, dtype: str, shape: Any) -> None:
    with pytest.raises(errors.UsageError, match="not the bytes") as caught:
        mfload.unpack(np.zeros(nbytes, np.uint8), dtype, shape)
    assert f"{nbytes} bytes" in str(caught.value.found)


def test_unknown_dtype() -> None:
    with pytest.raises(errors.UsageError, match="unknown dtype"):
        mfload.unpack(np.zeros(4, np.uint8), "F5", (4,))
