"""Rules: what a key map says of the tensors that one of its regexes matches."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfload import dtypes, errors
from mfload.dtypes import DType

Group = int | str
"""A group of a regex, by number or by name."""


class ConcatBy(NamedTuple):
    """How tensors are joined: the dim, the group that tells them apart, and its texts in order
    (None where they are numbers)."""

    axis: int
    group: Group
    order: tuple[str, ...] | None


class SplitBy(NamedTuple):
    """How a stored tensor is taken apart: the dim, and the sizes where the targets don't say."""

    axis: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to a stored tensor on its way into a target; `mfload.rule` makes one.

    Attributes:
        names: Templates of the targets' names: one, or one for each part of a split; None stands
            for a part that nobody wants. Without any, the tensor is left out.
        transpose: Order of the dims.
        reshape: The shape after that; one -1 stands for what is left.
        stack: Pairs of a group and the dim that its numbers make.
        concat: How tensors are joined.
        split: How the stored tensor is taken apart.
        cast: The dtype of the result.
        scale: A factor.
        reshape_first: Whether the reshape comes before the transpose.
        family: Whether it comes from a map written for a whole family of checkpoints, of which
            one need not use every rule.
    """

    names: tuple[str | None, ...]
    transpose: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    stack: tuple[tuple[Group, int], ...] = ()
    concat: ConcatBy | None = None
    split: SplitBy | None = None
    cast: DType | None = None
    scale: float | None = None
    reshape_first: bool = False
    family: bool = False

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that tell the tensors of one target apart."""
        joined = () if self.concat is None else (self.concat.group,)
        return (*(group for group, _ in self.stack), *joined)


def rule(
    replacement: str | Sequence[str | None],
    *,
    transpose: Sequence[int] | None = None,
    reshape: Sequence[int] | None = None,
    stack: Group | Sequence[Group] | Mapping[Group, int] | None = None,
    concat: tuple[int, Group] | tuple[int, Group, Sequence[str]] | None = None,
    split: int | tuple[int, Sequence[int]] | None = None,
    cast: Any = None,
    scale: float | None = None,
) -> Rule:
    r"""A rule of a key map, for what a name alone does not say.

    The steps are taken in this order, whatever the order of the arguments: split, transpose,
    reshape, concat, stack, scale, cast.

    Args:
        replacement: Name of the target, with `\1` or `\g<name>` for groups of the regex; for a
            split a sequence of them, with None for a part that is not wanted.
        transpose: Order of the stored tensor's dims, as in `numpy.transpose`.
        reshape: The shape after that; one -1 stands for what is left.
        stack: Stacks the tensors whose names differ in a group, in the order of its numbers: one
            group (dim 0), several (dims 0, 1, …: layers, experts), or `{group: dim}`.
        concat: Joins tensors: (dim, group) in the order of the group's numbers, or
            (dim, group, ("q", "k", "v")) in the order of its texts.
        split: Takes the stored tensor apart along a dim: the dim (the targets' shapes give the
            sizes) or (dim, sizes).
        cast: The dtype of the result, whatever that of the target. It may lose precision.
        scale: A factor; 8-bit and 16-bit floats are multiplied as float32 and rounded once.

    Returns:
        The rule, to be the value of a regex in `mapping=`.

    Raises:
        UsageError: An argument makes no sense.
    """
    names = _names(replacement, split is not None)
    return Rule(
        names,
        transpose=None if transpose is None else permutation(transpose),
        reshape=None if reshape is None else shape(reshape),
        stack=() if stack is None else _stack(stack),
        concat=None if concat is None else _concat(concat),
        split=None if split is None else _split(split, len(names)),
        cast=None if cast is None else dtypes.resolve(cast),
        scale=None if scale is None else _scale(scale),
    )


def permutation(given: Any) -> tuple[int, ...]:
    """The order of dims that a user wrote.

    Raises:
        UsageError: It is none.
    """
    axes = _ints(given)
    if axes is None or sorted(axes) != list(range(len(axes))):
        raise _bad("transpose=", "each dim once, such as (1, 0)", given)
    return axes


