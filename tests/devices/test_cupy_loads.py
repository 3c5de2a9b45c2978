"""Whole loads onto CupyDevice, over the stub of CuPy: right bits, nothing left when CUDA fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import samples
from devices import arrays
from devices.cupy_stub import Machine
from devices.queues import MODES

import mfload
from mfload import errors
from mfload.cuda import staging
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.memory import live_bytes

MODEL = samples.model()
CALLS = [
    "malloc", "hostRegister", "streamCreateWithFlags", "eventCreateWithFlags", "eventRecord",
    "eventQuery", "eventSynchronize", "memcpyAsync", "memcpy2DAsync", "streamSynchronize",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What goes, goes by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    return samples.save(tmp_path / "model.safetensors", MODEL)


def land(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    arrays.take(monkeypatch, arrays.Arrays(CupyDevice(0, machine.cupy(), machine.driver())))


def settled(machine: Machine) -> None:
    assert live_bytes() == 0
    assert (machine.stack, machine.local.mode) == ([None], 0)
    machine.assert_clean()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_bit_for_bit(path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, threads: int) -> None:
    machine = Machine(mode=mode)
    land(monkeypatch, machine)
    found = mfload.load(path, framework="numpy", options=mfload.Options(threads=threads))
    samples.assert_same(found, MODEL)
    del found
    settled(machine)


def test_pages_that_the_driver_does_not_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the right to (`ulimit -l`): the load is slower, and says why."""
    machine = Machine()
    land(monkeypatch, machine)
    machine.fail["hostRegister"] = 801
    report = mfload.Report()
    found = mfload.load(path, framework="numpy", report=report)
    samples.assert_same(found, MODEL)
    assert "from pageable memory" in str(report)
    del found
    settled(machine)


@pytest.mark.parametrize("before", [0, 5], ids=["at once", "later"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_fails(path: Path, monkeypatch: pytest.MonkeyPatch, call: str, before: int) -> None:
    machine = Machine()
    land(monkeypatch, machine)
    first = machine.calls[call] + before
    real = machine.status

    def status(name: str) -> int:
        found = real(name)
        return 719 if name == call and machine.calls[name] > first else found

    monkeypatch.setattr(machine, "status", status)
    failed = None
    try:
        mfload.load(path, framework="numpy", dtype="float16", options=mfload.Options(threads=2))
    except errors.DeviceError as error:
        failed = error.with_traceback(None)
    if failed is None:
        # Streams that end badly are nobody's concern once all has come; others are not so many.
        assert call == "streamSynchronize" or machine.calls[call] <= first
    else:
        assert "cuda:0" in str(failed)
        assert call in str(failed)
        # Memory for a result is nothing of a tensor's.
        assert failed.tensor in MODEL or call == "malloc"
    settled(machine)
