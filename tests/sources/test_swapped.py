"""A checkpoint that takes the place of another behind a URL, before any request of any call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from swapping import (
    INDEX,
    LAYOUTS,
    NEW,
    OLD,
    SAID,
    Swapped,
    assert_one,
    checkpoint,
    swap_everywhere,
)

import mfload
from mfload import errors
from mfload.ondemand import ExpertCache, LayerStream
from mfload.sources import http
from mfload.sources.base import Costs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, no `.netrc` of the user's, and first answers that hold no whole shard."""
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    monkeypatch.setattr(http, "_HEAD", 2048)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))


Call = Callable[[str, Path], dict[str, Any]]
ONE = mfload.Options(threads=1)


def _load(url: str, _: Path) -> dict[str, Any]:
    return mfload.load(url, "numpy", options=ONE)


def _get(url: str, _: Path) -> dict[str, Any]:
    with mfload.open(url, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in OLD}


def _get_again(url: str, _: Path) -> dict[str, Any]:
    """Goes on after an error: a later call must not take what an earlier one refused."""
    found: dict[str, Any] = {}
    failed: Exception | None = None
    with mfload.open(url, "numpy") as opened:
        for name in [*OLD, *OLD]:
            try:
                found[name] = opened.get_tensor(name)
            except errors.SourceChangedError as error:
                failed = error
    assert_one(found)
    if failed is not None:
        raise failed
    return found


def _get_and_all(url: str, _: Path) -> dict[str, Any]:
    """Takes one tensor, and then all by what needs all headers."""
    with mfload.open(url, "numpy") as opened:
        first = {name: opened.get_tensor(name) for name in [*OLD][:1]}
        opened.metadata()
        return opened.get_tensors([*OLD]) | first


def _lazy(url: str, _: Path) -> dict[str, Any]:
    with mfload.open(url, "numpy") as opened:
        halves = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: np.concatenate([half[:3], half[3:]]) for name, half in halves.items()}


def _stream(url: str, _: Path) -> dict[str, Any]:
    with mfload.stream(url, "numpy", options=ONE) as stream:
        return dict(stream)


def _convert(url: str, folder: Path) -> dict[str, Any]:
    target = folder / "made.safetensors"
    mfload.convert(url, target, overwrite=True)
    return mfload.load(target, "numpy")


def _verify(url: str, folder: Path) -> dict[str, Any]:
    old, new = (samples.save(folder / name, each) for name, each in (("o", OLD), ("n", NEW)))
    results = [mfload.verify(url), *(mfload.verify(url, against=each) for each in (old, new))]
    for problem in (problem for result in results for problem in result.problems):
        if "changed since" in problem.what:
            raise errors.SourceChangedError(problem.what, file=problem.file)
    headers, *against = results
    assert headers.ok, headers.problems
    assert any(against)
    return OLD if against[0] else NEW


def _diff(url: str, folder: Path) -> dict[str, Any]:
    found = mfload.diff(samples.save(folder / "o", OLD), url)
    assert len(found.changed) in (0, len(OLD))
    return NEW if found.changed else OLD


def _experts(url: str, _: Path) -> dict[str, Any]:
    found = {}
    with ExpertCache(url, budget="1MiB", framework="numpy") as cache:
        for layer in (0, 1):
            with cache.use(layer, [0]) as experts:
                name = f"model.layers.{layer}.mlp.experts.0.up_proj.weight"
                (found[name],) = (each.copy() for each in experts[0].values())
    return found


def _layers(url: str, _: Path) -> dict[str, Any]:
    with LayerStream(url, budget="1MiB", framework="numpy") as stream:
        found = {name: array.copy() for name, array in stream.resident.items()}
        for layer, tensors in stream:
            found |= {f"model.layers.{layer}.{n.split(f'layers.{layer}.')[-1]}": each.copy()
                      for n, each in tensors.items()}  # fmt: skip
    return found


CALLS: list[Call] = [
    _load, _get, _get_again, _get_and_all, _lazy, _stream, _convert, _verify, _diff,
    _experts, _layers,
]  # fmt: skip


SLOW = pytest.mark.slow


@pytest.fixture(
    params=[
        "digest",
        "redirects",
        pytest.param("weak", marks=SLOW),
        pytest.param("date", marks=SLOW),
    ]
)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "redirects":
        return {"say": SAID["digest"], "redirects": True}
    return {"say": SAID[request.param]}


