"""Publishing: names, links, permissions, races, leftovers, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import scenarios
from test_saving_kill import memory

import mfload
from mfload import dtypes, errors, sources
from mfload.formats import safetensors
from mfload.index import TensorInfo
from mfload.saving import locks, publishing
from mfload.saving.drafts import Draft
from mfload.saving.layout import FileLayout
from mfload.saving.publishing import SaveTarget
from mfload.sources.local import LocalFile

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
WAYS: list[Callable[[], AbstractContextManager[None]]] = [
    nullcontext,
    faults.no_tmpfile,
    faults.no_links,
]
OLD, NEW = scenarios.arrays(1), scenarios.arrays(2)


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def blank(size: int, *names: str) -> FileLayout:
    """A file of so many bytes, with tensors of no bytes."""
    return FileLayout(b"", [TensorInfo(name, dtypes.TABLE["U8"], (), ()) for name in names], size)


def found(path: Path) -> str:
    return scenarios.found(path, {"old": OLD, "new": NEW})


def snapshots(root: Path, limit: int | None) -> list[Path]:
    """Two snapshots of the old arrays, as the hub's cache has them: links to the same blobs."""
    (root / "blobs").mkdir()
    made = [root / "snapshots" / name for name in ("r1", "r2")]
    for each in made:
        each.mkdir(parents=True)
    mfload.save(OLD, f"{root}/made/", max_shard_size=limit)
    for path in (root / "made").iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        # The digits of small files are those that Git has.
        blob = root / "blobs" / (digest[:40] if path.name.endswith(".json") else digest)
        path.rename(blob)
        for each in made:
            (each / path.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    (root / "made").rmdir()
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestTarget:
    """As others use it, who bring their own bytes."""

    def write(self, target: SaveTarget, parts: list[bytes], held: list[list[str]]) -> Any:
        layouts = [blank(len(part), *names) for part, names in zip(parts, held, strict=True)]
        with target.drafts(layouts) as drafts:
            for draft, part in zip(drafts, parts, strict=True):
                draft.write(0, [np.frombuffer(part, np.uint8)])
                draft.sync()
            return target.publish(drafts, layouts)

    def test_one_file(self, tmp_path: Path) -> None:
        there = self.write(SaveTarget(tmp_path / "a.dat"), [b"x" * 5000], [["w"]])
        assert there == ([str(tmp_path / "a.dat")], [])
        assert files(tmp_path) == {"a.dat": b"x" * 5000}

    def test_several(self, tmp_path: Path) -> None:
        there, _ = self.write(SaveTarget(tmp_path), [b"x", b"yy"], [["a"], ["b", "c"]])
        assert [os.path.basename(file) for file in there] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        assert {os.path.basename(file) for file in there} == files(tmp_path).keys()

    def test_what_is_not_published_is_gone(self, tmp_path: Path) -> None:
        for way in WAYS:
            with (
                way(),
                SaveTarget(tmp_path / "a.safetensors").drafts([blank(10), blank(20)]) as drafts,
            ):
                drafts[0].write(0, [np.zeros(10, np.uint8)])
            assert os.listdir(tmp_path) == []

    def test_a_file_that_is_not_whole_is_not_published(self, tmp_path: Path) -> None:
        with (
            pytest.raises(errors.WriteError, match="not whole"),
            SaveTarget(tmp_path).drafts([blank(10)]) as (draft,),
        ):
            draft.sync()
        assert os.listdir(tmp_path) == []


class TestExisting:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("old", [None, 9000])
    @pytest.mark.parametrize("new", [None, 9000])
    def test_nothing_is_replaced_unless_asked_for(
        self,
        old: int | None,
        new: int | None,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=old)
        before = files(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "Draft", None)  # Not a byte may be written.
            with way(), pytest.raises(errors.TargetExistsError) as caught:
                mfload.save(NEW, tmp_path, max_shard_size=new)
        assert isinstance(caught.value, FileExistsError)
        assert os.path.basename(str(caught.value.file)) in before
        assert files(tmp_path) == before

    @pytest.mark.parametrize(
        "name",
        ["model.safetensors", "model.safetensors.index.json", "model-00007-of-00009.safetensors"],
    )
    def test_any_file_of_the_checkpoint_counts(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).touch()
        with pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, tmp_path)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("new", [None, 9000])
    def test_who_comes_between_is_not_replaced(
        self,
        new: int | None,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = Draft.sync

        def sync(draft: Draft) -> None:
            real(draft)
            (tmp_path / "model.safetensors").write_text("mine")

        monkeypatch.setattr(Draft, "sync", sync)
        with way(), pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, tmp_path, max_shard_size=new)
        assert files(tmp_path) == {"model.safetensors": b"mine"}

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "name",
        ["model.safetensors", "model.safetensors.index.json", "model-00003-of-00006.safetensors"],
    )
    def test_who_comes_between_and_heeds_no_lock_is_not_replaced(
        self,
        name: str,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = publishing.targets.look
        looks: list[Any] = []

        def look(*given: Any) -> Any:
            looks.append(real(*given))
            if len(looks) == 3:  # The last look, under the lock.
                (tmp_path / name).write_text("mine")
            return looks[-1]

        monkeypatch.setattr(publishing.targets, "look", look)
        sharded = name != "model.safetensors"
        with way(), pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, tmp_path, max_shard_size=6000 if sharded else None)
        assert files(tmp_path) == {name: b"mine"}

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("left", "right"), [(None, None), (9000, 9000), (None, 9000)])
    def test_of_two_that_race_one_wins(
        self,
        left: int | None,
        right: int | None,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        both = threading.Barrier(2)
        real = SaveTarget.drafts

        def drafts(target: SaveTarget, *args: Any, **options: Any) -> Any:
            both.wait(20)  # Both have looked, and nothing was there.
            return real(target, *args, **options)

        monkeypatch.setattr(SaveTarget, "drafts", drafts)
        lost: list[str] = []

        def run(name: str, arrays: Any, limit: int | None) -> None:
            try:
                mfload.save(arrays, tmp_path, max_shard_size=limit, timeout=60)
            except errors.TargetExistsError:
                lost.append(name)

        threads = [threading.Thread(target=run, args=args)
                   for args in (("old", OLD, left), ("new", NEW, right))]  # fmt: skip
        with way():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [found(tmp_path), *lost] in (["old", "new"], ["new", "old"])
        assert scenarios.hidden(tmp_path) == []

    @pytest.mark.parametrize("limit", [None, 9000])
    def test_of_two_that_replace_both_are_whole(self, limit: int | None, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=limit)

        def run(arrays: Any) -> None:
            for number in range(10):
                mfload.save(arrays, tmp_path, max_shard_size=limit and limit + 5000 * (number % 2),
                            overwrite=True, timeout=60)  # fmt: skip

        threads = [threading.Thread(target=run, args=(arrays,)) for arrays in (OLD, NEW)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found(tmp_path) in ("old", "new")
        assert scenarios.hidden(tmp_path) == []
        names = {os.path.basename(path) for path in mfload.open(tmp_path)._index.files}
        assert files(tmp_path).keys() - {"model.safetensors.index.json"} == names


class TestLinks:
    def test_a_link_is_followed_and_stays(self, tmp_path: Path) -> None:
        there = tmp_path / "there"
        there.mkdir()
        mfload.save(OLD, there / "real.safetensors")
        link = tmp_path / "model.safetensors"
        link.symlink_to("there/real.safetensors")
        with pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, link)
        saved = mfload.save(NEW, link, overwrite=True)
        assert saved.files == (str(there / "real.safetensors"),)
        assert link.is_symlink()
        assert found(link) == found(tmp_path) == found(there) == "new"
        assert os.listdir(there) == ["real.safetensors"]

    def test_a_link_that_leads_nowhere_yet(self, tmp_path: Path) -> None:
        link = tmp_path / "link.safetensors"
        link.symlink_to("real.safetensors")
        mfload.save(NEW, link)
        assert link.is_symlink()
        assert found(tmp_path / "real.safetensors") == "new"

    @pytest.mark.parametrize("way", WAYS[:2])
    @pytest.mark.parametrize("limit", [None, 9000])
    @pytest.mark.parametrize("before", [None, 9000])
    def test_of_a_hub_s_cache_only_the_snapshot_changes(
        self, before: int | None, limit: int | None, way: Any, tmp_path: Path
    ) -> None:
        first, second = snapshots(tmp_path, before)
        blobs = files(tmp_path / "blobs")
        with pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, first, max_shard_size=limit)
        with way():
            saved = mfload.save(NEW, first, max_shard_size=limit, overwrite=True)
        assert files(tmp_path / "blobs") == blobs
        assert found(second) == "old"
        assert found(first) == "new"
        assert {os.path.basename(file) for file in saved.files} == {*os.listdir(first)}
        assert not any(path.is_symlink() for path in first.iterdir())
        assert all(path.is_symlink() for path in second.iterdir())
        # Which of the names are still there; the others are told of as removed.
        told = ["the blobs stay" in note for note in saved.notes]
        assert any(told) == (before == limit)
        assert "blobs" not in str(mfload.save(OLD, first, overwrite=True).notes)

    def test_a_file_of_a_hub_s_snapshot_by_its_name(self, tmp_path: Path) -> None:
        first, second = snapshots(tmp_path, None)
        blobs = files(tmp_path / "blobs")
        link = tmp_path / "mine.safetensors"
        link.symlink_to(first / "model.safetensors")  # A chain: it leads to a name of the user's.
        saved = mfload.save(NEW, link, overwrite=True)
        assert saved.files == (str(first / "model.safetensors"),)
        assert saved.notes == (
            "replaced links into a cache of blobs, the blobs stay: model.safetensors",
        )
        assert link.is_symlink()
        assert [found(link), found(first), found(second)] == ["new", "new", "old"]
        assert files(tmp_path / "blobs") == blobs

    @pytest.mark.parametrize("limit", [None, 9000])
    def test_what_was_private_stays_so(self, limit: int | None, tmp_path: Path) -> None:
        first, _ = snapshots(tmp_path, limit)
        for blob in (tmp_path / "blobs").iterdir():
            blob.chmod(0o600)
        mfload.save(NEW, first, max_shard_size=limit, overwrite=True)
        assert {stat.S_IMODE(path.lstat().st_mode) for path in first.iterdir()} == {0o600}

    def test_a_blob_that_was_cleaned_away_does_not_come_back(self, tmp_path: Path) -> None:
        first, second = snapshots(tmp_path, None)
        for blob in (tmp_path / "blobs").iterdir():
            blob.unlink()
        mfload.save(NEW, first, overwrite=True)
        assert found(first) == "new"
        assert os.listdir(tmp_path / "blobs") == []
        assert not (second / "model.safetensors").exists()

    @pytest.mark.parametrize("limit", [None, 9000])
    @pytest.mark.parametrize("linked", ["shards", "one shard", "index", "all"])
    def test_shards_behind_links_are_not_replaced(
        self, linked: str, limit: int | None, tmp_path: Path
    ) -> None:
        there, here = tmp_path / "there", tmp_path / "here"
        here.mkdir()
        mfload.save(OLD, f"{there}/", max_shard_size=9000)
        for number, path in enumerate(sorted(there.iterdir())):
            is_index = path.name.endswith(".json")
            chosen = {"shards": not is_index, "one shard": number == 1, "index": is_index}
            if chosen.get(linked, True):
                elsewhere = tmp_path / str(number % 2)
                elsewhere.mkdir(exist_ok=True)
                os.rename(path, elsewhere / path.name)
                (here / path.name).symlink_to(elsewhere / path.name)
            else:
                os.rename(path, here / path.name)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        with pytest.raises(errors.TargetError, match="through a symbolic link") as caught:
            mfload.save(NEW, here, max_shard_size=limit, overwrite=True)
        assert os.path.islink(str(caught.value.file))
        assert caught.value.found == f"a link to {os.path.realpath(str(caught.value.file))}"
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
        assert found(here) == "old"

    def test_shards_are_not_written_through_a_link(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path / "real.safetensors")
        link = tmp_path / "model.safetensors"
        link.symlink_to("real.safetensors")
        with pytest.raises(errors.TargetError, match="through a symbolic link"):
            mfload.save(NEW, link, max_shard_size=9000, overwrite=True)
        assert found(link) == "old"

    def test_a_link_beside_an_index_is_not_written_through(self, tmp_path: Path) -> None:
        there, here = tmp_path / "there", tmp_path / "here"
        there.mkdir()
        here.mkdir()
        mfload.save(OLD, here, max_shard_size=9000)
        (here / "model.safetensors").symlink_to("../there/model.safetensors")
        with pytest.raises(errors.TargetError, match="through a symbolic link"):
            mfload.save(NEW, here / "model.safetensors", overwrite=True)
        assert found(here) == "old"
        assert os.listdir(there) == []

    def test_something_else_where_a_shard_would_be(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path)
        (tmp_path / "model-00002-of-00006.safetensors").mkdir()
        with pytest.raises(errors.TargetError, match="directory"):
            mfload.save(NEW, tmp_path, max_shard_size=9000, overwrite=True)
        assert found(tmp_path / "model.safetensors") == "old"

    def test_other_names_of_the_old_file_keep_it(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path / "a.safetensors")
        os.link(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        mfload.save(NEW, tmp_path / "a.safetensors", overwrite=True)
        assert found(tmp_path / "b.safetensors") == "old"


class TestPermissions:
    @pytest.fixture(autouse=True)
    def umask(self) -> Iterator[None]:
        before = os.umask(0o022)
        yield
        os.umask(before)

    def modes(self, folder: Path) -> dict[str, int]:
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("limit", [None, 9000])
    def test_new_files_are_as_any(
        self, limit: int | None, way: Callable[[], AbstractContextManager[None]], tmp_path: Path
    ) -> None:
        with way():
            mfload.save(OLD, tmp_path, max_shard_size=limit)
        assert set(self.modes(tmp_path).values()) == {0o644}

    @pytest.mark.parametrize(("old", "new", "way"), [
        (old, new, way)
        for old, new in [(None, None), (9000, 9000), (9000, 6000), (None, 9000), (9000, None)]
        for way in WAYS
        if way is not faults.no_links or not (old or new)  # Refused: see TestRefused.
    ])  # fmt: skip
    def test_what_is_replaced_hands_its_own_on(
        self,
        old: int | None,
        new: int | None,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
    ) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=old)
        for path in tmp_path.iterdir():
            path.chmod(0o600)
        with way():
            mfload.save(NEW, tmp_path, max_shard_size=new, overwrite=True)
        assert set(self.modes(tmp_path).values()) == {0o600}


