"""Recipes: the transform that makes one leaf of stored tensors, and its dtype. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import TensorInfo
from mfload.planning import selection
from mfload.trees.keymap import Group, Rule
from mfload.trees.transforms import Branch, Shape, Transform

_OPAQUE = ("scale", "packed", "unknown")
_INTEGERS = ("int", "uint", "bool")

new_row: Any = tuple.__new__
"""Makes a named tuple, of all of its fields, in half the time that its own constructor takes."""


OPEN: Shape = (-1,)
"""The shape of a leaf that takes any."""


class Leaf(NamedTuple):
    """One leaf of a target."""

    names: tuple[str, ...]  # More than one if variables are shared.
    shape: Shape
    dtype: DType | None = None  # None: any.
    value: Any = None
    sharding: Any = None  # Perhaps on an abstract mesh.
    axes: Any = None  # The axes that Flax's metadata names for its dims.
    optional: bool = False  # It may stay as it is.
    optimizer: bool = False  # An optimizer's state comes as a whole or not at all.
    held: bool = True  # It can hold a tensor; functions, texts and typed PRNG keys can't.
    abstract: bool = False  # A shape without numbers.
    also: tuple[str, ...] = ()  # Names that files may have for it as well.

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def counts(self) -> bool:
        """Whether it is a number or an array, of PRNG keys too; not a function or a text."""
        return self.held or hasattr(self.value, "dtype")


class Claim(NamedTuple):
    """A stored tensor, or part number `part` of it, on its way to one of a rule's `names`."""

    info: TensorInfo
    rule: Rule
    names: tuple[str | None, ...]
    part: int = 0
    groups: re.Match[str] | None = None


class Recipe(NamedTuple):
    """How a leaf is made."""

    name: str  # The one by which the checkpoint fills it.
    dtype: DType
    tensors: tuple[TensorInfo, ...]  # As the transform numbers them.
    transform: Transform
    landed: DType  # What tensors are converted to while they land.
    checked: bool = False  # Values are cast to an integer dtype, which may not hold them.


