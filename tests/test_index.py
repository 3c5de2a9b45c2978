"""The index: rows by name, and help for who mistypes one."""

from __future__ import annotations

import pickle
import time

import pytest

from mfload import dtypes, errors
from mfload.index import Index, Piece, TensorInfo


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


def test_a_name_like_none_is_met_with_silence(index: Index) -> None:
    with pytest.raises(errors.TensorNotFoundError) as caught:
        index["zzz"]
    assert caught.value.expected is None


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
