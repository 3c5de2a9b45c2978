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


def test_names_and_dtypes(run: Run, tmp_path: Path) -> None:
    arrays = {"m.a": np.arange(24, dtype=np.float32), "m.b": np.ones(3, np.float32)}
    source = tmp_path / "model" / "a.safetensors"
    source.parent.mkdir()
    (source.parent / "config.json").write_text("{}")
    safetensors.numpy.save_file(arrays, source)
    given = ("--rename", r"m\.(.*)=\1", "--dtype", "b=float64", "--dtype", "a=float16")
    assert run("convert", source.parent, f"{tmp_path}/out/", *given).code == 0
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: array.dtype for name, array in found.items()} == {"a": "float16", "b": "float64"}
    assert (tmp_path / "out" / "config.json").exists()
    for command in ("convert", "align"):
        ran = run(command, source.parent, f"{tmp_path}/{command}/", "--only-weights")
        assert (ran.code, ran.err) == (0, "")
        assert os.listdir(tmp_path / command) == ["model.safetensors"]
    (tmp_path / "out" / "config.json").write_text("mine")
    (tmp_path / "out" / "model.safetensors").unlink()
    ran = run("convert", source.parent, tmp_path / "out")
    assert ran.code == 3
    assert "--overwrite replaces it, --only-weights leaves it" in ran.err
    assert run("convert", source, tmp_path / "x.safetensors", "--rename", "m").code == 2
    assert run("convert", source, tmp_path / "x.safetensors", "--rename", "x=y").code == 5


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("convert", tmp_path / "none.npz", tmp_path / "x.safetensors").code == 3
    assert run("convert", tmp_path / "none.npz").code == 2
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 and no more")
    assert run("convert", tmp_path / "bad.npz", tmp_path / "x.safetensors").code == 4
    assert not (tmp_path / "x.safetensors").exists()
