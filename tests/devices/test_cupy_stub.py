"""CupyDevice over a stub of CuPy: its logic without a GPU, and its names against the real CuPy."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices.contract import Contract, download, flat, noise, pinned, streams, upload
from devices.cupy_stub import CUDARuntimeError, Machine
from devices.queues import MODES

from mfload import errors
from mfload.cuda import cupy_device, memory, staging
from mfload.cuda.copies import Methods
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.device import DeviceRows
from mfload.io import buffers

F4, F2 = np.dtype("f4"), np.dtype("f2")


class TestContract(Contract):
    @pytest.fixture(params=MODES)
    def machine(self, request: Any) -> Iterator[Machine]:
        made = Machine(mode=request.param)
        yield made
        made.assert_clean()

    @pytest.fixture
    def device(self, machine: Machine) -> CupyDevice:
        return CupyDevice(0, machine.cupy(), machine.driver())

    @pytest.fixture
    def other(self, machine: Machine) -> CupyDevice:
        return CupyDevice(1, machine.cupy(), machine.driver())


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.assert_clean()


@pytest.fixture
def device(machine: Machine) -> CupyDevice:
    return CupyDevice(1, machine.cupy(), machine.driver())


def test_every_name_is_one_of_cupy(machine: Machine) -> None:
    cupy = pytest.importorskip("cupy")
    stub = machine.cupy()
    assert compare(stub, cupy, "cupy") > 20


def compare(stub: Any, real: Any, path: str) -> int:
    """How many names were compared."""
    seen = 0
    for name in dir(stub):
        if name.startswith("_"):
            continue
        assert hasattr(real, name), f"{path}.{name} is not in CuPy"
        mine, theirs = getattr(stub, name), getattr(real, name)
        seen += 1
        if isinstance(mine, int):
            assert mine == theirs, f"{path}.{name}"
        elif callable(mine):
            assert parameters(mine) == parameters(theirs), f"{path}.{name}"
        else:
            seen += compare(mine, theirs, f"{path}.{name}")
    return seen


def parameters(function: Any) -> list[str] | None:
    """Names of the parameters; Cython writes them in the first line that looks like a call."""
    if function.__name__ in ("CUDARuntimeError", "UnownedMemory", "MemoryPointer", "Stream"):
        return None  # Cython keeps what they take to itself.
    text = re.match(r"\s*\w+\((.*)\)", function.__doc__ or "")
    if text is None:
        found = list(inspect.signature(function).parameters)
    else:
        found = [part.split("=")[0].split()[-1] for part in text[1].split(",") if part.strip()]
    return [name for name in found if name != "self"]


def test_errors_of_cupy_have_what_is_taken_of_them() -> None:
    cupy = pytest.importorskip("cupy")
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert (error.status, str(error).split(":")[0]) == (2, "cudaErrorMemoryAllocation")


def test_names(device: CupyDevice) -> None:
    assert (device.name, device.place, device.pci) == ("cuda:1", (2, 1), "0000:3c:00.0")


def test_the_callers_device_is_left_as_it_was(machine: Machine, device: CupyDevice) -> None:
    machine.stack[-1] = 0

    def use() -> None:
        download(upload(device, noise(1000)))
        device.memory_info()
        with pytest.raises(errors.MemoryLimitError):
            device.allocate(1 << 40)

    use()
    assert machine.stack == [0]
    stacks: list[Any] = []
    thread = threading.Thread(target=lambda: (use(), stacks.append(machine.stack)))
    thread.start()
    thread.join()
    assert stacks == [[None]]


def test_it_is_current_and_then_no_more(machine: Machine, device: CupyDevice) -> None:
    other = CupyDevice(0, machine.cupy(), machine.driver())
    with device.current():
        assert machine.stack == [None, 1]
        with other.current():
            assert (machine.stack, machine.local.mode) == ([None, 1, 0], 2)
        assert (machine.stack, machine.local.mode) == ([None, 1], 2)
    assert (machine.stack, machine.local.mode) == ([None], 0)


def test_memory_dies_on_its_own_device_in_any_thread(machine: Machine, device: CupyDevice) -> None:
    held = [device.allocate(100)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    machine.assert_clean()  # It would name a call that found no device current.


def test_memory_goes_when_the_work_on_it_is_over(machine: Machine, device: CupyDevice) -> None:
    source, target = upload(device, noise(1000)), device.allocate(1000)
    with streams(device) as stream:
        stream.copy_within(target, 0, source, 0, flat(1000))
        del source
        gc.collect()
    assert download(target).tobytes() == noise(1000).tobytes()


def test_rows_beyond_the_longest_pitch(machine: Machine, device: CupyDevice) -> None:
    data = noise(1000)
    target = device.allocate(500)
    with pinned(device, 1000) as stage, streams(device) as stream:
        stage[:] = data
        machine.calls.clear()
        stream.copy_in(target, 0, stage, DeviceRows(5, 100, 200))
        stream.copy_in(target, 0, stage, DeviceRows(1, 100, 300))
        stream.copy_in(target, 0, stage, DeviceRows(5, 100, 100))
        assert machine.calls["memcpyAsync"] == 7
        stream.copy_in(target, 0, stage, DeviceRows(5, 100, 200))
        stream.copy_in(target, 0, stage, DeviceRows(10, 50, 100))
        assert machine.calls["memcpy2DAsync"] == 1
    wanted = data.reshape(10, 100)[:, :50]
    assert download(target).tobytes() == wanted.tobytes()


CALLS = {
    "malloc": lambda d, s, e, m: d.allocate(5),
    "memGetInfo": lambda d, s, e, m: d.memory_info(),
    "streamCreateWithFlags": lambda d, s, e, m: d.stream().close(),
    "eventCreateWithFlags": lambda d, s, e, m: s.record(),
    "eventRecord": lambda d, s, e, m: s.record(),
    "eventQuery": lambda d, s, e, m: e.done(),
    "eventSynchronize": lambda d, s, e, m: e.wait(),
    "streamWaitEvent": lambda d, s, e, m: s.wait(e),
    "streamSynchronize": lambda d, s, e, m: s.synchronize(),
    "memcpyAsync": lambda d, s, e, m: s.copy_within(m, 0, m, 8, flat(8)),
    "memcpy2DAsync": lambda d, s, e, m: s.copy_within(m, 0, m, 8, DeviceRows(2, 1, 2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_errors_name_device_call_and_what_cuda_said(
    machine: Machine, device: CupyDevice, call: str
) -> None:
    fail(machine, device, call)
    gc.collect()


def fail(machine: Machine, device: CupyDevice, call: str) -> None:
    memory = device.allocate(16)
    with streams(device) as stream:
        event = stream.record()
        machine.fail[call] = 719
        with pytest.raises(errors.DeviceError, match=f"cuda:1.*{call}.*cudaErrorLaunchFailure"):
            CALLS[call](device, stream, event, memory)
        machine.fail.clear()
        CALLS[call](device, stream, event, memory)
        stream.synchronize()


def test_memory_that_is_not_there(machine: Machine, device: CupyDevice) -> None:
    with pytest.raises(errors.MemoryLimitError) as caught:
        device.allocate(2 << 30)
    assert caught.value.expected == f"{2 << 30} bytes"
    assert "cuda:1" in str(caught.value)
    assert "cudaErrorMemoryAllocation" in str(caught.value)


def test_pages_that_are_not_locked(machine: Machine, device: CupyDevice) -> None:
    stage = buffers.allocate(5000)
    for status in (1, 2):
        machine.fail["hostRegister"] = status
        with pytest.raises(errors.MemoryLimitError, match=r"5000 bytes for cuda:1") as caught:
            device.pin(stage)
        assert str(CUDARuntimeError(status)) in str(caught.value)
    device.unpin(stage)  # Nothing to take back, and nothing raised.


def test_closing_never_raises(machine: Machine, device: CupyDevice) -> None:
    stream = device.stream()
    machine.fail = {"streamSynchronize": 719}
    stream.close()
    assert not machine.streams
    machine.fail.clear()
    for call in (stream.record, stream.synchronize):
        with pytest.raises(errors.DeviceError, match="closed"):
            call()
    target = device.allocate(8)
    with pinned(device, 8) as stage, pytest.raises(errors.DeviceError, match="closed"):
        stream.copy_in(target, 0, stage, flat(8))


def test_a_driver_that_refuses(machine: Machine) -> None:
    with pytest.raises(errors.DeviceError, match=r"cuda:7.*cuDevicePrimaryCtxRetain.*101"):
        CupyDevice(7, machine.cupy(), machine.driver())


def test_the_end_of_the_interpreter(machine: Machine, device: CupyDevice) -> None:
    memory = device.allocate(5)
    with streams(device) as stream:
        event = stream.record()
    machine.fail = {"free": 4, "eventDestroy": 4}
    del memory, event  # The driver is gone; pytest would tell of an error in __del__.
    gc.collect()
    machine.events.clear()
    machine.memory.clear()


def test_events_are_used_again_until_their_stream_ends(
    machine: Machine, device: CupyDevice
) -> None:
    stream = device.stream()
    kept, other = stream.record(), stream.record()
    first = other.handle
    assert kept.handle != first
    del other
    other = stream.record()
    assert other.handle == first
    assert len(machine.events) == machine.calls["eventCreateWithFlags"] == 2
    del other
    stream.close()
    assert len(machine.events) == 1
    assert kept.done()
    del kept
    assert not machine.events


def test_copies_from_pageable_memory_give_up_the_lock(
    machine: Machine, device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take as long as to read it; those of page-locked memory return at once."""
    kept, target, stage = [], device.allocate(5000), buffers.allocate(5000)
    real = device.memcpy
    monkeypatch.setattr(device, "memcpy", lambda *args: kept.append(args) or real(*args))
    with pinned(device, 100) as locked, streams(device) as stream:
        stream.copy_in(target, 0, locked, flat(100))
        assert len(kept) == 1
        machine.fail["hostRegister"] = 2
        with pytest.raises(errors.MemoryLimitError):
            device.pin(stage)
        stream.copy_in(target, 0, stage, flat(5000))
        assert len(kept) == 1
        stream.copy_within(target, 0, target, 2000, flat(1000))
        assert len(kept) == 2
        stream.synchronize()


