"""Claims: which stored tensor wants to go into which target, and because of which rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mfload import errors
from mfload.index import TensorInfo
from mfload.trees import keymaps
from mfload.trees.arguments import Group
from mfload.trees.keymaps import Entry
from mfload.trees.lookup import Expand, Lookup, expander
from mfload.trees.rules import Rule

_AS_IT_IS = Rule(("",))


class Claim(NamedTuple):
    """A stored tensor, or a part of one, on its way to a target.

    Attributes:
        info: The stored tensor.
        target: Name of the target.
        rule: What happens on the way.
        names: Targets of all parts of the tensor.
        part: Which of these this is.
        groups: What the regex's groups hold, None where no regex was asked.
    """

    info: TensorInfo
    target: str
    rule: Rule
    names: tuple[str | None, ...]
    part: int = 0
    groups: re.Match[str] | None = None

    def text(self, group: Group) -> str | None:
        """What a group holds, None where it took no part."""
        return None if self.groups is None else self.groups[group]


@dataclass(slots=True)
class Claims:
    """What a key map makes of a checkpoint's names.

    Attributes:
        entries: Its lines.
        used: Numbers of those that a tensor went by.
        by_target: The claims on each target that there is.
        stray: Stored tensors that go nowhere, with the name they were given (None for none).
        twice: Stored tensors that several rules match, with these.
        disputed: Targets that such a tensor may be meant for.
    """

    entries: tuple[Entry, ...] = ()
    used: set[int] = field(default_factory=set[int])
    by_target: dict[str, list[Claim]] = field(default_factory=dict[str, list[Claim]])
    stray: list[tuple[TensorInfo, str | None]] = field(
        default_factory=list[tuple[TensorInfo, str | None]]
    )
    twice: list[tuple[TensorInfo, list[Entry]]] = field(
        default_factory=list[tuple[TensorInfo, list[Entry]]]
    )
    disputed: set[str] = field(default_factory=set[str])

    @property
    def unused(self) -> list[Entry]:
        """The lines that no tensor went by."""
        return [entry for at, entry in enumerate(self.entries) if at not in self.used]


def find(tensors: Iterable[TensorInfo], targets: Collection[str], mapping: Any) -> Claims:
    """Asks a key map about every stored tensor.

    Args:
        tensors: What the checkpoint holds.
        targets: Names of what there is to fill.
        mapping: None (names are the same on both sides), a function from a stored name to a
            target's (or to None), or a key map.

    Raises:
        UsageError: The key map is malformed, or the function raises or gives no name.
    """
    if mapping is None or callable(mapping):
        claims = Claims()
        for info in tensors:
            name = info.name if mapping is None else _called(mapping, info.name, targets)
            _claim(claims, targets, Claim(info, name or "", _AS_IT_IS, (name,)))
        return claims
    entries = keymaps.read(mapping)
    claims = Claims(entries)
    lookup = Lookup(entries)
    templates = [[_Templates(rule) for rule in entry.rules] for entry in entries]
    for info in tensors:
        found = lookup.matching(info.name)
        claims.used.update(number for number, _ in found)
        if not found:
            claims.stray.append((info, None))
        elif len(found) > 1:
            claims.twice.append((info, [entries[number] for number, _ in found]))
        for number, groups in found:
            for each in templates[number]:
                names = each.expand(groups)
                if len(found) > 1:
                    claims.disputed.update(filter(None, names))
                    continue
                for part, name in enumerate(names):
                    if name is not None:
                        _claim(claims, targets, Claim(info, name, each.rule, names, part, groups))
    return claims


class _Templates:
    """The names in a rule, ready to be filled in."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._expanders: list[Expand | None] = [
            None if name is None else expander(name) for name in rule.names
        ]

    def expand(self, groups: re.Match[str]) -> tuple[str | None, ...]:
        return tuple(None if expand is None else expand(groups) for expand in self._expanders)


def _claim(claims: Claims, targets: Collection[str], claim: Claim) -> None:
    if claim.names[claim.part] is None:
        return
    if claim.target in targets:
        claims.by_target.setdefault(claim.target, []).append(claim)
    else:
        claims.stray.append((claim.info, claim.target))


def _called(function: Callable[[str], Any], name: str, targets: Collection[str]) -> str | None:
    try:
        given = function(name)
    except Exception as error:
        raise errors.UsageError(
            f"the function in mapping= raised {type(error).__name__}: {error}",
            tensor=name,
            expected="the name of a target, or None to leave the tensor out",
        ) from error
    # A target that is one leaf and no tree has an empty name.
    if given is None or (isinstance(given, str) and (given or given in targets)):
        return given
    raise errors.UsageError(
        "the function in mapping= gives no name",
        tensor=name,
        expected="the name of a target, or None",
        found=repr(given),
    )
