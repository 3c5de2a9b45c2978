"""Misfits: why a target can't be made, and what would help."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mfload import errors
from mfload.trees.claims import Claim
from mfload.trees.geometry import Shape
from mfload.trees.recipes import Recipe
from mfload.trees.rules import Rule

_PERMUTED = 4  # Dims up to which all their orders are tried for a hint.


class Misfit(errors.MappingError):
    """One target can't be made; never seen outside, where all of them are told at once.

    Args:
        kind: What sort of problem it is, in two words.
        message: The problem, without the target's name.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def shape(recipe: Recipe, first: Sequence[Claim], rule: Rule, trail: Sequence[str]) -> str:
    """What to say where a target is made that does not have its shape.

    Args:
        recipe: How it is made.
        first: The claims on its first cell.
        rule: The rule they come from.
        trail: What was done, step by step, with the shape after each.
    """
    aim, info = recipe.aim, first[0].info
    hint = _hint(recipe, info.shape, rule)
    if not trail:
        return f"wants {list(aim.shape)}, but {info.name} is {list(info.shape)}{hint}"
    way = ", ".join(trail)
    made = f"{info.name} {list(info.shape)}, {way}, gives {list(recipe.shape)}"
    return f"wants {list(aim.shape)}, but {made}{hint}"


def _hint(recipe: Recipe, stored: Shape, rule: Rule) -> str:
    """What would make it fit, where that is a transpose more or less."""
    wanted = tuple(size for at, size in enumerate(recipe.aim.shape) if at not in recipe.axes)
    got = recipe.each.shape
    if len(wanted) + len(recipe.axes) != len(recipe.aim.shape) or wanted == got:
        return ""
    if math.prod(wanted) != math.prod(got):
        return ""
    if rule.transpose is not None and rule.reshape is None and stored == wanted:
        return "; without the transpose it fits"
    axes = _order(got, wanted)
    if axes is not None:
        changed = rule.transpose is not None or rule.reshape is not None
        return (
            f"; its dims in the order {axes} would fit" if changed else f"; transpose={axes} fits"
        )
    return f"; reshape={wanted} has as many elements" if rule.reshape is None else ""


def _order(got: Shape, wanted: Shape) -> tuple[int, ...] | None:
    if len(got) != len(wanted) or len(got) > _PERMUTED:
        return None
    orders = itertools.permutations(range(len(got)))
    return next((axes for axes in orders if tuple(got[axis] for axis in axes) == wanted), None)
