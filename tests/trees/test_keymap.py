"""Key maps: what is read from the forms users write, and what is refused."""

from __future__ import annotations

import dataclasses
import random
import re
from enum import Enum
from typing import Any

import numpy as np
import pytest

from mfload import errors
from mfload.trees import keymap, matching
from mfload.trees.keymap import Rule, rule

TURN, RESHAPE = (("transpose", (1, 0)),), (("reshape", (2, -1)),)


class Transform(Enum):
    EMBED = None
    SCALE = None
    LINEAR = ((1, 0), None)
    HEADS = ((2, 0, 1), (4, 8, 6), True)


def _read(value: Any, key: Any = r"(\w+)\.(?P<n>\d)") -> Rule:
    ((pattern, (found,)),) = keymap.read({key: value})
    assert isinstance(pattern, re.Pattern)
    return found


def _fields(found: Rule) -> dict[str, Any]:
    plain = Rule(())
    values = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (r"a.\1", {"names": (r"a.\1",)}),
        ((r"a.\1", None), {"names": (r"a.\1",), "family": True}),
        (("a", ((1, 0), None)), {"names": ("a",), "steps": TURN, "family": True}),
        (("a", (None, (2, -1))), {"names": ("a",), "steps": RESHAPE, "family": True}),
        (("a", [[1, 0], [2, 3]]),
         {"names": ("a",), "steps": (*TURN, ("reshape", (2, 3))), "family": True}),
        (("a", ((), ())), {"names": ("a",), "family": True}),
        (("a", Transform.SCALE), {"names": ("a",), "family": True}),
        (("a", Transform.LINEAR), {"names": ("a",), "steps": TURN, "family": True}),
        (("a", Transform.HEADS),
         {"names": ("a",), "family": True,
          "steps": (("reshape", (4, 8, 6)), ("transpose", (2, 0, 1)))}),
        (("a", ((1, 0), None, False)), {"names": ("a",), "steps": TURN, "family": True}),
        (r"layers\.\1\.w", {"names": (r"layers.\1.w",)}),
        (rule("a", stack=1), {"names": ("a",), "stack": ((1, 0),)}),
    ],
)  # fmt: skip
def test_forms_are_read(value: Any, fields: dict[str, Any]) -> None:
    assert _fields(_read(value)) == fields


@pytest.mark.parametrize(
    ("value", "names", "family"),
    [
        (None, [], False), (["a", "b"], ["a", "b"], False), (("a", r"b.\1"), ["a", r"b.\1"], False),
        ([rule("a"), rule("b", transpose=(1, 0))], ["a", "b"], False),
        (["a", rule("b"), ("c", None)], ["a", "b", "c"], False),
        ([("a", None), ("b", ((1, 0), None))], ["a", "b"], True),
        (("a", ("b", None)), ["a", "b"], False), ([("a", Transform.LINEAR)], ["a"], True),
        (["a", None], ["a"], True), (["a"], ["a"], False),
    ],
)  # fmt: skip
def test_lists_are_read(value: Any, names: list[str], family: bool) -> None:
    (entry,) = keymap.read({r"(\w)": value})
    assert [name for found in entry.rules for name in found.names] == names
    assert entry.family == family


def test_names_of_one_rule_share_its_steps() -> None:
    found = rule(["a", r"b.\1"], transpose=(1, 0))
    assert _fields(found) == {"names": ("a", r"b.\1"), "steps": TURN}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"transpose": [1, 0]}, {"steps": TURN}),
        ({"transpose": np.array([1, 0])}, {"steps": TURN}),
        ({"reshape": 4}, {"steps": (("reshape", (4,)),)}),
        ({"reshape": ()}, {"steps": (("reshape", ()),)}),
        ({"stack": "n"}, {"stack": (("n", 0),)}),
        ({"stack": (2, 1)}, {"stack": ((2, 0), (1, 1))}),
        ({"stack": {1: -1, "n": 0}}, {"stack": ((1, -1), ("n", 0))}),
        ({"concat": (0, 1)}, {"concat": (0, 1, None)}),
        ({"concat": (-1, "n", ["q", "k"])}, {"concat": (-1, "n", ("q", "k"))}),
        ({"scale": np.float32(2)}, {"scale": 2.0}),
        ({"cast": "bfloat16"}, {"cast": "BF16"}),
        ({"cast": np.int32}, {"cast": "I32"}),
    ],
)  # fmt: skip
def test_options_of_a_rule(options: dict[str, Any], fields: dict[str, Any]) -> None:
    found = _fields(_read(rule("a", **options)))
    assert found.pop("names") == ("a",)
    assert {name: str(v) if name == "cast" else v for name, v in found.items()} == fields


