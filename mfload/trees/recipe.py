"""Recipes: the transform that makes one leaf of stored tensors, and its dtype. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.planning import selection
from mfload.trees import transforms
from mfload.trees.keymap import Group, Rule
from mfload.trees.transforms import (
    Concat,
    Convert,
    Permute,
    Reads,
    Reshape,
    Shape,
    Slice,
    Stack,
    Take,
    Transform,
    shape_of,
)  # fmt: skip

_OPAQUE = ("scale", "packed", "unknown")
_INTEGERS = ("int", "uint", "bool")
_PERMUTED = 4  # Dims up to which all orders are tried for a hint.


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


class StoredBox(NamedTuple):
    """A box of a stored tensor, and the dtype that it lands in."""

    info: TensorInfo
    box: Box
    dtype: DType


class Recipe(NamedTuple):
    """How a leaf is made."""

    name: str  # The one by which the checkpoint fills it.
    dtype: DType
    tensors: tuple[TensorInfo, ...]  # As the transform numbers them.
    transform: Transform
    landed: DType | None = None  # What tensors are converted to while they land; None: nothing.
    checked: bool = False  # Values are cast to an integer dtype, which may not hold them.

    def part(self, box: Box) -> tuple[tuple[StoredBox, ...], Transform]:
        """What makes a box of the leaf: the boxes to read, and what is done with them.

        Only what the box needs is read, except where a reshape leaves no box of these elements.
        """
        reads: Reads = []
        transform = transforms.part(self.transform, box, reads)
        tensors = ((self.tensors[number], part) for number, part in reads)
        return tuple(StoredBox(i, part, self.landed or i.dtype) for i, part in tensors), transform


def is_plain(transform: Transform) -> bool:
    """Whether it is one tensor as it lands."""
    return isinstance(transform, Take) and transform.dtype is None


class MisfitError(Exception):
    """A leaf can't be made; never raised to users, who are told of all misfits at once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def make(
    name: str, leaf: Leaf, claims: Sequence[Claim], leaves: Mapping[str, Leaf], dtype: Any
) -> Recipe:
    """The recipe of a leaf, from what goes there.

    `leaves` are all leaves by name: some may share a stored tensor with this one. Raises
    `MisfitError`, whose message does not name the leaf.
    """
    rule, info = claims[0].rule, claims[0].info
    cells, counts = _arrange(claims)
    columns = zip(*cells, strict=True)
    for one, other in ((column[0].info, each.info) for column in columns for each in column):
        if one.shape != other.shape:
            both = f"{one.name} {list(one.shape)}, {other.name} {list(other.shape)}"
            raise MisfitError("bad stack", f"unequal shapes, {both}")
    tensors = tuple(claim.info for cell in cells for claim in cell)
    numbers = _numbers(name, leaf, rule, tensors, dtype)
    parts = [
        _one(Take(n, claim.info.shape, numbers.cast), claim, leaves, len(claims))
        for n, claim in enumerate(cells[0])
    ]
    made = parts[0] if rule.concat is None else _joined(parts, rule.concat.axis)
    inner = shape_of(made)
    axes = _stack_axes(rule, len(inner))
    if axes:
        made = Stack(made, len(cells[0]), counts, axes)
    shape = shape_of(made)
    if shape != leaf.shape:
        found = f"{info.name} is {list(info.shape)}"
        if not is_plain(made):
            stored = f"{info.name} {list(info.shape)}"
            several = f"{len(claims)} tensors such as {stored}" if len(claims) > 1 else stored
            found = f"the rule makes {list(shape)} of {several}"
        hint = "" if rule.steps else _transpose_hint(leaf.shape, axes, inner)
        raise MisfitError("wrong shape", f"wants {list(leaf.shape)}, but {found}{hint}")
    if numbers.convert is not None:
        made = Convert(made, *numbers.convert)
    if info.dtype.kind in _OPAQUE and not is_plain(made):
        raise MisfitError("wrong dtype", f"{info.dtype} can only be taken as it is stored")
    return Recipe(name, numbers.dtype, tensors, made, numbers.landed, numbers.checked)


# -- the order of tensors --------------------------------------------------------------------


