"""Orbax's checkpoints against Orbax's own restore, bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax_writer
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mfload
from mfload.formats import orbax, structure
from mfload.sources.directories import LocalDirectory

pytestmark = pytest.mark.filterwarnings("ignore")  # Of Orbax's own.


def located(path: object, *args: Any, **more: Any) -> str:
    """The path of what is read of a directory."""
    return orbax.locate(LocalDirectory(str(path)), *args, **more).name


def same(found: dict[str, Any], wanted: Any) -> None:
    expected = dict(orbax_writer.leaves(wanted))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        array, mine = np.asarray(value), np.asarray(found[name])
        array = array.astype(array.dtype.newbyteorder("="))
        assert (mine.dtype, mine.shape) == (array.dtype, array.shape), name
        assert mine.tobytes() == array.tobytes(), name


def own(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(located(path))


@pytest.mark.parametrize("kind", orbax_writer.KINDS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_what_orbax_restores(tmp_path: Path, kind: str, devices: int) -> None:
    saved = orbax_writer.tree(devices)
    orbax_writer.save(tmp_path / "x", kind, saved)
    found = mfload.load(tmp_path / "x", "numpy")
    same(found, own(tmp_path / "x"))
    same(found, saved)
    text = mfload.open(tmp_path / "x", "numpy").metadata()[structure.KEY]
    rebuilt = structure.loads(text, "x", found.__getitem__)
    assert rebuilt["empty"] == {"dict": {}, "list": [], "tuple": ()}
    assert rebuilt["nothing"] is None
    assert rebuilt["params"]["layers"][1]["k"] is found["params.layers.1.k"]
    assert rebuilt["numbered"]["3"] is found["numbered.3"]
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("kind", orbax_writer.KINDS)
def test_integers_of_2_and_4_bits(tmp_path: Path, kind: str) -> None:
    """Those that tensorstore has; it keeps a byte an element, and clears the bits above."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    parts = NamedSharding(mesh, P("a", "b"))
    numbers = np.arange(96).reshape(16, 6)
    saved = {
        "int4": jax.device_put(jnp.asarray(numbers % 16 - 8, jnp.int4), parts),
        "int2": jnp.asarray(numbers % 4 - 2, jnp.int2),
        "scalar": jnp.int4(-3),
    }
    orbax_writer.save(tmp_path / "x", kind, saved)
    same(mfload.load(tmp_path / "x", "numpy"), saved)
    for found in (
        mfload.load(tmp_path / "x", "jax"),
        mfload.load(tmp_path / "x", "jax", mesh=mesh, shardings={"int4": P("b", None)}),
        mfload.restore(tmp_path / "x", framework="jax"),
        mfload.restore(
            tmp_path / "x", {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in saved.items()}
        ),
        mfload.load_into(saved, tmp_path / "x"),
    ):
        same(found, saved)
    made = mfload.convert(tmp_path / "x", tmp_path / "x.safetensors")
    assert "int4 as I8: safetensors has no int4" in made.notes
    again = mfload.save(saved, tmp_path / "y.safetensors")
    assert any(note.startswith("int4 as I8") for note in again.notes)
    for path in (tmp_path / "x.safetensors", tmp_path / "y.safetensors"):
        same(mfload.load_into(saved, path), saved)
        same(mfload.load(path, "numpy"), jax.tree.map(lambda x: x.astype(jnp.int8), saved))


