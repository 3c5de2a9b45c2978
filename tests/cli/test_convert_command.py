"""`mfload convert`: what it writes and says, and the exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import safetensors.numpy
from conftest import Run


def test_an_npz(run: Run, tmp_path: Path) -> None:
    arrays = {"a": np.arange(24.0).reshape(4, 6), "b": np.ones(3, np.int16)}
    np.savez_compressed(tmp_path / "a.npz", a=arrays["a"], b=arrays["b"])
    out = tmp_path / "out.safetensors"
    ran = run("convert", tmp_path / "a.npz", out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("converted  2 tensors, ")
    found = safetensors.numpy.load_file(out)
    assert found.keys() == arrays.keys()
    assert all((found[name] == arrays[name]).all() for name in arrays)
    assert run("diff", tmp_path / "a.npz", out).code == 0
    assert run("convert", tmp_path / "a.npz", out).code == 3
    again = run("convert", tmp_path / "a.npz", out, "--overwrite", "--align", "64", "--json")
    assert again.json["files"] == [os.fspath(out)]
    shards = run("convert", tmp_path / "a.npz", f"{tmp_path}/shards/", "--max-shard-size", "100B")
    assert shards.code == 0
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 2
    assert run("convert", tmp_path / "a.npz", tmp_path / "b.safetensors", "--names", "b").code == 0
    assert safetensors.numpy.load_file(tmp_path / "b.safetensors").keys() == {"b"}
    small = ("--max-host-overhead", "16MiB", "--overwrite")
    assert run("convert", tmp_path / "a.npz", tmp_path / "b.safetensors", *small).code == 0
    assert safetensors.numpy.load_file(tmp_path / "b.safetensors").keys() == arrays.keys()


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("convert", tmp_path / "none.npz", tmp_path / "x.safetensors").code == 3
    assert run("convert", tmp_path / "none.npz").code == 2
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 and no more")
    assert run("convert", tmp_path / "bad.npz", tmp_path / "x.safetensors").code == 4
    assert not (tmp_path / "x.safetensors").exists()
