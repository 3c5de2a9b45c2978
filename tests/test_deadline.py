"""Deadlines: a bound on calls that may hang."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch

import mfload
from mfload import errors
from mfload.runtime import Deadline


@pytest.mark.parametrize("seconds", [0, -1, -0.5, math.nan, -math.inf, "5", [], 1j, True, False])
def test_what_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(errors.UsageError, match="timeout"):
        Deadline(seconds)


@pytest.mark.parametrize("seconds", [np.float32(60), np.int64(60), Fraction(60)])
def test_numbers_of_every_type(tmp_path: Path, seconds: Any) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"w": np.ones(2)})
    made = mfload.load(path, "numpy", options=mfload.Options(timeout=seconds))
    assert made["w"].tolist() == [1, 1]


@pytest.mark.parametrize("seconds", [None, math.inf, 1e300])
def test_for_ever_is_for_ever(seconds: float | None) -> None:
    deadline = Deadline(seconds)
    assert deadline.left() == math.inf
    assert deadline.bound(threading.current_thread, "…") is threading.current_thread()


def test_what_ends_in_time_gives_its_result() -> None:
    deadline = Deadline(60)
    assert 50 < deadline.left() <= 60
    thread = deadline.bound(threading.current_thread, "…")
    assert thread is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        deadline.bound(lambda: 1 // 0, "…")
    assert watch.wait_for(lambda: not watch.readers())


@pytest.mark.parametrize("call", ["load", "open"])
def test_a_system_without_threads_is_told_of(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = samples.save(tmp_path / "a.safetensors", {"w": np.ones(2)})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(errors.MfloadError, match=r"timeout= needs a thread.*can.t start") as caught:
        getattr(mfload, call)(path, "numpy", options=mfload.Options(timeout=9))
    assert caught.value.file == str(path)
    assert Deadline(None).bound(lambda: 7, "…", apart=True) == 7


def test_what_hangs_is_left_behind() -> None:
    release = threading.Event()
    deadline = Deadline(0.05)
    try:
        start = time.monotonic()
        with pytest.raises(errors.LoadTimeoutError, match="while waiting") as info:
            deadline.bound(lambda: release.wait(30), "waiting", "the file")
        assert time.monotonic() - start < 5
        assert info.value.file == "the file"
        assert "0.05 s" in str(info.value)
        # Nothing is begun that has no time left.
        with pytest.raises(errors.LoadTimeoutError):
            deadline.bound(lambda: release.wait(30), "waiting")
    finally:
        release.set()
    assert watch.wait_for(lambda: not watch.readers())


def test_an_error_keeps_nothing_alive_but_itself() -> None:
    class Thing:
        pass

    def fail() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        raise KeyError(1)

    kept: list[weakref.ref[Thing]] = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError) as info:
            Deadline(60).bound(fail, "…")
        assert kept[0]() is not None
        del info
        assert watch.wait_for(lambda: not watch.readers())
        assert kept[0]() is None
    finally:
        gc.enable()
