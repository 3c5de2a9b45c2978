r"""Key maps: the forms that users write, converted into rules.

Besides `{regex: name}` and `{regex: mfload.rule(...)}`, two forms of JAX projects are read:

- Tunix: `{regex: (name, (permute, reshape))}`, permuted first, and `(name, None)`;
- Bonsai: `{regex: (name, member)}` with an enum whose values are None, `(permute, reshape)` or
  `(permute, reshape, reshape_first)`.

A list of any of these gives each of its targets the tensor; None leaves it out.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from mfload import errors
from mfload.dtypes import DType, resolve

_ONE = "a name, mfload.rule(...), or (name, (permute, reshape))"
_FORMS = f"{_ONE}; a list of such; or None to leave the tensor out"

Group = int | str
"""A group of a regex, by number or by name."""

Step = tuple[Literal["transpose", "reshape"], tuple[int, ...]]


class ConcatBy(NamedTuple):
    """Tensors are joined along a dim, in the order of a group's numbers, or of its texts."""

    axis: int
    group: Group
    order: tuple[str, ...] | None


class SplitBy(NamedTuple):
    """A tensor is split along a dim, into parts of these sizes or of those of the targets."""

    axis: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to a stored tensor on its way into a target; `mfload.rule` makes one."""

    # Templates of the targets' names: each is given the tensor whole, or its part of a split
    # (None: the part is not wanted).
    names: tuple[str | None, ...]
    steps: tuple[Step, ...] = ()
    stack: tuple[tuple[Group, int], ...] = ()  # Groups, and the dims that their numbers make.
    concat: ConcatBy | None = None
    split: SplitBy | None = None
    cast: DType | None = None
    scale: float | None = None
    # Written in Tunix's or Bonsai's form. Their maps serve several checkpoints: a rule may match
    # nothing, or the front of a name, whose rest stays.
    family: bool = False

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that tell the tensors of one target apart."""
        joined = () if self.concat is None else (self.concat.group,)
        return (*(group for group, _ in self.stack), *joined)


class Entry(NamedTuple):
    """A line of a key map: a regex, and the rules for what it matches (none: left out)."""

    pattern: re.Pattern[str]
    rules: tuple[Rule, ...]

    @property
    def family(self) -> bool:
        """Whether all of its rules are in the form of Tunix or Bonsai."""
        return bool(self.rules) and all(rule.family for rule in self.rules)

    def __str__(self) -> str:
        return repr(self.pattern.pattern)


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
    r"""A rule of a key map, for transforms of the tensors that a regex matches.

    The steps are taken in this order, whatever the order of the arguments: split, transpose,
    reshape, concat, stack, scale, cast.

    Args:
        replacement: Name of the target, with `\1` or `\g<name>` for groups of the regex. With a
            list of names each target is given the whole tensor, as for tied weights; with `split`
            they are the parts, and None is a part that is not wanted.
        transpose: Order of the stored tensor's dims, as in `numpy.transpose`.
        reshape: The shape after that; one -1 stands for what is left.
        stack: Stacks the tensors whose names differ in a group, in the order of its numbers: one
            group (dim 0), several (dims 0, 1, …: layers, experts), or `{group: dim}`.
        concat: Joins tensors: (dim, group) in the order of the group's numbers, or
            (dim, group, ("q", "k", "v")) in the order of its texts.
        split: Splits the stored tensor: a dim (the targets' shapes give the sizes), or
            (dim, sizes).
        cast: The dtype of the result, instead of the target's. It may lose precision.
        scale: A factor; 8-bit and 16-bit floats are multiplied as float32 and rounded once. XLA
            flushes subnormal products to zero. The factor must be a normal number of the dtype
            that it is multiplied in.

    Returns:
        The rule, to be the value of a regex in `mapping=`.

    Raises:
        UsageError: An argument is invalid.
    """
    parts = split is not None
    what = "a name for each part, or None" if parts else "the name of a target, or several"
    found = _argument("the replacement", replacement, lambda given: _names(given, parts), what)
    made = Rule(found, _steps(transpose, reshape), cast=None if cast is None else resolve(cast))
    count = len(found)
    for name, given, read, expected in (
        ("stack", stack, _stack, "a group, several, or {group: dim}, each group and dim once"),
        ("concat", concat, _concat, '(dim, group) or (dim, group, ("q", "k", "v"))'),
        ("split", split, lambda pair: _split(pair, count), f"a dim, or (dim, {count} sizes)"),
        ("scale", scale, _scale, "a finite number other than 0"),
    ):
        if given is not None:
            made = replace(made, **{name: _argument(f"{name}=", given, read, expected)})
    return made


