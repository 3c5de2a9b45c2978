"""Whole loads onto CupyDevice, over the stub of CuPy: right bits, nothing left when CUDA fails."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import samples
from devices import arrays
from devices.cupy_stub import Machine
from devices.queues import MODES

import mfload
from mfload import errors, frameworks
from mfload.cuda import copies, staging
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.memory import live_bytes

MODEL = samples.model()
ROWS = {f"w{n}": samples.numbers((3000, 80), "u1", n) for n in range(9)}
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 2, 7, -1])
@pytest.mark.parametrize("call", ["memcpyAsync", "memcpy2DAsync"])
def test_a_copy_fails_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, mode: Any
) -> None:
    """When it runs, which ends the context: no call works any more, and none may hang."""
    machine = Machine(mode=mode)
    land(monkeypatch, machine)
    shardings = {"shardings": [(".*", 1)], "shard": (0, 2)} if call == "memcpy2DAsync" else {}
    model = samples.save(path.with_name("rows.safetensors"), ROWS) if shardings else path
    monkeypatch.setattr(copies, "_NARROW", 1)
    mfload.load(model, framework="numpy", **shardings)
    machine.late[call] = machine.calls[call] if number < 0 else number
    machine.ran.clear()
    with pytest.raises(errors.DeviceError, match=r"cuda:0.*restart the process") as caught:
        mfload.load(model, framework="numpy", **shardings)
    assert caught.value.tensor in (ROWS if shardings else MODEL)
    del caught
    assert live_bytes() == 0
    assert machine.lost
    assert not machine.misuse


def test_a_load_waits_for_no_work_of_the_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the default stream, nor on one that blocks or one that does not."""
    machine = Machine()
    land(monkeypatch, machine)
    device = frameworks.get("numpy", None).devices[0]
    source, target = device.allocate(1000), device.allocate(1000)
    with device.current():
        for stream in (0, *(device.runtime.streamCreateWithFlags(flags) for flags in (0, 1))):
            ends = target.address, source.address
            device.runtime.memcpyAsync(*ends, 1000, device.runtime.memcpyDefault, stream)
    before = machine.ran.total()
    found = mfload.load(path, framework="numpy")
    samples.assert_same(found, MODEL)
    assert machine.ran.total() - before == machine.calls["memcpyAsync"] - 3
    del found, source
    machine.streams.clear()
    target.owner.__del__()


def test_calls_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made with the interpreter locked: a block of one tensor costs a handful of them."""
    model = samples.save(tmp_path / "m.safetensors", {"w": samples.numbers((32 << 20,), "u1")})
    monkeypatch.setattr(staging, "SLOT", 1 << 20)
    machine = Machine()
    land(monkeypatch, machine)
    drives: Counter[str] = Counter()
    real = CupyDevice.drive

    def drive(self: CupyDevice, call: str, *args: Any) -> None:
        drives[call] += 1
        real(self, call, *args)

    monkeypatch.setattr(CupyDevice, "drive", drive)
    mfload.load(model, framework="numpy", options=mfload.Options(threads=2))
    blocks = machine.calls["memcpyAsync"]
    assert blocks > 30
    assert machine.calls["eventRecord"] == blocks
    assert machine.calls["eventCreateWithFlags"] <= 2 * staging.DEPTH  # One for each slot.
    assert machine.calls["eventSynchronize"] <= blocks
    assert drives["cuCtxPushCurrent_v2"] < blocks / 2
