"""`save(checksums=True)`: a manifest of what was just saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.checking.manifest import Manifest

MODEL = samples.model()


@pytest.mark.parametrize("limit", [None, 300_000])
def test_what_was_saved_verifies(limit: int | None, tmp_path: Path) -> None:
    saved = mfload.save(MODEL, tmp_path / "model.safetensors", max_shard_size=limit, checksums=True)
    at = tmp_path / "model.safetensors.checksums.json"
    assert str(at) in saved.notes[-1]
    assert Manifest.read(at).tensors.keys() == MODEL.keys()
    assert len(Manifest.read(at).files) == len(list(tmp_path.glob("*.safetensors")))
    found = mfload.verify(saved.files[-1])
    assert found.ok
    assert found.checked[-2:] == ("checksums", "sha256")
    assert mfload.verify(tmp_path).manifest == os.fspath(at)
    assert mfload.load(tmp_path, "numpy", verify=at).keys() == MODEL.keys()


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256", "both"])
def test_which_algorithm(algorithm: Any, tmp_path: Path) -> None:
    path, at = tmp_path / "model.safetensors", tmp_path / "model.safetensors.checksums.json"
    mfload.save(MODEL, path, checksums=algorithm)
    made = Manifest.read(at)
    assert (made.hashed, bool(made.files)) == (algorithm != "sha256", algorithm != "xxh3")
    assert mfload.verify(path, mode="check").ok
    with pytest.raises(errors.UsageError, match="did you mean 'xxh3'"):
        mfload.save(MODEL, tmp_path / "other.safetensors", checksums="xxh")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "other.safetensors").exists()


def test_saved_again(tmp_path: Path) -> None:
    path, at = tmp_path / "model.safetensors", tmp_path / "model.safetensors.checksums.json"
    mfload.save({"a": np.zeros(5)}, path, checksums=True)
    # The manifest is part of the old checkpoint: `verify` would take the new data for damaged.
    saved = mfload.save({"a": np.ones(5)}, path, overwrite=True)
    assert saved.notes[-1] == f"removed of the old checkpoint: {at}"
    assert not at.exists()
    assert mfload.verify(path).ok
    mfload.save({"a": np.ones(5)}, path, overwrite=True, checksums=True)
    assert mfload.verify(path).ok


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_could_not_be_written_stops_the_save(
    overwrite: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.checksums.json").write_text("{}")
    with pytest.raises(errors.TargetExistsError):
        mfload.save(MODEL, tmp_path, checksums=True, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["model.safetensors.checksums.json"]