def read(mapping: Any) -> tuple[Entry, ...]:
    """The lines of a key map: a mapping from regexes, or a list of pairs."""
    found: list[Entry] = []
    for key, value in _pairs(mapping):
        pattern = _pattern(key)
        try:
            found.append(Entry(pattern, _rules(value)))
            _check_groups(found[-1])
        except errors.UsageError as error:
            raise errors.UsageError(
                f"mapping[{pattern.pattern!r}]: {error.message}",
                expected=error.expected,
                found=error.found,
            ) from None
    return tuple(found)


def _pairs(mapping: Any) -> list[tuple[Any, Any]]:
    if isinstance(mapping, Mapping):
        return list(mapping.items())
    listed = isinstance(mapping, Iterable) and not isinstance(mapping, str)
    items: list[Any] = list(mapping) if listed else [None]
    if not all(isinstance(each, list | tuple) and len(each) == 2 for each in items):
        expected = "{regex: " + _FORMS + "}, a list of such pairs, or a function of the name"
        found = _brief(mapping)
        raise errors.UsageError("mapping= is not a key map", expected=expected, found=found)
    return [(key, value) for key, value in items]


def _pattern(key: Any) -> re.Pattern[str]:
    try:
        pattern = re.compile(key)
        pattern.search("")  # A pattern of bytes matches no name.
    except (re.error, TypeError) as error:
        message = "a key of mapping= is not a regular expression"
        raise errors.UsageError(message, expected=str(error), found=_brief(key)) from None
    return pattern


