"""`mfload align`: what it writes and says, and the exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.numpy
from conftest import Run


def test_into_another_place(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ran = run("align", model, tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("aligned  6 tensors, ")
    assert lines[0].endswith("read back and compared")
    written = tmp_path / "out" / "model.safetensors"
    assert lines[2] == f"file     {written}"
    assert safetensors.numpy.load_file(written).keys() == safetensors.numpy.load_file(model).keys()
    assert run("verify", written, "--against", model).code == 0
    assert run("diff", written, model).code == 0
    # Not again over it, unless that is said.
    assert run("align", model, tmp_path / "out").code == 3
    found = run("align", model, tmp_path / "out", "--overwrite", "--align", "64", "--json")
    assert found.code == 0
    assert found.json["files"] == [os.fspath(written)]
    assert found.json["bytes"] == written.stat().st_size


def test_in_place_and_into_shards(run: Run, shards: Path) -> None:
    ran = run("align", shards)
    assert (ran.code, ran.out) == (3, "")
    before = safetensors.numpy.load_file(shards / "model-00002-of-00002.safetensors")
    assert run("align", shards, "--overwrite").code == 0
    after = safetensors.numpy.load_file(shards / "model-00002-of-00002.safetensors")
    assert {name: array.tobytes() for name, array in after.items()} == {
        name: array.tobytes() for name, array in before.items()
    }
    assert run("align", shards, "--overwrite", "--max-shard-size", "12").code == 0
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert run("align", shards, "--overwrite", "--max-shard-size", "1GB").code == 0
    assert sorted(os.listdir(shards)) == ["model.safetensors"]


def test_what_can_t_be_done(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("align", model, tmp_path, "--align", "3").code == 2
    assert run("align", model, tmp_path, "--max-shard-size", "much").code == 2
    assert run("align", tmp_path / "none.safetensors", tmp_path).code == 3
    assert run("align", model, model / "x.safetensors").code == 3
    os.truncate(model, 100)
    assert run("align", model, tmp_path / "x.safetensors").code == 4
    assert not (tmp_path / "x.safetensors").exists()
