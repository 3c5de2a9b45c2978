"""The index: rows by name, and help for who mistypes one."""

from __future__ import annotations

import pickle
import time

import pytest

from mfload import dtypes, errors
from mfload.index import Columns, Index, Piece, Table, TensorInfo
from mfload.stored import Encoding, Stored


def row(name: str, *sizes: int) -> TensorInfo:
    offsets = [sum(sizes[:n]) for n in range(len(sizes))]
    pieces = tuple(Piece(0, at, n) for at, n in zip(offsets, sizes, strict=True))
    return TensorInfo(name, dtypes.TABLE["U8"], (sum(sizes),), pieces)


@pytest.fixture
def index() -> Index:
    rows = [row("model.q_proj.weight", 8), row("model.k_proj.weight", 3, 4), row("", 1)]
    return Index(("f",), {each.name: each for each in rows}, {"k": "v"})


def test_bytes_are_those_of_all_pieces(index: Index) -> None:
    assert index["model.k_proj.weight"].nbytes == 7
    assert index[""].nbytes == 1


def test_bytes_are_those_of_the_tensor_however_it_is_stored() -> None:
    encoded = Piece(0, 40, 9, Stored(encodings=(Encoding("deflate", 64),)))
    info = TensorInfo("w", dtypes.TABLE["F32"], (4, 4), (encoded,))
    assert info.nbytes == 64
    assert not info.simple
    assert info._replace(pieces=(Piece(0, 40, 64),)).simple


def test_is_a_table_of_names_in_order(index: Index) -> None:
    assert list(index) == ["model.q_proj.weight", "model.k_proj.weight", ""]
    assert len(index) == 3
    assert "" in index.tensors
    assert index.notes == ()


def test_a_missing_name_is_met_with_close_ones(index: Index) -> None:
    with pytest.raises(errors.TensorNotFoundError) as caught:
        index["model.q_proj.weigth"]
    error = caught.value
    assert (error.file, error.tensor) == ("f", "model.q_proj.weigth")
    assert str(error.expected).startswith("a name like model.q_proj.weight")


def test_a_name_like_none_is_met_with_some_that_are_there(index: Index) -> None:
    with pytest.raises(errors.TensorNotFoundError) as caught:
        index["zzz"]
    first, second = list(index)[:2]
    assert caught.value.expected == f"a name such as {first}, {second}"


def test_no_file_is_blamed_where_there_are_several(index: Index) -> None:
    several = Index(("f", "g"), index.tensors)
    with pytest.raises(KeyError) as caught:
        several["x"]
    assert caught.value.file is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [None, 5, [], {"a": 1}, b"x"])
def test_what_is_no_name_is_not_found(name: object, index: Index) -> None:
    with pytest.raises(errors.TensorNotFoundError):
        index[name]  # type: ignore[index]


def test_pickles(index: Index) -> None:
    copy = pickle.loads(pickle.dumps(index))
    assert copy.files == index.files
    assert list(copy) == list(index)
    assert copy["model.k_proj.weight"] == index["model.k_proj.weight"]


def test_close_names_are_found_among_many_in_little_time() -> None:
    rows = [row(f"model.layers.{n}.mlp.experts.{n % 9}.gate_proj", 1) for n in range(200_000)]
    index = Index(("f",), {each.name: each for each in rows})
    start = time.process_time()
    with pytest.raises(errors.TensorNotFoundError):
        index["model.layers.7.mlp.experts.7.gate_porj"]
    assert time.process_time() - start < 2


def simple(name: str, kind: str, shape: tuple[int, ...], source: int, offset: int) -> TensorInfo:
    dtype = dtypes.TABLE[kind]
    return TensorInfo(name, dtype, shape, (Piece(source, offset, dtype.size_of(shape) or 0),))


ROWS = [
    simple("a", "F32", (2, 3), 0, 8),
    simple("b", "U8", (5,), 0, 32),
    row("c", 3, 4),
    simple("d", "F32", (2, 3), 1, 16),
    simple("e", "F32", (3, 2), 1, 40),
]


def test_columns_give_back_the_rows_that_they_were_made_of() -> None:
    columns = Columns.of(ROWS)
    assert list(columns) == [columns[n] for n in range(5)] == ROWS
    assert columns[-3] == ROWS[2]
    assert list(columns[1:4]) == ROWS[1:4]
    assert list(columns.take([4, 2, 0])) == [ROWS[4], ROWS[2], ROWS[0]]
    assert len(columns.kinds) == 4  # Of "a" and "d" the same.
    assert list(columns.others) == [2]
    with pytest.raises(IndexError):
        columns[5]


def test_a_table_takes_the_tensors_of_one_file_after_another() -> None:
    table = Table()
    first = Columns.of(ROWS[:2])
    assert table.add(first) == []
    assert table.add(ROWS[2:]) == []
    assert list(table) == ["a", "b", "c", "d", "e"]
    assert list(table.values()) == [table[name] for name in table] == ROWS
    assert dict(table.items()) == {each.name: each for each in ROWS}
    assert table.columns.kind.tolist() == [0, 1, 2, 0, 3]
    assert Index(("f", "g"), table).columns is table.columns


def test_a_table_keeps_the_first_of_two_tensors_of_one_name() -> None:
    table = Table(Columns.of(ROWS[:2]))
    again = simple("b", "F16", (9,), 2, 0)
    new = simple("new", "F16", (9,), 2, 18)
    twice = new._replace(shape=(3, 3))
    assert table.add([again, new, twice]) == [again, twice]
    assert list(table.values()) == [*ROWS[:2], new]


def test_an_index_of_columns_pickles() -> None:
    copy = pickle.loads(pickle.dumps(Index(("f",), Table(Columns.of(ROWS)))))
    assert list(copy.tensors.values()) == ROWS
