"""Shards of a save that was killed before their index: no checkpoint, and removed later."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import scenarios
from test_publishing import NEW, OLD, WAYS, blank, files

import mfload
from mfload import errors
from mfload.formats import unfinished
from mfload.saving import drafts, publishing
from mfload.saving.drafts import Draft
from mfload.saving.publishing import SaveTarget

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
TOLD = "shards of a save that did not finish: model-00001-of-00006.safetensors"
CODE = """
import contextlib, itertools, os, sys
import faults, mfload, scenarios

def killing(*args, **options):
    if next(calls) == 7:
        os.kill(os.getpid(), 9)
    return real(*args, **options)

calls, (folder, mode, name) = itertools.count(1), sys.argv[1:]
with faults.no_links() if mode == "no-links" else contextlib.nullcontext():
    real = getattr(os, name)
    setattr(os, name, killing)
    mfload.save(scenarios.arrays(2), folder, max_shard_size=9000)
"""


class Stop(BaseException):
    """What Ctrl-C is."""


@pytest.fixture(scope="module", params=["plain", "no-links"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all shards have their names, and the index has not."""
    folder = tmp_path_factory.mktemp("killed") / "new"
    folder.mkdir()
    call = "link" if request.param == "plain" else "replace"
    made = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), request.param, call],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}, check=False,
    )  # fmt: skip
    assert made.returncode == -9
    assert len(list(folder.glob("model-*"))) == 6
    return folder


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy of it, of which some shards and the draft of the index remain."""
    folder = tmp_path / "new"
    shutil.copytree(killed, folder)
    return folder


def found(path: Path) -> str:
    return scenarios.found(path, {"old": OLD, "new": NEW})


def header(*names: str) -> bytes:
    """A file with empty tensors."""
    rows = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
    head = json.dumps(rows).encode()
    return len(head).to_bytes(8, "little") + head


class TestReaders:
    @pytest.mark.parametrize("act", [
        lambda path: mfload.load(path, "numpy"),
        lambda path: mfload.open(path, "numpy"),
        lambda path: list(mfload.stream(path, "numpy")),
        lambda path: mfload.plan(path, "numpy"),
        mfload.verify,
        lambda path: mfload.diff(path, path),
        lambda path: mfload.convert(path, path.parent / "to.safetensors"),
    ])  # fmt: skip
    @pytest.mark.parametrize("gone", [0, 2])
    def test_they_are_no_checkpoint(
        self, act: Callable[[Path], object], gone: int, left: Path
    ) -> None:
        for name in sorted(left.glob("model-*"))[6 - gone :]:
            name.unlink()
        with pytest.raises(errors.SourceNotFoundError, match=f"{6 - gone} {TOLD}"):
            act(left)

    def test_another_checkpoint_beside_them_is_found(self, left: Path) -> None:
        mfload.save(OLD, left / "other.safetensors")
        assert found(left) == "old"
        for notes in (
            mfload.plan(left, "numpy").notes,
            mfload.verify(left).notes,
            mfload.open(left, "numpy")._index.notes,
        ):
            assert [note for note in notes if f"left out: 6 {TOLD}" in note]
        assert len(list(left.glob("model-*"))) == 6  # Another save's: not its business.

    def test_an_index_beside_them_is_found(self, left: Path) -> None:
        mfload.save(OLD, left / "other.safetensors", max_shard_size=9000)
        assert found(left) == "old"

    def test_another_format_beside_them_is_found(self, left: Path) -> None:
        np.savez(left / "model.npz", **OLD)
        assert found(left) == "old"

    @pytest.mark.parametrize("way", WAYS)
    def test_while_the_writer_lives(
        self,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Between any two of its calls, a load finds nothing, and then all of it."""
        seen: list[str] = []
        index = tmp_path / "model.safetensors.index.json"

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                seen.append(found(tmp_path))
                assert (seen[-1] == "new") == index.exists()
                return real(*args, **options)

            return call

        with way(), monkeypatch.context() as patch:
            for name in ("pwritev", "fsync", "link", "replace", "unlink"):
                patch.setattr(os, name, watched(getattr(os, name)))
            mfload.save(NEW, tmp_path, max_shard_size=9000)
        assert seen[0] == "nothing"
        assert found(tmp_path) == "new"