def shape(given: Any) -> tuple[int, ...]:
    """The shape that a user wrote.

    Raises:
        UsageError: It is none.
    """
    sizes = (_int(given),) if _int(given) is not None else _ints(given)
    if sizes is None or any(size is None or size < -1 for size in sizes) or sizes.count(-1) > 1:
        raise _bad("reshape=", "sizes, at most one of them -1, such as (8, 64, -1)", given)
    return tuple(size for size in sizes if size is not None)


def _names(given: Any, split: bool) -> tuple[str | None, ...]:
    if isinstance(given, str):
        if not split:
            return (given,)
        raise _bad("a split", "a name for each part: rule([...], split=...)", given)
    names = tuple(given) if isinstance(given, list | tuple) else ()
    if not any(isinstance(name, str) for name in names):
        raise _bad("the replacement", "the name of a target", given)
    if not all(name is None or isinstance(name, str) for name in names):
        raise _bad("the replacement", "names, and None for parts that are not wanted", given)
    if not split:
        raise _bad("the replacement", "one name, or split= to take the tensor apart", given)
    return names


def _stack(given: Any) -> tuple[tuple[Group, int], ...]:
    if isinstance(given, Mapping):
        pairs = [(group, _int(axis)) for group, axis in given.items()]
    elif isinstance(given, list | tuple):
        pairs = [(group, axis) for axis, group in enumerate(given)]
    else:
        pairs = [(given, 0)]
    found = [(_group(group), axis) for group, axis in pairs]
    groups = {group for group, _ in found}
    axes = {axis for _, axis in found}
    if not found or None in groups or None in axes or len(groups) < len(found) > len(axes):
        raise _bad("stack=", "a group of the regex, several, or {group: dim}", given)
    if len(groups) < len(found) or len(axes) < len(found):
        raise _bad("stack=", "each group and each dim once", given)
    return tuple((g, a) for g, a in found if g is not None and a is not None)


def _concat(given: Any) -> ConcatBy:
    parts = tuple(given) if isinstance(given, list | tuple) else ()
    axis = _int(parts[0]) if parts else None
    group = _group(parts[1]) if len(parts) > 1 else None
    order: tuple[str, ...] | None = None
    if len(parts) == 3 and isinstance(parts[2], list | tuple):
        order = tuple(parts[2])
    sound = axis is not None and group is not None and (len(parts) == 2 or bool(order))
    if order is not None:
        sound = sound and all(isinstance(text, str) for text in order)
        sound = sound and len(set(order)) == len(order)
    if not sound or axis is None or group is None:
        raise _bad("concat=", '(dim, group) or (dim, group, ("q", "k", "v"))', given)
    return ConcatBy(axis, group, order)


def _split(given: Any, parts: int) -> SplitBy:
    axis = _int(given)
    if axis is not None:
        return SplitBy(axis, None)
    pair = tuple(given) if isinstance(given, list | tuple) else ()
    axis = _int(pair[0]) if len(pair) == 2 else None
    sizes = _ints(pair[1]) if len(pair) == 2 else None
    if axis is None or sizes is None or any(size < 0 for size in sizes):
        raise _bad("split=", "a dim, or (dim, sizes)", given)
    if len(sizes) != parts:
        raise _bad("split=", f"{parts} sizes, one for each name", given)
    return SplitBy(axis, sizes)


def _scale(given: Any) -> float:
    try:
        factor = math.nan if isinstance(given, str | bytes | bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if not math.isfinite(factor) or factor == 0:
        raise _bad("scale=", "a finite number other than 0", given)
    return factor


def _group(given: Any) -> Group | None:
    if isinstance(given, str):
        return given
    number = _int(given)
    return number if number is not None and number > 0 else None


def _ints(given: Any) -> tuple[int, ...] | None:
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        return None
    found = [_int(item) for item in given]
    return None if None in found else tuple(number for number in found if number is not None)


def _int(given: Any) -> int | None:
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def _bad(what: str, expected: str, found: object) -> errors.UsageError:
    return errors.UsageError(f"{what} makes no sense", expected=expected, found=repr(found))