@pytest.mark.parametrize(
    "layout", ["same index", "new names", "old ones stay", pytest.param("other index", marks=SLOW)]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_swap_before_any_request(
    call: Call, layout: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """All that comes of it is old, or new, or an error that says so."""
    with serving.serving({}) as server:

        def act(swapped: Swapped) -> dict[str, Any]:
            server.always = swapped
            return call(server.url(INDEX), tmp_path)

        swap_everywhere(act, layout, how)


def test_the_error_names_the_index() -> None:
    swapped = Swapped(LAYOUTS["other index"], 10**9, SAID["weak"])
    with serving.serving({}, always=swapped) as server, mfload.open(server.url(INDEX)) as opened:
        first, second, *_ = OLD
        opened.get_tensor(first)
        swapped.at = swapped.count
        with pytest.raises(errors.SourceChangedError) as info:
            opened.get_tensor(second)
        assert info.value.file == server.url(INDEX)


def test_an_opened_checkpoint_that_is_unpickled_is_of_the_same_version() -> None:
    first, second, *_ = OLD
    for redirects in (False, True):
        swapped = Swapped(LAYOUTS["other index"], 10**9, SAID["digest"], redirects=redirects)
        with serving.serving({}, always=swapped) as server:
            with mfload.open(server.url(INDEX)) as opened:
                opened.get_tensor(first)
                raw = pickle.dumps(opened)
            swapped.at = swapped.count
            with pickle.loads(raw) as again:
                for name in (first, second):
                    with pytest.raises(errors.SourceChangedError):
                        again.get_tensor(name)


@pytest.mark.parametrize("status", [304, 204])
def test_an_answer_without_the_bytes_is_no_version(status: int) -> None:
    with serving.serving(checkpoint(OLD)) as server, mfload.open(server.url(INDEX)) as opened:
        first, second, *_ = OLD
        opened.get_tensor(first)
        server.always = lambda h: h.path == INDEX and (h.plain(status) or True)
        with pytest.raises(errors.SourceError, match=str(status)):
            opened.get_tensor(second)


def test_a_server_without_versions_is_refused() -> None:
    with (
        serving.serving(checkpoint(OLD), validator=None) as server,
        pytest.raises(errors.SourceError, match="which version"),
    ):
        mfload.load(server.url(INDEX), "numpy")


def test_what_it_costs() -> None:
    """One small request for a load, and for each shard of which the header is read later."""
    files = checkpoint(OLD)
    with serving.serving(files) as server:
        mfload.load(server.url(INDEX), "numpy", options=ONE)
        asked = [each for each in server.asked if each.path == INDEX]
        assert [each.range for each in asked] == ["bytes=0-2047", "bytes=0-0"]
        server.asked.clear()
        with mfload.open(server.url(INDEX)) as opened:
            name = next(iter(OLD))
            for _ in range(5):
                opened.get_tensor(name)
        assert [each.range for each in server.asked if each.path == INDEX] == [
            "bytes=0-2047", "bytes=0-0",
        ]  # fmt: skip


class Stored:
    """A user's source over files that are replaced before one of its looks at them."""

    file, engine, costs = None, "table", Costs()

    def __init__(self, swapped: Swapped, name: str) -> None:
        self.name, self._swapped = name, swapped
        raw, self.identity = self._look()
        self.size = len(raw)

    def _look(self) -> tuple[bytes, int]:
        swapped = self._swapped
        if swapped.count == swapped.at:
            swapped.served, swapped.version = dict(swapped.new), 1
        swapped.count += 1
        return swapped.served[self.name], swapped.version

    def read(self, offset: int, nbytes: int) -> bytes:
        self.check()
        return self._swapped.served[self.name][offset : offset + nbytes]

    def open(self, flags: int = 0) -> StoredHandle:
        return StoredHandle(self)

    def keep(self, keeps: bool) -> None: ...

    def check(self) -> None:
        try:
            same = self._look()[1] == self.identity
        except KeyError:
            same = False
        if not same:
            raise errors.SourceChangedError("another version", file=self.name)

    def beside(self, name: str) -> Stored:
        return Stored(self._swapped, f"/m/{name}")


class StoredHandle:
    def __init__(self, source: Stored) -> None:
        self._source = source

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        done = 0
        for part in vector:
            raw = self._source.read(offset + done, part.nbytes)
            memoryview(part).cast("B")[: len(raw)] = raw
            done += len(raw)
        return done

    def close(self) -> None: ...


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "new names"])
@pytest.mark.parametrize("call", [_load, _get, _get_again, _get_and_all, _lazy, _stream, _convert])
def test_a_swap_under_a_source_of_the_user(call: Any, layout: str, tmp_path: Path) -> None:
    def act(swapped: Swapped) -> dict[str, Any]:
        return call(Stored(swapped, INDEX), tmp_path)

    swap_everywhere(act, layout, {"say": SAID["weak"]})
