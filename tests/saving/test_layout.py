"""Layouts: what the reference reads, where tensors lie, and what is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import hypothesis
import pytest
import reference
from hypothesis import strategies as st

from mfload import dtypes, errors
from mfload.formats import safetensors
from mfload.index import Piece, TensorInfo
from mfload.saving import layout
from mfload.saving.layout import lay_out, split

TABLE = dtypes.TABLE
NAMES = st.text(max_size=12).filter(lambda name: name != "__metadata__")


def entry(name: Any, dtype: str, *shape: int) -> TensorInfo:
    nbytes = TABLE[dtype].size_of(shape) or 0
    return TensorInfo(name, TABLE[dtype], shape, (Piece(0, 0, nbytes),))


@st.composite
def entries(draw: st.DrawFn) -> list[TensorInfo]:
    """Tensors of any dtype and small shapes, of whole bytes."""
    found: list[TensorInfo] = []
    for name in draw(st.lists(NAMES, max_size=8, unique=True)):
        row = draw(st.sampled_from(list(TABLE.values())))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        if row.elements > 1:
            shape = (*shape, draw(st.integers(0, 5)) * row.elements)
        found.append(entry(name, row.name, *shape))
    return found


ALIGNS = st.sampled_from([8, 16, 64, 512, 4096, 65536])
METADATA = st.none() | st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3)


@hypothesis.given(entries(), METADATA, ALIGNS)
def test_what_is_laid_out_is_what_readers_find(
    found: list[TensorInfo], metadata: dict[str, str] | None, align: int
) -> None:
    made = lay_out(found, metadata, align)
    raw = made.header + bytes(made.size - len(made.header))
    theirs = reference.read(raw)
    assert {n: (t.dtype, t.shape) for n, t in theirs.items()} == {
        each.name: (each.dtype.name, each.shape) for each in found
    }
    rows, strings = safetensors.parse(made.header[8:], size=made.size)
    assert list(rows) == made.tensors
    assert strings == metadata
    assert len(made.header) % align == 0
    assert struct.unpack("<Q", made.header[:8])[0] == len(made.header) - 8


@hypothesis.given(entries(), METADATA)
def test_equal_arguments_give_equal_bytes_and_so_does_the_second_time(
    found: list[TensorInfo], metadata: dict[str, str] | None
) -> None:
    first = lay_out(found, metadata)
    turned = None if metadata is None else dict(reversed(metadata.items()))
    again = lay_out(first.tensors, turned)
    assert (again.header, again.tensors, again.size) == (first.header, first.tensors, first.size)


@hypothesis.given(entries(), ALIGNS)
def test_every_tensor_is_as_aligned_as_its_size_allows(found: list[TensorInfo], align: int) -> None:
    for row in lay_out(found, align=max(align, 64)).tensors:
        offset, nbytes = row.pieces[0].offset, row.nbytes
        assert nbytes % 64 or offset % 64 == 0
        if row.dtype.bits % 8 == 0:
            assert offset % (row.dtype.bits // 8) == 0
        # Whatever divides the size divides the place, up to 64.
        assert nbytes == 0 or offset % min(nbytes & -nbytes, 64) == 0


def test_ties_keep_the_order() -> None:
    found = [entry("d", "U8", 3), entry("b", "F32", 16), entry("z", "I64", 0), entry("c", "U8", 5),
             entry("a", "U8", 64), entry("e", "F16", 1), entry("f", "BF16", 16)]  # fmt: skip
    made = lay_out(found)
    assert [row.name for row in made.tensors] == ["b", "z", "a", "f", "e", "d", "c"]
    first = made.tensors[0].pieces[0].offset
    assert [row.pieces[0].offset - first for row in made.tensors] == [0, 64, 64, 128, 160, 162, 165]


def test_the_header_is_padded_with_spaces_and_nothing_else() -> None:
    header = lay_out([entry("a", "U8", 1)], {"k": "v"}, 64).header
    text = b'{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    assert header[8:] == text.ljust(len(header) - 8)
    assert len(header) == 128


def test_nothing_at_all() -> None:
    made = lay_out([], None, 8)
    assert made.header == struct.pack("<Q", 8) + b"{}      "
    assert (made.tensors, made.size) == ([], 16)
    assert lay_out([], {}, 8).header[8:] == b'{"__metadata__":{}}'.ljust(24)


@pytest.mark.parametrize("align", [0, 1, 4, 12, 4095, 4097, -8, 1 << 40, 8.0, "x", None, True])
def test_align_is_a_power_of_two(align: Any) -> None:
    with pytest.raises(errors.UsageError, match="align"):
        layout.checked_align(align)


def test_align_is_a_size() -> None:
    assert [layout.checked_align(n) for n in (8, 4096, "64", "4KiB", "1MiB")] == [
        8, 4096, 64, 4096, 1 << 20
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), (7, 7), ("7", 7), ("5GB", 5 * 10**9), ("500MiB", 500 << 20), ("1.5 kB", 1500),
     (" 2GiB ", 2 << 30), ("3g", 3 * 10**9), ("1TiB", 1 << 40), ("0.001MB", 1000)],
)  # fmt: skip
def test_limits_of_shards(given: Any, found: int | None) -> None:
    assert layout.shard_limit(given) == found


@pytest.mark.parametrize(
    "given",
    ["", "GB", "-1", "0", "5XB", "5i", "1e9", "0.1", "nan", "9" * 5000, True, 1.5, 0, -1, []],
)
def test_limits_that_are_refused(given: Any) -> None:
    with pytest.raises(errors.UsageError, match="max_shard_size"):
        layout.shard_limit(given)


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", 5, None, b"a", "__metadata__"])
def test_names_that_no_reader_takes(name: Any) -> None:
    with pytest.raises(errors.UsageError):
        lay_out([entry(name, "U8", 1)])


def test_a_name_twice() -> None:
    with pytest.raises(errors.UsageError, match="twice") as caught:
        lay_out([entry("a", "U8", 1), entry("a", "F32", 1)])
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"\ud800": "a"}, {"a": "\udc00"}, [], "a", 5]
)
def test_metadata_is_strings(metadata: Any) -> None:
    with pytest.raises(errors.UsageError, match="metadata"):
        lay_out([], metadata)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("F4", (3,)),
        ("F6_E2M3", (2, 1)),
        ("U8", (2**64,)),
        ("U8", (2**32, 2**32)),
        ("U8", (2**64, 0)),
        ("F64", (2**58,)),
        ("U8", (-1,)),
    ],
)
def test_shapes_that_no_file_can_hold(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(errors.UnsupportedShapeError) as caught:
        lay_out([entry("w", dtype, *shape)])
    assert caught.value.tensor == "w"


def test_a_file_larger_than_any() -> None:
    most = [entry(str(n), "U8", 2**60) for n in range(8)]
    with pytest.raises(errors.UsageError, match="large"):
        lay_out(most)
    assert lay_out(most[:7]).size == 7 * 2**60 + 4096


def test_the_header_s_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_HEADER", 8192 - 8)
    assert len(lay_out([entry("x" * 8000, "U8", 1)]).header) == 8192
    with pytest.raises(errors.UsageError, match="too large"):
        lay_out([entry("x" * 8200, "U8", 1)])


class TestSplit:
    def test_greedy_and_in_order(self) -> None:
        found = [entry(str(n), "U8", 64 * n) for n in (3, 1, 2, 9, 1, 1)]
        found = [each._replace(name=f"{n}") for n, each in enumerate(found)]
        names = [[each.name for each in file] for file in split(found, 64 * 4)]
        assert names == [["0", "1"], ["2"], ["3"], ["4", "5"]]

    def test_one_file(self) -> None:
        found = [entry("a", "U8", 10), entry("b", "U8", 10)]
        assert split(found, 20) == [found]
        assert split(found, None) == [found]
        assert split([], 1) == [[]]
        assert [len(file) for file in split(found, 19)] == [1, 1]
        assert [len(file) for file in split(found, 1)] == [1, 1]

    @hypothesis.given(entries(), st.integers(1, 200))
    def test_splitting_what_was_split_changes_nothing(
        self, found: list[TensorInfo], limit: int
    ) -> None:
        files = split(found, limit)
        laid = [lay_out(file) for file in files]
        again = [row for made in laid for row in made.tensors]
        laid_again = [lay_out(file) for file in split(again, limit)]
        assert [made.header for made in laid_again] == [made.header for made in laid]
        assert [made.tensors for made in laid_again] == [made.tensors for made in laid]
        assert sorted(each.name for file in files for each in file) == sorted(
            each.name for each in found
        )
        for file in files:
            assert len(file) == 1 or sum(each.nbytes for each in file) <= limit


def test_the_index_is_hugging_face_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [
        lay_out([entry("ä", "U8", 9)]),
        lay_out([entry("b", "U8", 5), entry("a", "U8", 3)]),
    ]
    raw = layout.index_json(["1", "2"], layouts)
    table = json.loads(raw)
    assert table == {"metadata": {"total_size": 17}, "weight_map": {"a": "2", "b": "2", "ä": "1"}}
    assert list(table["weight_map"]) == ["a", "b", "ä"]
    assert raw.endswith(b"}\n")
    monkeypatch.setattr(layout, "MAX_HEADER", len(raw) - 1)
    with pytest.raises(errors.UsageError, match="too large"):
        layout.index_json(["1", "2"], layouts)