def interrupt(monkeypatch: pytest.MonkeyPatch, where: Any, call: str, at: int = 1) -> None:
    """Has Ctrl-C come when a call returns, the one of that number."""
    real, calls = getattr(where, call), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        found = real(*args)
        if next(calls) == at:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(where, call, interrupted)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_leaves_the_thread_as_it_was(
    machine: Machine, device: CupyDevice, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    interrupt(monkeypatch, device.driver, "cuThreadExchangeStreamCaptureMode", at)
    with pytest.raises(KeyboardInterrupt), device.current():
        pass
    assert machine.stack == [None]
    assert machine.local.mode == 0


def test_an_interrupt_of_a_call_comes_through(
    machine: Machine, device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, device.runtime, "memGetInfo")
    with pytest.raises(KeyboardInterrupt):
        device.memory_info()
    assert machine.stack == [None]


@pytest.mark.parametrize("call", ["cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode"])
def test_a_driver_that_refuses_the_thread(
    machine: Machine, device: CupyDevice, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(device.driver, call, lambda _: 201)
        with pytest.raises(errors.DeviceError, match=rf"cuda:1 failed in {call}") as caught:
            device.memory_info()
        assert str(caught.value).count("failed in") == 1
        assert caught.value.__cause__ is None
    assert machine.stack == [None]


def test_a_device_is_current_inside_itself(machine: Machine, device: CupyDevice) -> None:
    with device.current():
        with device.current():
            assert machine.local.mode == 2
        assert machine.local.mode == 2
        assert machine.stack[-1] == 1
    assert machine.local.mode == 0
    assert machine.stack == [None]


def test_an_error_without_words_is_told_by_its_name(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wordless() -> None:
        raise MemoryError

    monkeypatch.setattr(device.runtime, "memGetInfo", wordless)
    with pytest.raises(errors.DeviceError) as caught:
        device.memory_info()
    assert caught.value.found == "MemoryError"


def test_who_waits_for_an_event_that_is_gone_waits_as_before(device: CupyDevice) -> None:
    source, target = upload(device, noise(1000)), device.allocate(1000)
    with streams(device) as first, streams(device) as second, pinned(device, 1000) as stage:
        stage[:] = 7
        first.copy_in(source, 0, stage, flat(1000))
        second.wait(first.record())
        first.record()
        second.copy_within(target, 0, source, 0, flat(1000))
        second.synchronize()
    assert (download(target) == 7).all()


class TestCaptures:
    """While somebody captures a graph, a load and the end of its arrays leave it alone."""

    @pytest.fixture(autouse=True)
    def capture(self, machine: Machine, device: CupyDevice) -> Iterator[None]:
        machine.capturing = True
        yield
        assert not machine.broken
        assert machine.local.mode == 0

    def test_memory_dies_in_any_thread(self, machine: Machine, device: CupyDevice) -> None:
        held = [device.allocate(100)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert not machine.memory

    def test_a_load(self, machine: Machine, device: CupyDevice) -> None:
        data = noise(1000)
        assert download(upload(device, data)).tobytes() == data.tobytes()


def test_to_destroy_a_stream_waits_for_nothing(machine: Machine, device: CupyDevice) -> None:
    """And to free memory waits for what was given to it all the same."""
    source, target = upload(device, noise(1000)), device.allocate(1000)
    runtime = device.runtime
    with device.current():
        stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        runtime.memcpyAsync(target.address, source.address, 1000, runtime.memcpyDefault, stream)
        runtime.streamDestroy(stream)
    assert machine.queues.busy()
    del source
    gc.collect()
    assert not machine.queues.busy()
    assert download(target).tobytes() == noise(1000).tobytes()


def test_memory_that_is_unlocked_under_work_shows(device: CupyDevice, machine: Machine) -> None:
    target, stage = device.allocate(1000), buffers.allocate(1000)
    device.pin(stage)
    with streams(device) as stream:
        stream.copy_in(target, 0, stage, flat(1000))
        device.unpin(stage)
    assert machine.misuse == ["unregistered while work touches it"]
    machine.misuse.clear()


@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "not blocking"])
@pytest.mark.parametrize("first", ["the default stream", "the user's"])
def test_the_default_stream(machine: Machine, device: CupyDevice, flags: int, first: str) -> None:
    """It waits for streams that block, and they for it; no other does."""
    source, target = upload(device, noise(1000)), device.allocate(1000)
    runtime = device.runtime
    with device.current():
        users = runtime.streamCreateWithFlags(flags)
        pair = (0, users) if first == "the default stream" else (users, 0)
        runtime.memcpyAsync(target.address, source.address, 1000, runtime.memcpyDefault, pair[0])
        runtime.streamSynchronize(pair[1])
        assert machine.queues.busy() == bool(flags)
        runtime.streamSynchronize(pair[0])
        runtime.streamDestroy(users)
    assert download(target).tobytes() == noise(1000).tobytes()


@pytest.mark.parametrize("call", CALLS)
def test_a_device_that_is_lost(machine: Machine, device: CupyDevice, call: str) -> None:
    lose(machine, device, call)
    gc.collect()
    machine.memory.clear()
    machine.streams.clear()
    machine.events.clear()


def lose(machine: Machine, device: CupyDevice, call: str) -> None:
    memory = device.allocate(16)
    stream = device.stream()
    event = stream.record()
    machine.lost = 719
    for _ in range(2):
        with pytest.raises(errors.DeviceError, match=r"cuda:1.*restart.*cudaErrorLaunchFailure"):
            CALLS[call](device, stream, event, memory)
    stream.close()


def test_pages_of_a_device_that_is_lost(machine: Machine, device: CupyDevice) -> None:
    machine.lost = 700
    with pytest.raises(errors.DeviceError, match=r"cuda:1.*hostRegister.*restart the process"):
        device.pin(buffers.allocate(10))


def test_a_forked_process_says_so(machine: Machine, device: CupyDevice) -> None:
    machine.fail["memGetInfo"] = 3
    with pytest.raises(errors.DeviceError, match=r"cuda:1.*memGetInfo.*fork.*spawn"):
        device.memory_info()


def test_memory_may_outlive_everything() -> None:
    code = f"""
import builtins, sys
sys.path[:0] = {[str(Path(__file__).parents[n]) for n in (1, 2)]!r}
from devices.cupy_stub import Machine
from mfload.cuda.cupy_device import CupyDevice
machine = Machine()
device = CupyDevice(0, machine.cupy(), machine.driver())
stream = device.stream()
builtins.kept = device.allocate(100), stream.record()
cycle = [device.allocate(100), stream.record()]
cycle.append(cycle)
"""
    found = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_reader_makes_its_device_current_once(
    machine: Machine, device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the main thread for each call: an interrupt may come before it has left a context."""
    other = CupyDevice(0, machine.cupy(), machine.driver())
    real = device.drive

    def pushes() -> int:
        drives: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                device, "drive", lambda call, *args: drives.append(call) or real(call, *args)
            )
            with device.current():
                for _ in range(3):
                    device.memory_info()
                with other.current():
                    device.memory_info()
                other.memory_info()
                device.memory_info()
            device.memory_info()
        return drives.count("cuCtxPushCurrent_v2")

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(pushes()))
    thread.start()
    thread.join()
    assert found == [3]  # For itself, inside the other, and in the end.
    assert pushes() == 7
    assert machine.stack == [None]


def test_what_outlives_the_names_of_its_module_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that something refers to when the interpreter ends are emptied before it dies."""
    machine, said = Machine(), list[Any]()
    device = CupyDevice(0, machine.cupy(), machine.driver())
    size = staging.Staging(Methods([]), 1 << 16)
    held = [
        device.allocate(100),
        device.stream().record(),
        staging.PinnedSlot(device, size),
        memory.share(device, buffers.allocate(5000)),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", said.append)
        for module in (cupy_device, memory, staging):
            for name in vars(module).keys() - {"__builtins__"}:
                patch.setitem(vars(module), name, None)
        held.clear()
        gc.collect()
    assert not said
