"""Claims: which stored tensor wants to go into which target, and because of which rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mfload import errors
from mfload.index import TensorInfo
from mfload.mapping import keymaps
from mfload.mapping.arguments import Group
from mfload.mapping.keymaps import Entry
from mfload.mapping.lookup import Expand, Lookup, expander
from mfload.mapping.rules import Rule

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
        by_target: The claims on each target that there is.
        stray: Stored tensors that go nowhere, with the name they were given (None for none).
        twice: Stored tensors that several rules match, with these.
        disputed: Targets that such a tensor may be meant for.
        unused: Rules that match nothing.
    """

    by_target: dict[str, list[Claim]] = field(default_factory=dict[str, list[Claim]])
    stray: list[tuple[TensorInfo, str | None]] = field(
        default_factory=list[tuple[TensorInfo, str | None]]
    )
    twice: list[tuple[TensorInfo, list[Entry]]] = field(
        default_factory=list[tuple[TensorInfo, list[Entry]]]
    )
    disputed: set[str] = field(default_factory=set[str])
    unused: list[Entry] = field(default_factory=list[Entry])


def find(tensors: Iterable[TensorInfo], targets: Collection[str], mapping: Any) -> Claims:
    """Asks a key map about every stored tensor.

    Args:
        tensors: What the checkpoint holds.
        targets: Names of what there is to fill.
        mapping: None (names are the same on both sides), a function from a stored name to a
            target's (or to None), or a key map.

    Raises:
        UsageError: The key map is malformed, or the function gives no name.
    """
    claims = Claims()
    if mapping is None or callable(mapping):
        for info in tensors:
            name = info.name if mapping is None else _called(mapping, info.name)
            _claim(claims, targets, Claim(info, name or "", _AS_IT_IS, (name,)))
        return claims
    entries = keymaps.read(mapping)
    used: set[int] = set()
    lookup = Lookup(entries)
    expanders = [_expanders(entry.rule) for entry in entries]
    for info in tensors:
        found = lookup.matching(info.name)
        used.update(number for number, _ in found)
        if len(found) > 1:
            claims.twice.append((info, [entries[number] for number, _ in found]))
            for number, groups in found:
                claims.disputed.update(filter(None, _names(expanders[number], groups)))
        elif not found:
            claims.stray.append((info, None))
        else:
            number, groups = found[0]
            rule = entries[number].rule
            names = _names(expanders[number], groups)
            for part, name in enumerate(names):
                if name is not None:
                    _claim(claims, targets, Claim(info, name, rule, names, part, groups))
    claims.unused += [entry for number, entry in enumerate(entries) if number not in used]
    return claims


def _expanders(rule: Rule) -> list[Expand | None]:
    return [None if name is None else expander(name) for name in rule.names]


def _names(expanders: Iterable[Expand | None], groups: re.Match[str]) -> tuple[str | None, ...]:
    return tuple(None if expand is None else expand(groups) for expand in expanders)


def _claim(claims: Claims, targets: Collection[str], claim: Claim) -> None:
    if claim.names[claim.part] is None:
        return
    if claim.target in targets:
        claims.by_target.setdefault(claim.target, []).append(claim)
    else:
        claims.stray.append((claim.info, claim.target))


def _called(function: Callable[[str], Any], name: str) -> str | None:
    given = function(name)
    if given is None or isinstance(given, str):
        return given
    raise errors.UsageError(
        "the function in mapping= gives no name",
        tensor=name,
        expected="the name of a target, or None",
        found=repr(given),
    )