class TestWriters:
    @pytest.mark.parametrize("limit", [9000, 6000, None])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_next_save_removes_them(
        self, limit: int | None, overwrite: bool, left: Path
    ) -> None:
        saved = mfload.save(OLD, left, max_shard_size=limit, overwrite=overwrite)
        (note,) = saved.notes
        assert note.startswith(f"removed 6 {TOLD}")
        assert found(left) == "old"
        assert {os.path.basename(file) for file in saved.files} == set(os.listdir(left))

    @pytest.mark.parametrize("at", range(1, 9))
    def test_a_kill_while_it_removes_them(
        self, at: int, left: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = itertools.count(1)
        real = os.unlink

        def unlink(path: Any, **options: Any) -> None:
            if next(calls) == at:
                raise Stop
            real(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            if at < 8:
                with pytest.raises(Stop):
                    mfload.save(OLD, left)
                assert found(left) == "nothing"
        mfload.save(OLD, left)
        assert os.listdir(left) == ["model.safetensors"]

    def test_a_shard_without_tensors_is_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The index names no file for it."""
        parts = [header(), header("a")]
        layouts = [blank(len(parts[0])), blank(len(parts[1]), "a")]
        monkeypatch.setattr(Draft, "discard", Draft._close)
        monkeypatch.setattr(publishing, "_remove", lambda paths: [])
        real = Draft.publish

        def publish(draft: Draft, path: str, **options: Any) -> None:
            if path.endswith(".json"):
                raise Stop
            real(draft, path, **options)

        def write() -> None:
            target = SaveTarget(tmp_path)
            with target.drafts(layouts) as made:
                for draft, part in zip(made, parts, strict=True):
                    draft.write(0, [np.frombuffer(part, np.uint8)])
                    draft.sync()
                target.publish(made, layouts)

        monkeypatch.setattr(Draft, "publish", publish)
        with pytest.raises(Stop):
            write()
        monkeypatch.undo()
        assert len(list(tmp_path.glob("model-*"))) == 2
        saved = mfload.save(OLD, tmp_path)
        assert "removed 2 shards" in saved.notes[0]
        assert os.listdir(tmp_path) == ["model.safetensors"]

    def test_what_can_t_be_removed_after_a_failure_keeps_its_draft(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, links = os.link, itertools.count(1)

        def link(*args: Any, **options: Any) -> None:
            if next(links) == 4:
                raise OSError(5, "injected")
            real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            patch.setattr(publishing, "_remove", list)
            with pytest.raises(errors.WriteError):
                mfload.save(NEW, tmp_path, max_shard_size=9000)
        assert len(list(tmp_path.glob("model-*"))) == 3
        assert found(tmp_path) == "nothing"
        mfload.save(OLD, tmp_path)
        assert os.listdir(tmp_path) == ["model.safetensors"]

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_where_locks_are_not_known_they_stay(
        self, overwrite: bool, left: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their writer may live."""
        before = files(left)
        monkeypatch.setattr(fcntl, "flock", faults.no_locks)
        if overwrite:
            assert mfload.save(OLD, left, overwrite=True).notes[0].startswith("not removed")
            assert found(left) == "old"
            return
        with pytest.raises(errors.TargetExistsError, match="if no process is writing"):
            mfload.save(OLD, left)
        before = {name: raw for name, raw in before.items() if not name.endswith("-lock")}
        assert files(left) == before

    def test_nor_are_those_that_a_writer_holds(self, left: Path) -> None:
        held = os.open(left / "model-00002-of-00006.safetensors", os.O_RDONLY)
        assert drafts.lock(held)
        with pytest.raises(errors.TargetExistsError, match="if no process is writing"):
            mfload.save(OLD, left)
        os.close(held)
        assert found(left) == "nothing"
        mfload.save(OLD, left)
        assert os.listdir(left) == ["model.safetensors"]


class TestOthers:
    """Files that are not the killed save's, whatever they are called."""

    NAME = "model-00002-of-00006.safetensors"

    def tensors(self, left: Path) -> dict[str, Any]:
        return mfload.load(left / self.NAME, "numpy")

    @pytest.mark.parametrize("kind", ["same tensors", "same time", "text"])
    def test_a_user_s_file_of_such_a_name_stays(self, kind: str, left: Path) -> None:
        path = left / self.NAME
        held, time = self.tensors(left), path.stat().st_mtime_ns
        path.unlink()
        if kind == "text":
            path.write_text("mine")
        else:
            mfload.save(held if kind == "same tensors" else {"mine": np.ones(3)}, path)
        if kind != "same tensors":
            os.utime(path, ns=(time, time))
        mine = path.read_bytes()
        assert unfinished.shards(str(left), os.listdir(left)) == [
            f"model-0000{n}-of-00006.safetensors" for n in (1, 3, 4, 5, 6)
        ]
        with pytest.raises(errors.TargetExistsError, match="and no index") as caught:
            mfload.save(OLD, left)
        assert caught.value.file == str(path)
        assert path.read_bytes() == mine
        mfload.save(OLD, left, overwrite=True)
        assert path.read_bytes() == mine

    def test_other_files_stay(self, left: Path) -> None:
        time = (left / self.NAME).stat().st_mtime_ns
        mine = left / "mine.safetensors"
        mfload.save({}, mine)
        os.utime(mine, ns=(time, time))
        mfload.save(OLD, left, overwrite=True)
        assert sorted(os.listdir(left)) == ["mine.safetensors", "model.safetensors"]

    def test_with_an_index_they_are_a_checkpoint(self, left: Path) -> None:
        """A user took them as they are, or the writer died right after."""
        (draft,) = left.glob(".mfload-*-index")
        shutil.copyfile(draft, left / "model.safetensors.index.json")
        assert found(left) == "new"
        with pytest.raises(errors.TargetExistsError, match="overwrite=True"):
            mfload.save(OLD, left)
        mfload.save(OLD, left, overwrite=True)
        assert os.listdir(left) == ["model.safetensors"]

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 5}', '{"weight_map": {}}'])
    def test_a_draft_that_tells_nothing(self, text: str, left: Path) -> None:
        (draft,) = left.glob(".mfload-*-index")
        time = draft.stat().st_mtime_ns
        draft.write_text(text)
        os.utime(draft, ns=(time, time))
        assert unfinished.shards(str(left), os.listdir(left)) == []
        with pytest.raises(errors.TargetExistsError):
            mfload.save(OLD, left)

    @pytest.mark.parametrize("kind", ["owner", "link", "links"])
    def test_a_draft_of_anybody_tells_nothing(self, kind: str, left: Path) -> None:
        """Where others can write, it could name the user's own files, or be a link elsewhere."""
        (draft,) = left.glob(".mfload-*-index")
        if kind == "owner" and os.geteuid():
            pytest.skip("needs root")
        before = {path.name: path.read_bytes() for path in left.glob("model-*")}
        if kind == "owner":
            os.chown(draft, 4242, -1)
        for path in [] if kind == "owner" else [draft] if kind == "link" else left.glob("model-*"):
            time = path.stat().st_mtime_ns
            other = path.rename(left.parent / path.name.removeprefix("."))
            path.symlink_to(other)
            os.utime(path, ns=(time, time), follow_symlinks=False)
        assert mfload.load(left, "numpy").keys() == NEW.keys()
        with pytest.raises(errors.TargetExistsError):
            mfload.save(OLD, left)
        assert {path.name: path.read_bytes() for path in left.glob("model-*")} == before

    def test_a_draft_that_tells_nothing_is_not_read(
        self, left: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have millions of entries."""
        (draft,) = left.glob(".mfload-*-index")
        os.utime(draft, ns=(1, 1))
        monkeypatch.delattr(unfinished, "read_index")
        assert mfload.load(left, "numpy").keys() == NEW.keys()

    @pytest.mark.parametrize("gone", [0, 2])
    def test_without_a_draft_the_errors_say_what_to_do(self, gone: int, left: Path) -> None:
        """As earlier versions left them: they can't be told from a download without its index."""
        for name in [*sorted(left.glob("model-*"))[6 - gone :], *left.glob(".mfload-*")]:
            name.unlink()
        what = "a killed save left them, remove them" if gone else "a checkpoint exists already"
        with pytest.raises(errors.TargetExistsError, match=what):
            mfload.save(OLD, left)
        mfload.save(OLD, left, overwrite=True)
        if gone:
            with pytest.raises(errors.CheckpointError, match="side by side") as caught:
                mfload.load(left, "numpy")
            assert "(4 of 6; if a killed save left them, remove them)" in str(caught.value)
        else:
            assert found(left) == "old"
