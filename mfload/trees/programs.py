"""Programs: how arrays that were read become a box of a target. Pure.

A program is a small expression with a meaning of its own: it knows shapes and relative
positions, never where in a tensor a box lies. Boxes that are made alike, on whatever device,
have equal programs, and one compiled function serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes
from mfload.index import Box

# Dataclasses and not named tuples: two kinds of step with equal fields must not be equal.


@dataclass(frozen=True, slots=True)
class Take:
    """An array that was read.

    Attributes:
        number: Which one.
        dtype: Name of the dtype it is converted to first, None for none.
    """

    number: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Sliced:
    """A box, counted from the start of what is sliced."""

    of: Program
    box: Box


@dataclass(frozen=True, slots=True)
class Transposed:
    """Dims in another order."""

    of: Program
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements in another shape."""

    of: Program
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Arrays one after the other along a dim."""

    parts: tuple[Program, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """Arrays that are made alike, as new dims.

    Attributes:
        each: What is done with each: its `Take`s count from the first of its own arrays.
        width: How many arrays each is made of.
        counts: Sizes of the new dims; row-major, as the arrays come.
        axes: Where the new dims lie in the result.
    """

    each: Program
    width: int
    counts: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Converted:
    """Numbers scaled, then rounded once.

    Attributes:
        of: What is converted.
        scale: The factor, None for none.
        between: Name of the dtype the product is computed in.
        dtype: Name of the dtype of the result.
    """

    of: Program
    scale: float | None
    between: str
    dtype: str


Program = Take | Sliced | Transposed | Reshaped | Joined | Stacked | Converted


def evaluate(program: Program, arrays: Sequence[Any], xp: Any) -> Any:
    """The array that a program makes.

    With JAX, 64-bit results need 64-bit types enabled, as everywhere.

    Args:
        program: What to do.
        arrays: What was read, in the order of `Pull.sources`.
        xp: `numpy` or `jax.numpy`; with the latter it may run under `jit`.

    Returns:
        The box of the target.
    """
    return _value(program, lambda take: _cast(arrays[take.number], take.dtype), 0, arrays, xp)


def _value(
    program: Program, fetch: Callable[[Take], Any], lead: int, arrays: Sequence[Any], xp: Any
) -> Any:
    """The value of a program on arrays that all have `lead` more dims in front."""

    def inner(of: Program) -> Any:
        return _value(of, fetch, lead, arrays, xp)

    match program:
        case Take():
            return fetch(program)
        case Sliced(of, box):
            index = (slice(None),) * lead + tuple(slice(a, b) for a, b in box)
            return inner(of)[index]
        case Transposed(of, axes):
            return xp.transpose(inner(of), (*range(lead), *(axis + lead for axis in axes)))
        case Reshaped(of, shape):
            value = inner(of)
            return xp.reshape(value, (*value.shape[:lead], *shape))
        case Joined(parts, axis):
            return xp.concatenate([inner(part) for part in parts], axis=axis + lead)
        case Stacked():
            return _stacked(program, arrays, xp)
        case Converted(of, scale, between, dtype):
            value = inner(of)
            if scale is not None:
                value = _cast(value, between)
                value = value * xp.asarray(scale, dtype=value.dtype)
            return _cast(value, dtype)


def _stacked(program: Stacked, arrays: Sequence[Any], xp: Any) -> Any:
    """All arrays are stacked first, and what is done with each is done with all at once."""
    count = math.prod(program.counts)

    def fetch(take: Take) -> Any:
        numbers = range(take.number, count * program.width, program.width)
        return xp.stack([_cast(arrays[number], take.dtype) for number in numbers])

    value = _value(program.each, fetch, 1, arrays, xp)
    value = xp.reshape(value, (*program.counts, *value.shape[1:]))
    if program.axes == tuple(range(len(program.axes))):
        return value
    order = list(range(len(program.counts), value.ndim))
    for new, axis in sorted(enumerate(program.axes), key=lambda pair: pair[1]):
        order.insert(axis, new)
    return xp.transpose(value, order)


def _cast(array: Any, dtype: str | None) -> Any:
    if dtype is None:
        return array
    wanted = dtypes.TABLE[dtype].numpy
    return array if array.dtype == wanted else array.astype(wanted)
