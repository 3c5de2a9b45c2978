"""What takes a path takes the URL of an object, of an index and of a prefix: all but restore.

A store that counts stands for all; the same calls on S3 are below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory_store
import numpy as np
import pytest
import servers
from memory_store import MemoryStore, mem

import mfload
from mfload import cli, errors, ondemand

__all__ = ["mem"]

MODEL = {
    f"layers.{n}.w": np.random.default_rng(n).standard_normal((64, 64)).astype(np.float32)
    for n in range(12)
}
BESIDE = {"config.json": '{"a": 1}', "tokenizer.json": "{}", "tokenizer.model": "x"}
INDEX = "model.safetensors.index.json"
HEADERS = 3 * (64 << 10) + (4 << 10)  # Of the shards, at most, and the index.


def _filled(folder: Path) -> Path:
    """A file, shards with config and manifest, and an archive."""
    folder.mkdir(parents=True, exist_ok=True)
    mfload.save(MODEL, folder / "one.safetensors")
    (folder / "model").mkdir()
    mfload.save(MODEL, folder / "model", max_shard_size=64 << 10)
    for name, text in BESIDE.items():
        (folder / "model" / name).write_text(text)
    for each in ("one.safetensors", "model"):
        mfload.verify(folder / each, mode="write")
    np.savez(folder / "all.npz", **MODEL)
    return folder


@pytest.fixture
def bucket(mem: MemoryStore) -> MemoryStore:
    _filled(mem.folder / "b")
    return mem


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _filled(tmp_path_factory.mktemp("local"))


def _same(found: Any) -> None:
    assert set(found) == set(MODEL)
    for name, array in MODEL.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)


def load(url: str, local: Path, out: Path, **given: Any) -> None:
    _same(mfload.load(url, "numpy", **given))


def some(url: str, local: Path, out: Path, **given: Any) -> None:
    found = mfload.load(url, "numpy", names=r"layers\.3\..*", **given)
    np.testing.assert_array_equal(found["layers.3.w"], MODEL["layers.3.w"])


def shards(url: str, local: Path, out: Path, **given: Any) -> None:
    parts = [
        mfload.load(url, "numpy", shardings=[("w", 0)], shard=(n, 4), **given) for n in range(4)
    ]
    _same({name: np.concatenate([part[name] for part in parts]) for name in MODEL})


def lazily(url: str, local: Path, out: Path, **given: Any) -> None:
    with mfload.open(url, "numpy", **given) as opened:
        assert set(opened.keys()) == set(MODEL)
        part = opened.get_slice("layers.3.w")[:, 8:16]
        np.testing.assert_array_equal(part, MODEL["layers.3.w"][:, 8:16])
        np.testing.assert_array_equal(opened.get_tensor("layers.2.w"), MODEL["layers.2.w"])


def stream(url: str, local: Path, out: Path, **given: Any) -> None:
    _same(dict(mfload.stream(url, "numpy", **given)))


def into(url: str, local: Path, out: Path, **given: Any) -> None:
    import torch

    for atomic in (False, True):
        layers = [torch.nn.ParameterDict({"w": torch.zeros(64, 64)}) for _ in range(12)]
        module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        mfload.load_into(module, url, atomic=atomic, **given)
        _same({name: tensor.numpy() for name, tensor in module.state_dict().items()})


def fallback(url: str, local: Path, out: Path, **given: Any) -> None:
    reports = [mfload.Report(), mfload.Report()]
    gone = url.rpartition("/")[0] + "/not-there"
    _same(mfload.load(gone, "numpy", fallback=url, report=reports[0], **given))
    assert any("not-there" in note for note in reports[0].notes)
    back = str(local / "one.safetensors")
    _same(mfload.load(back, "numpy", fallback=url, report=reports[1], **given))


def verify(url: str, local: Path, out: Path, **given: Any) -> None:
    found = mfload.verify(url, against=local / "one.safetensors", **given)
    assert found.ok, found


def diff(url: str, local: Path, out: Path, **given: Any) -> None:
    assert mfload.diff(url, local / "one.safetensors", **given).equal
    assert mfload.diff(local / "model", url, **given).equal


def convert(url: str, local: Path, out: Path, **given: Any) -> None:
    mfload.convert(url, f"{out}/out/", **given)
    _same(mfload.load(out / "out", "numpy"))
    there = {each.name for each in (out / "out").iterdir()}
    assert ({*BESIDE} <= there) == ("/model" in url)


CALLS = [load, some, shards, lazily, stream, into, fallback, verify, diff, convert]
PATHS = ["one.safetensors", "model", "model/", f"model/{INDEX}", "all.npz"]


class TestEveryCall:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("call", CALLS)
    def test_of_a_store(
        self, call: Callable[..., None], path: str, bucket: MemoryStore, local: Path, tmp_path: Path
    ) -> None:
        call(f"mem://b/{path}", local, tmp_path)
        assert bucket.opened == 0

    @pytest.mark.parametrize("path", PATHS)
    def test_of_s3(self, path: str, moto: servers.Store, local: Path, tmp_path: Path) -> None:
        moto.put_tree(local, "above")
        options = mfload.Options(store=tuple(moto.options.items()))
        for call in CALLS:
            (tmp_path / call.__name__).mkdir()
            call(moto.url(f"above/{path}"), local, tmp_path / call.__name__, options=options)


class TestManifests:
    @pytest.mark.parametrize("path", ["one.safetensors", "model", f"model/{INDEX}"])
    def test_lies_beside_in_the_store(self, path: str, bucket: MemoryStore) -> None:
        found = mfload.verify(f"mem://b/{path}", mode="check")
        assert found.ok
        assert {"checksums", "sha256"} <= {*found.checked}

    def test_damage_is_found(self, bucket: MemoryStore) -> None:
        file = bucket.folder / "b" / "one.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert not mfload.verify("mem://b/one.safetensors").ok

    def test_is_written_to_a_local_path(self, bucket: MemoryStore, tmp_path: Path) -> None:
        mfload.verify("mem://b/model", mode="write", manifest=tmp_path / "sums.json")
        assert mfload.verify("mem://b/model", mode="check", manifest=tmp_path / "sums.json").ok


class TestBeside:
    @pytest.mark.parametrize("path", ["model", f"model/{INDEX}"])
    @pytest.mark.parametrize("rewrite", [mfload.convert, mfload.align])
    def test_config_and_tokenizer_come_along(
        self, rewrite: Any, path: str, bucket: MemoryStore, tmp_path: Path
    ) -> None:
        rewrite(f"mem://b/{path}", f"{tmp_path}/out/")
        for name, text in BESIDE.items():
            assert (tmp_path / "out" / name).read_text() == text
        assert sum(each.kind == "list" for each in bucket.asked) == 1

    def test_weights_alone(self, bucket: MemoryStore, tmp_path: Path) -> None:
        mfload.convert("mem://b/model", f"{tmp_path}/out/", only_weights=True)
        assert not (tmp_path / "out" / "config.json").exists()


class TestWhatTravels:
    @pytest.mark.parametrize("path", ["one.safetensors", "model", f"model/{INDEX}"])
    @pytest.mark.parametrize(
        "given", [{}, {"names": r"layers\.3\."}, {"shardings": [("w", 0)], "shard": (1, 8)}]
    )
    def test_the_plan_says_it_before(
        self, given: dict[str, Any], path: str, bucket: MemoryStore
    ) -> None:
        plan = mfload.plan(f"mem://b/{path}", "numpy", **given)
        headers = len(bucket.asked), bucket.nbytes
        assert bucket.nbytes < HEADERS
        bucket.asked.clear()
        mfload.load(f"mem://b/{path}", "numpy", **given)
        assert len(bucket.asked) == headers[0] + plan.remote_requests
        assert bucket.nbytes == headers[1] + plan.read_bytes
        assert plan.round_trips == -(-plan.remote_requests // max(1, plan.threads))
        assert plan.over_read_bytes <= plan.remote_requests * memory_store.COSTS.merge_gap

    def test_names_and_slices(self, mem: MemoryStore) -> None:
        wide = {f"w.{n}": np.ones((256, 4096), np.float32) for n in range(4)}
        mfload.save(wide, mem.folder / "b" / "w.safetensors")
        mfload.load("mem://b/w.safetensors", "numpy", names="w.2")
        assert mem.nbytes <= (4 << 20) + (64 << 10)
        mem.asked.clear()
        shards: Any = {"shardings": [("w", 0)], "shard": (3, 4)}
        mfload.load("mem://b/w.safetensors", "numpy", **shards)
        assert mem.nbytes <= (4 << 20) + (64 << 10)

    @pytest.mark.parametrize("shape", [(8, 1 << 21), (1024, 1 << 14)])
    def test_rows_apart_and_together(self, shape: tuple[int, int], mem: MemoryStore) -> None:
        mfload.save({"w": np.ones(shape, np.uint8)}, mem.folder / "b" / "w.safetensors")
        given: Any = {"shardings": [("w", 1)], "shard": (1, 8)}
        plan = mfload.plan("mem://b/w.safetensors", "numpy", **given)
        mem.asked.clear()
        mfload.load("mem://b/w.safetensors", "numpy", **given)
        assert plan.remote_requests == len(mem.asked) - 1
        assert plan.remote_requests in (8, 9)
        assert mem.nbytes == plan.read_bytes + mem.asked[0].nbytes

    def test_local_files_and_bytes_send_nothing(self, local: Path) -> None:
        for path in (local / "one.safetensors", (local / "one.safetensors").read_bytes()):
            plan = mfload.plan(path, "numpy")
            assert (plan.remote_requests, plan.round_trips) == (0, 0)
            assert "requests" not in dict(plan.rows())


class TestCommands:
    @pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
    @pytest.mark.parametrize("path", PATHS)
    def test_takes_a_url(self, command: str, path: str, bucket: MemoryStore) -> None:
        assert cli.run([command, f"mem://b/{path}"]) == 0

    def test_plan_says_the_requests(
        self, bucket: MemoryStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(["plan", "mem://b/model", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["remote_requests"], said["round_trips"]) == (3, 1)
        assert cli.run(["plan", "mem://b/model"]) == 0
        told = "3 requests for data, in 1 round trip after those for headers"
        assert told in capsys.readouterr().out


class TestOnDemand:
    def test_bundles_of_a_store(self, mem: MemoryStore, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        made = {
            f"layers.{n}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
            for n in range(2)
            for name, shape in (("fc1", (16, 8)), ("fc2", (8, 16)))
        }
        mfload.save(made, mem.folder / "b" / "m.safetensors")
        given: Any = {"up": r"layers\.(\d+)\.fc1\.weight", "down": r"layers\.(\d+)\.fc2\.weight"}
        ondemand.bundle("mem://b/m.safetensors", tmp_path / "f.safetensors", **given)
        mfload.align(tmp_path / "f.safetensors", mem.folder / "b" / "f.safetensors")
        with ondemand.NeuronCache("mem://b/f.safetensors") as cache, cache.use(1, [3, 5]) as part:
            rows = made["layers.1.fc1.weight"][part.rows]
            np.testing.assert_array_equal(part.up, rows)
        ondemand.unbundle(tmp_path / "f.safetensors", tmp_path / "u.safetensors")
        found = mfload.load(tmp_path / "u.safetensors", "numpy")
        for name, array in made.items():
            np.testing.assert_array_equal(found[name], array)

    def test_layers_of_a_store(self, bucket: MemoryStore) -> None:
        with ondemand.LayerStream("mem://b/model") as layers:
            found = {name: np.array(array) for _, each in layers for name, array in each.items()}
        _same(found)


class TestSeams:
    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
    def test_distributed_checkpoint(self, bucket: MemoryStore) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        from mfload.compat.dcp import HuggingFaceReader

        state = {name: torch.zeros(64, 64) for name in MODEL}
        dcp.load(state, storage_reader=HuggingFaceReader("mem://b/model"), no_dist=True)
        _same({name: tensor.numpy() for name, tensor in state.items()})

    def test_safe_open(self, bucket: MemoryStore) -> None:
        from mfload.compat.safetensors import safe_open

        with safe_open("mem://b/one.safetensors", "np") as opened:
            _same({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118

    def test_serve(self, bucket: MemoryStore) -> None:
        from mfload.peer import serve

        held, _ = serve.stored("mem://b/model")
        assert {each.name for each in held} == set(MODEL)

    def test_doctor(self, bucket: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
        cli.run(["doctor", "mem://b/model"])
        assert "mem://b/model/model-00001-of-00003.safetensors (not a" in capsys.readouterr().out

    @pytest.mark.parametrize("how", ["--quick", "--random"])
    def test_bench_refuses_it(
        self, how: str, bucket: MemoryStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(["bench", "mem://b/model", how]) == 2
        assert "expected: a path" in capsys.readouterr().err


class TestErrors:
    def test_names_the_url(self, bucket: MemoryStore) -> None:
        with pytest.raises(errors.SourceNotFoundError, match="mem://b/no"):
            mfload.load("mem://b/no", "numpy")

    @pytest.mark.parametrize("path", ["m.safetensors", "model"])
    def test_without_obstore(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("obstore", "obstore.exceptions", "obstore.store"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(errors.FrameworkMissingError, match="pip install 'obstore"):
            mfload.load(f"s3://bucket/{path}", "numpy")

    def test_a_missing_shard(self, bucket: MemoryStore) -> None:
        (bucket.folder / "b/model/model-00002-of-00003.safetensors").unlink()
        with pytest.raises(errors.ShardNotFoundError, match="model-00002"):
            mfload.load("mem://b/model", "numpy")

    def test_an_object_replaced_between_headers_and_data(self, bucket: MemoryStore) -> None:
        with mfload.open("mem://b/one.safetensors", "numpy") as opened:
            opened.keys()
            mfload.save(MODEL, bucket.folder / "b/one.safetensors", overwrite=True)
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("layers.0.w")
