"""The fake device: it keeps the contract in every mode, and it catches those who don't."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from devices.contract import Contract, download, flat, noise, pinned, streams, upload
from devices.entered import entered
from devices.fake import FakeDevice
from devices.queues import MODES

from mfload import errors
from mfload.cuda.device import DeviceRows
from mfload.cuda.memory import DeviceBuffer
from mfload.io import buffers


@pytest.mark.parametrize("mode", MODES)
class TestContract(Contract):
    @pytest.fixture
    def device(self, mode: Any) -> Iterator[Any]:
        made = FakeDevice(mode=mode)
        yield made
        made.assert_clean()

    @pytest.fixture
    def other(self, mode: Any) -> Iterator[Any]:
        made = FakeDevice((1, 1), "fake:1", mode=mode, seed=1)
        yield made
        made.assert_clean()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def blames(device: FakeDevice, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        device.assert_clean()
    device.misuse.clear()
    device.assert_clean()


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_is_used_too_early_shows(mode: Any) -> None:
    wrong = 0
    for seed in range(20):
        device = FakeDevice(mode=mode, seed=seed)
        target = device.allocate(10_000)
        with pinned(device, 1000) as stage, streams(device) as stream:
            for n in range(10):  # No event is waited for.
                stage[:] = n
                stream.copy_in(target, 1000 * n, stage, flat(1000))
        wrong += download(target).tobytes() != np.arange(10, dtype=np.uint8).repeat(1000).tobytes()
    assert wrong > 15


@pytest.mark.parametrize("mode", ["mixed", "thread"])
def test_streams_that_don_t_wait_run_in_any_order(mode: Any) -> None:
    seen = set()
    for seed in range(40):
        device = FakeDevice(mode=mode, seed=seed)
        target = device.allocate(1)
        with pinned(device, 2) as stage, streams(device, 2) as several:
            stage[:] = 0, 1
            for n, stream in enumerate(several):
                stream.copy_in(target, 0, stage[n:], flat(1))
        seen.add(int(download(target)[0]))
    assert seen == {0, 1}


def test_new_memory_is_not_zero(device: FakeDevice) -> None:
    assert download(device.allocate(100)).all()


def test_work_is_late(device: FakeDevice) -> None:
    with streams(device) as stream:
        event = stream.record()
        assert not event.done()
        assert event.done()


@pytest.mark.parametrize("verb", ["copy_in", "copy_within", "copy_out", "record",
                                  "wait", "synchronize", "event_done", "event_wait"])  # fmt: skip
def test_calls_fail(verb: str) -> None:
    device = FakeDevice(fail={verb: 2})
    call_twice(device, verb)
    device.assert_clean()


def call_twice(device: FakeDevice, verb: str) -> None:
    memory, back = device.allocate(8), np.empty(8, np.uint8)
    with pinned(device, 8) as stage, streams(device) as stream:
        event = stream.record()
        device.calls.clear()
        calls = {
            "copy_in": lambda: stream.copy_in(memory, 0, stage, flat(8)),
            "copy_within": lambda: stream.copy_within(memory, 0, memory, 4, flat(4)),
            "copy_out": lambda: stream.copy_out(back, memory, 0),
            "record": stream.record,
            "wait": lambda: stream.wait(event),
            "synchronize": stream.synchronize,
            "event_done": event.done,
            "event_wait": event.wait,
        }
        calls[verb]()
        with pytest.raises(errors.DeviceError, match=f"fake:0.*{verb}, call 2"):
            calls[verb]()
        calls[verb]()


def test_memory_pins_and_streams_fail() -> None:
    device = FakeDevice(fail={"allocate": 1, "pin": 1, "stream": 1})
    with pytest.raises(errors.MemoryLimitError, match="allocate, call 1"):
        device.allocate(1)
    with pytest.raises(errors.MemoryLimitError, match="pin, call 1"):
        device.pin(buffers.allocate(1))
    with pytest.raises(errors.DeviceError, match="stream, call 1"):
        device.stream()
    device.assert_clean()


def test_work_fails_late() -> None:
    device = FakeDevice(fail_later={"copy_in": 2})
    target = device.allocate(30)
    with pinned(device, 30) as stage, streams(device, 2) as (one, two):
        stage[:] = 7
        events = []
        for n in range(3):
            one.copy_in(target, 10 * n, stage, flat(10))
            events.append(one.record())
        events[0].wait()
        for ask in (events[1].wait, events[1].done, events[2].wait, one.synchronize, one.record):
            with pytest.raises(errors.DeviceError, match="fail late"):
                ask()
        two.wait(events[1])
        with pytest.raises(errors.DeviceError, match="fail late"):
            two.synchronize()
        del events, ask
    made = download(target)
    assert (made[:10] == 7).all()
    assert not (made[10:] == 7).any()
    del target
    device.assert_clean()


def test_what_is_left(device: FakeDevice) -> None:
    stage = buffers.allocate(100)
    device.pin(stage)
    kept = device.stream(), device.allocate(100)
    event = kept[0].record()
    with pytest.raises(AssertionError, match="1 ranges pinned, 1 streams open, 1 events, 256 byt"):
        device.assert_clean()
    device.unpin(stage)
    kept[0].close()
    del event
    device.assert_clean(result=True)
    del kept
    device.assert_clean()


def test_bounds(device: FakeDevice) -> None:
    go_beyond(device)
    blames(device, "copy_out out of bounds")


def go_beyond(device: FakeDevice) -> None:
    small, large = device.allocate(10), device.allocate(20)
    with pinned(device, 15) as whole, streams(device) as stream:
        stage = whole[:15]
        for wrong in (
            lambda: stream.copy_in(small, 0, stage, flat(11)),
            lambda: stream.copy_in(small, 1, stage, flat(10)),
            lambda: stream.copy_in(small, -1, stage, flat(2)),
            lambda: stream.copy_in(large, 0, stage, flat(16)),
            lambda: stream.copy_in(large, 0, stage, DeviceRows(2, 2, 14)),
            lambda: stream.copy_in(large, 0, stage[::2], flat(4)),
            lambda: stream.copy_within(large, 0, small, 0, flat(11)),
            lambda: stream.copy_within(large, 0, small, 0, DeviceRows(2, 2, 9)),
            lambda: stream.copy_out(stage, small, 0),
        ):
            wrong()
            assert device.misuse == [f"{device.misuse[0].split()[0]} out of bounds"]
            device.misuse.clear()
        wrong()


def test_pinning(device: FakeDevice) -> None:
    stage, target = buffers.allocate(8192), device.allocate(10)
    with streams(device) as stream:
        stream.copy_in(target, 0, stage, flat(10))
    device.pin(stage)
    device.pin(stage[4096:])
    assert device.misuse == [
        "copy_in from memory that is not page-locked", "pin of memory that is pinned"]  # fmt: skip
    with streams(device) as stream:
        stream.copy_in(target, 0, stage, flat(10))
        device.unpin(stage)
    device.unpin(stage)
    device.pin(stage[1:])
    device.unpin(stage[1:])
    assert device.misuse[2:] == [
        "unpin while queued work touches the memory",
        "unpin of memory that this device did not pin",
        "pin of memory that does not begin on a page",
    ]
    del target
    blames(device, "page-locked")


def test_memory_that_dies_too_early(device: FakeDevice) -> None:
    with pinned(device, 100) as stage, streams(device) as stream:
        target = device.allocate(100)
        stream.copy_in(target, 0, stage, flat(100))
        del target
        gc.collect()
    blames(device, "died while queued work")


def test_a_closed_stream(device: FakeDevice) -> None:
    stream = device.stream()
    stream.close()
    stream.synchronize()
    blames(device, "synchronize on a closed stream")


def test_memory_of_others(device: FakeDevice) -> None:
    theirs = np.zeros(100, np.uint8)
    lent = DeviceBuffer(device, theirs.ctypes.data, 100, theirs, own=False)
    with pinned(device, 100) as stage, streams(device) as stream:
        stage[:] = noise(100)
        stream.copy_in(lent, 50, stage, flat(50))
    assert theirs[50:].tobytes() == noise(100)[:50].tobytes()
    assert not theirs[:50].any()
    device.assert_clean()


def test_what_is_current(device: FakeDevice) -> None:
    other = FakeDevice((1, 1), "fake:1", fail={"current": 2})
    with device.current(), other.current():
        assert entered() == [device, other]
        with pytest.raises(errors.DeviceError, match="current, call 2"), other.current():
            raise AssertionError
        with pytest.raises(AssertionError, match="1 times current"):
            other.assert_clean()
    assert entered() == []
    device.assert_clean()
    other.assert_clean()


def test_limits(device: FakeDevice) -> None:
    device.total, device.taken = 10_000, 2000
    assert device.memory_info() == (8000, 10_000)
    held = upload(device, noise(5000))
    assert device.memory_info() == (8000 - 5120, 10_000)
    with pytest.raises(errors.MemoryLimitError, match=r"fake:0.*4000 bytes.*2880 free"):
        device.allocate(4000)
    del held
    gc.collect()
    assert device.memory_info() == (8000, 10_000)
