"""One rule for what a checkpoint with an index holds, in every call.

All that the shards hold is there, whether the index lists it or not; of a name in several shards,
the index's choice. A copy that the index doesn't list, in two shards, is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from reference import Tensor, write

import mfload
from mfload import errors
from mfload.cli.ls import ls
from mfload.ondemand import LayerStream

INDEX = "model.safetensors.index.json"
Shards = dict[str, dict[str, bytes]]


def lay(root: Path, shards: Shards, placed: dict[str, str]) -> Path:
    root.mkdir(exist_ok=True)
    for file, held in shards.items():
        tensors = {name: Tensor("U8", (len(data),), data) for name, data in held.items()}
        (root / file).write_bytes(write(tensors))
    (root / INDEX).write_text(json.dumps({"weight_map": placed}))
    return root


def drawn(rng: random.Random) -> tuple[Shards, dict[str, str]]:
    """Shards of some names, copies among them, and an index of some, or of nearly all."""
    files = [f"{n}.safetensors" for n in range(rng.randint(1, 4))]
    shards: Shards = {file: {} for file in files}
    twice, listed = rng.choice([0, 0.3]), rng.choice([0.5, 0.8, 1])
    placed: dict[str, str] = {}
    for n in range(rng.randint(1, 9)):
        name = f"layers.{n}.w"
        for file in rng.sample(files, 2 if rng.random() < twice and len(files) > 1 else 1):
            shards[file][name] = rng.randbytes(3)
            if rng.random() < listed or not placed:
                placed[name] = file
    named = {*placed.values()}  # What the index names no file for, is no part of it.
    return {file: held for file, held in shards.items() if file in named}, placed


def meant(shards: Shards, placed: dict[str, str]) -> dict[str, bytes] | None:
    """What a checkpoint holds; None if nothing says which of two is meant."""
    made: dict[str, bytes] = {}
    for held in shards.values():
        for name, data in held.items():
            if name in placed:
                made[name] = shards[placed[name]][name]
            elif name in made:
                return None
            else:
                made[name] = data
    return made


def as_bytes(pairs: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in pairs}


def opened(path: Path) -> dict[str, bytes]:
    with mfload.open(path) as file:
        names = file.keys()
        assert len(file) == len(names)
        assert all(name in file for name in names)
        assert list(file) == names
        assert as_bytes(file.get_tensors().items()) == as_bytes((n, file[n]) for n in names)
        return as_bytes((name, file.get_tensor(name)) for name in names)


def streamed_layers(path: Path) -> dict[str, bytes]:
    with LayerStream(path) as layers:
        return as_bytes(pair for _, held in layers for pair in held.items())


def listed(path: Path) -> dict[str, bytes]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        ls(str(path), as_json=True)
    found: dict[str, bytes] = {}
    for row in json.loads(out.getvalue())["tensors"]:
        start = row["offset"]
        found[row["name"]] = Path(row["file"]).read_bytes()[start : start + row["bytes"]]
    return found


def converted(path: Path) -> dict[str, bytes]:
    target = path / "new" / "model.safetensors"
    mfload.convert(path, target, overwrite=True)
    return as_bytes(mfload.load(target, "numpy").items())


CALLS: dict[str, Callable[[Path], dict[str, bytes]]] = {
    "load": lambda path: as_bytes(mfload.load(path, "numpy").items()),
    "expression": lambda path: as_bytes(mfload.load(path, "numpy", names="w").items()),
    "function": lambda path: as_bytes(mfload.load(path, "numpy", names=lambda _: True).items()),
    "stream": lambda path: as_bytes(mfload.stream(path, "numpy")),
    "restore": lambda path: as_bytes(
        (f"layers.{n}.w", held["w"])
        for n, held in mfload.restore(path, framework="numpy")["layers"].items()
    ),
    "open": opened,
    "LayerStream": streamed_layers,
    "ls": listed,
    "convert": converted,
}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_every_call_takes_the_same(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    shards, placed = drawn(rng)
    path = lay(tmp_path_factory.mktemp("any"), shards, placed)
    expected = meant(shards, placed)
    copies = sum(map(len, shards.values())) - len({n for held in shards.values() for n in held})
    sound = not copies and all(name in placed for held in shards.values() for name in held)
    assert mfload.verify(path).ok == sound
    if expected is None:
        for call in CALLS.values():
            with pytest.raises(errors.CheckpointError, match="two files hold the tensor"):
                call(path)
        return
    for what, call in CALLS.items():
        assert call(path) == expected, what
    report = mfload.Report()
    mfload.load(path, "numpy", report=report)
    plan = mfload.plan(path)
    assert plan.tensors == len(expected)
    left_out = expected.keys() - placed.keys()
    for notes in (report.notes, plan.notes):
        assert any("not in the index" in note for note in notes) == bool(left_out)
        assert any("index does not choose" in note for note in notes) == bool(copies)
    assert mfload.diff(path, path).equal
    some = rng.sample(sorted(expected), rng.randint(1, len(expected)))
    chosen = as_bytes(mfload.load(path, "numpy", names=some).items())
    assert chosen == {name: expected[name] for name in some}


def test_the_index_chooses_and_a_note_says_what_it_leaves(tmp_path: Path) -> None:
    shards = {
        "1.safetensors": {"a": b"aa", "b": b"bb"},
        "2.safetensors": {"c": b"cc", "a": b"--"},
    }
    lay(tmp_path, shards, {"a": "1.safetensors", "c": "2.safetensors"})
    report = mfload.Report()
    found = mfload.load(tmp_path, "numpy", report=report)
    assert as_bytes(found.items()) == {"a": b"aa", "b": b"bb", "c": b"cc"}
    assert [note for note in report.notes if "index" in note] == [
        "in the shards but not in the index: 1 tensor",
        "copies that the index does not choose, not loaded: 1 tensor, 'a' in "
        f"{tmp_path / '2.safetensors'}",
    ]
    mfload.load(tmp_path, "numpy", names="b|c", report=report)
    assert "in the shards but not in the index: 1 tensor" in report.notes


def test_what_the_index_leaves_out_needs_no_missing_shard(tmp_path: Path) -> None:
    placed = {"a": "1.safetensors", "z": "2.safetensors"}
    lay(tmp_path, {"1.safetensors": {"a": b"aa", "x": b"xx"}}, placed)
    for names in (["x"], "x", lambda name: name == "x"):
        assert as_bytes(mfload.load(tmp_path, "numpy", names=names).items()) == {"x": b"xx"}
        assert as_bytes(mfload.stream(tmp_path, "numpy", names=names)) == {"x": b"xx"}
        assert mfload.plan(tmp_path, names=names).tensors == 1
    with mfload.open(tmp_path, "numpy") as file:
        assert file.keys() == ["a", "x", "z"]
        assert file.get_tensor("x").tobytes() == b"xx"
        assert {*file.get_tensors(["x", "a"])} == {"a", "x"}
        with pytest.raises(errors.ShardNotFoundError):
            file.get_tensor("z")


def test_a_copy_is_not_taken_in_the_place_of_what_is_missing(tmp_path: Path) -> None:
    """The shard that the index means may be missing, or lack the tensor, and a copy be there."""
    shards = {"1.safetensors": {"a": b"aa"}, "2.safetensors": {"c": b"cc", "a": b"--"}}
    lay(tmp_path, shards, {"a": "1.safetensors", "c": "2.safetensors"})
    (tmp_path / "1.safetensors").unlink()
    for names in (["a"], "a", None):
        with pytest.raises(errors.ShardNotFoundError):
            mfload.load(tmp_path, "numpy", names=names)
    assert mfload.plan(tmp_path).tensors == 1
    report = mfload.Report()
    assert list(mfload.load(tmp_path, "numpy", names="c", report=report)) == ["c"]
    assert "1.safetensors" in next(note for note in report.notes if "missing" in note)
    (tmp_path / "1.safetensors").write_bytes(write({"x": Tensor("U8", (1,), b"x")}))
    for names in (["a"], "a", None):
        with pytest.raises(errors.CheckpointError, match="not where the index says") as caught:
            mfload.load(tmp_path, "numpy", names=names)
        assert str(tmp_path / "2.safetensors") in str(caught.value)
