"""Arranging: the order in which stored tensors are stacked and joined into one target."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mfload.trees.arguments import Group
from mfload.trees.claims import Claim
from mfload.trees.misfits import Misfit


class Arranged(NamedTuple):
    """The tensors of a target in their order.

    Attributes:
        cells: What is joined, for each place in the stack; row-major.
        counts: Sizes of the stack's dims.
    """

    cells: tuple[tuple[Claim, ...], ...]
    counts: tuple[int, ...]


def arrange(claims: Sequence[Claim]) -> Arranged:
    """Puts the claims on one target in order.

    Raises:
        Misfit: They come from several rules, lie in one place, or leave one empty.
    """
    rule = claims[0].rule
    if not rule.groups or any(claim.rule != rule for claim in claims):
        if len(claims) > 1:
            raise Misfit("filled twice", f"by {_names(claims)}")
        return Arranged((tuple(claims),), ())
    order = None if rule.concat is None else rule.concat.order
    numeric = len(rule.groups) - (order is not None)
    table: dict[tuple[int | str, ...], Claim] = {}
    for claim in claims:
        key = tuple(
            _number(claim, group) if at < numeric else _text(claim, group, order or ())
            for at, group in enumerate(rule.groups)
        )
        if key in table:
            raise Misfit("filled twice", f"by {_names([table[key], claim])}")
        table[key] = claim
    values = [_values(table, at) for at in range(numeric)]
    if order is not None:
        values.append(list(order))
    for group, found in zip(rule.groups[:numeric], values, strict=False):
        _check_even(group, found)
    places = list(itertools.product(*values))
    _check_full(table, places, rule.groups)
    width = len(values[-1]) if rule.concat is not None else 1
    ordered = [table[place] for place in places]
    cells = tuple(tuple(ordered[at : at + width]) for at in range(0, len(ordered), width))
    return Arranged(cells, tuple(len(found) for found in values[: len(rule.stack)]))


def _number(claim: Claim, group: Group) -> int:
    text = claim.text(group)
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise Misfit(
            "bad stack",
            f"group {group!r} orders tensors by number, but in {claim.info.name!r} it is {text!r}",
        )
    return int(text)


def _text(claim: Claim, group: Group, order: tuple[str, ...]) -> str:
    text = claim.text(group)
    if text is None or text not in order:
        raise Misfit(
            "bad stack",
            f"group {group!r} is one of {', '.join(order)}, "
            f"but in {claim.info.name!r} it is {text!r}",
        )
    return text


def _values(table: dict[tuple[int | str, ...], Claim], at: int) -> list[int | str]:
    numbers = {key[at] for key in table}
    return sorted(numbers, key=int)


def _check_even(group: Group, found: Sequence[int | str]) -> None:
    """Layers 3, 4, 5 are a stack, and so are 1, 3, 5; 0, 1, 3 lack one."""
    numbers = [int(number) for number in found]
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(steps) < 2:
        return
    step = min(steps)
    lacking = (n for n in range(numbers[0], numbers[-1], step) if n not in set(numbers))
    shown = ", ".join(map(str, itertools.islice(lacking, 5)))
    raise Misfit("bad stack", f"group {group!r} has {_brief(found)}: {shown} is missing")


def _check_full(
    table: dict[tuple[int | str, ...], Claim],
    places: Sequence[tuple[int | str, ...]],
    groups: tuple[Group, ...],
) -> None:
    lacking = [place for place in places if place not in table]
    if not lacking:
        return
    named = [zip(groups, place, strict=True) for place in lacking[:3]]
    shown = "; ".join(" and ".join(f"group {g!r} = {value}" for g, value in each) for each in named)
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    raise Misfit("bad stack", f"no tensor with {shown}{more}")


def _brief(numbers: Sequence[int | str]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, …"


def _names(claims: Sequence[Claim]) -> str:
    names = [claim.info.name for claim in claims[:4]]
    return ", ".join(names) + (f" and {len(claims) - 4} more" if len(claims) > 4 else "")
