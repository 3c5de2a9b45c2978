"""A manifest changes together with its data: no moment, failure or other writer parts them."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.checking import sealing, verify as verifying
from mfload.checking.manifest import Manifest
from mfload.saving import manifest_files, publishing
from mfload.saving.drafts import Draft

OLD = {"a": np.zeros(300, np.float32), "b": np.zeros(200, np.float32)}
NEW = {name: array + 1 for name, array in OLD.items()}  # The same headers and sizes.
FORMS = {"one": None, "shards": 800}


def _manifest(directory: Path) -> Path:
    return next(iter(directory.glob("*.checksums.json")), directory / "none")


def _hidden(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".mfload")]


def _write(way: str, path: Path) -> None:
    """Writes a manifest in one of the ways there are; a checkpoint of `OLD` with one is there."""
    source = path.with_name("source.npz")
    match way:
        case "save":
            mfload.save(NEW, path, overwrite=True, checksums=True)
        case "save shards":
            mfload.save(NEW, path, overwrite=True, checksums=True, max_shard_size=800)
        case "verify":
            mfload.verify(path, mode="write", overwrite=True)
        case "align":
            mfload.align(path, overwrite=True, align=64)
        case "convert":
            np.savez(source, allow_pickle=False, **NEW)
            mfload.verify(source, mode="write")
            mfload.convert(source, path, overwrite=True)
        case _:
            raise AssertionError(way)


WAYS = ["save", "save shards", "verify", "align", "convert"]


@pytest.mark.parametrize("way", WAYS)
def test_the_name_of_a_manifest_is_synced(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    events: list[str] = []

    def record(name: str, what: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*given: Any, **more: Any) -> Any:
            events.append(what(*given))
            return real(*given, **more)

        monkeypatch.setattr(os, name, call)

    for name in ("link", "replace", "rename"):
        record(name, lambda _, target, *__: os.path.basename(target))
    record("fsync", lambda fd: "sync" if stat.S_ISDIR(os.fstat(fd).st_mode) else "data")
    _write(way, path)
    at = max(n for n, each in enumerate(events) if each.endswith(".checksums.json"))
    assert events[at + 1] == "sync", events
    assert mfload.verify(tmp_path if "shards" in way else path, mode="check").ok


@contextmanager
def _gone_after(calls: int) -> Generator[list[str]]:
    """The disk is gone after so many changes of names: as after a kill, nothing is cleaned up."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("link", "replace", "rename", "unlink", "fsync"):
            real = getattr(os, name)

            def call(*given: Any, real: Any = real, name: str = name, **more: Any) -> Any:
                if len(done) >= calls:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done.append(name)
                return real(*given, **more)

            patch.setattr(os, name, call)
        yield done


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_no_failure_leaves_a_manifest_beside_other_data(
    before: str, after: str, sums: bool, tmp_path: Path
) -> None:
    calls = 0
    while True:
        directory = tmp_path / str(calls)
        path = directory / "model.safetensors"
        mfload.save(OLD, path, max_shard_size=FORMS[before], checksums=True)
        with _gone_after(calls) as done:
            try:
                mfload.save(NEW, path, max_shard_size=FORMS[after], checksums=sums, overwrite=True)
            except errors.TargetError:
                pass
            else:
                break
        index = directory / "model.safetensors.index.json"
        there = index if index.exists() else path
        assert mfload.verify(there).ok, (calls, done, os.listdir(directory))
        first = float(mfload.load(there, "numpy")["a"][0])
        # The next save finds its way, and leaves nothing of this one.
        mfload.save(NEW, path, overwrite=True, checksums=True)
        assert not _hidden(directory)
        assert mfload.verify(path, mode="check").ok
        assert first in (0.0, 1.0)
        calls += 1
    assert calls > 3
    assert _manifest(directory).exists() == sums


