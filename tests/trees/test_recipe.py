"""Recipes: any box of any target is what the computation on whole arrays has there."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mfload import dtypes
from mfload.index import Box, Index, Piece, TensorInfo
from mfload.trees.keymap import Rule, rule
from mfload.trees.matching import match
from mfload.trees.recipe import Leaf, Recipe
from mfload.trees.transforms import Transform

Array = np.ndarray[Any, Any]
FLOATS = ["F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F64"]


def _index(stored: dict[str, Array]) -> Index:
    rows = {}
    for name, array in stored.items():
        row = dtypes.resolve(array.dtype)
        rows[name] = TensorInfo(name, row, array.shape, (Piece(0, 0, array.nbytes),))
    return Index(("file",), rows)


def _bits(array: Any) -> Array:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind != "b" else array


class Source(NamedTuple):
    """A box of a stored tensor, and the dtype that it lands in."""

    info: TensorInfo
    box: Box
    dtype: dtypes.DType


class Part(NamedTuple):
    """What makes a box of a leaf."""

    sources: list[Source]
    transform: Transform

    def made(self, arrays: list[Array]) -> Any:
        return self.transform.evaluate(arrays, np)


def _part(recipe: Recipe, box: Box) -> Part:
    transform, reads = recipe.transform.part(box)
    found = [Source(recipe.tensors[number], read, recipe.landed) for number, read in reads]
    return Part(found, transform)


def _match(index: Index, leaves: list[Leaf], *how: Any, **more: Any) -> dict[str, Recipe]:
    return {each.name: each for each in match(index, leaves, *how, **more).recipes.values()}


def _leaf(name: str, shape: tuple[int, ...], dtype: Any = None) -> Leaf:
    return Leaf((name,), shape, dtype)


class Plan(NamedTuple):
    """What a rule does, in the forms that the rule and NumPy take."""

    rule: Rule
    split: tuple[int, tuple[int, ...]] | None
    part: int
    joined: int
    axis: int
    stack: tuple[int, ...]
    axes: tuple[int, ...]
    names: dict[str, tuple[int, ...]]
    dtype: str
    cast: str | None


def _landed(source: Any, stored: dict[str, Array]) -> Array:
    box = tuple(slice(*dim) for dim in source.box)
    with np.errstate(all="ignore"):
        return stored[source.info.name][box].astype(source.dtype.numpy)


def _whole(plan: Plan, stored: dict[str, Array]) -> Array:
    """The target, made of whole arrays, without a look at numbers."""
    cells = []
    names = iter(plan.names)
    for _ in range(math.prod(plan.stack)):
        parts = [_one(plan, stored[next(names)]) for _ in range(plan.joined)]
        cells.append(parts[0] if plan.joined == 1 else np.concatenate(parts, axis=plan.axis))
    if not plan.stack:
        return cells[0]
    whole = np.stack(cells).reshape(*plan.stack, *cells[0].shape)
    # Moved one by one into place, lowest first, as NumPy itself would stack them.
    order = sorted(range(len(plan.axes)), key=lambda at: plan.axes[at])
    return np.moveaxis(whole, order, [plan.axes[at] for at in order])


def _one(plan: Plan, array: Array) -> Array:
    if plan.split is not None:
        axis, sizes = plan.split
        array = np.split(array, np.cumsum(sizes)[:-1], axis)[plan.part]
    for kind, how in plan.rule.steps:
        array = array.transpose(how) if kind == "transpose" else array.reshape(how)
    return array


def _numbers(plan: Plan, array: Array) -> Array:
    wanted = dtypes.TABLE[plan.cast or plan.dtype].numpy
    if plan.rule.scale is not None:
        wide = np.float64 if 8 in (array.dtype.itemsize, np.dtype(wanted).itemsize) else np.float32
        array = array.astype(wide) * wide(plan.rule.scale)
    return array.astype(wanted)


@st.composite
def _factors(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """A shape of so many elements."""
    if total == 0:
        return draw(st.sampled_from([(0,), (0, 3), (2, 0), (1, 0, 2)]))
    shape: list[int] = []
    while total > 1:
        factor = draw(st.sampled_from([n for n in range(2, total + 1) if total % n == 0]))
        shape.append(factor)
        total //= factor
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 6, 8, 0]), max_size=4).map(tuple))
    now, split, part = shape, None, 0
    if shape and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=1, max_size=2)))
        sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, shape[axis]]))
        split, part = (axis, sizes), draw(st.integers(0, len(sizes) - 1))
        now = (*shape[:axis], sizes[part], *shape[axis + 1 :])
    first = draw(st.booleans())
    reshape = transpose = None
    for step in ("reshape", "transpose") if first else ("transpose", "reshape"):
        if draw(st.booleans()):
            if step == "reshape":
                now = reshape = draw(_factors(math.prod(now)))
            else:
                transpose = tuple(draw(st.permutations(range(len(now)))))
                now = tuple(now[axis] for axis in transpose)
    joined = draw(st.integers(2, 3)) if now and draw(st.booleans()) else 1
    axis = draw(st.integers(0, len(now) - 1)) if joined > 1 else 0
    stack = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    axes = draw(st.permutations(range(len(now) + len(stack))))[: len(stack)]
    dtype = draw(st.sampled_from([*FLOATS, "I32"]))
    cast = draw(st.sampled_from([None, *FLOATS]))
    scaled = dtype != "I32" and (cast or dtype) != "F8_E4M3"
    scale = draw(st.sampled_from([None, 0.1, -3.0, 1e-3])) if scaled else None
    texts = [["b", "c", "a"][n] for n in range(joined)]
    ways = itertools.product(*(range(n) for n in stack), texts)
    names = {".".join(["w", *(str(7 + 2 * i) for i in way[:-1]), way[-1]]): shape for way in ways}
    targets = [f"t{n}" for n in range(len(split[1]))] if split else "t0"
    line = rule(
        targets,
        transpose=transpose,
        reshape=reshape,
        stack={at + 1: axes[at] for at in range(len(stack))} or None,
        concat=(axis, len(stack) + 1, texts) if joined > 1 else None,
        split=split,
        cast=cast,
        scale=scale,
    )
    if first:
        line = dataclasses.replace(line, steps=line.steps[::-1])
    return Plan(line, split, part, joined, axis, stack, tuple(axes), names, dtype, cast)


def _fill(plan: Plan, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    kind = dtypes.TABLE[plan.dtype].numpy
    made = {n: (rng.standard_normal(shape) * 4).astype(kind) for n, shape in plan.names.items()}
    # As a file has them, in no order that helps.
    return dict(sorted(made.items(), key=lambda pair: pair[0][::-1]))


def _box(data: st.DataObject, shape: tuple[int, ...]) -> Box:
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    return tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for start, size in zip(starts, shape, strict=True)
    )


@settings(max_examples=400)
@given(plan=_plans(), seed=st.integers(0, 9), data=st.data())
def test_a_box_is_what_whole_arrays_have_there(plan: Plan, seed: int, data: st.DataObject) -> None:
    stored = _fill(plan, seed)
    places = _whole(plan, stored)
    expected = _numbers(plan, places)
    pattern = r"w" + r"\.(\d+)" * len(plan.stack) + r"\.(\w)"
    leaf = _leaf(f"t{plan.part}", expected.shape)
    (recipe,) = _match(_index(stored), [leaf], {pattern: plan.rule}, strict=False).values()
    assert recipe.dtype.name == (plan.cast or plan.dtype)
    assert recipe.transform.shape == expected.shape
    if 0 in expected.shape:
        return  # Made without reading.
    for box in (tuple((0, size) for size in expected.shape), _box(data, expected.shape)):
        pull = _part(recipe, box)
        arrays = [_landed(source, stored) for source in pull.sources]
        made = pull.made(arrays)
        wanted = expected[tuple(slice(*dim) for dim in box)]
        assert made.shape == wanted.shape
        assert made.dtype == wanted.dtype
        assert np.array_equal(_bits(made), _bits(wanted))
        _check_bytes(plan, stored, pull, box)


def _check_bytes(plan: Plan, stored: dict[str, Array], pull: Part, box: Box) -> None:
    """Where the elements that are wanted are a box of a stored tensor, no others are read."""
    numbers, at = {}, 0
    for name, array in stored.items():
        numbers[name] = np.arange(at, at + array.size).reshape(array.shape)
        at += array.size
    wanted = set(_whole(plan, numbers)[tuple(slice(*dim) for dim in box)].ravel().tolist())
    read = [numbers[s.info.name][tuple(slice(*dim) for dim in s.box)] for s in pull.sources]
    for name, array in numbers.items():
        mine = np.isin(array, list(wanted))
        got = [part for s, part in zip(pull.sources, read, strict=True) if s.info.name == name]
        if not mine.any():
            assert not got
            continue
        (part,) = got
        where = np.argwhere(mine)
        extent = int(np.prod(where.max(axis=0) - where.min(axis=0) + 1))
        if extent == mine.sum():
            assert part.size == extent


class Line(NamedTuple):
    """One of the values in a list of a key map, and what its targets hold."""

    value: Any
    targets: list[str]
    stacked: bool
    transpose: tuple[int, ...] | None
    reshape: tuple[int, ...] | None
    scale: float | None

    def made(self, array: Array) -> Array:
        """What one stored tensor becomes."""
        if self.transpose is not None:
            array = array.transpose(self.transpose)
        if self.reshape is not None:
            array = array.reshape(self.reshape)
        return array if self.scale is None else array * np.float32(self.scale)


@st.composite
def _lines(draw: st.DrawFn, shape: tuple[int, ...], number: int) -> Line:
    """A line of any form: a name, names, a rule of one or several, or Tunix's pair."""
    form = draw(st.sampled_from(["name", "pair", "rule"]))
    stacked = form == "rule" and draw(st.booleans())
    tail = "" if stacked else r".\1"
    targets = [f"t{number}.{n}" for n in range(draw(st.integers(1, 3)) if form == "rule" else 1)]
    names = [name + tail for name in targets]
    transpose = reshape = scale = None
    if form != "name" and draw(st.booleans()):
        transpose = tuple(draw(st.permutations(range(len(shape)))))
    if form != "name" and draw(st.booleans()):
        reshape = draw(_factors(math.prod(shape)))
    if form == "rule":
        scale = draw(st.sampled_from([None, 0.1, -3.0]))
        value: Any = rule(
            names if len(names) > 1 else names[0],
            transpose=transpose,
            reshape=reshape,
            stack=1 if stacked else None,
            scale=scale,
        )
    else:
        # What is empty in that form, dims in order or a shape, is none.
        reshape = reshape or None
        value = names[0] if form == "name" else (names[0], (transpose, reshape))
    return Line(value, targets, stacked, transpose, reshape, scale)


