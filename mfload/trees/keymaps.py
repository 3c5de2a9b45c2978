"""Key maps: the forms that users write them in, read into rules.

Besides `{regex: rule(...)}` and `{regex: name}`, two forms are read that JAX projects write:

- Tunix: `{regex: (name, (permute, reshape))}`, permuted first, and `(name, None)`;
- Bonsai: `{regex: (name, member)}` with an enum whose values are None, `(permute, reshape)`, or
  `(permute, reshape, reshape_first)`.

A list of any of these gives each of its targets the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from mfload import errors
from mfload.trees import arguments
from mfload.trees.rules import Rule

_ONE = "a name, mfload.rule(...), or (name, (permute, reshape))"
_FORMS = f"{_ONE}; a list of such; or None to leave the tensor out"


class Entry(NamedTuple):
    """A line of a key map.

    Attributes:
        pattern: What names are matched with.
        rules: What is done with a tensor, rule by rule; none where it is left out.
    """

    pattern: re.Pattern[str]
    rules: tuple[Rule, ...]

    @property
    def family(self) -> bool:
        """Whether it has the form of a project whose maps serve a family of checkpoints."""
        return bool(self.rules) and all(rule.family for rule in self.rules)

    def __str__(self) -> str:
        return repr(self.pattern.pattern)


def read(mapping: Any) -> tuple[Entry, ...]:
    """The lines of a key map.

    Args:
        mapping: A mapping from regexes (texts or compiled), or a list of pairs.

    Raises:
        UsageError: A line is malformed; the message names its key.
    """
    found: list[Entry] = []
    for key, value in _pairs(mapping):
        pattern = _pattern(key)
        try:
            entry = Entry(pattern, _rules(value))
            _check(entry)
        except errors.UsageError as error:
            raise errors.UsageError(
                f"mapping[{pattern.pattern!r}]: {error.message}",
                expected=error.expected,
                found=error.found,
            ) from None
        found.append(entry)
    return tuple(found)


def _pairs(mapping: Any) -> list[tuple[Any, Any]]:
    if isinstance(mapping, Mapping):
        return list(mapping.items())
    try:
        items = None if isinstance(mapping, str | bytes) else list(mapping)
    except TypeError:
        items = None
    pairs = [isinstance(each, list | tuple) and len(each) == 2 for each in items or ()]
    if items is None or not all(pairs):
        raise errors.UsageError(
            "mapping= is no key map",
            expected="{regex: " + _FORMS + "}, a list of such pairs, or a function of the name",
            found=_brief(mapping),
        )
    return [(key, value) for key, value in items]


def _pattern(key: Any) -> re.Pattern[str]:
    try:
        pattern = re.compile(key)
        pattern.search("")  # One of bytes matches no name.
    except (re.error, TypeError) as error:
        raise errors.UsageError(
            "mapping= has a key that is no regular expression",
            expected=str(error),
            found=_brief(key),
        ) from None
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
        return Rule((arguments.template(value),))
    if _is_pair(value):
        return _transformed(arguments.template(value[0]), value[1])
    raise errors.UsageError("no rule", expected=expected, found=_brief(value))


def _is_pair(value: Any) -> bool:
    """Whether it is a name and a transform, and no list of names or rules."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
        return False
    second = value[1]
    if isinstance(second, list | tuple):
        return not second or not isinstance(second[0], str)
    return second is None or isinstance(second, Enum)


def _transformed(name: str, transform: Any) -> Rule:
    if isinstance(transform, Enum):
        transform = transform.value
    if transform is None:
        return Rule((name,), family=True)
    steps: tuple[Any, ...] = tuple(transform) if isinstance(transform, list | tuple) else ()
    if len(steps) not in (2, 3) or (len(steps) == 3 and not isinstance(steps[2], bool)):
        raise errors.UsageError(
            "no transform",
            expected="None, (permute, reshape), or (permute, reshape, reshape_first)",
            found=_brief(transform),
        )
    permute, reshape = steps[0], steps[1]
    return Rule(
        (name,),
        transpose=arguments.permutation(permute) if _given(permute) else None,
        reshape=arguments.shape(reshape) if _given(reshape) else None,
        reshape_first=len(steps) == 3 and steps[2],
        family=True,
    )


def _given(step: Any) -> bool:
    """Both projects skip an empty step."""
    return step is not None and step != ()


def _check(entry: Entry) -> None:
    """Groups that a regex does not have are found before any name is looked at."""
    pattern, rules = entry
    for name in (name for rule in rules for name in rule.names):
        try:
            pattern.sub(name or "", "")
        except (re.error, IndexError) as error:
            raise errors.UsageError(
                f"the replacement is malformed: {error}",
                expected=_groups(pattern),
                found=repr(name),
            ) from None
    for group in (group for rule in rules for group in rule.groups):
        known = group in pattern.groupindex if isinstance(group, str) else group <= pattern.groups
        if not known:
            raise errors.UsageError(
                "the regular expression has no such group",
                expected=_groups(pattern),
                found=f"group {group!r}",
            )


def _groups(pattern: re.Pattern[str]) -> str:
    if not pattern.groups:
        return "no group, as the expression has none"
    named = "".join(f", {name!r}" for name in pattern.groupindex)
    return f"a group from 1 to {pattern.groups}{named}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
