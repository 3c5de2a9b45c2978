"""Restoring and loading on a mesh from a store: checkpoints of Orbax and Flax, roots of steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax_writer
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from memory_store import MemoryStore, mem

import mfload
from mfload import errors

__all__ = ["mem"]

KINDS = ["v0-ocdbt-zarr2-zstd", "v0-files-zarr3-zstd", "v1-ocdbt-zarr3-raw"]
TREE = {
    "params": {f"w.{n}": np.arange(n, n + 64 * 32, dtype=np.float32).reshape(64, 32)
               for n in range(8)},
    "step": 3,
}  # fmt: skip


def _mesh(devices: int = 8) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def _target(devices: int, tree: Any = TREE) -> Any:
    rows = NamedSharding(_mesh(devices), P("x"))

    def leaf(value: Any) -> Any:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=rows)

    return jax.tree.map(lambda v: leaf(v) if isinstance(v, np.ndarray) else v, tree)


def _same(found: Any) -> None:
    for name, array in TREE["params"].items():
        np.testing.assert_array_equal(np.asarray(found["params"][name]), array)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each kind, a root of steps, and msgpack."""
    import orbax.checkpoint as ocp

    folder, tree = tmp_path_factory.mktemp("written"), jax.tree.map(jnp.asarray, TREE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A newer Orbax has another name for what saves.
        for kind in KINDS:
            orbax_writer.save(folder / kind, kind, tree)
    with ocp.CheckpointManager(folder / "root") as manager:
        for step in (1, 2, 10):
            params = {name: array + step for name, array in tree["params"].items()}
            manager.save(step, args=ocp.args.StandardSave({"params": params, "step": step}))
        manager.wait_until_finished()
    (folder / "flax.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    return folder


@pytest.fixture
def bucket(mem: MemoryStore, written: Path) -> MemoryStore:
    (mem.folder / "b").rmdir()
    (mem.folder / "b").symlink_to(written)
    return mem


@pytest.fixture(scope="module")
def moto(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "stores"))
        import servers

        with servers.moto(tmp_path_factory.mktemp("moto")) as store:
            store.put_tree(written, "written")
            yield store


class TestRestore:
    @pytest.mark.parametrize("devices", [1, 2, 4, 8])
    @pytest.mark.parametrize("path", [*KINDS, "flax.msgpack"])
    def test_onto_devices(self, path: str, devices: int, bucket: MemoryStore) -> None:
        found = mfload.restore(f"mem://b/{path}", _target(devices))
        _same(found)
        assert len(found["params"]["w.0"].sharding.device_set) == devices

    @pytest.mark.filterwarnings("ignore")  # The server is started by a fork.
    @pytest.mark.parametrize("devices", [1, 8])
    @pytest.mark.parametrize("path", [*KINDS, "flax.msgpack"])
    def test_from_s3(self, path: str, devices: int, moto: Any) -> None:
        options = mfload.Options(store=tuple(moto.options.items()))
        _same(mfload.restore(moto.url(f"written/{path}"), _target(devices), options=options))

    @pytest.mark.parametrize("path", [*KINDS, "flax.msgpack"])
    def test_a_tree_without_a_target(self, path: str, bucket: MemoryStore) -> None:
        _same(mfload.restore(f"mem://b/{path}", framework="numpy"))

    def test_steps_of_a_root(self, bucket: MemoryStore) -> None:
        for given, step in (({}, 10), ({"step": 2}, 2)):
            found = mfload.restore("mem://b/root", framework="numpy", **given)
            np.testing.assert_array_equal(found["params"]["w.1"], TREE["params"]["w.1"] + step)
        with pytest.raises(errors.SourceNotFoundError, match="there is no step 3"):
            mfload.restore("mem://b/root", framework="numpy", step=3)

    def test_steps_of_a_root_in_s3(self, moto: Any) -> None:
        given: Any = {"options": mfload.Options(store=tuple(moto.options.items()))}
        for step, expected in ((None, 10), (1, 1)):
            url = moto.url("written/root")
            found = mfload.restore(url, framework="numpy", step=step, **given)
            np.testing.assert_array_equal(found["params"]["w.1"], TREE["params"]["w.1"] + expected)

    def test_a_part_costs_a_part(self, bucket: MemoryStore) -> None:
        url = "mem://b/v1-ocdbt-zarr3-raw"
        mfload.restore(url, framework="numpy", names=r"params.*w\.3")
        part = bucket.nbytes
        bucket.asked.clear()
        mfload.restore(url, framework="numpy")
        assert part < bucket.nbytes - 6 * TREE["params"]["w.0"].nbytes


class TestOnAMesh:
    def test_shards_and_abstract(self, bucket: MemoryStore, tmp_path: Path) -> None:
        file = tmp_path / "store" / "c" / "w.safetensors"
        file.parent.mkdir()
        mfload.save(TREE["params"], file)
        for spec in (P("x"), P(None, "x"), P()):
            given: Any = {"mesh": _mesh(), "shardings": spec}
            shapes = mfload.abstract("mem://c/w.safetensors", **given)
            found = mfload.load("mem://c/w.safetensors", "jax", **given)
            for name, array in TREE["params"].items():
                np.testing.assert_array_equal(np.asarray(found[name]), array)
                assert found[name].sharding == shapes[name].sharding
        target = {name: jnp.zeros_like(array) for name, array in TREE["params"].items()}
        for atomic in (False, True):
            found = mfload.load_into(target, "mem://c/w.safetensors", atomic=atomic)
            for name, array in TREE["params"].items():
                np.testing.assert_array_equal(np.asarray(found[name]), array)