@settings(max_examples=300)
@given(data=st.data())
def test_each_target_of_a_list_is_made_as_by_itself(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3).map(tuple))
    layers = range(data.draw(st.integers(0, 9)), 12, data.draw(st.sampled_from([1, 5])))
    rng = np.random.default_rng(0)
    stored = {f"l.{n}": rng.standard_normal(shape, np.float32) for n in layers}
    lines = [data.draw(_lines(shape, number)) for number in range(data.draw(st.integers(1, 3)))]
    expected: dict[str, Array] = {}
    for line in lines:
        made = {n: line.made(stored[f"l.{n}"]) for n in layers}
        for name in line.targets:
            if line.stacked:
                expected[name] = np.stack(list(made.values()))
            else:
                expected |= {f"{name}.{n}": array for n, array in made.items()}
    aims = [_leaf(name, array.shape) for name, array in expected.items()]
    values = [line.value for line in lines]
    index = _index(stored)
    recipes = _match(index, aims, {r"l\.(\d+)": values})
    assert list(recipes) == list(expected)
    # As with a map for each line, which leaves the others' targets alone.
    alone: dict[str, Any] = {}
    for value in values:
        alone |= _match(index, aims, {r"l\.(\d+)": value}, strict=False)
    assert recipes == alone
    for name, array in expected.items():
        box = _box(data, array.shape)
        pull = _part(recipes[name], box)
        result = pull.made([_landed(s, stored) for s in pull.sources])
        wanted = array[tuple(slice(*dim) for dim in box)]
        assert result.shape == wanted.shape
        assert np.array_equal(_bits(result), _bits(wanted))


