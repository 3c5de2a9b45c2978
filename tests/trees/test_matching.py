"""Matching: all that keeps a checkpoint from a target is told at once."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from mfload import dtypes, errors
from mfload.index import Index, Piece, TensorInfo
from mfload.trees import matching
from mfload.trees.keymap import Rule, rule
from mfload.trees.matching import match
from mfload.trees.recipe import Leaf, Recipe

Shape = tuple[int, ...]


def _index(**tensors: Shape | tuple[Shape, str]) -> Index:
    """Tensors by name, with two underlines for a dot, and a shape or (shape, dtype)."""
    rows = {}
    for key, value in tensors.items():
        shape, name = (value, "F32") if not value or isinstance(value[0], int) else value
        name, row = key.replace("__", "."), dtypes.TABLE[str(name)]
        piece = Piece(0, 0, row.size_of(shape) or 0)  # type: ignore[arg-type]
        rows[name] = TensorInfo(name, row, shape, (piece,))  # type: ignore[arg-type]
    return Index(("file",), rows)


def _leaves(leaves: dict[str, Any]) -> list[Leaf]:
    found = []
    for name, value in leaves.items():
        shape, dtype = (value, "F32") if not value or isinstance(value[0], int) else value
        found.append(Leaf((name,), shape, dtypes.TABLE[dtype]))
    return found


class Found(NamedTuple):
    recipes: dict[str, Recipe]
    notes: tuple[str, ...]


def _match(index: Index, leaves: dict[str, Any], key_map: Any = None, **more: Any) -> Any:
    found = match(index, _leaves(leaves), key_map, **more)
    return Found({each.name: each for each in found.recipes.values()}, found.notes)


def _problems(index: Index, leaves: dict[str, Any], key_map: Any = None, **more: Any) -> list[str]:
    with pytest.raises(errors.MappingError) as info:
        _match(index, leaves, key_map, **more)
    assert info.value.message.startswith("the checkpoint does not fit the target")
    assert isinstance(info.value, ValueError)
    return list(info.value.problems)


def test_names_match_as_they_are() -> None:
    matched = _match(_index(b=(2,), a__w=(3, 2)), {"a.w": (3, 2), "b": (2,)})
    assert list(matched.recipes) == ["a.w", "b"]
    assert all(recipe.transform.plain for recipe in matched.recipes.values())
    assert matched.notes == ()


def test_missing_and_extra_with_close_names() -> None:
    index = _index(a__kernel=(2,), other=(1, 3))
    assert _problems(index, {"a.kernl": (2,), "zzz": ()}) == [
        "missing: a.kernl [2]: nothing in the checkpoint goes there, did you mean 'a.kernel'?",
        "missing: zzz []: nothing in the checkpoint goes there",
        "extra: a.kernel [2]: the target has no 'a.kernel', did you mean 'a.kernl'?",
        "extra: other [1, 3]: the target has no 'other'",
    ]


def test_strict_is_about_names_alone() -> None:
    index = _index(a=(2,), other=(1,))
    matched = _match(index, {"a": (2,), "b": (2,)}, strict=False)
    assert list(matched.recipes) == ["a"]
    assert matched.notes == ("tensors that the target has no place for: other",)
    assert _problems(index, {"a": (3,)}, strict=False) == [
        "wrong shape: a: wants [3], but a is [2]",
    ]


def test_a_target_that_is_mistyped_in_the_only_rule() -> None:
    with pytest.raises(errors.MappingError) as info:
        _match(_index(z=(1,), a=(2,)), {"x": (2,), "head": (2,)}, {"a": "haed"}, strict=False)
    assert (info.value.expected, info.value.found) == ("names like 'head'", "names like 'haed'")


def test_an_optional_leaf_may_be_missing_and_may_be_there() -> None:
    row = dtypes.TABLE["U32"]
    leaves = [Leaf(("a",), (2,), dtypes.TABLE["F32"]), Leaf(("rng",), (4,), row, optional=True)]
    assert list(match(_index(a=(2,)), leaves).recipes) == [0]
    assert list(match(_index(a=(2,), rng=((4,), "U32")), leaves).recipes) == [0, 1]
    with pytest.raises(errors.MappingError, match="wrong shape"):
        match(_index(a=(2,), rng=((2,), "U32")), leaves)


def test_everything_wrong_is_told_at_once() -> None:
    index = _index(
        a=(2, 3), b__x=(2,), c=((2,), "C64"), d__0=(2,), d__1=(2,), d__3=(2,), e=(2,), f=(2,),
        lost=(5,), g=(4,),
    )  # fmt: skip
    leaves = {"a": (3, 2), "b": (2,), "c": (2,), "d": (3, 2), "e": (2,), "gone": (7,), "g": (2, 3)}
    key_map = {
        "a": "a", r"b\..": "b", r".\.x": "b", "c": "c", r"d\.(\d)": rule("d", stack=1),
        "(e|f)": "e", "none": "a", "g": rule("g", reshape=(2, 3)),
    }  # fmt: skip
    assert _problems(index, leaves, key_map) == [
        r"matched twice: b.x: several rules match, 'b\\..', '.\\.x'; make one narrower, or write "
        "one rule with a list of targets",
        "wrong shape: a: wants [3, 2], but a is [2, 3]; transpose=(1, 0) fits",
        "filled twice: b: by b.x, b.x",
        "filled twice: e: by e, f",
        "wrong dtype: c: wants F32, stored is C64",
        "bad stack: d: no tensor with group 1 = 2",
        "bad rule: g: reshape=(2, 3) does not fit g of shape [4]",
        "missing: gone [7]: nothing in the checkpoint goes there",
        "extra: lost [5]: no rule matches",
        "unused rule: 'none' matches no tensor",
    ]


@pytest.mark.parametrize(
    ("tensors", "leaf", "line", "expected"),
    [
        ({"l__0": (2,), "l__1": (3,)}, (2, 2), rule("t", stack=1),
         "bad stack: t: unequal shapes, l.0 [2], l.1 [3]"),
        ({"l__0": (2,), "l__00": (2,)}, (2, 2), rule("t", stack=1),
         "filled twice: t: by l.0, l.00"),
        ({"l__a": (2,)}, (1, 2), rule("t", stack=1),
         "bad stack: t: group 1 orders tensors by number, but in 'l.a' it is 'a'"),
        ({"l__0": (2,), "l__1": (2,)}, (3, 2), rule("t", stack=1),
         "wrong shape: t: wants [3, 2], but the rule makes [2, 2] of 2 tensors such as l.0 [2]"),
        ({"l__0": (2,)}, (2,), rule("t", stack=1),
         "wrong shape: t: wants [2], but the rule makes [1, 2] of l.0 [2]"),
        ({"l__0": (2,)}, (1, 2), rule("t", stack={1: 2}),
         "bad rule: t: stack= names dim 2 of a result of 2"),
        ({"l__k": (2,)}, (4,), rule("t", concat=(0, 1, ("q", "k"))),
         "bad stack: t: no tensor with group 1 = q"),
        ({"l__k": (2,), "l__z": (2,)}, (4,), rule("t", concat=(0, 1, ("q", "k"))),
         "bad stack: t: group 1 is one of q, k, but in 'l.z' it is 'z'"),
        ({"l__0": (2,), "l__1": (2, 2)}, (4,), rule("t", concat=(0, 1)),
         "bad rule: t: [2], [2, 2] can't be joined along dim 0"),
        ({"l__0": (2,), "l__1": (2,)}, (4,), rule("t", concat=(1, 1)),
         "bad rule: t: concat= names dim 1 of [2], [2]"),
        ({"l__0": (2, 3)}, (2, 3), rule("t", transpose=(1, 0)),
         "wrong shape: t: wants [2, 3], but the rule makes [3, 2] of l.0 [2, 3]"),
        ({"l__0": (2, 3)}, (2, 3), rule("t", transpose=(0, 2, 1)),
         "bad rule: t: transpose=(0, 2, 1) does not fit l.0 of shape [2, 3]"),
        ({"l__0": (2, 6)}, (2, 2, 3), rule("t"),
         "wrong shape: t: wants [2, 2, 3], but l.0 is [2, 6]"),
        ({"l__0": (4, 6)}, (2, 2, 6), rule("t", transpose=(1, 0), reshape=(6, 2, 2)),
         "wrong shape: t: wants [2, 2, 6], but the rule makes [6, 2, 2] of l.0 [4, 6]"),
        ({"l__0": (6,)}, (2,), rule(["t", None], split=(0, (2, 3))),
         "bad rule: t: parts of 2 + 3 along dim 0 are not all of l.0 of shape [6]"),
        ({"l__0": (6,)}, (2,), rule(["t", "u"], split=1),
         "bad rule: t: split= names dim 1 of l.0 of shape [6]"),
        ({"l__0": (6, 4)}, (2, 3), rule(["t", None], split=0),
         "bad rule: t: the targets' shapes do not say how l.0 of shape [6, 4] is split along dim 0"
         "; split=(dim, sizes) does"),
        ({"l__0": (6,)}, (2,), rule(["t", None, None], split=0),
         "bad rule: t: the targets' shapes do not say how l.0 of shape [6] is split along dim 0; "
         "split=(dim, sizes) does"),
        ({"l__0": ((2, 2), "F4")}, ((2, 2), "F4"), rule("t", transpose=(1, 0)),
         "wrong dtype: t: F4 can only be taken as it is stored"),
        ({"l__0": ((2, 2), "F8_E8M0")}, ((1, 2, 2), "F8_E8M0"), rule("t", stack=1),
         "wrong dtype: t: F8_E8M0 can only be taken as it is stored"),
        ({"l__0": ((2,), "F4")}, (2,), rule("t", cast="float32"),
         "wrong dtype: t: wants F32, stored is F4: no conversion between these dtypes"),
        ({"l__0": ((2,), "C64")}, (2,), rule("t", cast="float32"),
         "wrong dtype: t: wants F32, stored is C64: no conversion between these dtypes"),
        ({"l__0": ((2,), "I32")}, (2,), rule("t", scale=2),
         "wrong dtype: t: I32 to F32: scale= makes floats of floats, or of integers up to 16 bits"),
    ],
)  # fmt: skip
def test_what_is_said(tensors: Any, leaf: Any, line: Rule, expected: str) -> None:
    assert _problems(_index(**tensors), {"t": leaf}, {r"l\.(\w+)": line}, strict=False) == [
        expected
    ]


def test_a_hole_among_experts_is_named() -> None:
    places = [(i, j) for i in range(2) for j in range(3) if (i, j) != (1, 1)]
    index = _index(**{f"l__{i}__{j}": (2,) for i, j in places})
    key_map = {r"l\.(\d)\.(?P<e>\d)": rule("t", stack=(1, "e"))}
    assert _problems(index, {"t": (2, 3, 2)}, key_map) == [
        "bad stack: t: no tensor with group 1 = 1 and group 'e' = 1"
    ]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (3, 4, 5), (1, 3, 5), (9, 10, 11)])
def test_a_stack_may_begin_anywhere_and_skip_evenly(numbers: tuple[int, ...]) -> None:
    index = _index(**{f"l__{n}": (2,) for n in sorted(numbers, key=str)})
    matched = _match(index, {"t": (3, 2)}, {r"l\.(\d+)": rule("t", stack=1)})
    names = [info.name for info in matched.recipes["t"].tensors]
    assert names == [f"l.{n}" for n in numbers]


def test_two_regexes_may_share_a_stack() -> None:
    line = rule("t", stack=1)
    index = _index(dense__0=(2,), expert__1=(2,))
    matched = _match(index, {"t": (2, 2)}, {r"dense\.(\d)": line, r"expert\.(\d)": line})
    assert [info.name for info in matched.recipes["t"].tensors] == ["dense.0", "expert.1"]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("F32", "BF16"), ("BF16", "F32"), ("F8_E4M3", "F16"), ("I32", "I64"), ("U8", "I16"),
     ("BOOL", "I32"), ("F4", "F4"), ("F8_E8M0", "F8_E8M0")],
)  # fmt: skip
def test_dtypes_of_targets_that_are_met(stored: str, wanted: str) -> None:
    recipe = _match(_index(a=((2,), stored)), {"a": ((2,), wanted)}).recipes["a"]
    assert recipe.dtype.name == wanted
    assert recipe.transform.plain
    assert recipe.landed is recipe.dtype
    assert not recipe.checked


@pytest.mark.parametrize(
    ("stored", "wanted", "advice"),
    [("I64", "I32", "int32"), ("F32", "I32", "int32"), ("I32", "F32", "float32"),
     ("BOOL", "F32", "float32"), ("F32", "C64", "complex64"), ("I8", "U8", "uint8"),
     ("F4", "F32", None), ("C64", "F32", None)],
)  # fmt: skip
def test_dtypes_of_targets_that_are_refused(stored: str, wanted: str, advice: str | None) -> None:
    index, leaves = _index(a=((2,), stored)), {"a": ((2,), wanted)}
    tail = "" if advice is None else f"; rule(cast={advice!r}) converts it"
    assert _problems(index, leaves) == [f"wrong dtype: a: wants {wanted}, stored is {stored}{tail}"]
    if advice is not None:
        recipe = _match(index, leaves, {"a": rule("a", cast=advice)}).recipes["a"]
        assert recipe.dtype.name == wanted
        assert recipe.checked == (wanted[0] in "IU")


def test_the_stored_dtype_and_one_for_all() -> None:
    index, leaves = _index(a=((2,), "BF16"), n=((2,), "I64")), {"a": (2,), "n": ((2,), "I32")}

    def found(dtype: Any) -> list[str]:
        matched = _match(index, leaves, dtype=dtype)
        return [matched.recipes[name].dtype.name for name in leaves]

    assert found("stored") == found(None) == ["BF16", "I64"]
    assert found("float16") == ["F16", "I64"]
    assert _problems(index, leaves, dtype="int64") == [
        "wrong dtype: a: stored is BF16: the conversion would lose values; ask for it by name: "
        "dtype={name: dtype}"
    ]
    for dtype in ("float31", 5, {"a": "float31"}):
        with pytest.raises(errors.UsageError, match="unknown dtype"):
            found(dtype)


def test_a_stack_of_several_dtypes_needs_one_that_is_wanted() -> None:
    index = _index(l__0=((2,), "F32"), l__1=((2,), "BF16"))
    key_map = {r"l\.(\d)": rule("t", stack=1)}
    assert _match(index, {"t": ((2, 2), "F16")}, key_map).recipes["t"].dtype.name == "F16"
    assert _problems(index, {"t": (2, 2)}, key_map, dtype="stored") == [
        "wrong dtype: t: its parts are BF16 and F32; rule(cast=) chooses one for all"
    ]


def test_dtypes_go_by_names_of_the_target() -> None:
    index = _index(stored__a=(2,), stored__b=((2,), "BF16"), stored__n=((2,), "I32"))
    leaves = {"a.w": ((2,), "BF16"), "b.w": (2,), "n.w": ((2,), "I64")}
    key_map = {r"stored\.(\w)": r"\1.w"}

    def found(dtype: Any) -> list[str]:
        matched = _match(index, leaves, key_map, dtype=dtype)
        return [matched.recipes[name].dtype.name for name in leaves]

    # What no regex matches is as the target has it.
    assert found({}) == ["BF16", "F32", "I64"]
    assert found([("a", "F16")]) == ["F16", "F32", "I64"]
    assert found([(r"^a\.w$", "F64"), ("w", "U8")]) == ["F64", "U8", "U8"]
    rules = [("stored", "F16"), (re.compile("B", re.I), "F16")]
    with pytest.warns(UserWarning, match="dtype= .*'stored'"):
        assert found(rules) == ["BF16", "F16", "I64"]
    for dtype in ([("(", "F16")], [("a", "F16"), (5, "F16")]):
        with pytest.raises(errors.UsageError, match="regular expression"):
            found(dtype)
    assert _problems(_index(a=((2,), "C64")), {"a": ((2,), "C64")}, dtype={"a": "F32"}) == [
        "wrong dtype: a: wants F32, stored is C64: no conversion between these dtypes"
    ]


@pytest.mark.parametrize("value", [("", None), [("", None), ("copy.", ((0,), None))]])
def test_forms_of_other_projects_match_fronts(value: Any) -> None:
    index = _index(model__head=(2,), model__head_scale=(1,))
    leaves = {"head": (2,), "head_scale": (1,)}
    if isinstance(value, list):
        leaves |= {f"copy.{name}": shape for name, shape in leaves.items()}
    # What follows the match stays.
    assert set(_match(index, leaves, {r"model\.": value}).recipes) == set(leaves)
    # A match of the whole name goes before.
    key_map = {r"model\.": value, r"model\.head_sc(.*)": r"head_sc\1"}
    made = _match(index, leaves, key_map, strict=False).recipes
    assert set(made) == set(leaves) - {"copy.head_scale"}


@pytest.mark.parametrize("value", ["q", rule("q"), ["q"], [rule("q")], [("q", None), "q"]])
def test_a_plain_regex_matches_whole_names(value: Any) -> None:
    index = _index(x__1=(2,), x__10=(2,), x__1__bias=(2,))
    with_y = _index(x__1=(2,), x__10=(2,), x__1__bias=(2,), y=(2,))
    assert _match(with_y, {"y": (2,)}, {r"x\.1": value, "y": "y"}, strict=False).notes == (
        "tensors that the target has no place for: x.1, x.10, x.1.bias",
    )
    if not isinstance(value, list) or len(value) == 1:
        part = "matches only part of it, and a key map matches whole names"
        assert _problems(index, {"q": (2,), "q0": (2,), "q.bias": (2,)}, {r"x\.1": value}) == [
            "missing: q0 [2]: nothing in the checkpoint goes there",
            "missing: q.bias [2]: nothing in the checkpoint goes there",
            f"extra: x.10 [2]: no rule matches; 'x\\\\.1' {part}",
            f"extra: x.1.bias [2]: no rule matches; 'x\\\\.1' {part}",
        ]


def test_a_rule_that_misses_by_matching_a_part_alone_is_told_so() -> None:
    index = _index(l__0__q__weight=(2,), l__1__q__weight=(2,), rotary__freq=(2,))
    key_map = {r"\.(\d+)\.q": rule("q", stack=1), "rotary": None}
    part = "matches only part of it, and a key map matches whole names"
    assert _problems(index, {"q": (2, 2)}, key_map) == [
        "missing: q [2, 2]: nothing in the checkpoint goes there",
        *[rf"extra: l.{n}.q.weight [2]: no rule matches; '\\.(\\d+)\\.q' {part}" for n in range(2)],
        f"extra: rotary.freq [2]: no rule matches; 'rotary' {part}",
        r"unused rule: '\\.(\\d+)\\.q' matches only part of l.0.q.weight, and a key map matches "
        r"whole names",
    ]


@pytest.mark.parametrize("pattern", ["rotary", r"rope\.freq", "freq$"])
def test_a_rule_that_leaves_nothing_out_warns(pattern: str) -> None:
    index = _index(a=(2,), rotary__freq=(2,))
    key_map = {r"a|rotary\.freq": r"\g<0>", pattern: None}
    with pytest.warns(UserWarning, match=f"mapping=: {re.escape(repr(pattern))} matches") as told:
        _match(index, {"a": (2,), "rotary.freq": (2,)}, key_map)
    assert ("a key map matches whole names" in str(told[0].message)) == ("rope" not in pattern)
    assert len(told) == 1


@pytest.mark.parametrize("key_map", [
    {r"a\.w": "a", ".*": None}, {".*": None, r"a\.w": "a"},
    {"a": ("a", None), ".*": None},
])  # fmt: skip
def test_the_rest_may_be_left_out(key_map: Any) -> None:
    index = _index(a__w=(2,), b__w=(2,), b__x=(1,))
    leaf = "a.w" if isinstance(key_map.get("a"), tuple) else "a"
    matched = _match(index, {leaf: (2,)}, key_map)
    assert list(matched.recipes) == [leaf]
    # Nor does it need to be there.
    assert list(_match(_index(a__w=(2,)), {leaf: (2,)}, key_map).recipes) == [leaf]


def test_a_tensor_may_go_to_several_targets() -> None:
    index = _index(embed=(2, 3))
    leaves = {"embed.table": (2, 3), "head.copy": (2, 3)}
    for value in (list(leaves), rule(list(leaves)), [rule(name) for name in leaves]):
        matched = _match(index, leaves, {"embed": value})
        assert list(matched.recipes) == list(leaves)
        assert all(recipe.transform.plain for recipe in matched.recipes.values())
    leaves["head.kernel"] = (3, 2)
    line = [rule(["embed.table", "head.copy"]), rule("head.kernel", transpose=(1, 0))]
    assert list(_match(index, leaves, {"embed": line}).recipes) == list(leaves)
    assert _problems(index, leaves, {"embed": [*line, "head.copy"]}) == [
        "filled twice: head.copy: by embed, embed"
    ]
    assert _problems(index, leaves, {"embed": [*line, "haed"]}) == [
        "extra: embed [2, 3]: the target has no 'haed'"
    ]
    matched = _match(index, leaves, {"embed": ["haed", "hand", *line]}, strict=False)
    assert matched.notes == ("tensors that the target has no place for: embed",)


@pytest.mark.parametrize("scale", [1e39, -1e39, 3.5e38, 1e-46, -1e-40])
def test_factors_that_are_no_normal_numbers(scale: float) -> None:
    index, line = _index(a=((2,), "BF16")), {"a": rule("a", scale=scale)}
    for dtype, name in (("F32", "F32"), ("BF16", "F32"), ("C64", "C64")):
        assert _problems(index, {"a": ((2,), dtype)}, line, dtype=None if dtype != "C64" else {
            "a": "C64"}) == [
            f"bad rule: a: scale={scale!r} is not a normal number of {name}, in which the product "
            "is computed: 1.175e-38 to 3.403e+38"
        ]  # fmt: skip
    assert _match(index, {"a": ((2,), "F64")}, line).recipes["a"].dtype.name == "F64"
    with pytest.raises(errors.MappingError, match="not a normal number of F64"):
        _match(index, {"a": ((2,), "F64")}, {"a": rule("a", scale=5e-324)})
    for sound in (3.4e38, -1.2e-38):
        assert _match(index, {"a": ((2,), "BF16")}, {"a": rule("a", scale=sound)}).recipes


def test_rules_of_a_family_may_be_unused_where_all_else_is_well() -> None:
    index = _index(a=(2,))
    family = {"a": ("a", None), "b": ("b", None), r"rotary.*": None}
    (note,) = _match(index, {"a": (2,)}, family).notes
    assert note == "rules that matched nothing: 'b', 'rotary.*'"
    assert _problems(index, {"a": (2,), "c": (2,)}, family) == [
        "missing: c [2]: nothing in the checkpoint goes there",
        "unused rule: 'b' matches no tensor",
    ]
    assert _problems(index, {"a": (2,)}, {"a": "a", "b": rule("b")}) == [
        "unused rule: 'b' matches no tensor"
    ]


def test_a_function_gives_names() -> None:
    index = _index(model__a=(2,), model__b=(2,))
    leaves = {"a": (2,)}

    def short(name: str) -> str | None:
        return None if name.endswith("b") else name.removeprefix("model.")

    assert list(_match(index, leaves, short).recipes) == ["a"]
    with pytest.raises(errors.UsageError, match="gives no name"):
        _match(index, leaves, lambda name: 5)
    with pytest.raises(errors.UsageError, match="gives no name") as info:
        _match(index, leaves, lambda name: "")
    assert info.value.tensor == "model.a"
    # A target that is a single leaf has an empty name.
    assert list(_match(_index(a=(2,)), {"": (2,)}, lambda name: "").recipes) == [""]


def test_a_function_that_raises_is_told_of_with_the_name() -> None:
    index = _index(model__a=(2,))
    with pytest.raises(errors.UsageError, match="raised IndexError: list index") as info:
        _match(index, {"a": (2,)}, lambda name: name.split(".")[5])
    assert info.value.tensor == "model.a"
    assert isinstance(info.value.__cause__, IndexError)


def test_parts_that_nobody_wants_are_what_is_left() -> None:
    recipe = _match(_index(q=(8, 2)), {"k": (3, 2)}, {"q": rule([None, "k"], split=0)}).recipes["k"]
    assert recipe.transform.part(((0, 3), (0, 2)))[1] == [(0, ((5, 8), (0, 2)))]


def test_a_split_of_every_layer_is_stacked() -> None:
    index = _index(l__0=(8, 2), l__1=(8, 2))
    line = rule(["q", "k"], split=0, transpose=(1, 0), stack=1)
    recipes = _match(index, {"q": (2, 2, 5), "k": (2, 2, 3)}, {r"l\.(\d)": line}).recipes
    whole = ((0, 2), (0, 2), (0, 3))
    assert [box for _, box in recipes["k"].transform.part(whole)[1]] == [((5, 8), (0, 2))] * 2


def test_a_hundred_thousand_names_and_fifty_rules_take_seconds() -> None:
    row = dtypes.TABLE["BF16"]
    names = [f"m.layers.{i}.experts.{j}.{p}_proj.weight" for i in range(50) for j in range(1000)
             for p in ("up", "down")]  # fmt: skip
    pieces = (Piece(0, 0, 64),)
    index = Index(("file",), {name: TensorInfo(name, row, (8, 4), pieces) for name in names})
    key_map = {
        **{rf"m\.layers\.(\d+)\.attn\.x{n}_proj\.weight$": (rf"\1.x{n}", None) for n in range(49)},
        r"m\.layers\.(\d+)\.experts\.(\d+)\.(up|down)_proj\.weight$": rule(
            r"\3", transpose=(1, 0), stack=(1, 2)
        ),
    }
    leaves = [Leaf((name,), (50, 1000, 4, 8), row) for name in ("up", "down")]
    with pytest.raises(errors.MappingError) as info:
        match(index, [*leaves, Leaf(("x",), (1,), row)], key_map)
    assert len(info.value.problems) == 50
    assert re.search("1 missing, 49 unused rule", str(info.value))


def test_hints_are_bounded_however_many_rules_are_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(matching, "_TRIED", 100)
    monkeypatch.setattr(matching, "_matches_part", lambda entry, _: tried.append(entry))
    names = {f"w{n}": (2,) for n in range(60)}
    key_map = {name: name for name in names} | {f"z{n}": f"z{n}" for n in range(50)}
    assert len(_problems(_index(**names), dict(names), key_map)) == 50
    assert len(tried) == 100


def test_a_stored_tensor_for_a_typed_prng_key_is_told_of() -> None:
    class Key:
        dtype = "key<fry>"

    leaves = [*_leaves({"a": (2,)}), Leaf(("rng",), (), None, Key(), optional=True, held=False)]
    index = _index(a=(2,), rng=((2,), "U32"))
    with pytest.raises(errors.MappingError) as info:
        match(index, leaves)
    assert info.value.problems == (
        "extra: rng [2]: 'rng' can't hold a tensor; it is a typed PRNG key: put "
        "jax.random.key_data(key) into the target, and wrap what is loaded with "
        "jax.random.wrap_key_data",
    )
    note = match(index, leaves, strict=False).notes[-1]
    assert note.startswith("rng was not loaded; it is a typed PRNG key: put jax.random.key_data")
    assert match(_index(a=(2,)), leaves).notes == ()


def test_leaves_that_may_stay_are_hinted_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the step of a train state; required ones alone if there are too many."""
    step = Leaf(("step",), (), None, 0, optional=True)
    leaves = [*_leaves({"params.w": (2,)}), step]
    index = _index(**{"params.w": (2,), "steps": ((), "I32")})
    with pytest.raises(errors.MappingError) as info:
        match(index, leaves)
    text = "extra: steps []: the target has no 'steps'"
    assert info.value.problems == (f"{text}, did you mean 'step'?",)
    monkeypatch.setattr(matching, "_AMONG", 0)
    with pytest.raises(errors.MappingError) as info:
        match(index, leaves)
    assert info.value.problems == (text,)
