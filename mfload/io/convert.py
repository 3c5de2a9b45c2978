"""Conversions of numbers as they land: the bits of NumPy's `astype` in a fraction of its time.

NumPy and ml_dtypes convert floats of 8 and 16 bits one by one. Here all that has up to 16 bits is
looked up in a table of what `astype` makes of it, and float32 is rounded by arithmetic on whole
arrays; both block by block, so that what is at hand stays in the processor's cache. A framework
that is loaded may have faster loops: they are used where a trial shows the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mfload import errors

BLOCK = 1 << 15
"""Elements that are converted at once."""

Converter = Callable[[Any, Any], None]
"""Fills an array, its second argument, with the numbers of another."""

_LARGE = 1 << 17  # The same, if a block takes no memory beside it.
_FEW = 1 << 13  # What has fewer elements is converted before a kernel is prepared.
_EXPONENT = np.uint32(0x7F80_0000)
_FRACTION_BITS = 23
_FLAGS: Any = ["external_loop", "buffered"]
_OPERANDS: Any = [["readonly", "contig", "aligned"], ["writeonly", "contig", "aligned"]]


def convert(
    source: Any,
    target: Any,
    tensor: str | None = None,
    *,
    checked: bool = False,
    converters: Sequence[Converter] = (),
) -> None:
    """Fills an array with the numbers of another one of its shape.

    `converters` are loops of frameworks, for arrays in C order. If `checked`, a number that an
    integer target can't hold, or a fraction that is to become a bool, raises LossyCastError.
    """
    # Overflow to infinity or NaN is what a narrower float means, and warns in NumPy.
    with np.errstate(all="ignore"):
        pair = source.dtype, target.dtype
        worth = source.size >= _FEW and source.dtype.isnative
        if worth and source.flags.carray and target.flags.carray:
            for converter in converters:
                if _agrees(converter, *pair):
                    _lent(converter, source.reshape(-1), target.reshape(-1))
                    return
        kernel = _kernel(*pair) if worth else None
        checked = checked and target.dtype.kind in "iub" and source.size > 0
        if kernel is None and not checked:
            _as_type(source, target)
            return
        size = BLOCK if kernel else _LARGE
        blocks: Any = np.nditer([source, target], _FLAGS, _OPERANDS, buffersize=size)
        with blocks:
            for given, made in blocks:
                if checked:
                    _check_range(given, target.dtype, tensor)
                (kernel or _as_type)(given, made)


def _as_type(source: Any, target: Any) -> None:
    np.copyto(target, source, casting="unsafe")


def _kernel(source: np.dtype[Any], target: np.dtype[Any]) -> Converter | None:
    """What converts a block, in one thread; None if `astype` is as fast."""
    if source == np.float32:
        return _Rounding(target) if target.name in _ROUNDED else None
    eight = any(each.itemsize == 1 and each.kind in "fV" for each in (source, target))
    if source.itemsize > 2 or not (eight or source == np.float16):
        return None
    table, index = _table(source, target), np.dtype(f"u{source.itemsize}")

    def look_up(given: Any, made: Any) -> None:
        np.take(table, given.view(index), out=made, mode="wrap")

    return look_up


@functools.cache
def _table(source: np.dtype[Any], target: np.dtype[Any]) -> Any:
    """What each value of a dtype becomes, by its bits."""
    return _every(source).astype(target)


def _every(dtype: np.dtype[Any]) -> Any:
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


# Floats whose sign is one bit, whatever the number. To bfloat16 ml_dtypes is as fast.
_ROUNDED = ("float16", "float8_e4m3fn", "float8_e5m2")


class _Rounding:
    """Rounds float32 to a narrower float, to the nearest, ties to even.

    To |x| a power of two is added, so large that the last bit of the sum is worth what the last bit
    of the narrower float is worth at x. So the sum is rounded as the narrower float is, subnormal
    numbers included; the bits of its fraction, added to the shifted exponent, are the result's.
    """

    def __init__(self, target: np.dtype[Any]) -> None:
        kept, least, self._most = _float(target)
        dropped, width = _FRACTION_BITS - kept, 8 * target.itemsize
        self._dropped, self._bits = np.uint32(dropped), np.dtype(f"u{target.itemsize}")
        self._sign = self._bits.type(1 << width - 1)
        # What is to be subtracted from the exponent is in the fraction of the power, modulo the
        # width: it is even, so ties stay what they are.
        first = (int(least.view(np.uint32)) >> _FRACTION_BITS) + dropped
        self._raise = np.uint32((dropped << _FRACTION_BITS) + (-(first << kept) % (1 << width)))
        # NumPy's maximum of two arrays takes half the time of that of an array and a number.
        self._least = np.full(BLOCK, least)
        self._sum, self._power = np.empty((2, BLOCK), np.float32)
        self._signs, self._negative = np.empty(BLOCK, self._bits), np.empty(BLOCK, np.bool_)

    def __call__(self, given: Any, made: Any) -> None:
        part = slice(given.size)
        total, power = self._sum[part], self._power[part]
        np.abs(given, out=total)
        if not total.max() <= self._most:  # NaN compares as false.
            _as_type(given, made)
            return
        np.maximum(total, self._least[part], out=power)
        bits, exponent = total.view(np.uint32), power.view(np.uint32)
        np.bitwise_and(exponent, _EXPONENT, out=exponent)
        np.add(exponent, self._raise, out=exponent)
        np.add(total, power, out=total)
        np.right_shift(bits, self._dropped, out=exponent)
        np.add(bits, exponent, out=bits)
        made = made.view(self._bits)
        np.copyto(made, bits, casting="unsafe")
        signs, negative = self._signs[part], self._negative[part]
        np.signbit(given, out=negative)
        np.multiply(negative.view(np.uint8), self._sign, out=signs)
        np.bitwise_or(made, signs, out=made)


@functools.cache
def _float(dtype: np.dtype[Any]) -> tuple[int, Any, float]:
    """Bits of the fraction, least normal number, and a bound below which nothing overflows.

    The bound lies a quarter of the last bit above the largest number, to which it rounds.
    """
    import ml_dtypes

    info = ml_dtypes.finfo(dtype)
    kept = int(info.nmant)
    return (
        kept,
        np.array(info.smallest_normal, np.float32),
        float(info.max) * (1 + 0.5 ** (kept + 2)),
    )


def _lent(converter: Converter, source: Any, target: Any) -> None:
    """Converts with a framework's loops what it converts as NumPy does.

    Frameworks differ in the NaN that they make, and in what they make of numbers out of range.
    """
    narrows = source.dtype == np.float32
    most = _float(target.dtype)[2] if narrows else np.inf
    for start in range(0, source.size, _LARGE):
        given, made = source[start : start + _LARGE], target[start : start + _LARGE]
        try:
            converter(given, made)
        except RuntimeError:  # Not in this thread, or not now.
            _as_type(given, made)
            continue
        wide = given if narrows else made
        if not (-most <= wide.min() and wide.max() <= most):  # NaN compares as false.
            _as_type(given, made)


@functools.cache
def _agrees(converter: Converter, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether the results are those of `astype`, except of NaN and numbers out of range.

    Tried are all numbers of 16 bits; of float32 a spread, with those halfway between two narrower
    floats and their neighbours.
    """
    if source == np.float16 and target == np.float32:
        given = _every(source)
    elif source == np.float32 and target.name in (*_ROUNDED, "float8_e4m3fnuz", "float8_e5m2fnuz"):
        chance = np.random.default_rng(0)
        bits = chance.integers(0, 1 << 32, 1 << 13, np.uint32)
        cleared = chance.integers(0, _FRACTION_BITS, bits.size, np.uint32)
        halves = bits >> cleared << cleared
        given = np.concatenate([bits, halves, halves + 1, halves - 1]).view(np.float32)
        given = given[np.abs(given) <= _float(target)[2]]
    else:
        return False
    wanted = given.astype(target)
    numbers = wanted == wanted  # NaN is not equal to itself.
    given, wanted = given[numbers], wanted[numbers]
    made = np.empty_like(wanted)
    try:
        converter(given, made)
    except (AttributeError, RuntimeError):  # An older version has no such type, or no such loop.
        return False
    return made.tobytes() == wanted.tobytes()


def _check_range(source: Any, target: np.dtype[Any], tensor: str | None) -> None:
    """Stops a conversion to integers that would wrap, and of fractions to bool."""
    low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
    wrong: list[Any]
    if source.dtype.kind in "iub":
        wrong = [each for each in (source.min(), source.max()) if not low <= int(each) <= high]
    else:
        wide = source.astype(np.float64 if source.itemsize > 4 else np.float32, copy=False)
        # If one is NaN, the least and the greatest are.
        ends = wide if target.kind == "b" else np.array([wide.min(), wide.max()], np.float64)
        whole = np.trunc(ends)
        # As a float `high` may be the number above. NaN compares as false.
        fits = (whole >= low) & (whole < float(high + 1))
        fits &= (whole == ends) | (target.kind != "b")
        wrong = list(ends[~fits])
    if wrong:
        raise errors.LossyCastError(
            "a value does not fit the dtype asked for",
            tensor=tensor,
            expected=f"{low} to {high} for {target}",
            found=wrong[0],
        )
