r"""Key maps: the forms that users write, converted into rules.

Besides `{regex: name}` and `{regex: mfload.rule(...)}`, two forms of JAX projects are read:

- Tunix: `{regex: (name, (permute, reshape))}`, permuted first, and `(name, None)`;
- Bonsai: `{regex: (name, member)}` with an enum whose values are None, `(permute, reshape)` or
  `(permute, reshape, reshape_first)`.

A list of any of these gives each of its targets the tensor; None leaves it out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np

from mfload import errors
from mfload.dtypes import DType, resolve
from mfload.planning.selection import compiled

_FORMS = (
    "a name, mfload.rule(...), or (name, (permute, reshape)); a list of such; or None to leave "
    "the tensor out"
)

_EXPECTED = {
    "replacement": "the name of a target, or several; with split= one for each part, or None",
    "transpose": "each dim once, such as (1, 0)",
    "reshape": "sizes, at most one of them -1, such as (8, 64, -1)",
    "stack": "a group, several, or {group: dim}, each group and dim once",
    "concat": '(dim, group) or (dim, group, ("q", "k", "v"))',
    "split": "a dim, or (dim, sizes)",
    "scale": "a finite number other than 0",
}

Group = int | str
"""A group of a regex, by number or by name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to a stored tensor on its way into a target; `mfload.rule` makes one."""

    # Templates of the targets' names: each is given the tensor whole, or its part of a split
    # (None: the part is not wanted).
    names: tuple[str | None, ...]
    steps: tuple[tuple[Literal["transpose", "reshape"], tuple[int, ...]], ...] = ()
    stack: tuple[tuple[Group, int], ...] = ()  # Groups, and the dims that their numbers make.
    # The dim along which tensors are joined, in the order of a group's numbers, or of its texts.
    concat: tuple[int, Group, tuple[str, ...] | None] | None = None
    # The dim along which a tensor is split, into parts of these sizes or of those of the targets.
    split: tuple[int, tuple[int, ...] | None] | None = None
    cast: DType | None = None
    scale: float | None = None
    # Written in Tunix's or Bonsai's form. Their maps serve several checkpoints: a rule may match
    # nothing, or the front of a name, whose rest stays.
    family: bool = False


class KeyMapEntry(NamedTuple):
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
    names = [replacement] if isinstance(replacement, str) and split is None else replacement
    made = Rule(
        _argument("replacement", names, _names),
        _steps(transpose, reshape),
        _argument("stack", stack, _stack) or (),
        _argument("concat", concat, _concat),
        _argument("split", split, _split),
        None if cast is None else resolve(cast),
        _argument("scale", scale, _scale),
    )
    fits = None not in made.names
    if made.split is not None:
        fits = made.split[1] is None or len(made.split[1]) == len(made.names)
    if not fits:
        expected, found = "a name, or None, for each part of split=", f"{names!r}, split={split!r}"
        raise errors.UsageError("the replacement is invalid", expected=expected, found=found)
    return made


def read(mapping: Any) -> tuple[KeyMapEntry, ...]:
    """The lines of a key map: a mapping from regexes, or a list of pairs."""
    pairs: list[Any] = [None]
    if isinstance(mapping, Iterable) and not isinstance(mapping, str):
        pairs = list(mapping.items() if isinstance(mapping, Mapping) else mapping)
    if not all(isinstance(each, list | tuple) and len(each) == 2 for each in pairs):
        expected = "{regex: " + _FORMS + "}, a list of such pairs, or a function of the name"
        found = repr(mapping)
        raise errors.UsageError("mapping= is not a key map", expected=expected, found=found)
    entries: list[KeyMapEntry] = []
    for key, value in pairs:
        pattern = compiled(key)
        try:
            entries.append(KeyMapEntry(pattern, _rules(value)))
            _check_groups(entries[-1])
        except errors.UsageError as error:
            raise errors.UsageError(
                f"mapping[{pattern.pattern!r}]: {error.message}",
                expected=error.expected,
                found=error.found,
            ) from None
    return tuple(entries)


def _rules(value: Any) -> tuple[Rule, ...]:
    if value is None:
        return ()
    several = isinstance(value, list | tuple) and len(value) > 0 and _rule(value) is None
    found: list[Rule] = []
    for each in value if several else [value]:
        made = _rule(each)
        if made is None:
            raise errors.UsageError("not a rule", expected=_FORMS, found=repr(each))
        found.append(made)
    return tuple(found)


def _rule(value: Any) -> Rule | None:
    """The rule that one value stands for; None if it is a list of such, or invalid."""
    match value:
        case Rule():
            return value
        case str():
            return Rule((_template(value),))
        case [str(), [str(), *_]]:
            return None
        case [str() as name, (None | Enum() | list() | tuple()) as transform]:
            return _family(_template(name), transform)
        case _:
            return None


def _family(name: str, transform: Any) -> Rule:
    """The rule for Tunix's (permute, reshape), or for a member of Bonsai's enum."""
    if isinstance(transform, Enum):
        transform = transform.value
    match transform:
        case None:
            return Rule((name,), family=True)
        case [permute, reshape] | [permute, reshape, False]:
            steps = _steps(permute or None, reshape or None)  # Both projects skip an empty step.
        case [permute, reshape, True]:
            steps = _steps(permute or None, reshape or None)[::-1]
        case _:
            raise errors.UsageError(
                "not a transform",
                expected="None, (permute, reshape), or (permute, reshape, reshape_first)",
                found=repr(transform),
            )
    return Rule((name,), steps, family=True)


def _check_groups(entry: KeyMapEntry) -> None:
    """Refuses groups that the regex does not have, before any name is looked at."""
    pattern, rules = entry
    numbered = f"a group from 1 to {pattern.groups}" if pattern.groups else "no group: it has none"
    expected = numbered + "".join(f", {name!r}" for name in pattern.groupindex)
    for each in rules:
        joined = () if each.concat is None else (each.concat[1],)
        for group in (*(group for group, _ in each.stack), *joined):
            if group not in pattern.groupindex and group not in range(1, pattern.groups + 1):
                message = "the regular expression does not have this group"
                raise errors.UsageError(message, expected=expected, found=f"group {group!r}")
        for name in each.names:
            try:
                pattern.sub(name or "", "")
            except (re.error, IndexError) as error:
                message = f"the replacement is malformed: {error}"
                raise errors.UsageError(message, expected=expected, found=repr(name)) from None


# -- arguments of a rule ---------------------------------------------------------------------


def _template(name: str) -> str:
    r"""A template without escapes that mean nothing in one: Bonsai writes `layers\.\1`."""
    return re.sub(r"(\\[\\a-zA-Z0-9])|\\(.)", r"\1\2", name, flags=re.DOTALL)


def _steps(transpose: Any, reshape: Any) -> tuple[Any, ...]:
    axes = _argument("transpose", transpose, _permutation)
    sizes = _argument("reshape", reshape, _shape)
    steps = (("transpose", axes), ("reshape", sizes))
    return tuple(step for step in steps if step[1] is not None)


def _argument(name: str, given: Any, read: Callable[[Any], Any]) -> Any:
    """An argument as a rule holds it, None if it is not given."""
    if given is None and name != "replacement":
        return None
    try:
        return read(given)
    except (TypeError, ValueError, OverflowError):
        message, expected = f"{name}= is invalid", _EXPECTED[name]
        raise errors.UsageError(message, expected=expected, found=repr(given)) from None


def _require(valid: bool) -> None:
    if not valid:
        raise ValueError


def _names(given: Any) -> tuple[str | None, ...]:
    names = _sequence(given)
    _require(any(names) and all(name is None or isinstance(name, str) for name in names))
    return tuple(None if name is None else _template(name) for name in names)


def _permutation(given: Any) -> tuple[int, ...]:
    axes = _ints(given)
    _require(sorted(axes) == list(range(len(axes))))
    return axes


def _shape(given: Any) -> tuple[int, ...]:
    sizes = _ints(given)
    _require(min(sizes, default=0) >= -1 and sizes.count(-1) <= 1)
    return sizes


def _stack(given: Any) -> tuple[tuple[Group, int], ...]:
    groups = given if isinstance(given, Mapping | list | tuple) else (given,)
    axes = _ints(list(given.values()) if isinstance(given, Mapping) else range(len(groups)))
    found = tuple(zip(map(_group, groups), axes, strict=True))
    _require(0 < len(found) == len(dict(found)) == len(set(axes)))
    return found


def _concat(given: Any) -> tuple[int, Group, tuple[str, ...] | None]:
    axis, group, *rest = _sequence(given)
    order = _sequence(*rest) if rest else None
    if order is not None:
        texts = {text for text in order if isinstance(text, str)}
        _require(0 < len(texts) == len(order))
    return _int(axis), _group(group), order


def _split(given: Any) -> tuple[int, tuple[int, ...] | None]:
    axis, sizes = given if isinstance(given, list | tuple) else (given, None)
    if sizes is not None:
        sizes = _ints(sizes)
        _require(min(sizes) >= 0)
    return _int(axis), sizes


def _scale(given: Any) -> float:
    _require(not isinstance(given, str | bytes | bool))
    factor = float(given)
    _require(math.isfinite(factor) and factor != 0)
    return factor


def _group(given: Any) -> Group:
    number = given if isinstance(given, str) else _int(given)
    _require(isinstance(number, str) or number > 0)
    return number


def _sequence(given: Any) -> tuple[Any, ...]:
    _require(isinstance(given, list | tuple))
    return tuple(given)


def _ints(given: Any) -> tuple[int, ...]:
    array = np.atleast_1d(given)
    _require(array.ndim == 1 and (array.dtype.kind in "iu" or array.size == 0))
    return tuple(array.tolist())


def _int(given: Any) -> int:
    (number,) = _ints((given,))
    return number
