"""The header in columns against the header row by row: the same tensors, or none at all."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import hypothesis
import mutations
import pytest
import reference
from hypothesis import strategies as st
from test_differential import checkpoints

from mfload import errors
from mfload.formats import safetensors

ENTRY = '"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}}'


def _both(raw: bytes) -> tuple[Any, Any]:
    """What both ways find in a file; None is a refusal."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length]
    quick = safetensors._in_columns(header, len(raw), "f", 3)
    try:
        slow = safetensors._row_by_row(header, len(raw), "f", 3)
    except errors.HeaderError:
        slow = None
    return quick and (list(quick[0]), quick[1]), slow and (list(slow[0]), slow[1])


def _file(*entries: str, data: int) -> bytes:
    return reference.join("{" + ",".join(entries) + "}", bytes(data))


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(raw=checkpoints(), rng=st.randoms(use_true_random=False), damaged=st.booleans())
def test_columns_hold_what_rows_hold_or_nothing(
    raw: bytes, rng: random.Random, damaged: bool
) -> None:
    if damaged:
        raw = mutations.mutate(rng, raw)
        hypothesis.assume(len(raw) >= 8)
    quick, slow = _both(raw)
    assert quick is None or quick == slow


def test_headers_of_the_reference_writer_go_through_columns() -> None:
    tensors = {f"a.{n}é": reference.Tensor("F16", (n, 2), bytes(4 * n)) for n in range(9)}
    for strings in (
        None,
        {"format": "pt"},
        {},
        {"format": "pt", "k": 'a "quoted" text', "é": "\x01"},
    ):
        quick, slow = _both(reference.write(tensors, strings))
        assert quick is not None
        assert quick == slow


def test_entries_in_another_order_are_sorted_by_offset() -> None:
    raw = _file(
        ENTRY.format("b", "U8", 2, 3, 5),
        ENTRY.format("empty", "U8", 0, 3, 3),
        ENTRY.format("a", "U8", 3, 0, 3),
        data=5,
    )
    quick, slow = _both(raw)
    assert [row.name for row in quick[0]] == ["a", "empty", "b"]
    assert quick == slow


@pytest.mark.parametrize(
    "entries",
    [
        [ENTRY.format("a", "F31", 4, 0, 4)],  # Unknown: loads all the same, row by row.
        [ENTRY.format("a", "U8", "04", 0, 4)],
        [ENTRY.format("a", "U8", "4,", 0, 4)],
        [ENTRY.format("a", "U8", ",4", 0, 4)],
        [ENTRY.format("a", "U8", 4, 0, "04")],
        [ENTRY.format("a", "U8", 4, 0, 4) + ","],
        [ENTRY.format("a", "U8", 2, 0, 2), ENTRY.format("a", "U8", 2, 2, 4)],
        [ENTRY.format("a", "U8", 2, 0, 2), ENTRY.format("b", "U8", 2, 1, 4)],
        [ENTRY.format("a", "U8", 1, 0, 1), ENTRY.format("b", "U8", 2, 2, 4)],
        [ENTRY.format("a", "U8", 1, 1, 4)],
        [ENTRY.format("a", "U8", 5, 0, 5)],
        [ENTRY.format("a", "F32", 2, 0, 4)],
        [ENTRY.format("a", "F4", 3, 0, 4)],
        [ENTRY.format("a", "U8", f"{2**63},4,0", 0, 4)],
        [ENTRY.format("a", "U8", ",".join(["0"] * 100), 0, 4)],
        [ENTRY.format("__metadata__", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":1}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"b","a":"c"}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"\\ud800"}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"\x01"}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"b",}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"b"x}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"b""c":"d"}', ENTRY.format("a", "U8", 4, 0, 4)],
        ['"__metadata__":{"a":"b"}'],
        ['"__metadata__":{"a":"b"', ENTRY.format("a", "U8", 4, 0, 4)],
        [ENTRY.format("a", "U8", f"0,{2**64}", 0, 0)],
        ["x" + ENTRY.format("a", "U8", 4, 0, 4)],
        [ENTRY.format("a", "U8", 4, 0, 4) + "x"],
        [ENTRY.format("a", "U8", 2, 0, 2) + "}", ENTRY.format("b", "U8", 2, 2, 4)],
        [ENTRY.format("a\x01", "U8", 4, 0, 4)],
        [ENTRY.format("\\u0061", "U8", 4, 0, 4)],
        ['"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"k":1}'],
        ['"a":{"dtype":"U8","shape":[true,4],"data_offsets":[0,4]}'],
        ['"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}'],
        [],
    ],
)
def test_what_is_odd_is_left_to_the_rows(entries: list[str]) -> None:
    quick, _ = _both(_file(*entries, data=4))
    assert quick is None


@pytest.mark.parametrize("text", ["", "{", "}", "{}", "[]", "{{}}", " {}", "﻿{}", "\udcff"])
def test_texts_without_tensors_are_left_to_the_rows(text: str) -> None:
    header = text.encode("utf-8", "surrogateescape")
    assert safetensors._in_columns(header, 8 + len(header), "f", 0) is None


def test_a_hostile_text_takes_no_longer_than_its_length() -> None:
    start = ENTRY.format("a", "U8", 1, 0, 1) + ","
    for filler in ('"', '"a":{"dtype":"', "0", ",", '"a":{"dtype":"A","shape":[1'):
        raw = ("{" + start + filler * ((1 << 20) // len(filler)) + "}").encode()
        assert safetensors._in_columns(raw, 1 << 30, "f", 0) is None


def test_headers_with_spaces_go_through_columns() -> None:
    header = {
        "__metadata__": {"format": "np"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    }
    text = json.dumps(header)
    quick, slow = _both(reference.join(text, bytes(25)))
    assert quick is not None
    assert quick == slow
    for at in [n for n, each in enumerate(text) if each == " "]:
        for odd in (text[:at] + text[at + 1 :], text[:at] + " " + text[at:]):
            quick, slow = _both(reference.join(odd, bytes(25)))
            assert quick in (None, slow)
