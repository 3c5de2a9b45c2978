"""Progress: never backwards, never over, and at the end, the end."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from calls import as_options

import mfload
from mfload.planning import blocks
from mfload.progress import shown

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = blocks.Costs(block=64 << 10)
    monkeypatch.setattr("mfload.sources.local.LocalFile.costs", small)
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _calls(path: Path, **options: Any) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    mfload.load(
        path, framework="numpy", progress=lambda *call: calls.append(call), **as_options(options)
    )
    return calls


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap", "auto"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"names": ["odd", "scalar", "wide"]},
        {"names": ["empty"]},
        {"dtype": "float64"},
    ],
)
def test_it_grows_to_the_total(path: Path, engine: Any, threads: int, options: Any) -> None:
    calls = _calls(path, engine=engine, threads=threads, **options)
    names = options.get("names", list(MODEL))
    total = sum(MODEL[name].nbytes for name in names)
    assert {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_bytes_read_over_do_not_count(tmp_path: Path) -> None:
    arrays = {f"t{n:03}": np.full(50, n, np.uint8) for n in range(100)}
    path = samples.save(tmp_path / "gaps.safetensors", arrays)
    calls = _calls(path, names=["t000", "t050", "t099"])
    assert calls[-1] == (150, 150)
    assert all(done <= 150 for done, _ in calls)


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_told_while_it_happens(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.told(monkeypatch)
    path = samples.save(tmp_path / "a.safetensors", {"a": np.zeros(40 << 20, np.uint8)})
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 1:
            # The load is not over: its readers are at work, or have more to do.
            assert done < total

    mfload.load(
        path,
        framework="numpy",
        progress=progress,
        options=mfload.Options(engine="pread", threads=threads),
    )
    assert len(seen) >= 3


def test_a_bar_reaches_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    for engine in ("pread", "mmap"):
        screen = io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        mfload.load(path, framework="numpy", progress=True, options=mfload.Options(engine=engine))
        monkeypatch.undo()
        assert "100%" in screen.getvalue()


def test_without_tqdm_there_is_no_bar_and_a_word(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with caplog.at_level(logging.WARNING, "mfload"):
        samples.assert_same(mfload.load(path, framework="numpy", progress=True), MODEL)
    assert "pip install 'tqdm>=" in caplog.text


def test_a_load_that_fails_says_no_end() -> None:
    calls: list[tuple[int, int]] = []

    def fail() -> None:
        with shown(lambda *call: calls.append(call), 100) as advance:
            assert advance is not None
            advance(30)
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fail()
    assert calls == [(30, 100)]


def test_nobody_looks() -> None:
    with shown(False, 100) as advance:
        assert advance is None
