"""Symbolic links in front of a checkpoint: every call means the same place, where the data is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.checking.manifest import Manifest

OLD = {"w": np.arange(6000.0), "v": np.arange(500, dtype=np.int32)}
NEW = {"w": np.ones(6000), "v": np.zeros(500, np.int32)}


def _target(link: Path, target: str) -> Path:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


# Ways to `there/real.safetensors`, each made in a directory.
WAYS: dict[str, Callable[[Path], Any]] = {
    "itself": lambda root: root / "there/real.safetensors",
    "a link": lambda root: _target(root / "a.safetensors", "there/real.safetensors"),
    "an absolute link": lambda root: _target(
        root / "b.safetensors", f"{root}/there/real.safetensors"
    ),
    "a link of a link": lambda root: _target(
        root / "far/c.safetensors",
        _target(root / "far/d.safetensors", "../there/real.safetensors").name,
    ),
    "a linked directory": lambda root: _target(root / "dir", "there") / "real.safetensors",
    "a link in a linked directory": lambda root: _target(root / "dir2", "far2")
    / _target(root / "far2/e.safetensors", "../there/real.safetensors").name,
    "what is above a linked directory": lambda root: os.path.join(
        _target(root / "x/y/dir3", "../../there"), "..", "there", "real.safetensors"
    ),
}  # fmt: skip


def _files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


@pytest.fixture
def real(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return samples.save(tmp_path / "there/real.safetensors", OLD)


@pytest.mark.parametrize("way", WAYS)
class TestOneFile:
    def test_a_save_with_checksums(self, way: str, real: Path, tmp_path: Path) -> None:
        path = WAYS[way](tmp_path)
        saved = mfload.save(NEW, path, checksums=True, overwrite=True)
        assert saved.files == (str(real),)
        at = _only_manifest(tmp_path)
        for each in WAYS.values():
            _remove_links(tmp_path)
            found = mfload.verify(each(tmp_path), mode="check")
            assert found.ok
            assert found.manifest == str(at)
            assert {"checksums", "sha256"} <= {*found.checked}

    def test_a_manifest_that_verify_writes(self, way: str, real: Path, tmp_path: Path) -> None:
        path = WAYS[way](tmp_path)
        assert mfload.verify(path, mode="write").manifest == str(_only_manifest(tmp_path))
        assert mfload.verify(path, mode="check").ok
        assert mfload.verify(real, mode="check").ok
        with pytest.raises(errors.TargetExistsError):
            mfload.verify(path, mode="write")
        assert [*Manifest.read(_only_manifest(tmp_path)).files] == ["real.safetensors"]

    def test_align_in_place(self, way: str, real: Path, tmp_path: Path) -> None:
        path = WAYS[way](tmp_path)
        mfload.verify(real, mode="write")
        before = real.read_bytes()
        aligned = mfload.align(path, overwrite=True)
        assert aligned.files == (str(real),)
        assert real.read_bytes() != before
        assert _files(tmp_path) == {"there/real.safetensors", *_manifests(tmp_path)}
        assert mfload.verify(path, mode="check").ok

    def test_convert(self, way: str, real: Path, tmp_path: Path) -> None:
        path = WAYS[way](tmp_path)
        source = samples.save(tmp_path / "source.safetensors", NEW)
        mfload.verify(source, mode="write")
        converted = mfload.convert(source, path, overwrite=True)
        assert converted.files == (str(real),)
        assert mfload.verify(path, mode="check").ok
        assert mfload.diff(path, source).equal
        # And from there, with its manifest.
        mfload.convert(path, tmp_path / "out.safetensors")
        assert mfload.verify(tmp_path / "out.safetensors", mode="check").ok


def _manifests(root: Path) -> list[str]:
    return sorted(name for name in _files(root) if name.endswith(".checksums.json"))


def _only_manifest(root: Path) -> Path:
    (name,) = _manifests(root)
    assert os.path.dirname(name) == "there"
    return root / name


def _remove_links(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_symlink():
            path.unlink()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    mfload.save(OLD, f"{tmp_path}/there/", max_shard_size=40_000)
    return tmp_path / "there"


class TestSeveralFiles:
    def test_all_of_them_elsewhere(self, shards: Path, tmp_path: Path) -> None:
        for path in shards.iterdir():
            _target(tmp_path / "links" / path.name, str(path))
        written = mfload.verify(tmp_path / "links", mode="write")
        assert written.manifest == str(_only_manifest(tmp_path))
        for each in (
            shards,
            tmp_path / "links",
            tmp_path / "links" / "model.safetensors.index.json",
        ):
            found = mfload.verify(each, mode="check")
            assert (found.ok, found.notes[1:]) == (True, ())

    @pytest.mark.parametrize("moved", ["index", "shards", "one"])
    def test_some_of_them_elsewhere(self, moved: str, shards: Path, tmp_path: Path) -> None:
        """The manifest is of this checkpoint: others may have the same index, or shards."""
        for number, path in enumerate(sorted(shards.iterdir())):
            index = path.name.endswith(".json")
            if {"index": index, "shards": not index, "one": number == 0}[moved]:
                place = tmp_path / str(number) / path.name
                place.parent.mkdir()
                path.rename(place)
                path.symlink_to(place)
        written = mfload.verify(shards, mode="write")
        assert written.manifest == str(_only_manifest(tmp_path))
        (tmp_path / "also").symlink_to("there")
        for each in (shards, tmp_path / "also"):
            assert mfload.verify(each, mode="check").ok
        before = _files(tmp_path)
        with pytest.raises(errors.TargetError, match="through a symbolic link"):
            mfload.align(shards, overwrite=True)
        assert _files(tmp_path) == before
        samples.assert_same(mfload.load(shards, framework="numpy"), OLD)


def _snapshots(root: Path, made: Path) -> list[Path]:
    """Snapshots of the files in a directory, as the cache of the hub has them."""
    snapshots = [root / "models--o--n" / "snapshots" / (digit * 40) for digit in "12"]
    blobs = root / "models--o--n" / "blobs"
    blobs.mkdir(parents=True)
    for path in made.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        for each in snapshots:
            _target(each / path.name, f"../../blobs/{blob.name}")
    refs = root / "models--o--n" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    (refs / "other").write_text("2" * 40)
    return snapshots


@pytest.fixture(params=["one file", "shards"])
def snapshots(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    several = 40_000 if request.param == "shards" else None
    mfload.save(OLD, f"{tmp_path}/made/", align=8, max_shard_size=several)
    (tmp_path / "made" / "config.json").write_text("{}")
    return _snapshots(tmp_path, tmp_path / "made")


def _blobs(snapshot: Path) -> dict[str, bytes]:
    blobs = snapshot.parent.parent / "blobs"
    return {path.name: path.read_bytes() for path in blobs.iterdir()}


class TestACacheOfBlobs:
    def test_a_manifest_lies_in_the_snapshot(self, snapshots: list[Path]) -> None:
        first, second = snapshots
        blobs = _blobs(first)
        written = mfload.verify(first, mode="write")
        assert written.ok
        assert os.path.dirname(str(written.manifest)) == str(first)
        assert [name for name in os.listdir(first) if name.endswith(".checksums.json")] == [
            os.path.basename(str(written.manifest))
        ]
        assert {*Manifest.read(str(written.manifest)).files} == {
            name for name in os.listdir(first) if name.endswith(".safetensors")
        }
        assert mfload.verify(first, mode="check").ok
        with pytest.raises(errors.SourceNotFoundError):
            mfload.verify(second, mode="check")
        assert _blobs(first) == blobs

    @pytest.mark.parametrize("call", ["save", "convert", "align"])
    def test_what_is_written_is_of_one_snapshot(self, call: str, snapshots: list[Path]) -> None:
        first, second = snapshots
        blobs = _blobs(first)
        given: dict[str, Any] = {"overwrite": True}
        if call == "save":
            done: mfload.Saved = mfload.save(NEW, first, checksums=True, **given)
        elif call == "align":
            mfload.verify(first, mode="write")
            done = mfload.align(first, **given)
        else:
            samples.save(first.parent.parent / "source.safetensors", NEW)
            done = mfload.convert(first.parent.parent / "source.safetensors", first, **given)
            mfload.verify(first, mode="write")
        arrays = OLD if call == "align" else NEW
        samples.assert_same(mfload.load(first, framework="numpy"), arrays)
        samples.assert_same(mfload.load(second, framework="numpy"), OLD)
        assert mfload.verify(first, mode="check").ok
        assert mfload.verify(second, sha256="auto").ok
        assert _blobs(first) == blobs
        assert not any(os.path.islink(file) for file in done.files)
        assert any("blobs stay" in n or "removed of the old" in n for n in done.notes)
        assert (first / "config.json").is_symlink()

    def test_a_manifest_from_the_hub(self, tmp_path: Path) -> None:
        """It is a link to a blob itself."""
        mfload.save(OLD, f"{tmp_path}/made/", checksums=True)
        first, second = _snapshots(tmp_path, tmp_path / "made")
        blobs = _blobs(first)
        assert mfload.verify(first, mode="check").ok
        mfload.save(NEW, first, checksums=True, overwrite=True)
        for each in (first, second):
            assert mfload.verify(each, mode="check").ok
        assert _blobs(first) == blobs

    def test_the_hub_s_client_still_knows_its_cache(self, snapshots: list[Path]) -> None:
        hub: Any = pytest.importorskip("huggingface_hub")
        first, second = snapshots
        cache = first.parent.parent.parent
        for each in cache.iterdir():
            if not each.name.startswith("models--"):
                each.rmdir()
        before = hub.scan_cache_dir(cache)
        mfload.save(NEW, first, checksums=True, overwrite=True)
        found = hub.scan_cache_dir(cache)
        assert not before.warnings
        assert not found.warnings
        (repo,) = found.repos
        assert {each.commit_hash for each in repo.revisions} == {first.name, second.name}
        (revision,) = (each for each in repo.revisions if each.commit_hash == first.name)
        assert {each.file_name for each in revision.files} == {*os.listdir(first)}
        found.delete_revisions(first.name).execute()
        assert not first.exists()
        samples.assert_same(mfload.load(second, framework="numpy"), OLD)
        assert mfload.verify(second, sha256="auto").ok


def test_a_loop_and_what_is_no_path_have_their_own_errors(tmp_path: Path) -> None:
    loop = _target(tmp_path / "loop.safetensors", "loop.safetensors")
    for checksums in (False, True):
        with pytest.raises(errors.TargetError, match="Too many levels of symbolic links"):
            mfload.save(NEW, loop, checksums=checksums, overwrite=True)
    for checksums in ("auto", "check"):
        assert not mfload.verify(loop, mode=checksums).ok
        with pytest.raises(errors.SourceError):
            mfload.verify(f"{tmp_path}/a\0b/model.safetensors", mode=checksums)
    with pytest.raises(errors.SourceError):
        mfload.align(loop, overwrite=True)


def test_a_manifest_is_replaced_where_its_link_leads(tmp_path: Path) -> None:
    path, real, link = (tmp_path / name for name in ("m.safetensors", "real.json", "link.json"))
    mfload.save({"a": np.ones(3)}, path)
    mfload.verify(path, mode="write", manifest=real)
    link.symlink_to(real.name)
    mfload.save({"a": np.zeros(3)}, path, overwrite=True)
    assert mfload.verify(path, mode="write", manifest=link, overwrite=True).ok
    assert link.is_symlink()
    assert mfload.verify(path, mode="check", manifest=real).ok