def test_random_keys_strings_and_items(tmp_path: Path) -> None:
    saved = {"key": jax.random.key(3), "old": jax.random.PRNGKey(4), "name": "run", "w": np.ones(3)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", saved)
    with mfload.open(tmp_path / "x", "numpy") as opened:
        found, metadata = opened.get_tensors(opened.keys()), opened.metadata()
    tree = structure.loads(metadata[structure.KEY], "x", dict(found).__getitem__)
    assert tree["name"] == "run"
    assert (tree["key"] == jax.random.key_data(saved["key"])).all()
    assert (tree["old"] == np.asarray(saved["old"])).all()
    assert json.loads(metadata[orbax.KEYS_KEY]) == {"key": "threefry2x32"}


def test_roots_of_managers(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="model", step_format_fixed_length=4)
    with ocp.CheckpointManager(tmp_path / "x", options=options) as manager:
        for step in (2, 10):
            items = {"state": ocp.args.StandardSave({"w": np.full(3, step)}),
                     "extra": ocp.args.JsonSave({"a": 1})}  # fmt: skip
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    assert mfload.load(tmp_path / "x", "numpy")["w"].tolist() == [10, 10, 10]
    assert Path(located(tmp_path / "x", step=2)).name == "model_0002"


@pytest.mark.parametrize("kind", ["v0-ocdbt-zarr2-raw", "v1-ocdbt-zarr3-zstd"])
@pytest.mark.parametrize("saved_on", [1, 4])
def test_onto_other_meshes(tmp_path: Path, kind: str, saved_on: int) -> None:
    saved = orbax_writer.tree(saved_on)
    orbax_writer.save(tmp_path / "x", kind, saved)
    for devices, spec in itertools.product((1, 2, 4, 8), (P("d"), P(None, "d"))):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        rules = [(r"params\.(w|bf16)$", spec)]
        found = mfload.load(tmp_path / "x", "jax", mesh=mesh, shardings=rules, names=r"w$|bf16$")
        for name in ("w", "bf16"):
            mine = found[f"params.{name}"]
            assert mine.sharding == NamedSharding(mesh, spec)
            assert np.asarray(mine).tobytes() == np.asarray(saved["params"][name]).tobytes()


@pytest.mark.parametrize("kind", [each for each in orbax_writer.KINDS if each.endswith("raw")])
def test_one_row_of_raw_chunks_reads_its_pages(tmp_path: Path, kind: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    rows = np.arange(512 * 2048, dtype="f4").reshape(512, 2048)
    saved = jax.device_put(rows, NamedSharding(mesh, P("a", "b")))
    orbax_writer.save(tmp_path / "x", kind, {"w": saved})
    plan = mfload.plan(tmp_path / "x", "numpy", shardings=[("w", 0)], shard=(301, 512))
    assert plan.read_bytes <= 4 * 4096  # Of two chunks 4 KiB each, which begin anywhere.
    with mfload.open(tmp_path / "x", "numpy") as opened:
        assert (opened.get_slice("w")[301] == rows[301]).all()


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "paddle"])
def test_other_frameworks(tmp_path: Path, framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"no {framework}")
    orbax_writer.save(tmp_path / "x", "v1-ocdbt-zarr3-zstd", orbax_writer.tree(2))
    code = (
        "import sys, numpy, mfload\n"
        "made = mfload.load(sys.argv[1], sys.argv[2], names=r'params\\.w|flags|double')\n"
        "wanted = mfload.load(sys.argv[1], 'numpy')\n"
        "assert all((made[n].numpy() == wanted[n]).all() for n in made), made\n"
        "print(len(made))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x"), framework]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split()[-1:] == ["3"], found.stderr[-1000:]


def test_diff_verify_and_streams(tmp_path: Path) -> None:
    saved = orbax_writer.tree(4)
    for kind in ("v0-files-zarr2-raw", "v1-ocdbt-zarr3-zstd"):
        orbax_writer.save(tmp_path / kind, kind, saved)
    first, second = (tmp_path / kind for kind in ("v0-files-zarr2-raw", "v1-ocdbt-zarr3-zstd"))
    assert mfload.diff(first, second).equal
    assert mfload.verify(first, against=second).ok
    written = mfload.verify(second, mode="write")
    assert written.ok
    assert mfload.verify(second, mode="check").ok
    same(dict(mfload.stream(second, "numpy")), saved)
    saved["flags"] = saved["flags"].at[0].set(False)
    orbax_writer.save(tmp_path / "third", "v1-ocdbt-zarr3-raw", saved)
    assert not mfload.diff(first, tmp_path / "third").equal
    data = next(each for each in (second / "state").rglob("d/*"))
    data.write_bytes(data.read_bytes() + b"x")
    assert not mfload.verify(second, mode="check").ok


def test_converting_what_begins_unlike_any_file(tmp_path: Path) -> None:
    """Raw chunks alone: no file of the checkpoint looks like one of another format."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": np.arange(4096.0), "v": np.ones((64, 64))})
    mfload.convert(tmp_path / "x", tmp_path / "x.safetensors")
    assert mfload.diff(tmp_path / "x", tmp_path / "x.safetensors").equal