def brief(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class MisfitError(Exception):
    """A leaf can't be made; never raised to users, who are told of all misfits at once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Recipes:
    """Makes the recipes of leaves; those that are alike share a transform, and dtypes.

    `leaves` are all leaves by name: some may share a stored tensor. `arrays` are the names of the
    dtypes that the framework has arrays of.
    """

    def __init__(self, leaves: Mapping[str, Leaf], dtype: Any, arrays: Collection[str]) -> None:
        self._leaves, self._dtype, self._arrays = leaves, dtype, arrays
        self._known: dict[Any, Recipe] = {}

    def make(self, name: str, claims: Sequence[Claim]) -> Recipe:
        """The recipe of a leaf; raises `MisfitError`, whose message does not name the leaf."""
        leaf, claim = self._leaves[name], claims[0]
        info, rule = claim.info, claim.rule
        if len(claims) > 1 or rule.stack or rule.concat or rule.split:
            return self._made(name, claims)
        asked = self._dtype.find(name) if isinstance(self._dtype, selection.Rules) else None
        # By id, since the hashes of rules and dtypes take longer; all of them outlive this.
        key = id(rule), id(info.dtype), info.shape, leaf.shape, id(leaf.dtype), id(asked)
        alike = self._known.get(key)
        if alike is None:
            alike = self._known[key] = self._made(name, claims)
        _, dtype, _, transform, landed, checked = alike
        return new_row(Recipe, (name, dtype, (info,), transform, landed, checked))

    def _made(self, name: str, claims: Sequence[Claim]) -> Recipe:
        made = _make(name, self._leaves[name], claims, self._leaves, self._dtype)
        if made.dtype.name not in self._arrays:
            raise MisfitError("misfit", f"the framework has no arrays of {made.dtype}")
        return made


def _make(
    name: str, leaf: Leaf, claims: Sequence[Claim], leaves: Mapping[str, Leaf], dtype: Any
) -> Recipe:
    rule, info = claims[0].rule, claims[0].info
    cells, counts = _arrange(claims)
    for column in zip(*cells, strict=True):
        one = column[0].info
        for other in (claim.info for claim in column):
            if one.shape != other.shape:
                both = f"{one.name} {list(one.shape)}, {other.name} {list(other.shape)}"
                raise MisfitError("bad stack", f"unequal shapes, {both}")
    tensors = tuple(claim.info for cell in cells for claim in cell)
    result, landed, checked = _dtypes(name, leaf, rule, tensors, dtype)
    branches = tuple(_branch(claim, leaves, len(claims)) for claim in cells[0])
    inner = Transform(branches)
    if rule.concat is not None:
        shapes = [branch.shapes[-1] for branch in branches]
        texts = brief([str(list(shape)) for shape in shapes])
        axis = _axis(rule.concat[0], len(shapes[0]), "concat", texts)
        if len({(*shape[:axis], None, *shape[axis + 1 :]) for shape in shapes}) > 1:
            raise MisfitError("bad rule", f"{texts} can't be joined along dim {axis}")
        inner = Transform(branches, axis)
    rank = len(inner.shape) + len(counts)
    axes = tuple(_axis(axis, rank, "stack", f"a result of {rank}") for _, axis in rule.stack)
    if len(set(axes)) < len(axes):
        raise MisfitError("bad rule", f"stack= names dim {axes[0]} twice")
    made = inner._replace(counts=counts, axes=axes)
    if made.shape != leaf.shape != OPEN:
        found = f"{info.name} is {list(info.shape)}"
        if not made.plain:
            several = f"{len(claims)} tensors such as " if len(claims) > 1 else ""
            stored = f"{several}{info.name} {list(info.shape)}"
            found = f"the rule makes {list(made.shape)} of {stored}"
        wanted = tuple(size for at, size in enumerate(leaf.shape) if at not in axes)
        if not rule.steps and wanted == inner.shape[::-1] != inner.shape:
            found += f"; transpose={tuple(range(len(wanted)))[::-1]} fits"
        raise MisfitError("wrong shape", f"wants {list(leaf.shape)}, but {found}")
    if rule.scale is not None:
        made = made._replace(scale=rule.scale, dtype=result.name)
    if info.dtype.kind in _OPAQUE and not made.plain:
        raise MisfitError("wrong dtype", f"{info.dtype} can only be taken as it is stored")
    return Recipe(name, result, tensors, made, landed, checked)


# -- the order of tensors --------------------------------------------------------------------


def _arrange(claims: Sequence[Claim]) -> tuple[Sequence[Sequence[Claim]], Shape]:
    """What is joined for each place in the stack, row-major, and the sizes of the stack's dims."""
    rule = claims[0].rule
    groups: list[tuple[Group, tuple[str, ...] | None]] = [(group, None) for group, _ in rule.stack]
    if rule.concat is not None:
        groups.append(rule.concat[1:])
    if not groups or any(claim.rule != rule for claim in claims):
        if len(claims) > 1:
            raise MisfitError("filled twice", f"by {brief([claim.info.name for claim in claims])}")
        return [claims], ()
    table: dict[tuple[int, ...], Claim] = {}
    for claim in claims:
        place = tuple(_number(claim, group, order) for group, order in groups)
        if place in table:
            names = f"{table[place].info.name}, {claim.info.name}"
            raise MisfitError("filled twice", f"by {names}")
        table[place] = claim
    ranges: list[range] = []
    for (_, order), found in zip(groups, zip(*table, strict=True), strict=True):
        # Layers 3, 4, 5 are a stack, and so are 1, 3, 5; 0, 1, 3 lack one.
        numbers = sorted(set(found))
        step = min((b - a for a, b in itertools.pairwise(numbers)), default=1)
        every = range(numbers[0], numbers[-1] + 1, step) if order is None else range(len(order))
        ranges.append(every[: len(claims) + 1])  # Of more than there are tensors one is missing.
    for place in itertools.product(*ranges):
        if place not in table:
            texts = (
                f"group {group!r} = {at if order is None else order[at]}"
                for (group, order), at in zip(groups, place, strict=True)
            )
            raise MisfitError("bad stack", f"no tensor with {' and '.join(texts)}")
    ordered = [table[place] for place in itertools.product(*ranges)]
    width = 1 if rule.concat is None else len(ranges[-1])
    cells = [ordered[at : at + width] for at in range(0, len(ordered), width)]
    return cells, tuple(map(len, ranges[: len(rule.stack)]))


def _number(claim: Claim, group: Group, order: tuple[str, ...] | None) -> int:
    """The place of a claim in a group: its number, or that of its text in an order."""
    text = claim.groups[group] if claim.groups else None
    if order is not None and text in order:
        return order.index(text)
    if order is None and text is not None and re.fullmatch("[0-9]{1,18}", text):
        return int(text)
    wanted = "orders tensors by number" if order is None else f"is one of {', '.join(order)}"
    found = f"in {claim.info.name!r} it is {text!r}"
    raise MisfitError("bad stack", f"group {group!r} {wanted}, but {found}")


# -- the steps of a rule ---------------------------------------------------------------------


def _branch(claim: Claim, leaves: Mapping[str, Leaf], count: int) -> Branch:
    """One stored tensor, split, transposed and reshaped."""
    branch = Branch(claim.info.shape)
    if claim.rule.split is not None:
        axis, start, stop = _stretch(claim, leaves, count)
        box = [(0, size) for size in branch.shape]
        box[axis] = start, stop
        branch = Branch(branch.shape, (("slice", tuple(box)),))
    for kind, given in claim.rule.steps:
        shape, wanted, same = branch.shapes[-1], given, tuple(range(len(given)))
        fits = len(given) == len(shape)
        if kind == "reshape":
            total, known = math.prod(shape), math.prod(size for size in given if size >= 0)
            wanted = tuple(size if size >= 0 else total // max(1, known) for size in given)
            fits, same = math.prod(wanted) == total, shape
        if not fits:
            of = f"{claim.info.name} of shape {list(shape)}"
            raise MisfitError("bad rule", f"{kind}={given} does not fit {of}")
        if wanted != same:
            branch = Branch(branch.shape, (*branch.steps, (kind, wanted)))
    return branch


def _stretch(claim: Claim, leaves: Mapping[str, Leaf], count: int) -> tuple[int, int, int]:
    """The part of a split: its dim, and where in it the part begins and ends."""
    split, shape = claim.rule.split, claim.info.shape
    assert split is not None
    stored = f"{claim.info.name} of shape {list(shape)}"
    dim, sizes = split
    axis = _axis(dim, len(shape), "split", stored)
    if sizes is None:
        # From the elements of the targets; one may be what the others leave.
        row = max(1, math.prod(shape[:axis] + shape[axis + 1 :]) * count)
        found = (None if name is None else leaves.get(name) for name in claim.names)
        targets = [None if leaf is None or leaf.shape == OPEN else leaf for leaf in found]
        wanted = [0 if leaf is None else math.prod(leaf.shape) for leaf in targets]
        left = shape[axis] - sum(wanted) // row
        if any(size % row for size in wanted) or targets.count(None) > 1:
            text = f"the targets' shapes do not say how {stored} is split along dim {axis}"
            raise MisfitError("bad rule", f"{text}; split=(dim, sizes) does")
        pairs = zip(targets, wanted, strict=True)
        sizes = [max(left, 0) if leaf is None else size // row for leaf, size in pairs]
    if sum(sizes) != shape[axis]:
        parts = f"parts of {' + '.join(map(str, sizes))} along dim {axis}"
        raise MisfitError("bad rule", f"{parts} are not all of {stored}")
    start = sum(sizes[: claim.part])
    return axis, start, start + sizes[claim.part]


def _axis(axis: int, rank: int, step: str, of: str) -> int:
    if not -rank <= axis < rank:
        raise MisfitError("bad rule", f"{step}= names dim {axis} of {of}")
    return axis % rank


# -- dtypes ----------------------------------------------------------------------------------


def _dtypes(
    name: str, leaf: Leaf, rule: Rule, tensors: Sequence[TensorInfo], dtype: Any
) -> tuple[DType, DType, bool]:
    """The dtype of a leaf, the one that its tensors land in, and whether that may not hold them."""
    stored = {info.dtype: info for info in tensors}  # One of each dtype speaks for the others.
    found = {_wanted(name, leaf, rule, info, dtype) for info in stored.values()}
    wanted = {each for each, _ in found}
    if len(wanted) > 1:
        names = " and ".join(sorted(each.name for each in wanted))
        raise MisfitError("wrong dtype", f"its parts are {names}; rule(cast=) chooses one for all")
    (result,) = wanted
    if rule.scale is not None:
        return result, _product(stored, result, rule.scale), False
    return result, result, any(checked for _, checked in found)


def _wanted(name: str, leaf: Leaf, rule: Rule, info: TensorInfo, dtype: Any) -> tuple[DType, bool]:
    """What a tensor becomes, and whether its values are to be checked."""
    asked = rule.cast
    if asked is None and isinstance(dtype, selection.Rules):
        asked = dtype.find(name)
        if asked is None:
            return _as_target(leaf, rule, info.dtype)
    try:
        return selection.target(info, dtype) if asked is None else selection.asked(info, asked)
    except (errors.LossyCastError, errors.UnsupportedDtypeError) as error:
        wanted = "" if asked is None else f"wants {asked}, "
        message = f"{wanted}stored is {info.dtype}: {error.message}"
        raise MisfitError("wrong dtype", message) from None


def _as_target(leaf: Leaf, rule: Rule, stored: DType) -> tuple[DType, bool]:
    """The dtype that a leaf has, if stored numbers become it without harm; and if to check them.

    Python's integers, such as steps, are saved with 64 bits: one without dims becomes any integer
    that holds its value.
    """
    wanted = leaf.dtype or stored
    if wanted is stored or stored.kind == wanted.kind == "float":
        return wanted, wanted is not stored and wanted.name in dtypes.NO_INFINITY
    if stored.kind in _INTEGERS:
        if rule.scale is not None and wanted.kind == "float":
            return wanted, False
        holds = selection.holds(wanted, stored)
        fits = holds or wanted.wide is stored or (not leaf.shape and rule.scale is None)
        if wanted.kind in ("int", "uint") and fits:
            return wanted, not holds
    message = f"wants {wanted}, stored is {stored}"
    if {stored.kind, wanted.kind}.isdisjoint(_OPAQUE) and stored.kind != "complex":
        message += f"; rule(cast={wanted.aliases[0]!r}) converts it"
    raise MisfitError("wrong dtype", message)


def _product(stored: Collection[DType], result: DType, scale: float) -> DType:
    """The dtype a product is computed in: wide enough for both sides, float32 at the least."""
    kinds = {each.kind for each in stored}
    wide = any(each.kind in _INTEGERS and each.bits > 16 for each in stored)
    if wide or not kinds.isdisjoint(_OPAQUE) or result.kind not in ("float", "complex"):
        names = ", ".join(sorted(each.name for each in stored))
        text = "scale= makes floats of floats, or of integers up to 16 bits"
        raise MisfitError("wrong dtype", f"{names} to {result}: {text}")
    if result.name in dtypes.NO_INFINITY:
        text = f"scale= can't make {result}, which has no infinity for products beyond its range: "
        text += "load a wider float, and convert that"
        raise MisfitError("bad rule", text)
    if "complex" in {*kinds, result.kind}:
        made = dtypes.TABLE["C64"]
    else:
        wide = any(each.bits > 32 for each in (*stored, result))
        made = dtypes.TABLE["F64" if wide else "F32"]
    limits = np.finfo(made.numpy)  # Of a complex dtype those of its parts.
    with np.errstate(all="ignore"):
        size = abs(limits.dtype.type(scale))
    if not limits.tiny <= size <= limits.max:
        raise MisfitError(
            "bad rule",
            f"scale={scale!r} is not a normal number of {made}, in which the product is "
            f"computed: {limits.tiny:.4g} to {limits.max:.4g}",
        )
    return made