def test_options_of_a_split() -> None:
    assert _fields(rule(["a", None], split=0)) == {"names": ("a", None), "split": (0, None)}
    assert _fields(rule(("a", "b"), split=(-1, [2, 3])))["split"] == (-1, (2, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"transpose": (1, 1)}, {"transpose": (0, 2)}, {"transpose": 1}, {"transpose": "10"},
        {"transpose": (True, False)}, {"transpose": (1.0, 0.0)}, {"transpose": {1: 0, 0: 1}},
        {"reshape": (-1, -1)}, {"reshape": (-2,)}, {"reshape": "ab"}, {"reshape": (2.5,)},
        {"reshape": True}, {"stack": 0}, {"stack": True}, {"stack": ()}, {"stack": (1, 1)},
        {"stack": {1: 0, 2: 0}}, {"stack": {1: "a"}}, {"stack": 1.5}, {"stack": [[1]]},
        {"concat": 1}, {"concat": (0,)}, {"concat": (0, 1, "qkv")}, {"concat": (0, 1, ("q", "q"))},
        {"concat": (0, 1, ())}, {"concat": (0, 1, (1, 2))}, {"concat": ("a", 1)},
        {"concat": (0, 1, ("q",), 2)}, {"split": 0}, {"scale": "2"}, {"scale": 0},
        {"scale": float("nan")}, {"scale": True}, {"scale": 1j}, {"scale": 10**400},
        {"cast": "bfloat17"}, {"cast": float},
    ],
)  # fmt: skip
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError) as info:
        rule("a", **options)
    assert info.value.expected


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (["a", None], None), ([], None), ([], 0), ([None], 0), ([1, "a"], 0), ("a", 0), (5, None),
        (None, None),
        (["a", "b"], (0, (1,))), (["a", "b"], (0, (1, -1))), (["a", "b"], "0"),
        (["a", "b"], (0, 1, 2)), (["a", "b"], True), (b"a", None),
    ],
)  # fmt: skip
def test_senseless_names_and_splits_are_refused(names: Any, split: Any) -> None:
    with pytest.raises(errors.UsageError):
        rule(names, split=split)


@pytest.mark.parametrize(
    "value",
    [
        5, (), [5], ["a", 5], [["a", "b"]], ("a", None, None), ["a", "b", None], ("a", r"\3"),
        ("a", 5), [rule("a"), rule("b", stack=3)], ("a", ((1, 0),)), ("a", ((1, 1), None)),
        ("a", (None, (-2,))), ("a", ((1, 0), None, 1)), ("a", ((1, 0), None, True, True)),
        (5, None), r"\3", r"\g<m>", r"\q", rule("a", stack=3), rule("a", stack="m"),
        rule("a", concat=(0, 3)), rule(["a", r"\9"], split=0), {"a": "b"}, b"a",
    ],
)  # fmt: skip
def test_a_malformed_line_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(errors.UsageError, match=re.escape("mapping['(\\\\w+)")) as info:
        _read(value)
    assert info.value.expected


@pytest.mark.parametrize("key", ["(", "*", 5, None, b"a", re.compile(b"a")])
def test_a_key_has_to_be_a_regex(key: Any) -> None:
    with pytest.raises(errors.UsageError, match="malformed regular expression"):
        _read("a", key)