def test_a_manifest_that_can_t_be_placed_says_that_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    real = Draft.publish

    def publish(draft: Draft, to: str, *, replace: bool) -> None:
        if to.endswith(".checksums.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(draft, to, replace=replace)

    monkeypatch.setattr(Draft, "publish", publish)
    with pytest.raises(errors.TargetError, match="checkpoint itself is whole") as info:
        mfload.save(NEW, path, overwrite=True, checksums=True)
    assert info.value.file == os.fspath(tmp_path / "model.safetensors.checksums.json")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    samples.assert_same(mfload.load(path, "numpy"), NEW)


@pytest.mark.parametrize("way", ["save", "save shards", "convert"])
def test_a_full_disk_changes_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    before = _manifest(tmp_path).read_bytes()
    real = manifest_files.drafted

    def full(place: Any, name: str, text: bytes | None, *given: Any) -> Any:
        if text is not None and name.startswith("model"):
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise errors.from_target(error, place.at(name), "make room for the file")
        return real(place, name, text, *given)

    monkeypatch.setattr(manifest_files, "drafted", full)
    with pytest.raises(errors.TargetError, match="No space left"):
        _write(way, path)
    assert (tmp_path / "model.safetensors.checksums.json").read_bytes() == before
    assert mfload.verify(path, mode="check").ok
    samples.assert_same(mfload.load(path, "numpy"), OLD)
    assert not _hidden(tmp_path)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    path, at = tmp_path / f"{'m' * 243}.safetensors", tmp_path / f"{'s' * 255}.json"
    for given in (path.with_name(f"m{path.name}"), path):  # One that fits, but not its shards.
        limit = 800 if given is path else None
        for overwrite in (False, True):
            with pytest.raises(errors.TargetError, match="name too long"):
                mfload.save(NEW, given, checksums=True, overwrite=overwrite, max_shard_size=limit)
            assert os.listdir(tmp_path) == []
    mfload.save(NEW, path, checksums=True)
    assert mfload.verify(path, mode="check").ok
    with pytest.raises(errors.TargetError, match="name too long"):
        mfload.verify(path, mode="write", manifest=at)
    assert not _hidden(tmp_path)


def test_a_manifest_without_its_checkpoint_is_not_kept_for_another(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    path.unlink()
    for sums in (False, True):
        with pytest.raises(errors.TargetExistsError, match="overwrite=True"):
            mfload.save(NEW, path, checksums=sums)
    assert os.listdir(tmp_path) == ["model.safetensors.checksums.json"]
    mfload.save(NEW, path, overwrite=True)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_that_is_no_manifest_stays(tmp_path: Path) -> None:
    at = tmp_path / "model.safetensors.checksums.json"
    at.write_text("{}")
    for array in (OLD, NEW):
        saved = mfload.save(array, tmp_path / "model.safetensors", overwrite=True)
        assert not any(at.name in note for note in saved.notes)
    assert at.read_text() == "{}"


@pytest.mark.parametrize("left", [b"", bytes(9000)])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_manifest_whose_bytes_were_lost_is_replaced(
    checksums: bool, left: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    _manifest(tmp_path).write_bytes(left)
    assert not mfload.verify(path).ok
    mfload.save(NEW, path, overwrite=True, checksums=checksums)
    assert mfload.verify(path).ok
    assert _manifest(tmp_path).exists() == checksums


def test_a_link_to_a_manifest_is_followed(tmp_path: Path) -> None:
    path, kept, link = (tmp_path / name for name in ("model.safetensors", "kept.json", "link.json"))
    mfload.save(OLD, path)
    link.symlink_to(kept)
    for data in (OLD, NEW):
        mfload.save(data, path, overwrite=True)
        assert mfload.verify(path, mode="write", manifest=link, overwrite=True).ok
        assert link.is_symlink()
        assert mfload.verify(path, manifest=kept).ok


def test_other_data_is_not_damage(tmp_path: Path) -> None:
    path, at = tmp_path / "model.safetensors", tmp_path / "model.safetensors.checksums.json"
    for algorithm in ("xxh3", "sha256", "both"):
        mfload.save(OLD, path, checksums=algorithm, overwrite=True)
        text = at.read_text()
        mfload.save({**NEW, "c": np.ones(3)}, path, overwrite=True)
        at.write_text(text)
        (only,) = mfload.verify(path).problems
        assert only.what == "the manifest is of other data"
        assert only.file == os.fspath(path)
        assert str(only.found).startswith(f"{path.stat().st_size} bytes with the header")
        if algorithm != "sha256":
            with pytest.raises(errors.ChecksumError, match="is of other data") as info:
                mfload.load(path, "numpy", verify=at)
            assert info.value.problems == ()
        with pytest.raises(errors.ChecksumError, match="is of other data"):
            mfload.convert(path, tmp_path / "out.safetensors")
        # What the manifest is of is still told from it by the byte.
        mfload.save(NEW, path, overwrite=True)
        at.write_text(text)
        assert "other data" not in str(mfload.verify(path).problems)
        assert not mfload.verify(path).ok


def test_shards_are_other_data_one_by_one(tmp_path: Path) -> None:
    mfload.save(OLD, tmp_path, max_shard_size=800, checksums=True)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    (name,) = mfload.load(first, "numpy")
    samples.save(first, {name: NEW[name]})  # Laid out in another way.
    raw = bytearray(second.read_bytes())
    raw[-1] ^= 1
    second.write_bytes(raw)
    told = [(each.what, each.file) for each in mfload.verify(tmp_path).problems]
    assert told[0] == ("the manifest is of other data", os.fspath(first))
    assert told[1:] == [
        ("the tensor's bytes have changed", os.fspath(second)),
        ("the file's SHA-256 differs", os.fspath(second)),
    ]


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_formats_without_a_header_have_an_identity(suffix: str, tmp_path: Path) -> None:
    path, at = tmp_path / f"model.{suffix}", tmp_path / "sums.json"

    def write(*arrays: Any) -> None:
        if suffix == "npz":
            np.savez(path, *arrays, allow_pickle=False)
        else:
            np.save(path, np.concatenate(arrays))

    write(OLD["a"])
    mfload.verify(path, mode="write", manifest=at)
    assert mfload.verify(path, manifest=at).ok
    assert Manifest.read(at).identity.keys() == {path.name}
    write(NEW["a"], NEW["b"])
    told = [each.what for each in mfload.verify(path, manifest=at).problems]
    assert told == ["the manifest is of other data"]
    with pytest.raises(errors.ChecksumError, match="of other data"):
        mfload.load(path, "numpy", verify=at)
    write(NEW["a"])
    assert "the tensor's bytes have changed" in str(mfload.verify(path, manifest=at).problems)


def test_threads_that_write_one_manifest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(15):
                assert mfload.verify(path, mode="write", overwrite=True).ok
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert {*os.listdir(tmp_path)} == {path.name, f"{path.name}.checksums.json"}


@pytest.mark.parametrize("then", ["verify", "save"])
def test_what_a_killed_writer_of_a_manifest_left_goes(then: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path)
    real = os.link

    def link(source: Any, target: Any, **more: Any) -> None:
        real(source, target, **more)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        mfload.verify(path, mode="write")
        patch.setattr(os, "link", link)
        patch.setattr(os, "unlink", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            mfload.verify(path, mode="write", overwrite=True)
    assert _hidden(tmp_path)
    if then == "verify":
        mfload.verify(path, mode="write", overwrite=True)
    else:
        mfload.save(NEW, path, overwrite=True)
    assert not _hidden(tmp_path)


def test_an_interrupt_right_after_the_switch_brings_no_old_manifest_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True, max_shard_size=800)
    index, real = f"{path}.index.json", Draft.publish

    def publish(draft: Draft, name: str, **options: Any) -> None:
        real(draft, name, **options)
        if name == index:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            mfload.save(NEW, path, checksums=True, max_shard_size=800, overwrite=True)
    samples.assert_same(mfload.load(index, "numpy"), NEW)
    assert mfload.verify(index).ok


def test_a_failed_convert_keeps_the_manifest_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = tmp_path / "source.npz", tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    np.savez(source, allow_pickle=False, **NEW)
    for sums in (False, True):
        if sums:
            mfload.verify(source, mode="write")
        with monkeypatch.context() as patch:
            real = Draft.publish

            def publish(draft: Draft, to: str, *, replace: bool, real: Any = real) -> None:
                if to == os.fspath(path):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                real(draft, to, replace=replace)

            patch.setattr(Draft, "publish", publish)
            with pytest.raises(errors.TargetError):
                mfload.convert(source, path, overwrite=True)
        assert mfload.verify(path, mode="check").ok
        samples.assert_same(mfload.load(path, "numpy"), OLD)
        assert not _hidden(tmp_path)


@pytest.mark.parametrize("call", ["convert", "align", "bundle"])
def test_a_source_without_a_manifest_leaves_no_old_one(call: str, tmp_path: Path) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    mfload.save(NEW, source)
    if call == "bundle":
        mfload.save({"up0": np.ones((4, 3)), "down0": np.ones((3, 4))}, source, overwrite=True)
        rules: Any = {"up": r"up(\d)", "down": r"down(\d)"}
        done = mfload.ondemand.bundle(source, path, **rules, overwrite=True)
    else:
        done = getattr(mfload, call)(source, path, overwrite=True)
    at = tmp_path / "model.safetensors.checksums.json"
    assert f"removed of the old checkpoint: {at}" in done.notes
    assert not at.exists()
    assert mfload.verify(path).ok


def test_beside_another_writer_nothing_is_damaged(tmp_path: Path) -> None:
    """The sums are of the drafts, whatever has the name meanwhile."""
    path, said = tmp_path / "model.safetensors", list[str]()

    def write(arrays: dict[str, Any]) -> None:
        for _ in range(25):
            try:
                mfload.save(arrays, path, overwrite=True, checksums=True)
            except errors.MfloadError as error:
                said.append(str(error))

    threads = [threading.Thread(target=write, args=(each,)) for each in (OLD, NEW)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            said += [str(each) for each in mfload.verify(path).problems]
        except (errors.SourceNotFoundError, errors.SourceChangedError):
            continue
    said = [each for each in said if "another process is writing" not in each]
    changed = "since its header was read"
    assert not [each for each in said if changed not in each], said
    assert mfload.verify(path, mode="check").ok


def test_what_the_disk_gives_back_is_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    real = Draft.write

    def flip(draft: Draft, offset: int, pieces: Any, *tensor: Any) -> int:
        copy = np.concatenate(pieces)
        copy[-1] ^= 1
        return real(draft, offset, [copy], *tensor)

    monkeypatch.setattr(Draft, "write", flip)
    for algorithm in ("xxh3", "sha256"):
        with pytest.raises(errors.WriteError, match="gave back other bytes") as info:
            mfload.save(NEW, path, checksums=algorithm, overwrite=True)  # type: ignore[arg-type]
        assert info.value.file == os.fspath(path)
    monkeypatch.undo()
    assert mfload.verify(path, mode="check").ok
    samples.assert_same(mfload.load(path, "numpy"), OLD)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (errors.ReadError, errors.WriteError),
        (errors.LoadTimeoutError, errors.LoadTimeoutError),
        (errors.MemoryLimitError, errors.MemoryLimitError),
    ],
)
def test_what_fails_while_it_is_read_back_names_the_target(
    kind: type[errors.MfloadError],
    seen: type[errors.MfloadError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scan(files: Any, *_: Any) -> None:
        raise kind("no", file=files[0].name)

    monkeypatch.setattr(sealing, "scan", scan)
    path = tmp_path / "model.safetensors"
    with pytest.raises(seen) as caught:
        mfload.save(OLD, path, checksums=True)
    assert caught.value.file == os.fspath(path)
    assert os.listdir(tmp_path) == []


def test_an_old_manifest_that_goes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "model.safetensors", os.rename
    mfload.save(OLD, path, checksums=True)

    def rename(old: str, new: str) -> None:
        if old.endswith(".checksums.json"):
            os.unlink(old)
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    mfload.save(NEW, path, overwrite=True, checksums=True)
    assert mfload.verify(path, mode="check").ok


def test_sums_of_data_that_was_replaced_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path)
    real = publishing.write_manifest

    def late(*given: Any, **more: Any) -> None:
        mfload.save(NEW, path, overwrite=True, checksums=True)
        real(*given, **more)

    monkeypatch.setattr(publishing, "write_manifest", late)
    with pytest.raises(errors.SourceChangedError):
        mfload.verify(path, mode="write", overwrite=True)
    monkeypatch.undo()
    assert mfload.verify(path, mode="check").ok
    assert not _hidden(tmp_path)


def test_a_manifest_that_another_writer_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    real = manifest_files.is_manifest

    def late(name: str) -> bool:
        Path(name).unlink(missing_ok=True)
        return real(name)

    monkeypatch.setattr(manifest_files, "is_manifest", late)
    assert mfload.verify(path, mode="write", overwrite=True).ok
    assert mfload.verify(path, mode="check").ok


def test_a_replaced_checkpoint_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is read after the headers: it may be of what has their place by then."""
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    real = vars(verifying)["_read_manifest"]

    def late(*given: Any, **more: Any) -> Any:
        mfload.save({**NEW, "c": np.ones(3)}, path, overwrite=True, checksums=True)
        return real(*given, **more)

    monkeypatch.setattr(verifying, "_read_manifest", late)
    (only,) = mfload.verify(path).problems
    assert only.what == "the file changed since its header was read"


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("way", WAYS)
def test_permissions_of_a_manifest_stay(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path, checksums=True)
    at = _manifest(tmp_path)
    at.chmod(0o600)
    _write(way, path)
    assert stat.S_IMODE(at.stat().st_mode) == 0o600


@pytest.mark.parametrize("way", ["save", "verify"])
def test_beside_private_data_a_manifest_is_private(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mfload.save(OLD, path)
    path.chmod(0o600)
    if way == "save":
        mfload.save(NEW, path, checksums=True, overwrite=True)
    else:
        mfload.verify(path, mode="write")
    assert stat.S_IMODE(_manifest(tmp_path).stat().st_mode) == 0o600


def test_a_manifest_that_can_t_be_read_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, away = tmp_path / "model.safetensors", tmp_path / "away"
    mfload.save(OLD, path, checksums=True)
    at = _manifest(tmp_path)
    real = open

    def refused(name: Any, *given: Any, **more: Any) -> Any:
        if name == os.fspath(at):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(name, *given, **more)

    before = at.read_bytes()
    monkeypatch.setattr("builtins.open", refused)
    for sums in (False, True):
        with pytest.raises(errors.TargetError, match="Permission denied"):
            mfload.save(NEW, path, overwrite=True, checksums=sums)
    with pytest.raises(errors.TargetError, match="Permission denied"):
        mfload.verify(path, mode="write", overwrite=True)
    monkeypatch.undo()
    assert at.read_bytes() == before
    # A link that leads nowhere, or to where nothing may be looked at, is no missing manifest.
    at.unlink()
    at.symlink_to(away / "none.json")
    assert not mfload.verify(path).ok
    with pytest.raises(errors.SourceError):
        mfload.convert(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_sums_of_files_take_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise errors.missing("checksums of tensors need the package xxhash", "verify")

    monkeypatch.setattr(sealing, "tensor_hash", missing)
    mfload.save(OLD, tmp_path / "model.safetensors", checksums="sha256")
    with pytest.raises(errors.FrameworkMissingError):
        mfload.save(OLD, tmp_path / "other.safetensors", checksums=True)
    assert json.loads(_manifest(tmp_path).read_text())["identity"]
    assert not (tmp_path / "other.safetensors").exists()