def _arrange(claims: Sequence[Claim]) -> tuple[Sequence[Sequence[Claim]], Shape]:
    """What is joined for each place in the stack, row-major, and the sizes of the stack's dims."""
    rule = claims[0].rule
    if not rule.groups or any(claim.rule != rule for claim in claims):
        if len(claims) > 1:
            raise MisfitError("filled twice", f"by {_names(claims)}")
        return [claims], ()
    order = None if rule.concat is None else rule.concat.order
    table: dict[tuple[int, ...], Claim] = {}
    for claim in claims:
        key = tuple(_number(claim, group, None) for group in rule.groups[:-1])
        key += (_number(claim, rule.groups[-1], order),)
        if key in table:
            raise MisfitError("filled twice", f"by {_names([table[key], claim])}")
        table[key] = claim
    values = [sorted(set(column)) for column in zip(*table, strict=True)]
    if order is not None:
        values[-1] = list(range(len(order)))
    for group, found in zip(rule.groups, values, strict=True):
        _check_even(group, found)
    places = list(itertools.product(*values))
    lacking = [place for place in places if place not in table]
    if lacking:
        shown: list[int | str] = list(lacking[0])
        if order is not None:
            shown[-1] = order[lacking[0][-1]]
        pairs = zip(rule.groups, shown, strict=True)
        text = " and ".join(f"group {group!r} = {value}" for group, value in pairs)
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise MisfitError("bad stack", f"no tensor with {text}{more}")
    width = len(values[-1]) if rule.concat is not None else 1
    ordered = [table[place] for place in places]
    cells = [ordered[at : at + width] for at in range(0, len(ordered), width)]
    return cells, tuple(len(found) for found in values[: len(rule.stack)])


def _number(claim: Claim, group: Group, order: tuple[str, ...] | None) -> int:
    """The place of a claim in a group: its number, or that of its text in an order."""
    text, name = claim.groups[group] if claim.groups else None, claim.info.name
    if order is not None:
        if text in order:
            return order.index(text)
        expected = f"is one of {', '.join(order)}"
    else:
        if text is not None and text.isascii() and text.isdigit() and len(text) <= 18:
            return int(text)
        expected = "orders tensors by number"
    raise MisfitError("bad stack", f"group {group!r} {expected}, but in {name!r} it is {text!r}")


