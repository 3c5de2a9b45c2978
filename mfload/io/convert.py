"""Conversions of numbers as they land: the bits of NumPy's `astype` in a fraction of its time.

NumPy and ml_dtypes convert floats of 8 and 16 bits one by one. Here all that has up to 16 bits is
looked up in a table of what `astype` makes of it, and float32 is rounded by arithmetic on whole
arrays; both block by block, so that what is at hand stays in the processor's cache. A framework
that is loaded may have faster loops: they are used where a trial shows the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mfload import dtypes, errors

BLOCK = 1 << 16
"""Elements that are converted at once: enough that readers seldom wait for the interpreter."""

Converter = Callable[[Any, Any], bool | None]
"""Fills an array, its second argument, with the numbers of another; True if all were in range."""

_LARGE = 1 << 18  # The same, where the arithmetic takes no memory of its own.
_LENT = 1 << 19  # The same, for a framework's loop.
_FEW = 1 << 13  # What has fewer elements is converted before a kernel is prepared.
_EXPONENT = np.uint32(0x7F80_0000)
_FRACTION_BITS = 23
_WIDE = {name: row.wide.numpy_name for name, row in dtypes.NARROW.items()}
_FLAGS: Any = ["external_loop", "buffered"]
_OPERANDS: Any = [["readonly", "contig", "aligned"], ["writeonly", "contig", "aligned"]]


def convert(
    source: Any,
    target: Any,
    tensor: str | None = None,
    *,
    checked: bool = False,
    converter: Converter | None = None,
) -> None:
    """Fills an array with the numbers of another one of its shape.

    `converter` is the loop of a framework, for arrays in C order. If `checked`, a number that an
    integer target or a float without infinity can't hold, or a fraction that is to become a bool,
    raises LossyCastError.
    """
    wanted, source, target = target.dtype, _plain(source), _plain(target)
    # Overflow to infinity is what a narrower float means, and warns in NumPy.
    with np.errstate(all="ignore"):
        worth = source.size >= _FEW and source.dtype.isnative
        plain = source.flags.carray and target.flags.carray
        lent = converter if plain else None
        kernel = _kernel(source.dtype, target.dtype, lent) if worth else None
        checked = checked and source.size > 0
        ranged = checked and target.dtype.kind in "iub"
        finite = checked and target.dtype.name in _FINITE
        if kernel is None and not ranged and not finite:
            _as_type(source, target)
            return
        size = BLOCK if isinstance(kernel, _Rounding) else _LENT if lent else _LARGE
        for given, made in _blocks(source, target, plain, size):
            if ranged:
                _check_range(given, wanted, tensor)
            moderate = (kernel or _as_type)(given, made)
            if finite and not moderate:
                _check_overflow(given, made, tensor)


def _plain(array: Any) -> Any:
    """The array; one of `dtypes.NARROW` as the 8-bit integers that its bytes are as well."""
    wide = _WIDE.get(array.dtype.name)
    return array if wide is None else array.view(wide)


def _blocks(source: Any, target: Any, plain: bool, size: int) -> Iterator[tuple[Any, Any]]:
    """Contiguous parts; of arrays that are not in C order themselves, through NumPy's buffers."""
    if plain:
        source, target = source.reshape(-1), target.reshape(-1)
        for start in range(0, source.size, size):
            yield source[start : start + size], target[start : start + size]
        return
    buffered: Any = np.nditer([source, target], _FLAGS, _OPERANDS, buffersize=size)
    with buffered:
        yield from buffered


def _as_type(source: Any, target: Any) -> None:
    np.copyto(target, source, casting="unsafe")


@functools.cache
def _kernel(
    source: np.dtype[Any], target: np.dtype[Any], converter: Converter | None
) -> Converter | None:
    """What converts a block, in one thread; None if `astype` is as fast."""
    if converter is not None and _agrees(converter, source, target):
        return functools.partial(_lent, converter, *_range(source, target))
    if source == np.float32:
        return _Rounding(target) if target.name in _ROUNDED else None
    eight = any(each.itemsize == 1 and each.kind in "fV" for each in (source, target))
    if source.itemsize > 2 or not (eight or source == np.float16):
        return None
    table, index = _every(source).astype(target), np.dtype(f"u{source.itemsize}")

    def look_up(given: Any, made: Any) -> None:
        np.take(table, given.view(index), out=made, mode="wrap")

    return look_up


def _every(dtype: np.dtype[Any]) -> Any:
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


# Floats whose sign is one bit, whatever the number. To bfloat16 ml_dtypes is as fast.
_ROUNDED = ("float16", "float8_e4m3fn", "float8_e5m2")


# Floats without infinity, and the bits of their NaN but for the sign; -0 is that of some.
_FINITE = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0, "float8_e5m2fnuz": 0}


class _Scratch(threading.local):
    """Memory of each thread's own: the kernel would have to clear new one for each block."""

    def __init__(self) -> None:
        self.words = np.empty((2, BLOCK), np.uint32)


_SCRATCH = _Scratch()


