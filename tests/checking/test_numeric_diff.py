"""How far numbers lie apart, against plain Python, number by number."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mfload import dtypes, packed
from mfload.checking import numeric_diff
from mfload.checking.numeric_diff import NumericDiff

NAMES = list(dtypes.TABLE)
REAL = [name for name in NAMES if name != "C64"]


def _numbers(dtype: Any, raw: bytes) -> list[Any]:
    """Python's own numbers: int, float or complex."""
    if dtype.kind == "bool":
        return [int(byte != 0) for byte in raw]
    count = len(raw) // dtype.nbytes * dtype.elements
    array = packed.unpack(np.frombuffer(raw, np.uint8), dtype.name, (count,))
    kind = {"int": int, "uint": int, "complex": complex}.get(dtype.kind, float)
    return [kind(number) for number in array]


def _reference(ours: list[Any], theirs: list[Any]) -> tuple[int, int, Any, Any]:
    """differing, nans, max_abs and max_rel, exact where numbers are finite."""
    differing = nans = 0
    most: Any = Fraction(0)
    share: Any = Fraction(0)
    for a, b in zip(ours, theirs, strict=True):
        if math.isnan(a) or math.isnan(b):
            alone = math.isnan(a) != math.isnan(b)
            differing, nans = differing + alone, nans + alone
        elif a != b:
            differing += 1
            if math.isinf(a) or math.isinf(b):
                most = share = math.inf
                continue
            gap = abs(Fraction(a) - Fraction(b))
            most = max(most, gap)
            share = max(share, gap / max(abs(Fraction(a)), abs(Fraction(b))))
    return differing, nans, most, share


def _near(found: float, exact: Any) -> bool:
    if exact == math.inf or exact > Fraction(np.finfo(np.float64).max):
        return found == math.inf
    return math.isclose(found, float(exact), rel_tol=1e-15, abs_tol=5e-324)


def _compare(left: str, raw_a: bytes, right: str, raw_b: bytes) -> NumericDiff:
    a, b = (np.frombuffer(raw, np.uint8) for raw in (raw_a, raw_b))
    return numeric_diff.between(dtypes.TABLE[left], a, dtypes.TABLE[right], b)


@st.composite
def _sides(draw: st.DrawFn) -> tuple[str, bytes, str, bytes]:
    left, right = draw(st.sampled_from(REAL)), draw(st.sampled_from(REAL))
    right = left if draw(st.booleans()) else right
    count = 4 * draw(st.integers(1, 6))
    raws: list[bytes] = []
    for name in (left, right):
        size = dtypes.TABLE[name].size_of((count,))
        assert size is not None
        raws.append(draw(st.binary(min_size=size, max_size=size)))
    if left == right and draw(st.booleans()):
        # Mostly the same, as checkpoints are.
        changed = bytearray(raws[0])
        changed[draw(st.integers(0, len(changed) - 1))] ^= 1 << draw(st.integers(0, 7))
        raws[1] = bytes(changed)
    return left, raws[0], right, raws[1]


def _pack(kind: Any, *values: Any) -> bytes:
    return np.array(values, kind).tobytes()


BIG = 2**53


@given(_sides())
@example(("I64", _pack(np.int64, BIG, -BIG), "I64", _pack(np.int64, BIG + 1, -BIG - 1)))
@example(("I64", _pack(np.int64, -(2**63)), "I64", _pack(np.int64, 2**63 - 1)))
@example(("I64", _pack(np.int64, -(2**63), 5), "U64", _pack(np.uint64, 2**64 - 1, 5)))
@example(("U64", _pack(np.uint64, 2**64 - 1), "I8", _pack(np.int8, -1)))
@example(("I64", _pack(np.int64, BIG + 1), "F64", _pack(np.float64, BIG)))
@example(("F32", _pack(np.float32, 0.5), "I64", _pack(np.int64, BIG + 1)))
@example(("F64", _pack(np.float64, 1.7e308), "F64", _pack(np.float64, -1.7e308)))
@example(("F64", _pack(np.float64, np.inf, 1), "F64", _pack(np.float64, np.inf, np.inf)))
@example(("F64", _pack(np.float64, np.inf, 0.0), "F64", _pack(np.float64, -np.inf, -0.0)))
@example(("F32", _pack(np.float32, np.nan, np.nan, 1), "F32", _pack(np.float32, np.nan, 1, 1)))
@example(("F64", _pack(np.float64, 5e-324), "F64", _pack(np.float64, -5e-324)))
@example(("BOOL", b"\0\1", "BOOL", b"\1\2"))
def test_against_exact_numbers(sides: tuple[str, bytes, str, bytes]) -> None:
    left, raw_a, right, raw_b = sides
    ours, theirs = _numbers(dtypes.TABLE[left], raw_a), _numbers(dtypes.TABLE[right], raw_b)
    differing, nans, most, share = _reference(ours, theirs)
    found = _compare(*sides)
    assert (found.differing, found.nans) == (differing, nans)
    assert _near(found.max_rel, share), (found, float(share))
    if all(dtypes.TABLE[name].kind in ("int", "uint", "bool") for name in (left, right)):
        assert found.max_abs == most
        assert isinstance(found.max_abs, int)
    else:
        assert _near(float(found.max_abs), most), (found, float(most))
    assert (found.at is None) == (differing == 0)
    if found.at is not None and found.max_abs not in (0, math.inf):
        gap = abs(Fraction(ours[found.at]) - Fraction(theirs[found.at]))
        assert math.isclose(gap, most, rel_tol=1e-15)
    # The same both ways.
    turned = _compare(right, raw_b, left, raw_a)
    assert turned[:4] == found[:4]


