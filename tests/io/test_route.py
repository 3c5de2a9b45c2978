"""Routes: an engine a file, and the reason said."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch

import mfload
from mfload.io import probes, route
from mfload.sources.local import LocalFile

LARGE = samples.numbers((9 << 20,), np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 9 MiB, which is not small."""
    return samples.save(tmp_path_factory.mktemp("route") / "large.safetensors", {"a": LARGE})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "small.safetensors", {"a": LARGE[:100]})


def _leg(path: Path, engine: str = "auto") -> route.Leg:
    source = LocalFile(path)
    (leg,) = route.choose([(source, source.size)], engine)
    return leg


def _real_disk(path: Path) -> None:
    """Skips where the kernel can't say or forget what it caches of the file."""
    path.read_bytes()
    with path.open("rb") as file:
        warm = probes.cached_share(file.fileno(), path.stat().st_size)
        watch.drop_cache(path)
        cold = probes.cached_share(file.fileno(), path.stat().st_size)
        if (warm, cold) != (1.0, 0.0) or probes.direct_alignment(file.fileno()) is None:
            pytest.skip(f"cached {warm} when read, {cold} when dropped")


def test_what_the_cache_holds_is_read_through_it(large: Path) -> None:
    _real_disk(large)
    large.read_bytes()
    leg = _leg(large)
    assert (leg.engine, leg.why, leg.cached) == ("pread", "100% in the page cache", 1.0)


def test_what_it_does_not_hold_is_read_past_it(large: Path) -> None:
    _real_disk(large)
    leg = _leg(large)
    assert (leg.engine, leg.why, leg.cached) == ("direct", "0% in the page cache", 0.0)
    report = mfload.Report()
    loaded = mfload.load(large, framework="numpy", report=report)
    assert samples.same(loaded["a"], LARGE)
    assert report.route == ((os.fspath(large), "direct", "0% in the page cache"),)
    # Looking and loading have left the cache as it was, but for the header and the ends.
    with large.open("rb") as file:
        assert (probes.cached_share(file.fileno(), large.stat().st_size) or 0) < 0.1


def _with(monkeypatch: pytest.MonkeyPatch, cached: float | None, direct: Any = (512, 512)) -> None:
    monkeypatch.setattr(probes, "cached_share", lambda *_: cached)
    monkeypatch.setattr(probes, "direct_alignment", lambda _: direct)


@pytest.mark.parametrize(
    ("cached", "direct", "engine", "why"),
    [
        (0.49, (512, 512), "direct", "49% in the page cache"),
        (0.5, (512, 512), "pread", "50% in the page cache"),
        (0.1, None, "pread", "10% in the page cache, but the file takes no O_DIRECT"),
        (None, (512, 512), "pread", "the kernel does not say what it caches"),
    ],
)
def test_auto_says_why(
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: float | None,
    direct: Any,
    engine: str,
    why: str,
) -> None:
    _with(monkeypatch, cached, direct)
    assert _leg(large)[1:3] == (engine, why)


def test_small_files_are_read_through_the_cache(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, 0.0)
    assert _leg(small)[1:3] == ("pread", "small read")


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_what_is_asked_for_is_done(
    small: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    _with(monkeypatch, 0.0)
    assert _leg(small, engine)[1:3] == (engine, "asked for")


def test_direct_where_there_is_none_says_so(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, 0.0, None)
    assert _leg(small, "direct")[1:3] == (
        "pread",
        "direct asked for; the file takes no O_DIRECT",
    )


def test_auto_never_maps(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (0.0, 0.5, 1.0, None):
        for direct in ((512, 512), None):
            _with(monkeypatch, cached, direct)
            assert _leg(large).engine != "mmap"


def test_choices_are_logged_and_orders_are_not(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mfload")
    _with(monkeypatch, 0.2)
    _leg(large)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", f"{large}: direct (20% in the page cache)")
    ]
    caplog.clear()
    _leg(large, "pread")
    assert caplog.records == []
    _with(monkeypatch, 0.2, None)
    _leg(large, "direct")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
