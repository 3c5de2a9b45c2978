"""Whatever takes a path takes the URL of a file, an index or a directory of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers

import mfload
from mfload import errors
from mfload.cli import run
from mfload.saving import uploads

ARRAYS = {
    f"l.{n}.w": np.random.default_rng(n).standard_normal((128, 256), np.float32) for n in range(6)
}
INDEX = "model.safetensors.index.json"
SUMS = "model.safetensors.checksums.json"


@pytest.fixture(scope="module")
def model(moto: servers.Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several shards, which lies at `org/model` and `org/one.safetensors` too."""
    directory = tmp_path_factory.mktemp("everything")
    mfload.save(ARRAYS, directory, max_shard_size="300kB")
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    mfload.verify(directory, mode="write")
    moto.put_tree(directory, "org/model")
    mfload.save(ARRAYS, directory / "one.safetensors")
    one = directory / "one.safetensors"
    moto.put("org/one.safetensors", one.read_bytes())
    one.unlink()
    return directory


@pytest.fixture(autouse=True)
def credentials(moto: servers.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(moto: servers.Store, model: Path) -> str:
    del model
    return moto.url("org/model")


def check(loaded: Any) -> None:
    assert {*loaded} == {*ARRAYS}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)


@pytest.mark.parametrize("path", ["model", "model/", f"model/{INDEX}", "one.safetensors"])
def test_loads(url: str, path: str) -> None:
    place = url.removesuffix("model") + path
    check(mfload.load(place, "numpy"))
    check(dict(mfload.stream(place, "numpy")))
    half = mfload.load(place, "numpy", shard=(1, 2), shardings=[(".", 0)])
    np.testing.assert_array_equal(half["l.3.w"], ARRAYS["l.3.w"][64:])
    assert mfload.load(place, "numpy", names=["l.5.w"]).keys() == {"l.5.w"}
    with mfload.open(place) as opened:
        part = opened.get_slice("l.2.w")[3:5, ::7]
        np.testing.assert_array_equal(part, ARRAYS["l.2.w"][3:5, ::7])
    assert str(mfload.plan(place, "numpy")).count("s3://")


def test_a_list_of_urls(url: str, model: Path) -> None:
    names = [each.name for each in sorted(model.glob("*.safetensors"))]
    check(mfload.load([f"{url}/{name}" for name in names], "numpy"))
    with pytest.raises(errors.UsageError, match="a list has files alone"):
        mfload.load([url], "numpy")


def test_checks(url: str, model: Path) -> None:
    assert mfload.verify(url).ok
    assert mfload.verify(url, against=str(model)).ok
    for sums in (f"{url}/{SUMS}", str(model / SUMS)):
        check(mfload.load(url, "numpy", verify=sums))
    assert mfload.diff(url, model)
    assert mfload.diff(f"{url.removesuffix('model')}one.safetensors", url).equal


@pytest.mark.parametrize("verb", [mfload.convert, mfload.align])
def test_rewriting_to_a_directory_brings_what_lies_beside(
    url: str, tmp_path: Path, verb: Any
) -> None:
    verb(url, tmp_path)
    check(mfload.load(tmp_path, "numpy"))
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "tokenizer.json").exists()


def test_the_rest(url: str, tmp_path: Path) -> None:
    check(mfload.load(f"{url}-none", "numpy", fallback=url))
    pattern = r"l\.(\d+)\."
    with mfload.ondemand.LayerStream(url, pattern, framework="numpy") as layers:
        found = {f"l.{n}.{name}": each.copy() for n, held in layers for name, each in held.items()}
    check({name[name.rindex("l.") :]: each for name, each in found.items()})
    with mfload.publish(mfload.load(url, "numpy"), model="m") as seed:
        check(mfload.load(seed.url, "numpy"))


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify", "doctor"])
def test_commands(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, url]) == 0
    assert "s3://" in capsys.readouterr().out or command in ("ls", "verify")
    assert run([command, url, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_a_benchmark_is_refused_by_name(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", url]) == 2
    assert "read local files" in capsys.readouterr().err


def test_a_cache(url: str, tmp_path: Path) -> None:
    how = mfload.Options(cache=tmp_path / "cache")
    check(mfload.load(url, "numpy", options=how))
    report = mfload.Report()
    check(mfload.load(url, "numpy", options=how, report=report))
    assert all("KiB from the cache" in engine for _, engine, _ in report.route)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("org/modle", "did you mean 'model'"),
        ("org/nothing/at/all.safetensors", "no such object"),
        ("org/model/tokenizer.json", "not a checkpoint index"),
    ],
)
def test_what_is_not_there(url: str, moto: servers.Store, path: str, said: str) -> None:
    del url
    with pytest.raises(errors.MfloadError, match=said):
        mfload.load(moto.url(path), "numpy")


def test_one_file_in_place_of_shards_is_found_at_any_moment(
    moto: servers.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a shard of its own in the directory, of which the index goes on to decide."""
    place = moto.url("replaced")
    mfload.save(ARRAYS, place, max_shard_size="300kB")
    removed = uploads._Bucket._removed  # pyright: ignore[reportPrivateUsage]

    def watched(self: Any, *given: Any) -> bool:
        done = removed(self, *given)
        check(mfload.load(place, "numpy"))
        return done

    monkeypatch.setattr(uploads._Bucket, "_removed", watched)  # pyright: ignore[reportPrivateUsage]
    mfload.save(ARRAYS, place, overwrite=True)
    check(mfload.load(place, "numpy"))
