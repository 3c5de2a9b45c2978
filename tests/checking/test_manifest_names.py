"""Each checkpoint has a manifest of its own, by its whole name; old names are still read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from hypothesis import given, settings, strategies as st

import mfload
from mfload import errors
from mfload.checking.manifest import Manifest
from mfload.formats.discovery import INDEX_SUFFIX
from mfload.formats.strict_json import encodable
from mfload.saving import manifests, targets

# What the names of checkpoints are made of: numbers, endings of formats, parts of other rules.
_PARTS = st.sampled_from(
    ["a", "ckpt", "model", "-", "_", ".", "+", "0", "1", "100", "v2", "-00001-of-00002", "é",
     "\udcff", ".npz", ".npy", ".msgpack", ".safetensors", ".checksums", "checkpoint", "x" * 120]
)  # fmt: skip
_STEMS = st.lists(_PARTS, min_size=1, max_size=4).map("".join)
_FILES = _STEMS.map(lambda stem: f"{stem}.safetensors").filter(
    lambda name: len(os.fsencode(name)) <= 220 and name[0] != "."
)


@given(_FILES, _FILES)
def test_two_checkpoints_have_two_manifests(one: str, other: str) -> None:
    made = [manifests.named(name) for name in (one, other)]
    assert (made[0] == made[1]) == (one == other)
    for name, at in zip((one, other), made, strict=True):
        assert len(os.fsencode(at)) <= manifests.LONGEST
        stem = name.removesuffix(".safetensors")
        shards = [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
        assert targets.Location("/", name).manifest == at
        assert manifests.names_of([name])[0] == at
        assert manifests.names_of(shards)[0] == at
        assert manifests.names_of(shards, stem + INDEX_SUFFIX)[0] == at
        assert at in manifests.names_of(shards[:1])


@settings(max_examples=25)
@given(
    names=st.sets(_FILES, min_size=2, max_size=5),
    limit=st.sampled_from([None, 100]),
    algorithm=st.sampled_from(["both", "xxh3", "sha256"]),
)
def test_each_of_many_is_found_again(
    names: set[str], limit: int | None, algorithm: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("many")
    if limit is not None:
        names = {name for name in names if encodable(name)}  # Others have no shards.
    # A file that has the name of a shard of another is in that one's way.
    names = {n for n in names if manifests.saved_as(n) == n or manifests.saved_as(n) not in names}
    for number, name in enumerate(sorted(names)):
        arrays = {"w": np.full(20, number), "v": np.full(20, -number)}
        mfload.save(arrays, directory / name, checksums=algorithm, max_shard_size=limit)
    for name in names:
        path = directory / name
        if limit is not None:
            path = directory / (name.removesuffix(".safetensors") + INDEX_SUFFIX)
        found = mfload.verify(path, mode="check")
        assert found.ok, found
        assert os.path.basename(found.manifest or "") == manifests.named(name)
        part = mfload.verify(path, mode="check", manifest=found.manifest, checksums=algorithm)
        assert part.ok, part


_OLD = {
    "model.safetensors": "model", "ckpt-100.safetensors": "ckpt", "step_100.safetensors": "step",
    "epoch3.safetensors": "epoch3", "layer.1.safetensors": "layer", "m.v2.safetensors": "m.v",
    "a.npz": "a", "a1.npz": "a1.npz", "a.npy": "a.npy", "1.safetensors": "checkpoint",
    "2.safetensors": "2", "model-00001-of-00001.safetensors": "model",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
@pytest.mark.parametrize("name", _OLD)
def test_old_names_are_read(name: str, algorithm: Any, tmp_path: Path) -> None:
    path, old = _written(tmp_path, name), tmp_path / f"{_OLD[name]}.checksums.json"
    _write_old(path, old, algorithm)
    found = mfload.verify(path, mode="check")
    assert (found.ok, found.manifest) == (True, os.fspath(old))
    assert mfload.verify(tmp_path).manifest == os.fspath(old)
    with _damaged(path):
        assert not mfload.verify(path).ok
    # One manifest for one data: a new one takes the place of the old one.
    if old.name != manifests.named(name):
        with pytest.raises(errors.TargetExistsError) as info:
            mfload.verify(path, mode="write")
        assert info.value.file == os.fspath(old)
    written = mfload.verify(path, mode="write", overwrite=True)
    assert written.manifest == os.fspath(tmp_path / manifests.named(name))
    assert os.listdir(tmp_path).count(old.name) == (old.name == manifests.named(name))
    assert mfload.verify(path, mode="check").ok


@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
def test_the_old_manifest_of_another_is_passed_over(algorithm: Any, tmp_path: Path) -> None:
    first, second = (_written(tmp_path, f"ckpt-{n}00.safetensors", n) for n in (1, 2))
    old = tmp_path / "ckpt.checksums.json"
    _write_old(first, old, algorithm)
    found = mfload.verify(second)
    assert found.ok
    assert found.manifest is None
    assert "is for other files and was not used" in "\n".join(found.notes)
    with pytest.raises(errors.SourceNotFoundError, match="is for other files"):
        mfload.verify(second, mode="check")
    done = mfload.convert(second, tmp_path / "new" / "x.safetensors")
    assert "is for other files" in "\n".join(done.notes)
    assert os.listdir(tmp_path / "new") == ["x.safetensors"]
    # Without names of files it may be of either.
    assert (mfload.verify(first).manifest is None) == (algorithm == "xxh3")
    # Nor does it stand in the way, nor go.
    mfload.save(_arrays(3), second, overwrite=True, checksums=True)
    assert mfload.verify(second, mode="check").ok
    assert old.exists()


def test_other_tensors_are_of_another(tmp_path: Path) -> None:
    path, old = _written(tmp_path, "ckpt-100.safetensors"), tmp_path / "ckpt.checksums.json"
    mfload.save({"other": np.ones(2)}, tmp_path / "x.safetensors")
    _write_old(tmp_path / "x.safetensors", old, "xxh3")
    found = mfload.verify(path)
    assert found.ok
    assert "its tensors are others" in "\n".join(found.notes)


@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
def test_a_shard_and_the_manifest_of_its_set(algorithm: Any, tmp_path: Path) -> None:
    saved = mfload.save(
        {"a": np.ones(50), "b": np.zeros(50)},
        tmp_path,
        max_shard_size=400,
        checksums=algorithm,
    )
    *shards, index = map(Path, saved.files)
    at = tmp_path / "model.safetensors.checksums.json"
    for source in (shards[0], [shards[0]], os.fspath(shards[1])):
        for options in ({"manifest": at}, {}):
            found = mfload.verify(source, mode="check", **options)  # type: ignore[arg-type]
            assert found.ok, found
            assert found.manifest == os.fspath(at)
            assert found.data_checked
            assert "has other files, too" in "\n".join(found.notes)
    if algorithm != "sha256":
        assert mfload.load(shards[0], "numpy", verify=at).keys() == {"a"}
    out = tmp_path / "out" / "one.safetensors"
    mfload.convert(shards[0], out)
    assert mfload.verify(out, mode="check").ok
    # Its own manifest is another than that of the set.
    made = mfload.verify(shards[0], mode="write", overwrite=True).manifest
    assert made == f"{shards[0]}.checksums.json"
    # Damage is found, and so is a shard that is gone.
    with _damaged(shards[1]):
        assert not mfload.verify(shards[1]).ok
    assert mfload.verify(tmp_path).ok
    index.unlink()
    assert mfload.verify(tmp_path, mode="check").ok
    shards[1].unlink()
    found = mfload.verify(tmp_path)
    assert found.manifest == made
    Path(f"{shards[0]}.checksums.json").unlink()
    found = mfload.verify(tmp_path)
    assert found.manifest == os.fspath(at)
    told = "\n".join(map(str, found.problems))
    assert "missing" in told
    assert "'b'" in told


@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
def test_a_shard_beside_the_single_file_that_replaced_its_set(
    algorithm: Any, tmp_path: Path
) -> None:
    shard = _written(tmp_path, "model-00001-of-00002.safetensors", 1)
    path = tmp_path / "model.safetensors"
    mfload.save(_arrays(2), path, checksums=algorithm, overwrite=True)
    found = mfload.verify(shard)
    assert found.ok
    assert found.manifest is None
    assert "is for other files" in "\n".join(found.notes)
    mfload.verify(shard, mode="write")
    assert mfload.verify(shard, mode="check").ok
    assert mfload.verify(path, mode="check").ok


def test_a_lost_file_of_a_directory_is_told(tmp_path: Path) -> None:
    for number in range(3):
        mfload.save({f"t{number}": np.ones(3)}, tmp_path / f"consolidated.0{number}.safetensors")
    at = mfload.verify(tmp_path, mode="write").manifest
    assert at == os.fspath(tmp_path / "checkpoint.checksums.json")
    (tmp_path / "consolidated.00.safetensors").unlink()
    assert not mfload.verify(tmp_path).ok
    (tmp_path / "consolidated.01.safetensors").unlink()
    found = mfload.verify(tmp_path)
    assert found.manifest == at
    assert (
        sum(problem.what == "a tensor of the manifest is missing" for problem in found.problems)
        == 2
    )


def test_lists_in_one_directory_have_a_manifest_each(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.npz" for n in range(4)]
    for number, path in enumerate(paths):
        arrays: Any = {f"t{number}": np.full(3, number)}
        np.savez(path, **arrays)
    lists = [paths[:2], paths[2:], paths[1:3]]
    written = [mfload.verify(each, mode="write").manifest for each in lists]
    assert len({*written}) == 3
    assert [mfload.verify(each, mode="check").manifest for each in lists] == written


def test_a_conversion_leaves_the_manifest_of_its_source(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(5))
    for old in ("a.npz.checksums.json", "a.checksums.json"):
        at = tmp_path / old
        mfload.verify(tmp_path / "a.npz", mode="write", manifest=at)
        raw = at.read_bytes()
        mfload.convert(tmp_path / "a.npz", tmp_path / "a.safetensors", overwrite=True)
        assert at.read_bytes() == raw
        assert mfload.verify(tmp_path / "a.npz", mode="check").manifest == os.fspath(at)
        found = mfload.verify(tmp_path / "a.safetensors", mode="check")
        assert found.manifest == os.fspath(tmp_path / "a.safetensors.checksums.json")
        at.unlink()


@pytest.mark.parametrize("algorithm", ["both", "xxh3"])
def test_an_old_manifest_goes_when_its_data_is_aligned(algorithm: Any, tmp_path: Path) -> None:
    path, old = _written(tmp_path, "m.safetensors"), tmp_path / "m.checksums.json"
    _write_old(path, old, algorithm)
    mfload.align(path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "m.safetensors.checksums.json"]
    assert mfload.verify(path, mode="check").ok


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
def test_an_old_manifest_goes_when_its_data_is_replaced(
    algorithm: Any, limit: int | None, checksums: bool, tmp_path: Path
) -> None:
    arrays = {"w": np.full(20, 1), "v": np.full(20, 2)}
    saved = mfload.save(arrays, tmp_path, max_shard_size=limit)
    path, old = saved.files[-1], tmp_path / "model.checksums.json"
    _write_old(path, old, algorithm)
    assert mfload.verify(tmp_path, mode="check").manifest == os.fspath(old)
    arrays["w"] += 1
    saved = mfload.save(arrays, tmp_path, max_shard_size=limit, overwrite=True, checksums=checksums)
    assert not old.exists()
    assert str(old) in "\n".join(saved.notes)
    found = mfload.verify(tmp_path)
    assert found.ok
    assert (found.manifest is None) == (not checksums)


def test_which_manifests_go_with_a_checkpoint(tmp_path: Path) -> None:
    """Those of its own names, old and new, and of its files; those of others stay."""
    for name in ("m.safetensors", "m-1.safetensors", "m.npz"):
        (tmp_path / name).touch()
    shards = [f"m-0000{n}-of-00002.safetensors" for n in (1, 2)]
    entry = '{"size": 1, "sha256": "' + "0" * 64 + '"}'

    def write(name: str, *files: str) -> None:
        listed = ", ".join(f'"{file}": {entry}' for file in files)
        text = f'{{"mfload_checksums": 1, "tensors": {{}}, "files": {{{listed}}}}}'
        (tmp_path / name).write_text(text)

    new = ["m.safetensors.checksums.json", f"{shards[0]}.checksums.json"]
    for name in new:
        write(name)
    write("m.npz.checksums.json")
    write("m-1.safetensors.checksums.json")

    def lying(*files: str) -> list[str]:
        place = targets.resolve(tmp_path / "m.safetensors")
        return manifests.lying(place.directory, {place.name, *files}, place.index)

    for files, gone in (
        (["m.safetensors"], True), (shards, True), (["m.npz"], False), (["m-1.safetensors"], False),
        (["m.safetensors", "m.npz"], True), ([], False),
    ):  # fmt: skip
        write("m.checksums.json", *files)
        wanted = sorted([*new, *(["m.checksums.json"] if gone else [])])
        assert lying(*shards) == wanted
    (tmp_path / "m-1.safetensors").unlink()
    (tmp_path / "m.npz").unlink()
    assert "m.checksums.json" in lying()  # It can be of nothing else.
    (tmp_path / "m.checksums.json").write_text("{")
    assert "m.checksums.json" not in lying()


_FIRST = "model-00001-of-00002.safetensors"


def _save_shard(path: Path) -> Any:
    return mfload.save({"a": np.full(5, 9)}, path / _FIRST, overwrite=True)


def _align_shard(path: Path) -> Any:
    return mfload.align(path / _FIRST, align=8192, overwrite=True)


@pytest.mark.parametrize("write", [_save_shard, _align_shard])
def test_the_manifest_of_a_set_goes_when_one_shard_is_replaced(write: Any, tmp_path: Path) -> None:
    arrays = {name: np.full(5, n) for n, name in enumerate("ab")}
    saved = mfload.save(arrays, tmp_path, max_shard_size=40, checksums=True)
    told = write(tmp_path).notes
    assert any(manifests.SUFFIX in note and "removed" in note for note in told), told
    found = mfload.verify(saved.files[-1])
    assert found.ok, found
    assert found.manifest is None


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_the_manifest_of_several_files_goes_with_one(
    number: int, listed: bool, tmp_path: Path
) -> None:
    files = [tmp_path / f"part{n}.safetensors" for n in (1, 2)]
    for n, file in enumerate(files, 1):
        mfload.save({f"w{n}": np.zeros(5)}, file)
    whole = files if listed else tmp_path
    assert mfload.verify(whole, mode="write").ok
    mfload.save({"x": np.zeros(5)}, tmp_path / "x/part3.safetensors")
    assert mfload.verify(whole, mode="check").ok
    mfload.save({f"w{number}": np.ones(5)}, files[number - 1], overwrite=True)
    found = mfload.verify(whole)
    assert found.ok, found
    assert found.manifest is None


def test_an_old_manifest_that_names_no_files_is_in_no_way(tmp_path: Path) -> None:
    """It may be of the whole directory."""
    old = tmp_path / "checkpoint.checksums.json"
    old.write_text('{"mfload_checksums": 1, "algorithm": "xxh3_128", "tensors": {}}')
    mfload.save(_arrays(), tmp_path / "a.safetensors")
    mfload.save(_arrays(), tmp_path / "a.safetensors", overwrite=True)
    assert old.exists()


@pytest.mark.parametrize("before", ["nothing", "a file"])
def test_no_manifest_of_an_earlier_shard_lies_by_a_new_one(before: str, tmp_path: Path) -> None:
    arrays = {name: np.full(5, n) for n, name in enumerate("ab")}
    mfload.save(arrays, tmp_path, max_shard_size=40)
    assert mfload.verify(tmp_path / _FIRST, mode="write").ok
    for path in tmp_path.glob("*.safetensors*"):
        if not path.name.endswith(manifests.SUFFIX):
            path.unlink()
    arrays["a"] += 1
    if before == "a file":
        mfload.save(arrays, tmp_path)
    with pytest.raises(errors.TargetExistsError):
        mfload.save(arrays, tmp_path, max_shard_size=40)
    mfload.save(arrays, tmp_path, max_shard_size=40, overwrite=True)
    assert mfload.verify(tmp_path / _FIRST).ok


def test_a_name_without_an_end_may_be_an_old_manifest_s(tmp_path: Path) -> None:
    first, second = _written(tmp_path, "ckpt-1.safetensors"), _written(tmp_path, "ckpt", 2)
    old = tmp_path / "ckpt.checksums.json"
    _write_old(first, old)
    assert mfload.verify(second).manifest is None
    assert mfload.verify(first).manifest == os.fspath(old)
    for write in (
        lambda: mfload.verify(second, mode="write", overwrite=True),
        lambda: mfload.save(_arrays(2), second, checksums=True, overwrite=True),
    ):
        with pytest.raises(errors.TargetExistsError, match="of another checkpoint"):
            write()
    assert "ckpt.checksums.json" not in targets.look(targets.resolve(second)).manifests
    mfload.verify(first, mode="write", overwrite=True)
    assert mfload.verify(second, mode="write").ok


@pytest.mark.parametrize("algorithm", ["both", "xxh3", "sha256"])
@pytest.mark.parametrize("stem", [os.fsdecode(b"x\xff"), "é" * 118, "x" * 243, "a\nb", "..x", " "])
def test_odd_names(stem: str, algorithm: Any, tmp_path: Path) -> None:
    path = os.path.join(tmp_path, stem + ".safetensors")
    mfload.save(_arrays(), path, checksums=algorithm)
    found = mfload.verify(path, mode="check")
    assert found.ok, found
    assert found.data_checked
    mfload.align(path, overwrite=True)
    assert mfload.verify(path, mode="check").ok
    assert len(os.listdir(tmp_path)) == 2
    assert Manifest.read(found.manifest or "").files.keys() <= {
        manifests.as_text(os.path.basename(path))
    }


def _arrays(number: int = 1) -> Any:
    return {"w": np.full(5, number)}


def _written(directory: Path, name: str, number: int = 1) -> Path:
    path = directory / name
    if name.endswith(".npz"):
        np.savez(path, **_arrays(number))
    elif name.endswith(".npy"):
        np.save(path, np.ones(5))
    else:
        samples.save(path, _arrays(number))
    return path


def _write_old(path: str | Path, old: Path, algorithm: Any = "both") -> None:
    """Writes a manifest as earlier versions did."""
    mfload.verify(path, mode="write", manifest=old, checksums=algorithm)
    table = json.loads(old.read_text())
    kept = ("algorithm", "tensors", "files")
    made = {"mfload_checksums": 1} | {key: table[key] for key in kept if key in table}
    old.write_text(json.dumps(made))


@contextlib.contextmanager
def _damaged(path: Path) -> Generator[None]:
    raw = path.read_bytes()
    at = raw.index(np.int64(1).tobytes()) if path.suffix == ".npz" else len(raw) - 1
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
    yield
    path.write_bytes(raw)