def _check_even(group: Group, numbers: Sequence[int]) -> None:
    """Layers 3, 4, 5 are a stack, and so are 1, 3, 5; 0, 1, 3 lack one."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(steps) > 1:
        known = set(numbers)
        every = range(numbers[0], numbers[-1], min(steps))
        lacking = ", ".join(map(str, itertools.islice((n for n in every if n not in known), 5)))
        shown = ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
        raise MisfitError("bad stack", f"group {group!r} has {shown}: {lacking} is missing")


def _names(claims: Sequence[Claim]) -> str:
    names = [claim.info.name for claim in claims[:4]]
    return ", ".join(names) + (f" and {len(claims) - 4} more" if len(claims) > 4 else "")


# -- the steps of a rule ---------------------------------------------------------------------


def _one(made: Transform, claim: Claim, leaves: Mapping[str, Leaf], count: int) -> Transform:
    """One stored tensor, split, transposed and reshaped."""
    if claim.rule.split is not None:
        axis, start, stop = _stretch(claim, leaves, count)
        whole = [(0, size) for size in claim.info.shape]
        made = Slice(made, (*whole[:axis], (start, stop), *whole[axis + 1 :]))
    for kind, given in claim.rule.steps:
        shape, wanted = shape_of(made), given
        fits = kind == "reshape" or len(given) == len(shape)
        if kind == "reshape":
            total, known = math.prod(shape), math.prod(size for size in given if size >= 0)
            wanted = tuple(size if size >= 0 else total // known if known else 0 for size in given)
            fits = math.prod(wanted) == total
        if not fits:
            of = f"{claim.info.name} of shape {list(shape)}"
            raise MisfitError("bad rule", f"{kind}={given} does not fit {of}")
        if kind == "reshape":
            made = made if wanted == shape else Reshape(made, wanted)
        elif given != tuple(range(len(given))):
            made = Permute(made, given)
    return made


def _stretch(claim: Claim, leaves: Mapping[str, Leaf], count: int) -> tuple[int, int, int]:
    """The part of a split: its dim, and where in it the part begins and ends."""
    split, shape, name = claim.rule.split, claim.info.shape, claim.info.name
    assert split is not None
    axis = split.axis + len(shape) if split.axis < 0 else split.axis
    if not 0 <= axis < len(shape):
        of = f"{name} of shape {list(shape)}"
        raise MisfitError("bad rule", f"split= names dim {split.axis} of {of}")
    sizes = split.sizes or _part_sizes(claim, leaves, count, axis)
    if sum(sizes) != shape[axis]:
        parts = f"parts of {' + '.join(map(str, sizes))} along dim {axis}"
        raise MisfitError("bad rule", f"{parts} are not all of {name} of shape {list(shape)}")
    start = sum(sizes[: claim.part])
    return axis, start, start + sizes[claim.part]


def _part_sizes(claim: Claim, leaves: Mapping[str, Leaf], count: int, axis: int) -> tuple[int, ...]:
    """How long each part is, from the elements of its target; one may be what the others leave."""
    shape, of = claim.info.shape, claim.info.name
    row = math.prod(shape[:axis] + shape[axis + 1 :]) * count
    found: list[int | None] = []
    for name in claim.names:
        leaf = None if name is None else leaves.get(name)
        size, rest = (None, 0) if leaf is None else divmod(math.prod(leaf.shape), row or 1)
        if leaf is not None and rest:
            raise MisfitError(
                "bad rule",
                f"no part of {of} {list(shape)} along dim {axis} makes {name} {list(leaf.shape)}; "
                "split=(dim, sizes) says what does",
            )
        found.append(size)
    left = shape[axis] - sum(size for size in found if size is not None)
    if found.count(None) > 1 or (None in found and left < 0):
        message = f"the targets don't say how {of} is split; split=(dim, sizes) does"
        raise MisfitError("bad rule", message)
    return tuple(left if size is None else size for size in found)


def _joined(parts: Sequence[Transform], given: int) -> Transform:
    shapes = [shape_of(part) for part in parts]
    rank = len(shapes[0])
    axis = given + rank if given < 0 else given
    rests = {(len(shape), shape[:axis] + shape[axis + 1 :]) for shape in shapes}
    if not 0 <= axis < rank or len(rests) > 1:
        texts = ", ".join(str(list(shape)) for shape in shapes[:4])
        raise MisfitError("bad rule", f"{texts} can't be joined along dim {given}")
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), axis)


def _stack_axes(rule: Rule, rank: int) -> tuple[int, ...]:
    total = rank + len(rule.stack)
    axes = tuple(axis + total if axis < 0 else axis for _, axis in rule.stack)
    if len(set(axes)) < len(axes) or any(not 0 <= axis < total for axis in axes):
        given = ", ".join(str(axis) for _, axis in rule.stack)
        message = f"there is no dim {given} to stack along: the result has {total}"
        raise MisfitError("bad rule", message)
    return axes


def _transpose_hint(leaf: Shape, axes: tuple[int, ...], got: Shape) -> str:
    wanted = tuple(size for at, size in enumerate(leaf) if at not in axes)
    if wanted != got and len(got) <= _PERMUTED and len(wanted) + len(axes) == len(leaf):
        for order in itertools.permutations(range(len(got))):
            if tuple(got[axis] for axis in order) == wanted:
                return f"; transpose={order} fits"
    return ""


# -- dtypes ----------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """How stored numbers become those of a leaf; see `Recipe`."""

    dtype: DType
    cast: str | None = None  # Each tensor at once, as their dtypes differ.
    convert: tuple[str, float | None, str | None] | None = None  # Last: see `Convert`.
    checked: bool = False
    landed: DType | None = None


def _numbers(
    name: str, leaf: Leaf, rule: Rule, tensors: Iterable[TensorInfo], dtype: Any
) -> _Numbers:
    given = {info.dtype: info for info in tensors}  # One of each dtype speaks for the others.
    stored = set(given)
    wanted = {_wanted(name, leaf, rule, info, dtype) for info in given.values()}
    if len(wanted) > 1:
        names = " and ".join(sorted(each.name for each in wanted))
        raise MisfitError("wrong dtype", f"its parts are {names}; rule(cast=) chooses one for all")
    (result,) = wanted
    between = None if rule.scale is None else _between(stored, result, rule.scale)
    convert = None if between is None else (result.name, rule.scale, between.name)
    first = between or result
    if _is_for_the_host({*stored, first}):
        return _Numbers(result, convert=convert, landed=first)
    cast = first.name if len(stored) > 1 else None
    if between is not None:
        return _Numbers(result, cast, convert)
    checked = result.kind in _INTEGERS and not all(_harmless(each, result) for each in stored)
    convert = None if cast or stored == {result} else (result.name, None, None)
    return _Numbers(result, cast, convert, checked)


def _wanted(name: str, leaf: Leaf, rule: Rule, info: TensorInfo, dtype: Any) -> DType:
    stored, by_name = info.dtype, selection.has_rules(dtype)
    asked = rule.cast or (selection.named(name, dtype) if by_name else None)
    if asked is not None:
        if not _convertible(stored, asked):
            raise MisfitError("wrong dtype", f"there is no conversion from {stored} to {asked}")
        return asked
    text = dtype if isinstance(dtype, str) else ""
    if by_name or text == "target":
        if leaf.dtype is None:
            return stored
        scaled = rule.scale is not None and stored.kind in _INTEGERS and leaf.dtype.kind == "float"
        if not scaled and not _harmless(stored, leaf.dtype):
            cast = f"; rule(cast={leaf.dtype.aliases[0]!r}) converts it"
            advice = cast if _convertible(stored, leaf.dtype) else ""
            raise MisfitError("wrong dtype", f"wants {leaf.dtype}, stored is {stored}{advice}")
        return leaf.dtype
    if dtype is None or text == "stored":
        return stored
    try:
        return selection.target(info, dtype)[0]
    except (errors.LossyCastError, errors.UnsupportedDtypeError) as error:
        raise MisfitError("wrong dtype", f"stored is {stored}: {error.message}") from None


def _harmless(stored: DType, wanted: DType) -> bool:
    if stored is wanted or stored.kind == wanted.kind == "float":
        return True
    whole = stored.kind in _INTEGERS and wanted.kind in ("int", "uint")
    return whole and selection.holds(wanted, stored)


def _convertible(stored: DType, wanted: DType) -> bool:
    opaque = stored.kind in _OPAQUE or wanted.kind in _OPAQUE
    return stored is wanted or not (opaque or (stored.kind == "complex" != wanted.kind))


def _is_for_the_host(found: set[DType]) -> bool:
    """Whether XLA does not convert among these as it must be done.

    On CPUs it takes float64 to the 16-bit and 8-bit floats through float32, which rounds twice,
    and flushes what is subnormal in float32 to zero, on either side of float64. Among the other
    floats, and from integers, all is as `ml_dtypes` has it. Measured with JAX 0.10.
    """
    wide = dtypes.TABLE["F64"] in found
    return wide and len(found) > 1 and all(each.kind == "float" for each in found)


def _between(stored: set[DType], result: DType, scale: float) -> DType:
    """The dtype a product is computed in: wide enough for both sides, float32 at the least."""
    kinds = {each.kind for each in stored}
    wide = any(each.kind in _INTEGERS and each.bits > 16 for each in stored)
    if wide or not kinds.isdisjoint(_OPAQUE) or result.kind not in ("float", "complex"):
        names = ", ".join(sorted(each.name for each in stored))
        text = "scale= makes floats of floats, or of integers up to 16 bits"
        raise MisfitError("wrong dtype", f"{names} to {result}: {text}")
    if "complex" in {*kinds, result.kind}:
        between = dtypes.TABLE["C64"]
    else:
        wide = any(each.bits > 32 for each in (*stored, result))
        between = dtypes.TABLE["F64" if wide else "F32"]
    limits = np.finfo(between.numpy)  # Of a complex dtype those of its parts.
    with np.errstate(all="ignore"):
        size = abs(limits.dtype.type(scale))
    if not limits.tiny <= size <= limits.max:
        raise MisfitError(
            "bad rule",
            f"scale={scale!r} is not a normal number of {between}, in which the product is "
            f"computed: {limits.tiny:.4g} to {limits.max:.4g}",
        )
    return between