class TestLeftovers:
    def leave(self, folder: Path) -> list[str]:
        """Has a writer without O_TMPFILE die before it publishes."""
        code = (
            "import os, pathlib, sys, faults, recorder, scenarios\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "def kill(number, call):\n"
            "    call == 'fsync' and os.kill(os.getpid(), 9)\n"
            "with faults.no_tmpfile(), recorder.Recorder(folder, kill):\n"
            "    scenarios.SCENARIOS['single-single'].save(folder, scenarios.arrays(1))\n"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
            check=False,
        )
        return [name for name in scenarios.hidden(folder) if not name.endswith("-lock")]

    def test_a_dead_writer_s_are_removed_by_the_next_save(self, tmp_path: Path) -> None:
        assert len(self.leave(tmp_path)) == 1
        mfload.save(OLD, tmp_path / "other.safetensors")
        assert len(scenarios.hidden(tmp_path)) == 2  # Another checkpoint's: not its business.
        mfload.save(NEW, tmp_path, overwrite=True)
        assert scenarios.hidden(tmp_path) == []

    def test_a_live_writer_s_are_not(self, tmp_path: Path) -> None:
        with faults.no_tmpfile():
            context = SaveTarget(tmp_path, True).drafts([blank(10)])
            (draft,) = context.__enter__()
        # Something else removed its lock.
        publishing._remove([locks.lock_of(SaveTarget(tmp_path).place)])
        other = threading.Thread(target=mfload.save, args=(NEW, tmp_path))
        other.start()
        other.join()
        assert found(tmp_path) == "new"
        assert len(scenarios.hidden(tmp_path)) == 1
        assert draft.is_at(draft.hidden)
        context.__exit__(None, None, None)
        assert scenarios.hidden(tmp_path) == []

    def test_a_fifo_of_such_a_name_is_not_waited_for(self, tmp_path: Path) -> None:
        target = SaveTarget(tmp_path / "model.safetensors")
        os.mkfifo(tmp_path / f"{target.place.hidden}0")
        saving = threading.Thread(target=mfload.save, args=(NEW, target.path), daemon=True)
        saving.start()
        saving.join(10)
        assert found(tmp_path) == "new"
        assert scenarios.hidden(tmp_path) == []

    def test_where_locks_are_not_known_nothing_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = self.leave(tmp_path)
        monkeypatch.setattr(fcntl, "flock", faults.no_locks)
        mfload.save(NEW, tmp_path, overwrite=True)  # But the lock, which is empty.
        assert scenarios.hidden(tmp_path) == left


