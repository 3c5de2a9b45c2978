"""How far the numbers of two arrays lie apart. Pure.

The absolute difference of a and b is |a - b|; the relative one is |a - b| / max(|a|, |b|), so that
it is the same both ways: 0 where they are equal, 2 at most for numbers of either sign, and infinite
where one is infinite. NaN and NaN are no difference; NaN and a number are counted apart and enter
no maximum. Zeros of either sign are equal.

Floats of any width are compared as float64, which holds them all. Integers are compared as
integers, so that those beyond 2^53 are not mistaken for their neighbours; against a float or a
complex number, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mfload import packed
from mfload.dtypes import DType

# Elements that are looked at together: as float64 they stay in a processor's cache.
_CHUNK = 1 << 16
_EXACT = 1 << 53  # Integers up to here are float64s.

Number = int | float


class Gap(NamedTuple):
    """How far two runs of elements lie apart.

    Attributes:
        differing: Elements whose values differ, NaN against a number among them.
        nans: Elements that are NaN on one side alone.
        max_abs: Largest absolute difference; an int where both are integers.
        max_rel: Largest relative difference.
        at: Element with the largest absolute difference, None where none differs.
    """

    differing: int = 0
    nans: int = 0
    max_abs: Number = 0
    max_rel: float = 0.0
    at: int | None = None

    def joined(self, other: Gap) -> Gap:
        """Both together."""
        first = self if _rank(self) >= _rank(other) else other
        return Gap(
            self.differing + other.differing,
            self.nans + other.nans,
            first.max_abs,
            max(self.max_rel, other.max_rel),
            first.at,
        )


def _rank(gap: Gap) -> tuple[Number, bool, int]:
    """Larger first; where they are equal, whichever comes earlier."""
    return gap.max_abs, gap.at is not None, -(gap.at or 0)


def comparable(left: DType, right: DType) -> bool:
    """Whether there are numbers to compare."""
    return left.known and right.known


def between(left: DType, ours: Any, right: DType, theirs: Any, first: int = 0) -> Gap:
    """Compares elements.

    Args:
        left: The dtype of the one side.
        ours: Its bytes, uint8: whole blocks of elements.
        right: The dtype of the other.
        theirs: Its bytes, as many elements.
        first: Number of the first element.

    Returns:
        How far they lie apart.
    """
    gap = Gap()
    count = ours.size // left.nbytes * left.elements
    for start in range(0, count, _CHUNK):
        stop = min(count, start + _CHUNK)
        a, b = _bytes(left, ours, start, stop), _bytes(right, theirs, start, stop)
        # What is the same in every bit need not be understood.
        if left is not right or not np.array_equal(a, b):
            # A signalling NaN sets a flag wherever it is converted; it is no error here.
            with np.errstate(all="ignore"):
                found = _gap(_numbers(left, a), _numbers(right, b), first + start)
            gap = gap.joined(found)
    return gap


def _bytes(dtype: DType, data: Any, start: int, stop: int) -> Any:
    unit = dtype.elements
    return data[start // unit * dtype.nbytes : -(-stop // unit) * dtype.nbytes]


def _numbers(dtype: DType, data: Any) -> Any:
    """The elements as int64, uint64, float64 or complex128."""
    if dtype.kind == "bool":
        return (data != 0).astype(np.int64)
    count = data.size // dtype.nbytes * dtype.elements
    array = packed.unpack(data, dtype.name, (count,))
    if dtype.kind in ("int", "uint"):
        return array.astype(np.uint64 if dtype.name == "U64" else np.int64)
    return array.astype(np.complex128 if dtype.kind == "complex" else np.float64)


def _gap(a: Any, b: Any, first: int) -> Gap:
    integers = a.dtype.kind in "iu", b.dtype.kind in "iu"
    if all(integers):
        return _largest(*_integers(a, b), first)
    if any(integers):
        return _mixed(*((a, b) if integers[0] else (b, a)), first)
    kind = np.result_type(a, b)
    return _floats(a.astype(kind), b.astype(kind), first)


def _floats(a: Any, b: Any, first: int) -> Gap:
    """Numbers that may be NaN or infinite; complex ones are NaN where a part is."""
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    alone = nan_a != nan_b
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
    found = _largest(differ, gap, relative, first)
    nans = int(np.count_nonzero(alone))
    at = first + int(alone.argmax()) if nans and found.at is None else found.at
    return found._replace(differing=found.differing + nans, nans=nans, at=at)


def _integers(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Where they differ, by how much exactly, and relatively."""
    if a.dtype == b.dtype:
        above = a > b
        # In unsigned numbers that wrap around, the larger less the smaller is always right.
        wide_a, wide_b = a.view(np.uint64), b.view(np.uint64)
        gap = np.where(above, wide_a - wide_b, wide_b - wide_a)
        differ = a != b
    else:
        signed, unsigned = (a, b) if a.dtype.kind == "i" else (b, a)
        below = signed < 0
        wide = signed.view(np.uint64)
        gap = np.where(wide > unsigned, wide - unsigned, unsigned - wide)
        if below.any():
            # Such a difference may take 65 bits.
            gap = gap.astype(object)
            gap[below] = unsigned[below].astype(object) - signed[below].astype(object)
        differ = gap != 0
    size = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    return differ, gap, gap.astype(np.float64) / np.where(size == 0, 1, size)


def _mixed(whole: Any, other: Any, first: int) -> Gap:
    """Integers against floats, or complex numbers."""
    found = _floats(whole.astype(np.float64), other, first)
    rough = (np.abs(whole.astype(np.float64)) >= _EXACT) & np.isfinite(other)
    if not rough.any():
        return found
    # Beyond float64's integers Python's own numbers take over, for these alone.
    places = np.flatnonzero(rough)
    gaps = [_length(int(whole[n]) - int(other[n].real), other[n].imag) for n in places]
    sizes = [max(abs(int(whole[n])), float(abs(other[n]))) for n in places]
    rest = _floats(np.where(rough, 0, whole).astype(np.float64), np.where(rough, 0, other), first)
    worst = max(range(len(gaps)), key=lambda n: gaps[n])
    exact = Gap(
        sum(gap > 0 for gap in gaps),
        0,
        float(gaps[worst]),
        max(gap / size for gap, size in zip(gaps, sizes, strict=True)),
        first + int(places[worst]) if gaps[worst] else None,
    )
    return rest.joined(exact)


def _length(real: int, imaginary: float) -> Number:
    return math.hypot(real, imaginary) if imaginary else abs(real)


def _largest(differ: Any, gap: Any, relative: Any, first: int) -> Gap:
    count = int(np.count_nonzero(differ))
    if not count:
        return Gap(max_abs=0 if gap.dtype.kind in "uiO" else 0.0)
    at = int(gap.argmax())
    most = gap[at]
    value = int(most) if gap.dtype.kind in "uiO" else float(most)
    return Gap(count, 0, value, float(relative.max()), first + at)
