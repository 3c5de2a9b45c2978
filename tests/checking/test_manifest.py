"""The manifest: what is written is what is read, and nothing else is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.checking import manifest
from mfload.checking.manifest import FileEntry, FileIdentity, Manifest, TensorEntry

_hex = st.sampled_from("0123456789abcdef")
_names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_tensors = st.builds(
    TensorEntry,
    st.sampled_from(["F32", "F4", "NEW"]),
    st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple),
    st.text(_hex, min_size=32, max_size=32),
)
_unhashed = st.builds(lambda entry: entry._replace(digest=None), _tensors)
_files = st.builds(FileEntry, st.integers(0, 2**63 - 1), st.text(_hex, min_size=64, max_size=64))
_identities = st.builds(
    FileIdentity, st.integers(0, 2**63 - 1), st.text(_hex, min_size=64, max_size=64)
)
_manifests = st.builds(
    Manifest,
    st.dictionaries(_names, _tensors) | st.dictionaries(_names, _unhashed),
    st.dictionaries(_names, _files),
    identity=st.dictionaries(_names, _identities),
)

OLD = {
    "mfload_checksums": 1,
    "algorithm": "xxh3_128",
    "tensors": {"w": {"dtype": "F32", "shape": [2], "digest": "a" * 32}},
    "files": {"f": {"size": 5, "sha256": "b" * 64}},
}
GOOD = {**OLD, "mfload_checksums": 2, "identity": {"f": {"size": 5, "header": "c" * 64}}}


@given(made=_manifests)
def test_what_is_written_is_read(made: Manifest, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("manifest") / "m.json"
    made.write(path)
    found = Manifest.read(path)
    assert found == made
    assert found.path == os.fspath(path)
    # The order in which tensors came does not matter to the text.
    turned = Manifest(
        dict(reversed(made.tensors.items())),
        dict(reversed(made.files.items())),
        identity=dict(reversed(made.identity.items())),
    )
    assert turned.text() == path.read_text()


def test_the_text_is_the_one_that_is_documented(tmp_path: Path) -> None:
    made = Manifest(
        {"w": TensorEntry("F32", (2,), "a" * 32)},
        {"f": FileEntry(5, "b" * 64)},
        identity={"f": FileIdentity(5, "c" * 64)},
    )
    assert json.loads(made.text()) == GOOD
    assert made.text().splitlines()[4].startswith('  "w": {"dtype": "F32"')
    assert json.loads(Manifest({}).text())["tensors"] == {}
    bare = Manifest({"w": TensorEntry("F32", (2,), None)}, made.files, identity=made.identity)
    assert (made.hashed, bare.hashed) == (True, False)
    wanted = {k: v for k, v in GOOD.items() if k != "algorithm"}
    assert json.loads(bare.text()) == {**wanted, "tensors": {"w": {"dtype": "F32", "shape": [2]}}}
    (tmp_path / "m").write_text(json.dumps({k: v for k, v in GOOD.items() if k != "files"}))
    assert Manifest.read(tmp_path / "m").files == {}
    (tmp_path / "old").write_text(json.dumps(OLD))
    assert Manifest.read(tmp_path / "old") == Manifest(made.tensors, made.files)


def test_writing_replaces_nothing_unless_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("mine")
    made = Manifest({})
    with pytest.raises(errors.TargetExistsError) as info:
        made.write(path)
    assert info.value.file == os.fspath(path)
    with pytest.raises(errors.TargetExistsError, match="if it is a manifest"):
        made.write(path, overwrite=True)
    assert path.read_text() == "mine"
    # Damaged, it still is one.
    path.write_text('{"mfload_checksums": 1, ')
    made.write(path, overwrite=True)
    assert Manifest.read(path) == made
    assert os.listdir(tmp_path) == ["m.json"]
    with pytest.raises(errors.TargetError):
        made.write(tmp_path / "nowhere" / "m.json")


_BAD: dict[str, Any] = {
    "a list": [],
    "an index": {"weight_map": {"w": "f"}},
    "another version": {**GOOD, "mfload_checksums": 3},
    "version 1 with an identity": {**GOOD, "mfload_checksums": 1},
    "version 2 without one": {**OLD, "mfload_checksums": 2},
    "an identity that is a list": {**GOOD, "identity": []},
    "an identity without a header": {**GOOD, "identity": {"f": {"size": 5}}},
    "an identity with a short header": {**GOOD, "identity": {"f": {"size": 5, "header": "c"}}},
    "a version that is a bool": {**GOOD, "mfload_checksums": True},
    "another algorithm": {**GOOD, "algorithm": "md5"},
    "no algorithm": {k: v for k, v in GOOD.items() if k != "algorithm"},
    "no tensors": {k: v for k, v in GOOD.items() if k != "tensors"},
    "tensors in a list": {**GOOD, "tensors": []},
    "files in a list": {**GOOD, "files": []},
    "more than there should be": {**GOOD, "more": 1},
    "a tensor that is a string": {**GOOD, "tensors": {"w": "x"}},
    **{
        f"a tensor with {key} {value!r}": {
            **GOOD,
            "tensors": {"w": {**GOOD["tensors"]["w"], key: value}},  # type: ignore[index]
        }
        for key, value in [
            ("dtype", 5), ("shape", 5), ("shape", [-1]), ("shape", [True]), ("shape", [2**64]),
            ("shape", [1.0]), ("digest", "a" * 31), ("digest", "A" * 32), ("digest", 5),
            ("digest", "a" * 32 + "\n"), ("digest", None), ("other", 1),
        ]
    },
    **{
        f"a file with {key} {value!r}": {
            **GOOD,
            "files": {"f": {**GOOD["files"]["f"], key: value}},  # type: ignore[index]
        }
        for key, value in [("size", -1), ("size", True), ("size", 2**63), ("sha256", "b"), ("x", 1)]
    },
}  # fmt: skip


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UsageError, match="not a path"):
        Manifest({}).write("a\0b.json")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(errors.TargetError, match="No such file or directory"):
        Manifest({}).write("a.json")


@pytest.mark.parametrize("name", _BAD)
def test_what_is_no_manifest_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(_BAD[name]))
    with pytest.raises(errors.HeaderError) as info:
        Manifest.read(path)
    assert info.value.file == os.fspath(path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", b'{"mfload_checksums": 1, "mfload_checksums": 1}', b"[" * 10_000,
     b'{"mfload_checksums": NaN}'],
)  # fmt: skip
def test_json_is_read_as_strictly_as_a_header(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(raw)
    with pytest.raises(errors.HeaderError, match=r"manifest|JSON"):
        Manifest.read(tmp_path / "m")


def test_a_manifest_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_SIZE", 10)
    (tmp_path / "m").write_bytes(b" " * 11)
    with pytest.raises(errors.HeaderError, match="too long"):
        Manifest.read(tmp_path / "m")
    with pytest.raises(errors.SourceNotFoundError):
        Manifest.read(tmp_path / "none")


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(*names: str) -> list[str]:
        return [os.fspath(tmp_path / name) for name in names]

    shards = at("big-00001-of-00002.safetensors", "big-00002-of-00002.safetensors")
    one = at("big-00001-of-00002.safetensors")
    cases = [
        (at("model.safetensors"), None, "model.safetensors"),
        (at("model"), None, "model"),
        (at("model.npz"), None, "model.npz"),
        (at("model_1.safetensors"), None, "model_1.safetensors"),
        (shards, None, "big.safetensors"),
        (one, None, "big-00001-of-00002.safetensors"),  # Saved by itself, say, or looked at.
        (shards, at("other.safetensors.index.json")[0], "other.safetensors"),
        (at("sub/a.safetensors"), at("x.safetensors.index.json")[0], "x.safetensors"),
        (at("sub/a.safetensors"), at("list.json")[0], "list.json"),
        (at("m-00001-of-00001.safetensors", "m.safetensors.index.json"), None, "m.safetensors"),
    ]
    for files, index, name in cases:
        assert manifest.beside(files, index) == at(f"{name}.checksums.json")[0]
    several = at("c.00.safetensors", "c.01.safetensors")
    assert manifest.beside(several, whole=True) == at("checkpoint.checksums.json")[0]
    (listed,) = {manifest.beside(several), manifest.beside(several[::-1])}
    assert re.fullmatch(r"c\.00\.safetensors\+1-[0-9a-f]{12}\.checksums\.json", Path(listed).name)
    assert manifest.beside([*several, *one]) != listed
    url = "https://host/a/m%20x.safetensors?token=1"
    assert manifest.beside([url]).endswith("/a/m x.safetensors.checksums.json")
    assert manifest.relative_names([url], None) == {url: "m x.safetensors"}
    monkeypatch.chdir(tmp_path)
    assert manifest.beside(["model.safetensors"]) == at("model.safetensors.checksums.json")[0]


def test_it_is_taken_for_no_checkpoint(tmp_path: Path) -> None:
    Manifest({}).write(tmp_path / "model.safetensors.checksums.json")
    with pytest.raises(errors.SourceNotFoundError):
        mfload.open(tmp_path)
    with pytest.raises(errors.HeaderError):
        mfload.open(tmp_path / "model.safetensors.checksums.json")