def test_complex_numbers() -> None:
    def gap(a: complex, b: complex) -> NumericDiff:
        return _compare("C64", _pack(np.complex64, a), "C64", _pack(np.complex64, b))

    assert gap(3 + 4j, 0) == NumericDiff(1, 0, 5.0, 1.0, 0)
    assert gap(1j, 1j) == NumericDiff()
    assert gap(complex(math.nan, 1), complex(2, math.nan)) == NumericDiff(max_abs=0.0)
    assert gap(complex(math.nan, 1), 1)[:4] == (1, 1, 0.0, 0.0)
    assert gap(complex(math.inf, 1), 1)[:4] == (1, 0, math.inf, math.inf)
    assert gap(complex(math.inf, 1), complex(math.inf, 2))[:4] == (1, 0, math.inf, math.inf)
    real = _compare("C64", _pack(np.complex64, 3 + 4j), "F32", _pack(np.float32, 3))
    assert real == NumericDiff(1, 0, 4.0, 0.8, 0)


@pytest.mark.parametrize("turned", [False, True])
def test_whole_numbers_against_complex_ones_are_exact(turned: bool) -> None:
    def gap(whole: int, other: complex) -> NumericDiff:
        sides = [("I64", _pack(np.int64, whole)), ("C64", _pack(np.complex64, other))]
        (left, a), (right, b) = reversed(sides) if turned else sides
        return _compare(left, a, right, b)

    big = 2**60
    assert gap(big, big) == NumericDiff(max_abs=0.0)
    found = gap(big + 1, big)
    assert (found.differing, found.max_abs, found.at) == (1, 1.0, 0)
    assert math.isclose(found.max_rel, 2**-60)
    assert gap(big, complex(big, 3))[:3] == (1, 0, 3.0)
    assert gap(big, complex(math.nan, 3))[:3] == (1, 1, 0.0)
    assert gap(3, 3 + 4j)[:3] == (1, 0, 4.0)


@pytest.mark.filterwarnings("error")
def test_signalling_nans_warn_of_nothing() -> None:
    raw = (0x7F800001).to_bytes(4, "little")
    assert _compare("F32", raw, "F32", _pack(np.float32, 1))[:2] == (1, 1)


def test_the_worst_place_over_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_diff, "_CHUNK", 8)
    a = np.zeros(100, np.float32)
    b = a.copy()
    b[[5, 50, 93]] = 1, -7, 2
    for name, kind in (("F32", np.float32), ("I16", np.int16)):
        raws = a.astype(kind).view(np.uint8), b.astype(kind).view(np.uint8)
        found = numeric_diff.between(
            dtypes.TABLE[name], raws[0], dtypes.TABLE[name], raws[1], first=1000
        )
        assert found == NumericDiff(3, 0, 7, 1.0, 1050)
    # Packed elements, four to a chunk's three bytes.
    codes = np.zeros(75, np.uint8)
    other = codes.copy()
    other[70] = 255
    f6 = dtypes.TABLE["F6_E3M2"]
    found = numeric_diff.between(f6, codes, f6, other)
    values = packed.unpack(other, "F6_E3M2", (100,)).astype(np.float64)
    assert found.at == int(np.abs(values).argmax())
    assert found.max_abs == np.abs(values).max()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6))
def test_parts_may_come_in_any_order(parts: list[tuple[int, int]]) -> None:
    some = [NumericDiff(n, 0, n, n / 4, at if n else None) for n, at in parts]
    forward = backward = NumericDiff()
    for each in some:
        forward = forward.joined(each)
    for each in reversed(some):
        backward = backward.joined(each)
    assert forward == backward
    most = max(gap.max_abs for gap in some)
    places = [gap.at for gap in some if gap.max_abs == most and gap.at is not None]
    assert forward.at == min(places, default=None)