def _parts_of(line: Rule, shape: tuple[int, ...], aim: tuple[int, ...], *boxes: Box) -> list[Part]:
    index = _index({"w": np.zeros(shape, np.float32)})
    recipe = _match(index, [_leaf("t", aim)], {"w": line})["t"]
    return [_part(recipe, box) for box in boxes]


def test_heads_on_several_devices_take_their_columns_alone() -> None:
    line = rule("t", transpose=(1, 0), reshape=(6, 4, 8))
    boxes = [((0, 6), (n, n + 2), (0, 8)) for n in (0, 2)]
    one, other = _parts_of(line, (32, 6), (6, 4, 8), *boxes)
    assert [pull.sources[0].box for pull in (one, other)] == [
        ((0, 16), (0, 6)),
        ((16, 32), (0, 6)),
    ]
    # One compiled function serves both.
    assert one.transform == other.transform
    assert hash(one.transform) == hash(other.transform)
    assert pickle.loads(pickle.dumps(one.transform)) == one.transform


def test_parts_of_heads_are_cut_from_all_of_them() -> None:
    line = rule("t", reshape=(4, 8))
    (pull,) = _parts_of(line, (32,), (4, 8), ((1, 3), (2, 4)))
    assert pull.sources[0].box == ((8, 24),)
    (pull,) = _parts_of(line, (32,), (4, 8), ((1, 2), (2, 4)))
    assert pull.sources[0].box == ((10, 12),)