class _Rounding:
    """Rounds float32 to a narrower float, to the nearest, ties to even.

    To |x| a power of two is added, so large that the last bit of the sum is worth what the last bit
    of the narrower float is worth at x. So the sum is rounded as the narrower float is, subnormal
    numbers included; the bits of its fraction, added to the shifted exponent, are the result's.
    """

    def __init__(self, target: np.dtype[Any]) -> None:
        kept, least, self._most, _ = _float(target)
        dropped, width = _FRACTION_BITS - kept, 8 * target.itemsize
        self._dropped, self._bits = np.uint32(dropped), np.dtype(f"u{target.itemsize}")
        self._sign = self._bits.type(1 << width - 1)
        # What is to be subtracted from the exponent is in the fraction of the power, modulo the
        # width: it is even, so ties stay what they are.
        first = (int(least.view(np.uint32)) >> _FRACTION_BITS) + dropped
        self._raise = np.uint32((dropped << _FRACTION_BITS) + (-(first << kept) % (1 << width)))
        # NumPy's maximum of two arrays takes half the time of that of an array and a number.
        self._least = np.full(BLOCK, least)

    def __call__(self, given: Any, made: Any) -> bool:
        bits, exponent = _SCRATCH.words[:, : given.size]
        total, power = bits.view(np.float32), exponent.view(np.float32)
        np.abs(given, out=total)
        if not total.max() <= self._most:  # NaN compares as false.
            _as_type(given, made)
            return False
        np.maximum(total, self._least[: given.size], out=power)
        np.bitwise_and(exponent, _EXPONENT, out=exponent)
        np.add(exponent, self._raise, out=exponent)
        np.add(total, power, out=total)
        np.right_shift(bits, self._dropped, out=exponent)
        np.add(bits, exponent, out=bits)
        made = made.view(self._bits)
        np.copyto(made, bits, casting="unsafe")
        negative, signs = bits.view(np.bool_)[: given.size], exponent.view(made.dtype)[: given.size]
        np.signbit(given, out=negative)
        np.multiply(negative.view(np.uint8), self._sign, out=signs)
        np.bitwise_or(made, signs, out=made)
        return True


@functools.cache
def _float(dtype: np.dtype[Any]) -> tuple[int, Any, float, int]:
    """Bits of the fraction, least normal number, and where overflow begins.

    That is a bound a quarter of the last bit above the largest number, to which it rounds, and the
    bits of that number; 0 if the sign is more than one bit of its own.
    """
    import ml_dtypes

    info = ml_dtypes.finfo(dtype)
    kept = int(info.nmant)
    most = float(info.max) * (1 + 0.5 ** (kept + 2))
    largest = int(np.array(info.max, dtype).view(f"u{dtype.itemsize}")[()])
    largest = largest if dtype.name in _ROUNDED else 0
    return kept, np.array(info.smallest_normal, np.float32), most, largest


def _range(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[float, int]:
    """Up to where a framework converts as NumPy does: a bound, and bits of the narrower float."""
    if source == np.float32:
        return _float(target)[2:]
    return np.inf, _float(source)[3]


def _lent(converter: Converter, most: float, largest: int, given: Any, made: Any) -> bool:
    """Converts with a framework's loop what it converts as NumPy does.

    Frameworks differ in the NaN that they make, and in what they make of numbers out of range.
    """
    with contextlib.suppress(RuntimeError):  # Not in this thread, or not now.
        converter(given, made)
        narrow, wide = sorted((given, made), key=lambda each: each.itemsize)
        # Fewer bytes are looked at first. NaN compares as false.
        if _moderate(narrow, largest) or (-most <= wide.min() and wide.max() <= most):
            return True
    _as_type(given, made)
    return False


def _moderate(numbers: Any, largest: int) -> bool:
    """Whether no number's bits, but for the sign, are those of the largest one or above."""
    width = numbers.itemsize
    most, below = numbers.view(f"i{width}").max(), numbers.view(f"u{width}").max()
    return bool(most < largest and below < largest + (1 << 8 * width - 1))


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
    else:
        return False
    most, largest = _range(source, target)
    wanted = given.astype(target)
    made = np.empty_like(wanted)
    try:
        converter(given, made)
    except (AttributeError, RuntimeError):  # An older version has no such type, or no such loop.
        return False
    numbers = (np.abs(given) <= most) & (wanted == wanted)  # NaN is not equal to itself.
    if source == np.float32:  # Whatever is out of range must show in the narrower float.
        bits = made.view(f"u{made.itemsize}")[~numbers]
        if np.any(bits & ((1 << 8 * bits.itemsize - 1) - 1) < largest):
            return False
    return made[numbers].tobytes() == wanted[numbers].tobytes()


def _check_overflow(source: Any, made: Any, tensor: str | None) -> None:
    """Stops a conversion that made NaN of numbers, as those to floats without infinity do."""
    import ml_dtypes

    nan = _FINITE[made.dtype.name]
    if _moderate(made, nan) if nan else made.view(np.int8).min() > -128:
        return
    wrong = source[np.isnan(made) & ~np.isnan(source)]
    if wrong.size:
        most = float(ml_dtypes.finfo(made.dtype).max)
        raise errors.LossyCastError(
            "a value does not fit the dtype asked for",
            tensor=tensor,
            expected=f"{-most:g} to {most:g} for {made.dtype}, or a dtype that has infinity",
            found=float(wrong[0]),
        )


def _check_range(source: Any, target: np.dtype[Any], tensor: str | None) -> None:
    """Stops a conversion to integers that would wrap, and of fractions to bool."""
    if source.dtype.kind not in "iub":
        source = source.astype(np.float64 if source.itemsize > 4 else np.float32, copy=False)
    low, high = 0, 1
    if target.kind != "b":
        import ml_dtypes

        low, high = ml_dtypes.iinfo(target).min, ml_dtypes.iinfo(target).max
    if target.kind == "b":
        wrong = source[(source != low) & (source != high)].tolist()
    else:  # Where one is NaN, both ends are. Python compares integers with floats exactly.
        ends = source.min().item(), source.max().item()
        wrong = [each for each in ends if not low - 1 < each < high + 1]
    if wrong:
        raise errors.LossyCastError(
            "a value does not fit the dtype asked for",
            tensor=tensor,
            expected=f"{low} to {high} for {target}",
            found=wrong[0],
        )
