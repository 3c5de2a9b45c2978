"""A path without a checkpoint: what is there instead, and what may have been meant."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.formats import surroundings

REVISION = "0123456789abcdef0123456789abcdef01234567"
OTHER = "00" * 20


def _said(path: object) -> str:
    with pytest.raises(errors.SourceNotFoundError) as caught:
        mfload.open(path)  # pyright: ignore
    assert caught.value.message.isprintable()
    return caught.value.message


def _model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return samples.save(directory / "model.safetensors", {"a": np.zeros(2)})


def _cache(hub: Path, name: str = "org--model", *, main: str | None = REVISION) -> Path:
    repository = hub / f"models--{name}"
    _model(repository / "snapshots" / OTHER)
    _model(repository / "snapshots" / REVISION)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    if main is not None:
        (repository / "refs" / "main").write_text(main)
    return repository


# Directories ------------------------------------------------------------------------------


def test_a_directory_of_other_files_says_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02ctorch._utils\n.")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "README.md").write_text("hello")
    said = _said(tmp_path)
    assert said.startswith("nothing to load in the directory; model.gguf seems to be a GGUF file")
    assert "pytorch_model.bin seems to be a PyTorch file" in said
    assert "README" not in said


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["_METADATA", "manifest.ocdbt"], "an Orbax checkpoint"),
        (["saved_model.pb", "variables"], "a TensorFlow SavedModel"),
        (["c.index", "c.data-00000-of-00002"], "a TensorFlow checkpoint"),
        (["__0_0.distcp", ".metadata"], "torch.distributed"),
        (["zarr.json"], "a Zarr store"),
    ],
)
def test_directories_of_others(tmp_path: Path, names: list[str], what: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert what in _said(tmp_path)


def test_what_cannot_be_told_is_not(tmp_path: Path) -> None:
    assert _said(tmp_path) == "nothing to load in the directory"
    (tmp_path / "README.md").write_text("x")
    assert _said(tmp_path) == "nothing to load in the directory"


def test_a_checkpoint_further_down_is_named(tmp_path: Path) -> None:
    _model(tmp_path / "unet")
    (tmp_path / "scheduler").mkdir()
    assert f"the checkpoint is in {tmp_path / 'unet'}" in _said(tmp_path)
    for name in ("vae", "x1", "x2"):
        _model(tmp_path / name)
    said = _said(tmp_path)
    assert f"checkpoints are in {tmp_path / 'unet'}, {tmp_path / 'vae'}, " in said
    assert said.endswith(" …")


def test_a_repository_of_the_hub_cache_leads_to_its_snapshot(tmp_path: Path) -> None:
    repository = _cache(tmp_path)
    assert _said(repository).endswith(f"its snapshot is {repository / 'snapshots' / REVISION}")
    assert f"the checkpoint is in {repository / 'snapshots' / REVISION}" in _said(tmp_path)
    mfload.open(repository / "snapshots" / REVISION)


@pytest.mark.parametrize("main", [None, "f" * 40, "../../../..", "\udcff", "x" * 9999])
def test_a_reference_that_leads_nowhere_is_not_followed(tmp_path: Path, main: str | None) -> None:
    repository = _cache(tmp_path, main=None)
    if main is not None:
        (repository / "refs" / "main").write_bytes(os.fsencode(main))
    assert _said(repository).endswith(f"its snapshot is {repository / 'snapshots' / OTHER}")


def test_a_repository_without_safetensors(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "pytorch_model.bin").write_bytes(b"x")
    assert "without safetensors" in _said(tmp_path / "models--a--b")


def test_fifos_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "model.bin")
    os.mkfifo(tmp_path / "refs")
    monkeypatch.setattr(surroundings, "LocalFile", lambda path: pytest.fail(f"opens {path}"))
    assert _said(tmp_path) == "nothing to load in the directory"


def test_listings_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "below"
    below.mkdir()
    for n in range(30):
        (below / f"{n:02}.txt").write_bytes(b"")
    monkeypatch.setattr(surroundings, "_MANY", 10)
    assert len(surroundings._listed(str(below), 10)) == 10
    assert surroundings._listed(str(tmp_path / "nowhere"), 10) == []
    assert surroundings._listed("a\0b", 10) == []


# Paths that are not there -----------------------------------------------------------------


def test_close_names_are_suggested(tmp_path: Path) -> None:
    _model(tmp_path)
    assert _said(tmp_path / "modle.safetensors").endswith("; close to it are model.safetensors")
    assert _said(tmp_path / "model.safetensor").endswith("close to it are model.safetensors")
    assert _said(tmp_path / "else.bin") == "could not open: No such file or directory"


def test_the_nearest_directory_that_is_there_is_looked_at(tmp_path: Path) -> None:
    _model(tmp_path / "checkpoints" / "step100")
    said = _said(tmp_path / "checkpionts" / "step100" / "model.safetensors")
    assert said.endswith("close to it are checkpoints")
    assert _said(tmp_path / "checkpoints" / "step100" / "model.safetensors" / "x")


def test_one_file_of_a_list(tmp_path: Path) -> None:
    path = _model(tmp_path)
    assert "close to it are model.safetensors" in _said([path, tmp_path / "modl.safetensors"])


def test_urls_and_tildes() -> None:
    for path in ("https://x/model.safetensors", "s3://bucket/x", "hf://org/model"):
        assert "mfload loads local files: download it first" in _said(path)
    assert "os.path.expanduser" in _said("~/model.safetensors")


def test_a_hub_id_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    said = _said("org/model")
    assert "`hf download org/model` prints the directory to load" in said
    for path in ("a/b/c", "org", "./org/model.safetensors", "org/"):
        assert "hf download" not in _said(path)
    (tmp_path / "org").mkdir()
    assert "hf download" not in _said("org/model")


def test_a_hub_id_that_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    repository = _cache(tmp_path / "home" / "hub")
    snapshot = repository / "snapshots" / REVISION
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert _said("org/model").endswith(f"the Hugging Face cache has it in {snapshot}")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert "hf download" in _said("org/model")


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to("blobs/\x1b[31mgone")
    assert _said(path).endswith(r"it is a link to blobs/\x1b[31mgone, which is not there")


def test_names_are_harmless(tmp_path: Path) -> None:
    _model(tmp_path / "\x1b[31m\n")
    assert r"\x1b[31m\n" in _said(tmp_path)
    (tmp_path / "model\n.safetensors").touch()
    assert r"model\n.safetensors" in _said(tmp_path / "model.safetensors")


def test_an_index_whose_shards_are_elsewhere_stays_a_checkpoint_error(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(errors.CheckpointError):
        mfload.open(tmp_path)
