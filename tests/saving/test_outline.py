"""Trees of NumPy arrays: names, the tree beside them, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import mfload
from mfload import errors
from mfload.formats import structure
from mfload.trees import outline


class Pair(NamedTuple):
    left: Any
    right: Any


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.int8)


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, np.ndarray | np.generic):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
        return
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, each in wanted.items():
            same(found[key], each)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted or (found != found and wanted != wanted)


TREES: list[Any] = [
    {"a": {"b": A, "c": {}}, "d": [B, (A, None)]},
    {"step": 3, "rate": float("nan"), "name": "x", "raw": b"\0", "none": None, "w": [A]},
    {"big": 1 << 70, "z": 1 + 2j, "yes": True, "w": [A], "empty": [[], ()]},
    [A, {"b": B}],
    (A,),
    {"a": {0: A, 1: B, "1.5": A}, "$b": {"$": B}},
    {"a": {"scalar": np.float64(0.5), "half": np.float16(2)}},
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("shards", [None, 16])
def test_the_same_tree_comes_back(tmp_path: Path, tree: Any, shards: Any) -> None:
    mfload.save(tree, f"{tmp_path}/t/", metadata={"x": "y"}, max_shard_size=shards)
    same(mfload.restore(tmp_path / "t", framework="numpy"), tree)


def test_names_are_paths() -> None:
    tree = {"a": [A, {"b": B}], 3: {None: A}, "n": Pair(A, 2)}
    arrays, strings = outline.named(tree, None)
    assert list(arrays) == ["a.0", "a.1.b", "3.None", "n.left"]
    found = structure.loads(strings[structure.KEY], "f", lambda name: arrays[name])
    same(found, {"a": [A, {"b": B}], 3: {None: A}, "n": {"left": A, "right": 2}})


def test_other_mappings(tmp_path: Path) -> None:
    tree = OrderedDict(a=MappingProxyType({"b": A}))
    mfload.save(tree, tmp_path / "t.safetensors")
    same(mfload.restore(tmp_path / "t.safetensors", framework="numpy"), {"a": {"b": A}})


@pytest.mark.parametrize("flat", [{}, {"a": A, "a.b": B}, {"s": np.float32(1)}, OrderedDict(b=B)])
def test_a_flat_dict_is_no_tree(flat: Any) -> None:
    assert not outline.is_tree(flat)


def test_a_flat_dict_is_written_as_ever(tmp_path: Path) -> None:
    mfload.save({"a.b": B, "a": A}, tmp_path / "t.safetensors", align=8)
    raw = (tmp_path / "t.safetensors").read_bytes()
    table = (
        b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"a.b":{"dtype":"I8","shape":[3],"data_offsets":[24,27]}}'
    )
    assert raw[8 : 8 + len(table)] == table


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a.b": A, "a": {"b": B}}, ("a.b", "['a.b'] and ['a', 'b']")),
        ({"a.b": 1, "a": {"b": B}}, ("a.b", "['a.b'] and ['a', 'b']")),
        ({"a": {1: A, "1": B}}, ("a.1",)),
        ({"a": {"f": print, "w": A}}, ("a.f",)),
        ({"a": {"s": {1, 2}, "w": A}}, ("a.s",)),
        ({"a": {"o": np.array([None]), "w": A}}, ("a.o",)),
        ({"a": {frozenset(): A}}, ("a.frozenset()", "a key")),
        ({"a": 1}, ("no dtype",)),
        ({"a": [1.0, 2.0]}, ("no dtype",)),
        ([], ("no array",)),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(tmp_path: Path, tree: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(errors.MfloadError) as caught:
        mfload.save(tree, tmp_path / "t.safetensors")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not [*tmp_path.iterdir()]


def test_trees_without_an_end(tmp_path: Path) -> None:
    ring: dict[str, Any] = {"w": A}
    ring["a"] = [ring]
    with pytest.raises(errors.UsageError, match=r"a\.0 is the state"):
        mfload.save(ring, tmp_path / "t.safetensors")
    deep: Any = A
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(errors.UsageError, match="nested too deep"):
        mfload.save(deep, tmp_path / "t.safetensors")


def test_the_name_of_the_tree_is_taken(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match=r"mfload\.tree"):
        mfload.save([A], tmp_path / "t.safetensors", metadata={structure.KEY: "{}"})


def test_trees_need_no_jax(tmp_path: Path) -> None:
    code = """
        import sys, numpy as np, torch, mfload
        tree = {"a": [np.ones(2), torch.ones(3)], "step": 2}
        mfload.save(tree, sys.argv[1])
        found = mfload.restore(sys.argv[1], framework="torch")
        assert found["step"] == 2 and torch.equal(found["a"][1], torch.ones(3))
        assert "jax" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "t.safetensors")]
    subprocess.run(command, check=True)
