"""How far the numbers of two arrays differ. Pure.

The absolute difference of a and b is |a - b|; the relative one is |a - b| / max(|a|, |b|), so that
it is the same both ways: 0 if they are equal, at most 2 for finite numbers, and infinite if one
is infinite. NaN against NaN is no difference; NaN against a number is counted apart and enters no
maximum. Zeros of either sign are equal.

With a tolerance (rtol, atol), elements differ if they are further apart than atol + rtol * |b|, as
for `numpy.isclose(a, b, rtol, atol, equal_nan=True)`: infinities are equal to themselves alone.

Floats are compared as float64, which holds all of them. Integers are compared as integers, so that
those beyond 2^53 are not mistaken for their neighbours, also against a float or a complex number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mfload import packed
from mfload.dtypes import DType

# Elements that are compared at once: as float64 they stay in a processor's cache.
_CHUNK = 1 << 16
_EXACT = 1 << 53  # All integers up to here are float64s.


class NumericDiff(NamedTuple):
    """How far two runs of elements differ; `at` is the element with the largest difference."""

    differing: int = 0  # By more than the tolerance; NaN against a number included.
    nans: int = 0  # On one side alone.
    max_abs: int | float = 0  # An int between integers.
    max_rel: float = 0.0
    at: int | None = None

    def joined(self, other: NumericDiff) -> NumericDiff:
        """Both together; of equal maxima, the earlier place counts."""
        worst = max(self, other, key=lambda x: (x.max_abs, x.at is not None, -(x.at or 0)))
        differing, nans = self.differing + other.differing, self.nans + other.nans
        max_rel = max(self.max_rel, other.max_rel)
        return NumericDiff(differing, nans, worst.max_abs, max_rel, worst.at)


SAME = NumericDiff()
Tolerance = tuple[float, float]
"""rtol and atol."""


def between(
    left: DType,
    ours: Any,
    right: DType,
    theirs: Any,
    first: int = 0,
    tolerance: Tolerance = (0.0, 0.0),
) -> NumericDiff:
    """Compares as many elements of two known dtypes, given as bytes, counted from `first`."""
    total = SAME
    count = ours.size * 8 // left.bits
    for start in range(0, count, _CHUNK):
        stop = min(count, start + _CHUNK)
        a = ours[start * left.bits // 8 : stop * left.bits // 8]
        b = theirs[start * right.bits // 8 : stop * right.bits // 8]
        # Equal bytes need not be converted.
        if left is not right or not np.array_equal(a, b):
            # A signalling NaN sets a flag wherever it is converted; it is no error here.
            with np.errstate(all="ignore"):
                found = _reduced(_numbers(left, a), _numbers(right, b), first + start, tolerance)
            total = total.joined(found)
    return total


def _numbers(dtype: DType, data: Any) -> Any:
    """The elements as int64, uint64, float64 or complex128."""
    if dtype.kind == "bool":
        return (data != 0).astype(np.int64)
    array = packed.unpack(data, dtype.name, (data.size * 8 // dtype.bits,))
    if dtype.kind in ("int", "uint"):
        return array.astype(np.uint64 if dtype.name == "U64" else np.int64)
    return array.astype(np.complex128 if dtype.kind == "complex" else np.float64)


def _reduced(a: Any, b: Any, first: int, tolerance: Tolerance) -> NumericDiff:
    whole = [side.dtype.kind in "iu" for side in (a, b)]
    nans = np.zeros(a.shape, bool)
    if all(whole):
        gap, relative = _between_integers(a, b)
    else:
        kind = np.result_type(a, b, np.float64)
        gap, relative, nans = _between_floats(a.astype(kind), b.astype(kind))
        if any(whole):
            _correct(gap, relative, *((a, b) if whole[0] else (b, a)))
    most, count = gap.max(), int(np.count_nonzero(nans))
    differ = gap != 0
    at = first + int(gap.argmax() if most else nans.argmax()) if most or count else None
    rtol, atol = tolerance
    if rtol or atol:
        differ &= ~(np.isfinite(b) & (gap <= atol + rtol * np.abs(b.astype(np.complex128))))
    differing = int(np.count_nonzero(differ)) + count
    largest = int(most) if all(whole) else float(most)
    return NumericDiff(differing, count, largest, float(relative.max()), at)


def _between_floats(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Absolute and relative differences, and where one side alone is NaN."""
    nan_a, nan_b = np.isnan(a), np.isnan(b)  # A complex number is NaN if a part of it is.
    differ = (a != b) & ~nan_a & ~nan_b
    gap = np.abs(np.where(differ, a - b, 0))
    # Infinity less infinity of another sign or direction is as far as can be.
    gap[np.isnan(gap)] = np.inf
    size = np.maximum(np.abs(a), np.abs(b))
    relative = np.divide(gap, size, out=np.zeros_like(gap), where=differ & (size != 0))
    relative[np.isinf(gap) & np.isinf(size)] = np.inf
    # The difference of two large numbers may overflow; their ratio does not.
    over = np.isinf(gap) & np.isfinite(size)
    relative[over] = np.abs(a[over] / size[over] - b[over] / size[over])
    return gap, relative, nan_a != nan_b


def _between_integers(a: Any, b: Any) -> tuple[Any, Any]:
    """Absolute differences, exact, and relative ones."""
    if a.dtype == b.dtype:
        # In unsigned numbers that wrap around, the larger less the smaller is always right.
        wide_a, wide_b = a.view(np.uint64), b.view(np.uint64)
        gap = np.where(a > b, wide_a - wide_b, wide_b - wide_a)
    else:
        gap = np.abs(a.astype(object) - b.astype(object))  # May take 65 bits.
    size = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    return gap, gap.astype(np.float64) / np.where(size == 0, 1, size)


def _correct(gap: Any, relative: Any, whole: Any, other: Any) -> None:
    """Puts right what float64 makes of integers beyond 2^53, with Python's own numbers."""
    rough = (np.abs(whole.astype(np.float64)) >= _EXACT) & np.isfinite(other)
    for n in np.flatnonzero(rough):
        exact = abs(int(whole[n]) - int(other[n].real))
        gap[n] = math.hypot(exact, other[n].imag) if other[n].imag else exact
        relative[n] = gap[n] / max(abs(int(whole[n])), float(abs(other[n])))