def _rules(value: Any) -> tuple[Rule, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and value and not _is_pair(value):
        return tuple(_rule(each, _ONE) for each in value)
    return (_rule(value, _FORMS),)


def _rule(value: Any, expected: str) -> Rule:
    if isinstance(value, Rule):
        return value
    if isinstance(value, str):
        return Rule((_template(value),))
    if _is_pair(value):
        return _family(_template(value[0]), value[1])
    raise errors.UsageError("not a rule", expected=expected, found=_brief(value))


def _is_pair(value: Any) -> bool:
    """Whether it is a name and a transform, and not a list of names or rules."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
        return False
    second = value[1]
    if isinstance(second, list | tuple):
        return not second or not isinstance(second[0], str)
    return second is None or isinstance(second, Enum)


def _family(name: str, transform: Any) -> Rule:
    """The rule for Tunix's (permute, reshape), or for a member of Bonsai's enum."""
    if isinstance(transform, Enum):
        transform = transform.value
    if transform is None:
        return Rule((name,), family=True)
    given: tuple[Any, ...] = tuple(transform) if isinstance(transform, list | tuple) else ()
    if len(given) not in (2, 3) or (len(given) == 3 and not isinstance(given[2], bool)):
        raise errors.UsageError(
            "not a transform",
            expected="None, (permute, reshape), or (permute, reshape, reshape_first)",
            found=_brief(transform),
        )
    # Both projects skip an empty step.
    permute, reshape = (None if step == () else step for step in given[:2])
    return Rule((name,), _steps(permute, reshape, reverse=given[2:] == (True,)), family=True)


def _steps(transpose: Any, reshape: Any, *, reverse: bool = False) -> tuple[Step, ...]:
    steps: list[Step] = []
    if transpose is not None:
        axes = _argument("transpose=", transpose, _permutation, "each dim once, such as (1, 0)")
        steps.append(("transpose", axes))
    if reshape is not None:
        expected = "sizes, at most one of them -1, such as (8, 64, -1)"
        steps.append(("reshape", _argument("reshape=", reshape, _shape, expected)))
    return tuple(reversed(steps) if reverse else steps)


def _check_groups(entry: Entry) -> None:
    """Refuses groups that the regex does not have, before any name is looked at."""
    pattern, rules = entry
    numbered = f"a group from 1 to {pattern.groups}" if pattern.groups else "no group: it has none"
    expected = numbered + "".join(f", {name!r}" for name in pattern.groupindex)
    for name in (name for rule in rules for name in rule.names):
        try:
            pattern.sub(name or "", "")
        except (re.error, IndexError) as error:
            message = f"the replacement is malformed: {error}"
            raise errors.UsageError(message, expected=expected, found=repr(name)) from None
    for group in (group for rule in rules for group in rule.groups):
        known = group in pattern.groupindex if isinstance(group, str) else group <= pattern.groups
        if not known:
            message = "the regular expression does not have this group"
            raise errors.UsageError(message, expected=expected, found=f"group {group!r}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


# -- arguments of a rule ---------------------------------------------------------------------


def _template(name: str) -> str:
    r"""A template without escapes that mean nothing in one: Bonsai writes `layers\.\1`."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if found[1].isalnum() or found[1] == "\\" else found[1]

    return re.sub(r"\\(.)", kept, name, flags=re.DOTALL)


def _argument(what: str, given: Any, read: Callable[[Any], Any], expected: str) -> Any:
    """An argument as a rule holds it; `read` raises TypeError or ValueError if it is invalid."""
    try:
        return read(given)
    except (TypeError, ValueError, OverflowError):
        message = f"{what} is invalid"
        raise errors.UsageError(message, expected=expected, found=repr(given)) from None


def _require(valid: bool) -> None:
    if not valid:
        raise ValueError


def _names(given: Any, split: bool) -> tuple[str | None, ...]:
    if isinstance(given, str) and not split:
        return (_template(given),)
    names = _sequence(given)
    _require(
        any(names) and all(isinstance(name, str) or (split and name is None) for name in names)
    )
    return tuple(None if name is None else _template(name) for name in names)


def _permutation(given: Any) -> tuple[int, ...]:
    axes = _ints(given)
    _require(sorted(axes) == list(range(len(axes))))
    return axes


def _shape(given: Any) -> tuple[int, ...]:
    sizes = _ints(given if hasattr(given, "__iter__") else (given,))
    _require(min(sizes, default=0) >= -1 and sizes.count(-1) <= 1)
    return sizes


def _stack(given: Any) -> tuple[tuple[Group, int], ...]:
    if not isinstance(given, Mapping):
        groups = given if isinstance(given, list | tuple) else (given,)
        given = dict(zip(groups, range(len(groups)), strict=True))
        _require(len(given) == len(groups))
    found = tuple((_group(group), _int(axis)) for group, axis in given.items())
    _require(0 < len(found) == len({axis for _, axis in found}))
    return found


def _concat(given: Any) -> ConcatBy:
    axis, group, *rest = _sequence(given)
    order = _sequence(*rest) if rest else None
    if order is not None:
        texts = {text for text in order if isinstance(text, str)}
        _require(0 < len(texts) == len(order))
    return ConcatBy(_int(axis), _group(group), order)


def _split(given: Any, parts: int) -> SplitBy:
    axis, sizes = given if isinstance(given, list | tuple) else (given, None)
    if sizes is not None:
        sizes = _ints(sizes)
        _require(len(sizes) == parts and min(sizes) >= 0)
    return SplitBy(_int(axis), sizes)


def _scale(given: Any) -> float:
    _require(not isinstance(given, str | bytes | bool))
    factor = float(given)
    _require(math.isfinite(factor) and factor != 0)
    return factor


def _group(given: Any) -> Group:
    if isinstance(given, str):
        return given
    number = _int(given)
    _require(number > 0)
    return number


def _sequence(given: Any) -> tuple[Any, ...]:
    _require(isinstance(given, list | tuple))
    return tuple(given)


def _ints(given: Any) -> tuple[int, ...]:
    _require(not isinstance(given, str | bytes | Mapping))
    return tuple(map(_int, given))


def _int(given: Any) -> int:
    _require(not isinstance(given, bool))
    return operator.index(given)
