"""How many requests a checkpoint in a bucket takes, and that none waits without need."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proxy as proxies
import pytest
import samples
import servers
from proxy import Proxy

import mfload
from mfload.sources import s3

COUNT = 32
MODEL = {f"l{n:02}": samples.numbers((256, 256), seed=n) for n in range(COUNT)}


@pytest.fixture(scope="module")
def bucket(
    moto: servers.Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[servers.Store, Proxy]]:
    folder, placed = tmp_path_factory.mktemp("trips"), dict[str, str]()
    samples.save(folder / "one.safetensors", MODEL)
    (folder / "eight").mkdir()
    for number in range(8):
        names = [*MODEL][number * 4 : number * 4 + 4]
        file = f"model-{number + 1:05}-of-00008.safetensors"
        samples.save(folder / "eight" / file, {name: MODEL[name] for name in names})
        placed |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "eight" / "model.safetensors.index.json").write_text(json.dumps(index))
    moto.put_tree(folder, "trips")
    with proxies.proxying(moto.port) as proxy:
        yield moto, proxy


WRITER = f"""
import sys
from pathlib import Path
import flax.serialization, jax, orbax_writer, samples
model = {{f"l{{n:02}}": samples.numbers((256, 256), seed=n) for n in range({COUNT})}}
folder = Path(sys.argv[1])
(folder / "m.msgpack").write_bytes(flax.serialization.to_bytes(model))
for kind in sys.argv[2:]:
    orbax_writer.save(folder / kind, kind, {{n: jax.numpy.asarray(w) for n, w in model.items()}})
"""
KINDS = {"v0-ocdbt-zarr2-zstd": 27, "v0-files-zarr2-zstd": 70, "v1-ocdbt-zarr3-zstd": 54}


@pytest.fixture(scope="module")
def written(bucket: tuple[servers.Store, Proxy], tmp_path_factory: pytest.TempPathFactory) -> None:
    """What JAX's libraries write, by another process: JAX wants one of its own."""
    for name in ("flax", "orbax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("written")
    path = os.pathsep.join([str(Path(samples.__file__).parent), *sys.path])
    subprocess.run(
        [sys.executable, "-c", WRITER, str(folder), *KINDS],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
    )
    bucket[0].put_tree(folder, "trips")


@pytest.fixture
def proxy(bucket: tuple[servers.Store, Proxy]) -> Proxy:
    bucket[1].reset()
    return bucket[1]


@pytest.fixture
def as_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts as S3 itself, of which each answer is of one version to its end."""
    monkeypatch.setattr(s3.S3Access, "atomic", True)


def options(bucket: tuple[servers.Store, Proxy]) -> mfload.Options:
    store, proxy = bucket
    return mfload.Options(store={**store.options, "endpoint": f"http://127.0.0.1:{proxy.port}"})


def asked(proxy: Proxy, *parts: str) -> int:
    """Requests whose path has all parts."""
    return sum(all(part in each.path for part in parts) for each in proxy.requests)


class TestRoundTrips:
    def load(self, bucket: tuple[servers.Store, Proxy], name: str) -> None:
        url = f"s3://{servers.BUCKET}/trips/{name}"
        samples.assert_same(mfload.load(url, "numpy", options=options(bucket)), MODEL)

    @pytest.mark.usefixtures("as_s3")
    def test_one_file(self, bucket: tuple[servers.Store, Proxy], proxy: Proxy) -> None:
        self.load(bucket, "one.safetensors")
        assert len(proxy.requests) == 2  # The header, and the rest.

    def test_of_another_server_the_version_is_looked_at_again(
        self, bucket: tuple[servers.Store, Proxy], proxy: Proxy
    ) -> None:
        self.load(bucket, "one.safetensors")
        assert [each.first for each in proxy.requests] == [0, 64 << 10, 0]

    @pytest.mark.usefixtures("as_s3")
    def test_shards(self, bucket: tuple[servers.Store, Proxy], proxy: Proxy) -> None:
        self.load(bucket, "eight")
        assert len(proxy.requests) == 1 + 2 + 2 * 8  # Listed; the index twice; headers and data.
        headers = [number for number, each in enumerate(proxy.requests) if each.first == 0]
        assert len(headers) == 10
        assert headers == list(range(1, 11))  # All of them before anything else.

    @pytest.mark.usefixtures("as_s3", "written")
    def test_msgpack(self, bucket: tuple[servers.Store, Proxy], proxy: Proxy) -> None:
        self.load(bucket, "m.msgpack")
        assert len(proxy.requests) <= 7
        assert proxy.sent < 2.1 * COUNT * MODEL["l00"].nbytes

    @pytest.mark.usefixtures("as_s3", "written")
    @pytest.mark.parametrize("kind", KINDS)
    def test_orbax(self, bucket: tuple[servers.Store, Proxy], proxy: Proxy, kind: str) -> None:
        found: Any = mfload.restore(
            f"s3://{servers.BUCKET}/trips/{kind}", framework="numpy", options=options(bucket)
        )
        samples.assert_same(found, MODEL)
        assert len(proxy.requests) <= KINDS[kind]
        assert asked(proxy, "list-type=2") == 2  # What is there, and what lies beside it.
        if "zarr3" in kind:  # The index of a shard is its last 20 bytes: all are asked for at once.
            spans = [(each, each.headers["range"][6:].split("-")) for each in proxy.requests
                     if "range" in each.headers]  # fmt: skip
            tails = [each for each, (first, last) in spans if int(last) - int(first) == 19]
            assert len(tails) == COUNT
            assert len({each.connection for each in tails}) > 4
        if "files" in kind:
            assert asked(proxy, ".zarray") == COUNT
