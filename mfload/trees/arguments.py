"""Arguments: what users write in rules, checked and put in one form."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mfload import errors

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

Group = int | str
"""A group of a regex, by number or by name."""


class ConcatBy(NamedTuple):
    """How tensors are joined.

    Attributes:
        axis: The dim along which.
        group: The group that tells them apart.
        order: Its texts in order, None where they are numbers.
    """

    axis: int
    group: Group
    order: tuple[str, ...] | None


class SplitBy(NamedTuple):
    """How a stored tensor is taken apart.

    Attributes:
        axis: The dim along which.
        sizes: Of the parts, None where the targets say it.
    """

    axis: int
    sizes: tuple[int, ...] | None


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


def template(name: str) -> str:
    r"""A template without the escapes that mean nothing in one: Bonsai writes `layers\.\1`."""
    return _ESCAPE.sub(lambda m: m[0] if m[1].isalnum() or m[1] == "\\" else m[1], name)


def names(given: Any, split: bool) -> tuple[str | None, ...]:
    """The names of targets that a user wrote.

    Raises:
        UsageError: It makes no sense.
    """
    if isinstance(given, str):
        if not split:
            return (template(given),)
        raise _bad("a split", "a name for each part: rule([...], split=...)", given)
    found = tuple(given) if isinstance(given, list | tuple) else ()
    if not any(isinstance(name, str) for name in found):
        raise _bad("the replacement", "the name of a target, or several", given)
    if not all(isinstance(name, str) or (split and name is None) for name in found):
        raise _bad("the replacement", "names; of a split also None, for a part left out", given)
    return tuple(None if name is None else template(name) for name in found)


def stack(given: Any) -> tuple[tuple[Group, int], ...]:
    """Pairs of a group and a dim, from any of the forms of `stack=`.

    Raises:
        UsageError: It makes no sense.
    """
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


def concat(given: Any) -> ConcatBy:
    """What `concat=` says.

    Raises:
        UsageError: It makes no sense.
    """
    parts = tuple(given) if isinstance(given, list | tuple) else ()
    axis = _int(parts[0]) if parts else None
    group = _group(parts[1]) if len(parts) > 1 else None
    order = _texts(parts[2]) if len(parts) == 3 else None
    if axis is None or group is None or (len(parts) > 2 and order is None):
        raise _bad("concat=", '(dim, group) or (dim, group, ("q", "k", "v"))', given)
    return ConcatBy(axis, group, order)


def _texts(given: Any) -> tuple[str, ...] | None:
    found = tuple(given) if isinstance(given, list | tuple) else ()
    sound = found and all(isinstance(text, str) for text in found) and len(set(found)) == len(found)
    return found if sound else None


def split(given: Any, parts: int) -> SplitBy:
    """What `split=` says of so many parts.

    Raises:
        UsageError: It makes no sense.
    """
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


def scale(given: Any) -> float:
    """The factor that a user wrote.

    Raises:
        UsageError: It makes no sense.
    """
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
