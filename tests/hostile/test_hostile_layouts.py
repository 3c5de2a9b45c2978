"""Checkpoints of several files: every lie gets its error, every fair layout loads."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_layouts
import pytest

import mfload
from mfload import errors
from mfload.formats import checkpoint

REFUSED, LOADS = hostile_layouts.REFUSED, hostile_layouts.LOADS


def _open(path: Path, framework: Any) -> None:
    mfload.open(path, framework=framework).offset_keys()  # Of all headers.


def _plan(path: Path, framework: Any) -> None:
    """A plan of what is there is made though shards are missing, and says so."""
    notes = mfload.plan(path, framework=framework).notes
    missing = tuple(note.removeprefix("a shard is missing: ") for note in notes)
    raise errors.ShardNotFoundError("shards are missing", file=str(path), problems=missing)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    build, kind, says = REFUSED[name]
    path = build(tmp_path)
    start = time.monotonic()
    for call in (mfload.load, _open, _plan):
        with pytest.raises(errors.MfloadError) as caught:
            call(path, framework="numpy")
        assert type(caught.value) is kind
        assert caught.value.file is not None
        assert caught.value.file.startswith(str(tmp_path))
        text = str(caught.value)
        whole = "\n".join((text, *caught.value.problems))  # The text cuts lines of long paths.
        assert [part for part in says if part not in whole] == []
        assert text.replace("\n", "").isprintable()
        assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, tmp_path: Path) -> None:
    path = LOADS[name](tmp_path)
    for spelled in (path, str(path)):
        loaded = mfload.load(spelled, framework="numpy")  # type: ignore[arg-type]
        assert {n: a.tolist() for n, a in loaded.items()} == {"a": [1], "b": [2]}


@pytest.mark.parametrize("name", hostile_layouts.ASTRAY)
def test_each_astray_name_is_refused_alone(name: str, tmp_path: Path) -> None:
    """One that got through would load: the file it leads to is there."""
    inner = tmp_path / "inner"
    hostile_layouts.shard(tmp_path / "out.safetensors", b=2)
    hostile_layouts.shard(inner / "sub" / "1.safetensors", a=1)
    hostile_layouts.index(inner, {"b": name})
    with pytest.raises(errors.CheckpointError, match="outside its directory") as caught:
        mfload.open(inner)
    assert len(caught.value.problems) == 1
    assert repr(name) in caught.value.problems[0]
    assert ("is not a file name" in caught.value.problems[0]) == (name in ("", "a\0b"))


def test_one_error_names_every_offender(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError) as caught:
        mfload.open(hostile_layouts.everything_at_once(tmp_path)).offset_keys()
    subjects = [line.split("'")[1] for line in caught.value.problems]
    assert sorted(subjects) == [
        "broken.safetensors", "elsewhere", "gone.safetensors", "nowhere", "twice",
    ]  # fmt: skip


def test_many_missing_shards_take_little_time(tmp_path: Path) -> None:
    hostile_layouts.index(tmp_path, {f"t{n}": f"{n}.safetensors" for n in range(20_000)})
    start = time.monotonic()
    with pytest.raises(errors.CheckpointError) as caught:
        mfload.open(tmp_path).offset_keys()
    assert len(caught.value.problems) == 20_000
    assert time.monotonic() - start < 5


class TestLists:
    def test_files_of_any_place_and_kind(self, tmp_path: Path) -> None:
        one = hostile_layouts.shard(tmp_path / "x" / "1.bin", a=1)
        two = hostile_layouts.shard(tmp_path / "y" / "2", b=2)
        for files in ([one, str(two)], (one, two), iter([one, two])):
            loaded = mfload.load(files, framework="numpy")  # type: ignore[arg-type]
            assert {n: a.tolist() for n, a in loaded.items()} == {"a": [1], "b": [2]}

    def test_part_of_the_shards_loads_when_listed(self, tmp_path: Path) -> None:
        hostile_layouts.shards_incomplete(tmp_path)
        files = sorted(tmp_path.glob("*.safetensors"))
        assert sorted(mfload.load(files, framework="numpy")) == ["a", "b"]

    def test_a_tensor_twice_names_both(self, tmp_path: Path) -> None:
        hostile_layouts.tensor_twice(tmp_path)
        files = sorted(tmp_path.glob("*.safetensors"), reverse=True)
        with pytest.raises(errors.CheckpointError) as caught:
            mfload.open(files)
        (line,) = caught.value.problems
        assert f"'b'; expected: one file; found: {files[0]} and {files[1]}" in line

    def test_a_file_twice(self, tmp_path: Path) -> None:
        file = hostile_layouts.shard(tmp_path / "1.safetensors", a=1)
        with pytest.raises(errors.UsageError, match="listed twice"):
            mfload.open([file, str(file)])

    def test_empty(self) -> None:
        with pytest.raises(errors.UsageError, match="empty list"):
            mfload.open([])


class TestMetadata:
    def test_is_merged_in_file_order(self, tmp_path: Path) -> None:
        from reference import Tensor, write

        for number, strings in enumerate([{"x": "1", "y": "1"}, {}, {"y": "2"}]):
            raw = write({f"t{number}": Tensor("U8", (1,), b"1")}, strings)
            (tmp_path / f"{number}.safetensors").write_bytes(raw)
        with mfload.open(tmp_path) as opened:
            assert opened.metadata() == {"x": "1", "y": "2"}

    def test_none_where_no_file_has_any(self, tmp_path: Path) -> None:
        with mfload.open(hostile_layouts.shards_without_index(tmp_path)) as opened:
            assert opened.metadata() is None


def test_tensors_that_the_index_leaves_out_are_noted(tmp_path: Path) -> None:
    hostile_layouts.shard(tmp_path / "1.safetensors", a=1, b=2, c=3)
    index, _ = checkpoint.read(hostile_layouts.index(tmp_path, {"a": "1.safetensors"}))
    assert sorted(index.tensors) == ["a", "b", "c"]
    assert index.notes == ("in the shards but not in the index: 2 tensors",)


def test_huge_directory(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"other-{number}.txt").touch()
    hostile_layouts.plain_directory(tmp_path)
    start = time.monotonic()
    assert sorted(mfload.load(tmp_path, framework="numpy")) == ["a", "b"]
    assert time.monotonic() - start < 2


def test_relative_path_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    hostile_layouts.shards_without_index(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    opened = mfload.open("model")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert opened.get_tensor("a").tolist() == [1]
    assert pickle.loads(pickle.dumps(opened)).get_tensor("b").tolist() == [2]


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(errors.SourceNotFoundError):
        mfload.open("model.safetensors")
    assert sorted(mfload.load(hostile_layouts.plain_directory(tmp_path), framework="numpy")) == [
        "a",
        "b",
    ]


@contextlib.contextmanager
def reachable() -> Iterator[Path]:
    """A folder that everybody can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


