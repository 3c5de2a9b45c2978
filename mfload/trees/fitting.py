"""Fitting: the recipe of one target, from its tensors in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mfload.trees import misfits
from mfload.trees.arranging import arrange
from mfload.trees.claims import Claim
from mfload.trees.converting import convert
from mfload.trees.misfits import Misfit
from mfload.trees.recipes import Aim, Recipe
from mfload.trees.rules import Rule
from mfload.trees.steps import Concat, Cut, Reshape, Step, Stored, Transpose


def fit(aim: Aim, claims: Sequence[Claim], aims: Mapping[str, Aim], dtype: Any) -> Recipe:
    """The recipe of a target.

    Args:
        aim: The target.
        claims: What goes there.
        aims: All targets by name, for those that share a stored tensor with this one.
        dtype: What `dtype=` was given.

    Raises:
        Misfit: It can't be made of that; the message does not name the target.
    """
    ordered = arrange(claims)
    rule = claims[0].rule
    tensors = [claim.info for claim in claims]
    first = ordered.cells[0]
    _check_alike(ordered.cells)
    made = convert(aim, rule, tensors, dtype)
    cast = None if made.cast is None else made.cast.name
    trail: list[str] = []
    steps = [
        _step(number, claim, aims, len(claims), cast, trail if not number else [])
        for number, claim in enumerate(first)
    ]
    each = steps[0] if rule.concat is None else _joined(steps, rule, trail)
    axes = _axes(rule, len(each.shape))
    if axes:
        numbers = " x ".join(map(str, ordered.counts))
        trail.append(f"{numbers} of them stacked along {', '.join(map(str, axes))}")
    recipe = Recipe(
        aim,
        made.dtype,
        each,
        tuple(tuple(claim.info for claim in cell) for cell in ordered.cells),
        ordered.counts,
        axes,
        made.conversion,
        made.checked,
        made.landed,
    )
    if recipe.shape != aim.shape:
        raise Misfit("wrong shape", misfits.shape(recipe, first, rule, trail))
    if tensors[0].dtype.kind in ("scale", "packed", "unknown") and not recipe.plain:
        raise Misfit("wrong dtype", f"{tensors[0].dtype} can only be taken as it is stored")
    return recipe


def _check_alike(cells: Sequence[Sequence[Claim]]) -> None:
    for column in zip(*cells, strict=True):
        for claim in column:
            if claim.info.shape != column[0].info.shape:
                one, other = column[0].info, claim.info
                raise Misfit(
                    "bad stack",
                    f"unequal shapes, {one.name} {list(one.shape)}, "
                    f"{other.name} {list(other.shape)}",
                )


def _step(
    number: int,
    claim: Claim,
    aims: Mapping[str, Aim],
    count: int,
    cast: str | None,
    trail: list[str],
) -> Step:
    rule = claim.rule
    step: Step = Stored(number, claim.info.shape, cast)
    if rule.split is not None:
        cut = _cut(step, claim, aims, count)
        trail.append(f"split [{cut.start}:{cut.stop}] along {cut.axis} {list(cut.shape)}")
        step = cut
    actions = [_transposed, _reshaped]
    for action in reversed(actions) if rule.reshape_first else actions:
        step = action(step, claim, trail)
    return step


def _transposed(step: Step, claim: Claim, trail: list[str]) -> Step:
    axes = claim.rule.transpose
    if axes is None:
        return step
    if len(axes) != len(step.shape):
        raise Misfit(
            "bad rule",
            f"transpose={axes} does not fit {claim.info.name} of shape {list(step.shape)}",
        )
    made = Transpose(step, axes)
    trail.append(f"transposed {axes} {list(made.shape)}")
    return step if axes == tuple(range(len(axes))) else made


def _reshaped(step: Step, claim: Claim, trail: list[str]) -> Step:
    wanted = claim.rule.reshape
    if wanted is None:
        return step
    total, known = math.prod(step.shape), math.prod(size for size in wanted if size >= 0)
    left = total // known if known else 0
    shape = tuple(left if size < 0 else size for size in wanted)
    if math.prod(shape) != total:
        raise Misfit(
            "bad rule",
            f"reshape={wanted} does not fit {claim.info.name} of shape {list(step.shape)}: "
            f"{total} elements",
        )
    trail.append(f"reshaped {list(shape)}")
    return step if shape == step.shape else Reshape(step, shape)


def _cut(step: Step, claim: Claim, aims: Mapping[str, Aim], count: int) -> Cut:
    split, shape, name = claim.rule.split, step.shape, claim.info.name
    assert split is not None
    axis = split.axis + len(shape) if split.axis < 0 else split.axis
    if not 0 <= axis < len(shape):
        raise Misfit("bad rule", f"split= names dim {split.axis} of {name} of shape {list(shape)}")
    sizes = split.sizes or _sizes(claim, aims, count, axis)
    if sum(sizes) != shape[axis]:
        raise Misfit(
            "bad rule",
            f"parts of {' + '.join(map(str, sizes))} along dim {axis} are not all of {name} of "
            f"shape {list(shape)}",
        )
    start = sum(sizes[: claim.part])
    return Cut(step, axis, start, start + sizes[claim.part])


def _sizes(claim: Claim, aims: Mapping[str, Aim], count: int, axis: int) -> tuple[int, ...]:
    """How long each part is, from the number of elements that its target has.

    One part may be unknown (nobody wants it): it is what the others leave.
    """
    shape = claim.info.shape
    row = math.prod(shape[:axis] + shape[axis + 1 :]) * count
    found: list[int | None] = []
    for name in claim.names:
        aim = None if name is None else aims.get(name)
        size, rest = (None, 0) if aim is None else divmod(math.prod(aim.shape), row or 1)
        if rest:
            assert aim is not None
            raise Misfit(
                "bad rule",
                f"no part of {claim.info.name} {list(shape)} along dim {axis} makes "
                f"{aim.name} {list(aim.shape)}; split=(dim, sizes) says what does",
            )
        found.append(size)
    left = shape[axis] - sum(size for size in found if size is not None)
    if found.count(None) > 1 or (None in found and left < 0):
        raise Misfit(
            "bad rule",
            f"the targets don't say how {claim.info.name} is split; split=(dim, sizes) does",
        )
    return tuple(left if size is None else size for size in found)


def _joined(steps: Sequence[Step], rule: Rule, trail: list[str]) -> Step:
    assert rule.concat is not None
    shapes = [step.shape for step in steps]
    axis = rule.concat.axis
    rank = len(shapes[0])
    axis = axis + rank if axis < 0 else axis
    rests = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if not 0 <= axis < rank or len(rests) > 1 or len({len(shape) for shape in shapes}) > 1:
        texts = ", ".join(str(list(shape)) for shape in shapes[:4])
        raise Misfit("bad rule", f"{texts} can't be joined along dim {rule.concat.axis}")
    made = Concat(tuple(steps), axis)
    trail.append(f"{len(steps)} of them joined along {axis} {list(made.shape)}")
    return steps[0] if len(steps) == 1 else made


def _axes(rule: Rule, rank: int) -> tuple[int, ...]:
    total = rank + len(rule.stack)
    axes = tuple(axis + total if axis < 0 else axis for _, axis in rule.stack)
    if len(set(axes)) < len(axes) or any(not 0 <= axis < total for axis in axes):
        given = ", ".join(str(axis) for _, axis in rule.stack)
        raise Misfit("bad rule", f"there is no dim {given} to stack along: the result has {total}")
    return axes