@pytest.mark.parametrize("given", [5, "a", b"a", ["a"], [("a",)], [("a", "b", "c")], object()])
def test_what_is_no_key_map_is_refused(given: Any) -> None:
    with pytest.raises(errors.UsageError, match="not a key map"):
        keymap.read(given)


def test_a_list_of_pairs_is_a_key_map() -> None:
    pairs = [("a", "b"), (re.compile("C", re.IGNORECASE), ("d", None))]
    assert [str(entry) for entry in keymap.read(pairs)] == ["'a'", "'C'"]
    assert keymap.read(iter(pairs)) == keymap.read(pairs)


@pytest.mark.parametrize(
    ("pattern", "front", "end"),
    [
        (r"layers\.(\d+)\.mlp\.weight", "layers.", ".mlp.weight"),
        (r"^norm\.weight$", "norm.weight", "norm.weight"), (r"a\-b\ c", "a-b c", "a-b c"),
        (r"a|b", "", ""), (r"(?i)weight", "", ""), (r"(?x) weight", "", ""),
        (r"\dweight", "", ""), (r"\\.weight", "\\", ""), (r"a\$", "a", ""), (r"ab+", "a", ""),
        (r"a{2}b", "", "b"), (r"ab\.?", "ab", ""), (r"[ab]", "", ""), (r"(?i:a)b", "", "b"),
        (r".*", "", ""), (r"(a|b)c", "", ""), (r"\x41b", "", ""), (r"a\.", "a.", "a."),
        (r"(a)\1b", "", ""), ("a\\\nb", "a\nb", "a\nb"), (r"ab(?#c)*", "", ""),
    ],
)  # fmt: skip
def test_what_matches_begin_and_end_with(pattern: str, front: str, end: str) -> None:
    assert matching.literals(re.compile(pattern)) == (front, end)


def test_no_pattern_that_matches_is_overlooked() -> None:
    rng = random.Random(0)
    parts = [
        "a",
        "b",
        "c",
        r"\.",
        r"\-",
        r"\\",
        ".",
        "a?",
        "b*",
        "(b)",
        "(a|b)",
        "[a-c]",
        r"\w",
        "-",
    ]
    for _ in range(300):
        texts = ["".join(rng.choices(parts, k=rng.randint(0, 5))) for _ in range(12)]
        patterns = [re.compile(text) for text in texts]
        whole, fronts = matching.likely(patterns), matching.likely(patterns, whole=False)
        for _ in range(30):
            name = "".join(rng.choices("abc.-\\", k=rng.randint(0, 5)))
            for number, pattern in enumerate(patterns):
                assert number in whole(name) or not pattern.fullmatch(name), (pattern, name)
                assert number in fronts(name) or not pattern.match(name), (pattern, name)


@pytest.mark.parametrize("form", [r"layers\.{}\.(\w+)", r"(\w+)\.{}", r"layers\.{}\.weight"])
def test_of_many_rules_few_are_tried(form: str) -> None:
    find = matching.likely([re.compile(form.format(n)) for n in range(1000)])
    for name in ("layers.7.weight", "layers.7", "layers.77.weight"):
        assert len(find(name)) <= 2


@pytest.mark.parametrize(
    "template",
    ["", "x", r"a.\1.b", r"\1\2", r"\g<1>0", r"\g<n>.\g<2>", r"\10", r"\1a\n", r"\\1", r"\101"],
)
def test_templates_expand_as_those_of_re(template: str) -> None:
    pattern = re.compile(r"(\w)\.(?P<n>\w)" + "(z)?" * 8)
    match = pattern.fullmatch("a.b")
    assert match is not None
    assert matching.expand(template, match) == match.expand(template)


def test_escapes_that_mean_nothing_are_dropped_from_templates() -> None:
    assert keymap._template(r"a\.\1\-\\.\n\g<n>") == r"a.\1-\\.\n\g<n>"