class TestRefused:
    def test_nothing_over_shards(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=9000)
        with pytest.raises(errors.TargetError, match="with an empty one"):
            mfload.save({}, tmp_path, overwrite=True)
        assert found(tmp_path) == "old"
        assert scenarios.hidden(tmp_path) == []

    @pytest.mark.parametrize(("old", "new"), [(9000, None), (9000, 9000), (None, 9000)])
    def test_shards_without_hard_links(
        self,
        old: int | None,
        new: int | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A file system that can't replace them at one stroke, told before bytes are written."""
        mfload.save(OLD, tmp_path, max_shard_size=old)
        before = files(tmp_path)
        other = tmp_path.with_name("other.safetensors")
        mfload.save(NEW, other, overwrite=True)
        monkeypatch.setattr(Draft, "write", None)
        more: Any = {"max_shard_size": new, "overwrite": True}
        for call in (partial(mfload.save, NEW), partial(mfload.convert, other)):
            with faults.no_links(), pytest.raises(errors.TargetError, match="hard links"):
                call(tmp_path, **more)
            assert files(tmp_path) == before
            assert scenarios.hidden(tmp_path) == []


class TestOthers:
    def test_other_checkpoints_are_not_touched(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path / "other.safetensors", max_shard_size=9000)
        mfload.save(OLD, tmp_path / "model2.safetensors")
        before = files(tmp_path)
        mfload.save(OLD, tmp_path / "model.safetensors", max_shard_size=9000)
        mfload.save(NEW, tmp_path / "model.safetensors", max_shard_size=6000, overwrite=True)
        mfload.save(NEW, tmp_path / "model.safetensors", overwrite=True)
        after = files(tmp_path)
        assert after.pop("model.safetensors")
        assert after == before

    def test_files_that_another_index_leads_to_are_kept(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=9000)
        shutil_index = (tmp_path / "model.safetensors.index.json").read_bytes()
        (tmp_path / "copy.safetensors.index.json").write_bytes(shutil_index)
        mfload.save(NEW, tmp_path / "model.safetensors", overwrite=True)
        assert found(tmp_path / "copy.safetensors.index.json") == "old"
        assert found(tmp_path / "model.safetensors") == "new"

    def test_who_names_the_directory_is_told_of_neighbours(self, tmp_path: Path) -> None:
        mfload.save(OLD, tmp_path / "other.safetensors")
        assert mfload.save(NEW, tmp_path / "model.safetensors").notes == ()
        saved = mfload.save(NEW, tmp_path, overwrite=True)
        assert saved.notes == (
            "other.safetensors lies beside it: load model.safetensors by its name, not the "
            "directory",
        )
        saved = mfload.save(NEW, tmp_path, max_shard_size=9000, overwrite=True)
        assert saved.notes == ("removed of the old checkpoint: model.safetensors",)
        assert found(tmp_path) == "new"
        mfload.save(OLD, tmp_path / "other.safetensors", max_shard_size=9000, overwrite=True)
        saved = mfload.save(NEW, tmp_path, max_shard_size=9000, overwrite=True)
        assert "other.safetensors.index.json lies beside it" in saved.notes[-1]

    def test_what_can_t_be_removed_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=9000)
        real = os.unlink

        def unlink(path: Any, **options: Any) -> None:
            if "-00002-of-" in str(path):
                raise PermissionError(errno.EPERM, "sticky")
            real(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            saved = mfload.save(NEW, tmp_path, overwrite=True)
        assert "could not be removed" in saved.notes[0]
        # Without its index the directory would hold both.
        assert saved.files[-1].endswith(".index.json")
        assert found(tmp_path) == "new"
        mfload.save(OLD, tmp_path, overwrite=True)
        assert os.listdir(tmp_path) == ["model.safetensors"]


class TestNotOurs:
    """What an overwriting save must leave, whatever lies about."""

    @pytest.mark.parametrize("name", ["model", "copy"])
    @pytest.mark.parametrize("kind", ["EIO", "text"])
    def test_an_index_that_can_t_be_read_costs_nothing(
        self, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may lead to any file, so that none is replaced or removed."""
        mfload.save(OLD, tmp_path, max_shard_size=9000)
        own = tmp_path / "model.safetensors.index.json"
        index = tmp_path / f"{name}.safetensors.index.json"
        index.write_bytes(own.read_bytes())
        if kind == "text":
            index.write_text("{")
        before = files(tmp_path)
        real = os.pread

        def pread(fd: int, *args: Any) -> bytes:
            if os.path.samestat(os.fstat(fd), index.stat()):
                raise OSError(errno.EIO, "injected")
            return real(fd, *args)

        with monkeypatch.context() as patch:
            if kind == "EIO":
                patch.setattr(os, "pread", pread)
            with pytest.raises(errors.TargetError, match="an index can't be read") as caught:
                mfload.save(NEW, tmp_path, overwrite=True)
        assert caught.value.file == str(index)
        assert files(tmp_path) == before

    def test_files_of_others_that_an_index_names(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("mine")
        (tmp_path / "run-3-of-10.safetensors").write_text("mine")
        (tmp_path / "run.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "config.json", "b": "run.safetensors.index.json"}})
        )
        mfload.save(NEW, tmp_path / "run.safetensors", max_shard_size=9000, overwrite=True)
        assert found(tmp_path / "run.safetensors.index.json") == "new"
        assert (tmp_path / "config.json").read_text() == "mine"
        assert (tmp_path / "run-3-of-10.safetensors").read_text() == "mine"

    @pytest.mark.parametrize("name", [b"\xff", b"a:b", b"http:x", b"\\x", b"..\\x"])
    def test_a_name_to_which_no_index_leads(self, name: bytes, tmp_path: Path) -> None:
        """It is not UTF-8, or a load would take it for a path out of the directory."""
        path = os.fsdecode(os.path.join(os.fsencode(tmp_path), name + b".safetensors"))
        with pytest.raises(errors.UsageError, match="UTF-8"):
            mfload.save(NEW, path, max_shard_size=9000)
        assert os.listdir(tmp_path) == []

    def test_the_same_thread_does_not_wait_for_itself(self, tmp_path: Path) -> None:
        with (
            locks.locked(os.path.realpath(tmp_path)),
            pytest.raises(errors.TargetError, match="already saving"),
        ):
            mfload.save(NEW, tmp_path)
        mfload.save(NEW, tmp_path)

    def test_a_directory_is_known_by_more_than_its_path(self, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        first.mkdir()
        with locks.locked(os.path.realpath(first)):
            first.rename(second)
            with pytest.raises(errors.TargetError, match="already saving"):
                mfload.save(NEW, second)
            mfload.save(NEW, first)  # Another directory by now.
        mfload.save(NEW, second)

    def test_names_are_on_disk_before_what_leads_to_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=9000)
        made: list[str] = []

        def note(name: str) -> None:
            real = getattr(os, name)

            def call(*args: Any, **options: Any) -> Any:
                index = name == "replace" and str(args[1]).endswith(".json")
                made.append("index" if index else name)
                return real(*args, **options)

            monkeypatch.setattr(os, name, call)

        for name in ("link", "fsync", "replace"):
            note(name)
        mfload.save(NEW, tmp_path, max_shard_size=9000, overwrite=True)
        first, second = (at for at, call in enumerate(made) if call == "index")
        count = len(list(tmp_path.glob("model-*")))
        # The files; the index' bytes; the names it leads to; its own name.
        links = ["link"] * count
        assert made[: first + 2] == ["fsync"] * (count + 1) + links + ["fsync", "index", "fsync"]
        # The names are on disk, then the bytes of the other index, and its own name.
        assert made[second - 3 : second + 2] == ["replace", "fsync", "fsync", "index", "fsync"]


class TestReaders:
    """Who loads while a checkpoint is replaced finds one of the two, or an error; never a mix."""

    @pytest.mark.parametrize(("name", "way"), [
        (name, way)
        for name, scenario in scenarios.SCENARIOS.items()
        for way in WAYS
        if scenario.old != 0 and (way is not faults.no_links or not scenario.sharded)
    ])  # fmt: skip
    def test_a_save_between_any_two_headers(
        self,
        name: str,
        way: Callable[[], AbstractContextManager[None]],
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        scenario = scenarios.SCENARIOS[name]
        real = safetensors.read
        read: list[str] = []

        def between(file: Any, source: int = 0) -> Any:
            read.append(file.name)
            if len(read) == at:
                with way():
                    scenario.save(folder, NEW)
            return real(file, source)

        for at in range(1, 7):
            folder = memory / str(at)
            scenario.begin(folder, OLD)
            read.clear()
            with monkeypatch.context() as patch:
                patch.setattr(safetensors, "read", between)
                try:
                    whole = found(folder)
                except errors.SourceChangedError:
                    whole = "changed"
            assert whole in ({"changed", "old", "new"} if len(read) >= at else {"old"})
            assert found(folder) == ("new" if len(read) >= at else "old")

    @pytest.mark.parametrize("indexed", [True, False])
    def test_headers_of_two_are_not_mixed_though_they_fit(
        self, indexed: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Same names, same shapes: nothing in the headers tells one from the other."""
        old, new = ({f"w{n}": np.full(9, seed) for n in range(4)} for seed in (1, 2))
        mfload.save(old, memory, max_shard_size=72)
        if not indexed:
            (memory / "model.safetensors.index.json").unlink()
        opened: list[str] = []

        def between(path: str, **how: bool) -> LocalFile:
            opened.append(path)
            if len(opened) == 3:
                mfload.save(new, memory, max_shard_size=72, overwrite=True)
            return LocalFile(path, **how)

        monkeypatch.setattr(sources, "local_file", between)
        with pytest.raises(errors.SourceChangedError):
            mfload.load(memory, "numpy")
        assert scenarios.found(memory, {"old": old, "new": new}) == "new"

    def test_a_checkpoint_that_never_rests(
        self, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mfload.save(OLD, memory, max_shard_size=9000)
        real = safetensors.read

        def between(file: Any, source: int = 0) -> Any:
            mfload.save(OLD, memory, max_shard_size=9000, overwrite=True)
            return real(file, source)

        monkeypatch.setattr(safetensors, "read", between)
        with pytest.raises((errors.SourceChangedError, errors.CheckpointError)):
            mfload.load(memory, "numpy")

    def test_readers_beside_a_writer(self, memory: Path) -> None:
        mfload.save(OLD, memory, max_shard_size=9000)
        seen: dict[str, int] = {}
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                try:
                    what = found(memory)
                except (errors.SourceError, errors.CheckpointError) as error:
                    what = type(error).__name__
                except AssertionError:
                    what = "mixed"
                seen[what] = seen.get(what, 0) + 1

        reader = threading.Thread(target=look)
        reader.start()
        for number in range(30):
            limit = [9000, 6000, None][number % 3]
            mfload.save([NEW, OLD][number % 2], memory, max_shard_size=limit, overwrite=True)
        stop.set()
        reader.join()
        # "nothing": a file that was gone when its bytes were to be read; an error as well.
        assert seen.keys() <= {"old", "new", "nothing", "SourceChangedError", "CheckpointError"}
        assert seen.get("old", 0) + seen.get("new", 0) > 0


class TestAfterSuccess:
    """What fails when the checkpoint is in its place is a note, or nothing."""

    def test_a_directory_that_can_t_be_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, listed = os.listdir, list[Any]()

        def listdir(path: Any) -> list[str]:
            listed.append(path)
            if len(listed) > 3:  # After the last look under the lock.
                raise OSError(errno.EIO, "broken")
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listdir)
            saved = mfload.save(NEW, tmp_path)
        assert saved.notes == ("could not look at what lies beside it: broken",)
        assert found(tmp_path) == "new"

    @pytest.mark.parametrize("way", WAYS)
    def test_files_that_can_t_be_closed(
        self,
        way: Callable[[], AbstractContextManager[None]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What was written is synced: that was the last word of the disk."""
        real = os.close

        def close(fd: int) -> None:
            real(fd)
            raise OSError(errno.EIO, "broken")

        class File(FileIO):
            def close(self) -> None:
                super().close()
                raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch, way():
            patch.setattr(os, "close", close)
            patch.setattr("mfload.saving.descriptors.FileIO", File)
            mfload.save(NEW, tmp_path)
        assert found(tmp_path) == "new"
        assert scenarios.hidden(tmp_path) == []
