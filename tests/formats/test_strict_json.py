"""Strict JSON: what Python's parser would let through."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from mfload import errors
from mfload.formats import strict_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).map(lambda value: json.loads(json.dumps(value)))


@hypothesis.given(values.filter(lambda value: "\\ud" not in json.dumps(value)))
def test_fair_json_comes_back(value: Any) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert strict_json.loads(text, "f") == value
    strict_json.check(value, "f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff", "the thing is not UTF-8"),
        (b"", "the thing is not JSON"),
        (b"[1,]", "the thing is not JSON"),
        (b"NaN", "the thing is not JSON"),
        (b"[-Infinity]", "the thing is not JSON"),
        (b"1e400", "the JSON has a number out of range"),
        (b'{"a":1,"b":{"a":1,"a":2}}', "the JSON gives a name twice in one object"),
        (b'["\\ud800"]', "the JSON has half of a surrogate pair"),
        (b'{"\\uDC00":1}', "the JSON has half of a surrogate pair"),
        (b'[{"a":["\\udc00\\ud800"]}]', "the JSON has half of a surrogate pair"),
        (b"[" * 100_000, "the JSON is nested too deep"),
        (b"9" * 5000, "the thing is not JSON"),
    ],
)
def test_refused(text: bytes, says: str) -> None:
    with pytest.raises(errors.HeaderError) as caught:
        strict_json.loads(text, "some/file", "thing")
    assert says in caught.value.message
    assert caught.value.file == "some/file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'\xef\xbb\xbf{"a": 1}', "a byte order mark before the JSON"),
        (b'{"a": 1,}', "a comma before the closing '}': line 1 column"),
        (b'{"a": [1, 2, ]}', "a comma before the closing ']': line 1 column"),
        (b'{"a": {"b": 1},\n}', "a comma before the closing '}': line "),
        (b'{"a": 1,,}', "line 1 column 9"),
        (b'{"a" "b"}', "Expecting ':' delimiter"),
    ],
)
def test_what_other_tools_take_is_named(text: bytes, says: str) -> None:
    with pytest.raises(errors.HeaderError, match="the thing is not JSON") as caught:
        strict_json.loads(text, "some/file", "thing")
    assert says in str(caught.value.found)


@hypothesis.given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xy", max_size=2))))
def test_of_equal_names_in_a_loose_object_the_last_counts(pairs: list[tuple[str, str]]) -> None:
    inner = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(text)}" for key, text in pairs) + "}"
    given = f'{{"m":{inner},"n":1}}'.encode()
    assert strict_json.loads(given, "f", loose="m") == {"m": dict(pairs), "n": 1}
    if len(dict(pairs)) < len(pairs):
        for other in (f'{{"x":{inner}}}', f'{{"m":[{inner}]}}', inner):
            with pytest.raises(errors.HeaderError, match="gives a name twice"):
                strict_json.loads(other.encode(), "f", loose="m")


def test_pairs_of_surrogates_and_escaped_backslashes_are_fair() -> None:
    assert strict_json.loads(b'"\\ud83d\\ude00"', "f") == "\U0001f600"
    assert strict_json.loads(rb'"\\ud800"', "f") == "\\ud800"


def test_minus_zero_is_no_integer() -> None:
    found = strict_json.loads(b'[-0, 0, -1, "-0"]', "f")
    assert [type(value) for value in found] == [float, int, int, str]
    for before, after in (("", ""), (" ", "\n"), ("[1,", "]"), ("[\r\n", " ]"), ('[{"a":', "}]")):
        found: Any = strict_json.loads(f"{before}-0{after}".encode(), "f")
        while not isinstance(found, float):
            found = found["a"] if isinstance(found, dict) else found[-1]
        assert math.copysign(1, found) == -1


def test_names_with_a_minus_zero_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook for each number would be called: a run whose id has the signs took twice as long."""
    hooks: list[set[str]] = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda text, **how: hooks.append({*how}) or loads(text, **how)
    )
    assert strict_json.loads(b'{"layer-0": [-0.5, -1, 0], "run": "a-0"}', "f")["layer-0"][1] == -1
    assert strict_json.loads(b'{"layer-0": [0, -0]}', "f")
    assert ["parse_int" in each for each in hooks] == [False, True]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_counted_with_what_lies_around() -> None:
    strict_json.check(_nested(127), "f")
    strict_json.check([_nested(1), _nested(126), {"a": _nested(125)}], "f")
    strict_json.check(_nested(120), "f", outer=7)
    for value, outer in ((_nested(128), 0), (_nested(121), 7), ([1, _nested(127)], 0)):
        with pytest.raises(errors.HeaderError, match="nested"):
            strict_json.check(value, "f", outer)


@pytest.mark.parametrize("value", [2**1024, [-(2**1024)], {"a": {"b": [0, 2**2000]}}], ids=type)
def test_integers_beyond_floats(value: Any) -> None:
    with pytest.raises(errors.HeaderError, match="range"):
        strict_json.check(value, "f")
    strict_json.check([2**1023, -(2**1023), True], "f")


def test_brief_is_brief() -> None:
    for value in (
        "x" * 10**6,
        [0] * 10**6,
        _nested(900),
        {str(n): n for n in range(10**5)},
        9**4000,
    ):
        assert len(strict_json.brief(value)) < 1000
    assert (
        strict_json.brief({"dtype": "F32", "shape": [1, 2]}) == "{'dtype': 'F32', 'shape': [1, 2]}"
    )