def test_only_layers_and_parts_in_the_box_are_read() -> None:
    stored = {f"l.{n}.{p}": np.zeros((2, 3), np.float32) for n in range(10) for p in "kqv"}
    line = rule("t", concat=(0, 2, ("q", "k", "v")), stack=1)
    recipe = _match(_index(stored), [_leaf("t", (10, 6, 3))], {r"l\.(\d+)\.(\w)": line})["t"]
    pull = _part(recipe, ((4, 6), (3, 6), (0, 3)))
    assert [(s.info.name, s.box[0]) for s in pull.sources] == [
        ("l.4.k", (1, 2)), ("l.4.v", (0, 2)), ("l.5.k", (1, 2)), ("l.5.v", (0, 2)),
    ]  # fmt: skip


def test_low_precision_is_rounded_once() -> None:
    array = np.array([1.0078125, 3.0], ml_dtypes.bfloat16)
    index = _index({"w": array})
    line = rule("t", scale=1.0009765625)
    part = _part(_match(index, [_leaf("t", (2,))], {"w": line})["t"], ((0, 2),))
    made = part.made([array.astype(part.sources[0].dtype.numpy)])
    assert (
        made.tolist()
        == (array.astype(np.float32) * np.float32(1.0009765625)).astype(ml_dtypes.bfloat16).tolist()
    )


@pytest.mark.parametrize("scale", [None, 0.5])
def test_stored_in_two_dtypes_and_stacked(scale: float | None) -> None:
    # NumPy and JAX have no common dtype for these two.
    stored = {
        "l.0": np.ones(2, ml_dtypes.float8_e5m2),
        "l.1": np.ones(2, ml_dtypes.float8_e4m3fn),
    }
    line = rule("t", stack=1, scale=scale)
    leaf = _leaf("t", (2, 2), dtypes.TABLE["BF16"])
    recipe = _match(_index(stored), [leaf], {r"l\.(\d)": line})["t"]
    part = _part(recipe, ((0, 2), (0, 2)))
    made = part.made([_landed(source, stored) for source in part.sources])
    assert made.dtype == ml_dtypes.bfloat16
    assert made.tolist() == [[scale or 1] * 2] * 2


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_small_tensors_pass(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    recipe = _match(_index({"t": array}), [_leaf("t", shape)])["t"]
    assert recipe.transform.plain
    assert _part(recipe, tuple((0, size) for size in shape)).made([array]) is array
