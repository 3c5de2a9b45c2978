"""The trials of streams see loads that return too early: planted here, since there is no GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices.fake import FakeDevice, FakeEvent, FakeStream

from benchmarks import gpu_memory, gpu_streams, gpu_trial
from benchmarks.gpu_given import Given
from mfload import frameworks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_streams, "_ELEMENTS", 1003)


class OnNone(Given):
    """A device that is none: trials take the way of a GPU, with arrays of the host."""

    gpu = property(lambda self: True)  # type: ignore[assignment]


class Array(np.ndarray):
    """As much of CuPy's as the trial uses."""

    def get(self) -> Any:
        return np.asarray(self)


class Late:
    """Loads whose copies are done when the device is waited for, and who waits for that, or not."""

    def __init__(self, load: Callable[..., dict[str, Any]]) -> None:
        self._load = load
        self.waits = True
        self._left: list[tuple[Any, Any]] = []

    def load(self, given: Given, path: Path, framework: str, **_: Any) -> dict[str, Any]:
        values = self._load(Given("cpu", given.folder), path, "numpy")
        made = {name: np.full_like(value, -1) for name, value in values.items()}
        self._left += [(made[name], values[name]) for name in made]
        if self.waits:
            self.finish()
        if framework == "torch":
            import torch

            return {name: torch.from_numpy(array) for name, array in made.items()}
        if framework == "jax":
            import jax

            return {name: jax.numpy.array(array) for name, array in made.items()}
        return {name: array.view(Array) for name, array in made.items()}

    def finish(self) -> None:
        for target, values in self._left:
            target[...] = values
        self._left.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    made = Late(Given.load)
    monkeypatch.setattr(Given, "load", lambda *args, **named: made.load(*args, **named))
    yield made
    made.finish()


def _torch(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", late.finish)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def _cupy(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(contextlib.nullcontext[None]):
        def __init__(self, non_blocking: bool) -> None:
            super().__init__()

        def synchronize(self) -> None:
            late.finish()

    stub = types.SimpleNamespace(
        __version__="0", zeros=np.zeros, cuda=types.SimpleNamespace(Stream=Stream),
        RawKernel=lambda *_: lambda *_: None,
        ElementwiseKernel=lambda *_: lambda values: values + 1,
    )  # fmt: skip
    monkeypatch.setattr(gpu_memory, "cupy", lambda: stub)


def _jax(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda _: cpu)
    full = np.full
    monkeypatch.setattr(np, "full", lambda shape, *rest: full((60, 60), *rest))


@pytest.mark.parametrize("way", [_torch, _cupy, _jax])
def test_a_load_that_returns_too_early_is_seen(
    way: Callable[[Late, pytest.MonkeyPatch], None],
    late: Late,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way(late, monkeypatch)
    name = f"streams/{way.__name__[1:]}/mfload"
    assert gpu_trial.run(name, OnNone("cpu", tmp_path)) == {"status": "pass", "said": "4 rounds"}
    late.waits = False
    found = gpu_trial.run(name, OnNone("cpu", tmp_path))
    assert found["status"] == "fail"
    assert found["said"].startswith("AssertionError: round 1, load 1: wrong w.0")


def test_mfload_that_waits_for_no_copy_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose copies are done when somebody waits, and mfload does not."""
    torch = pytest.importorskip("torch")
    from mfload.frameworks.torch_adapter import TorchAdapter

    made = TorchAdapter(torch.device("cpu"), FakeDevice())
    monkeypatch.setattr(frameworks, "get", lambda *_: made)
    given = Given("cpu", tmp_path)
    assert gpu_trial.run("streams/torch/mfload", given)["status"] == "pass"
    # As of a mfload that waits for nothing: neither for an event nor for a stream.
    monkeypatch.setattr(FakeEvent, "done", lambda _: True)
    monkeypatch.setattr(FakeEvent, "wait", lambda _: None)
    monkeypatch.setattr(FakeStream, "close", lambda _: None)
    monkeypatch.setattr(FakeStream, "synchronize", lambda _: None)
    found = gpu_trial.run("streams/torch/mfload", given)
    assert found["status"] == "fail"
    assert found["said"].startswith("AssertionError: round 1, load 1: wrong w.0")
