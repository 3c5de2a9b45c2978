"""Checkpoints in buckets of S3: each case over moto, SeaweedFS and rclone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import servers

import mfload
from mfload import sources
from mfload.options import LoadOptions

MODEL: dict[str, Any] = {
    "layers.0.weight": np.arange(96 * 40, dtype=np.float32).reshape(96, 40),
    "layers.0.bias": np.arange(96, dtype=np.int64),
    "layers.1.weight": np.arange(200_000, dtype=np.uint16).reshape(400, 500),
    "scale": np.float64(3.5) * np.ones(()),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, and shards with an index."""
    made = tmp_path_factory.mktemp("files")
    for name, size in (("single", None), ("shards", 300_000)):
        (made / name).mkdir()
        mfload.save(MODEL, made / name / "model.safetensors", max_shard_size=size)
    assert len(list((made / "shards").glob("*.safetensors"))) > 1
    return made


@pytest.fixture(scope="module")
def filled(store: servers.Store, files: Path) -> servers.Store:
    store.put_tree(files, "models/a b+c=ü")
    return store


def options(store: servers.Store, **more: Any) -> mfload.Options:
    return mfload.Options(store=store.options, **more)


@pytest.fixture(scope="module", params=[
    "single/model.safetensors", "single", "single/", "shards",
    "shards/model.safetensors.index.json",
])  # fmt: skip
def url(request: pytest.FixtureRequest, filled: servers.Store) -> str:
    return filled.url(f"models/a b+c=ü/{request.param}")


class TestWhatIsLoaded:
    def test_all(self, url: str, filled: servers.Store) -> None:
        samples.assert_same(mfload.load(url, "numpy", options=options(filled)), MODEL)

    def test_by_the_environment(
        self, url: str, filled: servers.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in filled.environment.items():
            monkeypatch.setenv(name, value)
        samples.assert_same(mfload.load(url, "numpy"), MODEL)

    def test_names(self, url: str, filled: servers.Store) -> None:
        found = mfload.load(url, "numpy", names=r"layers\.0", options=options(filled))
        samples.assert_same(found, {k: v for k, v in MODEL.items() if k.startswith("layers.0")})

    def test_opened(self, url: str, filled: servers.Store) -> None:
        with mfload.open(url, "numpy", options=options(filled)) as opened:
            assert sorted(opened.keys()) == sorted(MODEL)
            part = opened.get_slice("layers.1.weight")[100:107, 3:9]
            np.testing.assert_array_equal(part, MODEL["layers.1.weight"][100:107, 3:9])
            samples.assert_same({"s": opened.get_tensor("scale")}, {"s": MODEL["scale"]})

    def test_shard(self, url: str, filled: servers.Store) -> None:
        found = mfload.load(
            url, "numpy", shardings=[("weight", 0)], shard=(1, 4), options=options(filled)
        )
        np.testing.assert_array_equal(found["layers.0.weight"], MODEL["layers.0.weight"][24:48])

    def test_streamed(self, url: str, filled: servers.Store) -> None:
        found = dict(mfload.stream(url, "numpy", options=options(filled)))
        samples.assert_same(found, MODEL)


_ON_A_MESH = """
import os, sys, json
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, mfload
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
for url in sys.argv[1:]:
    found = mfload.load(url, "jax", names="weight", mesh=mesh, shardings=[("weight", P("b", "a"))])
    for name, array in found.items():
        assert len(array.sharding.device_set) == 8
        np.testing.assert_array_equal(np.asarray(array), np.load(f"{name}.npy"))
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_mesh(filled: servers.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODEL:
        np.save(tmp_path / f"{name}.npy", MODEL[name])
    urls = [filled.url(f"models/a b+c=ü/{name}") for name in ("single", "shards")]
    path = os.pathsep.join(filter(None, sys.path))
    monkeypatch.chdir(tmp_path)
    done = run(_ON_A_MESH, *urls, PYTHONPATH=path, **filled.environment)
    assert done.returncode == 0, done.stderr


def _read(source: Any, connection: Any) -> None:
    try:
        connection.send(bytes(source.read(0, 100)))
    except BaseException as error:
        connection.send(error)


def _load(url: str, options: Any, connection: Any) -> None:
    try:
        connection.send(mfload.load(url, "numpy", options=options))
    except BaseException as error:
        connection.send(error)


def in_process(kind: str, call: Callable[..., None], *args: Any) -> Any:
    """What a call sends from another process, which has a minute."""
    context = multiprocessing.get_context(kind)
    here, there = context.Pipe()
    process = context.Process(target=call, args=(*args, there))
    process.start()
    try:
        assert here.poll(60), "it hangs"
        return here.recv()
    finally:
        process.kill()
        process.join()


class TestOtherProcesses:
    @pytest.mark.parametrize("kind", ["fork", "spawn"])
    def test_a_source_travels(self, kind: str, filled: servers.Store) -> None:
        source = sources.find(
            filled.url("models/a b+c=ü/single/model.safetensors"),
            LoadOptions(store=filled.options),
        )
        expected = source.read(0, 100)
        assert in_process(kind, _read, source) == expected

    def test_a_fork_loads(self, url: str, filled: servers.Store) -> None:
        given = options(filled)
        mfload.load(url, "numpy", options=given)
        samples.assert_same(in_process("fork", _load, url, given), MODEL)

    def test_secrets_of_the_environment_stay(
        self, filled: servers.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in filled.environment.items():
            monkeypatch.setenv(name, value)
        source = sources.find(filled.url("models/a b+c=ü/single/model.safetensors"))
        source.read(0, 100)
        assert servers.SECRET.encode() not in pickle.dumps(source)
        assert pickle.loads(pickle.dumps(source)) == source