class TestPermission:
    """Tests may run as root, whom no permission stops: they become nobody for a while."""

    def refused(self, path: Path, *hidden: Path) -> errors.SourcePermissionError:
        for each in hidden:
            os.chmod(each, 0)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(errors.SourcePermissionError) as caught:
                _open(path, "numpy")
        finally:
            os.seteuid(was)
            for each in hidden:
                os.chmod(each, 0o700)
        assert caught.value.errno == 13
        return caught.value

    def test_file(self) -> None:
        with reachable() as root:
            file = hostile_layouts.shard(root / "1.safetensors", a=1)
            assert self.refused(file, file).file == str(file)

    def test_shard_of_an_index(self) -> None:
        with reachable() as root:
            hostile_layouts.indexed(root)
            file = root / "2.safetensors"
            assert self.refused(root, file).file == str(file)

    def test_directory_that_may_not_be_listed(self) -> None:
        with reachable() as root:
            folder = hostile_layouts.shard(root / "m" / "1.safetensors", a=1).parent
            assert self.refused(folder, folder).file == str(folder)

    def test_directory_that_may_not_be_entered(self) -> None:
        with reachable() as root:
            file = hostile_layouts.shard(root / "m" / "1.safetensors", a=1)
            assert self.refused(file, file.parent).file == str(file)
