"""Slots and streams that the loads of an open checkpoint leave to each other."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from devices import arrays, fake
from devices.fake import FakeDevice
from devices.queues import MODES, Span

import mfload
from mfload import errors
from mfload.cuda import memory, staging
from mfload.cuda.copies import Methods
from mfload.cuda.memory import DeviceBuffer
from mfload.cuda.staging import Kit, Kits, PinnedSlot, Ring, Staging
from mfload.formats import checkpoint
from mfload.frameworks import base
from mfload.frameworks.several import InPlaceAdapter
from mfload.io import buffers, probes, route as routing
from mfload.loading import allocate, lazy
from mfload.loading.session import Loader
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.planning.slicing import select
from mfload.sources.local import OpenFile

MODEL = {f"w{n}": samples.numbers((64, 1000 + n), np.float32) for n in range(6)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    return samples.save(tmp_path / "m.safetensors", MODEL)


def land(monkeypatch: pytest.MonkeyPatch, *devices: FakeDevice) -> None:
    arrays.take(monkeypatch, arrays.Arrays(*devices))


@pytest.mark.parametrize("mode", MODES)
def test_reads_of_an_open_checkpoint_lock_memory_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    device = FakeDevice(mode=mode)
    land(monkeypatch, device)
    for _ in range(2):
        with mfload.open(path, "numpy", options=mfload.Options(threads=2)) as opened:
            for name, wanted in MODEL.items():
                assert samples.same(opened.get_tensor(name), wanted)
                assert samples.same(opened.get_slice(name)[3:40, ::2], wanted[3:40, ::2])
        # Two threads, each with a stream and two slots, which are made anew for the first slice.
        assert 0 < device.calls["pin"] + device.calls["stream"] <= 2 * 3 * 2
    assert device.pinned > 0
    device.assert_clean()


def test_a_stream_locks_memory_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    options = mfload.Options(threads=1, max_host_overhead=1 << 20)
    found = dict(mfload.stream(path, "numpy", options=options))
    samples.assert_same(found, MODEL)
    assert device.calls["pin"] <= staging.DEPTH
    del found
    device.assert_clean()


@pytest.mark.parametrize("mode", MODES)
def test_loads_of_a_process_lock_memory_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    device = FakeDevice(mode=mode)
    land(monkeypatch, device)
    for _ in range(4):
        samples.assert_same(mfload.load(path, "numpy", options=mfload.Options(threads=2)), MODEL)
    assert 0 < device.calls["pin"] <= 2 * staging.DEPTH
    assert 0 < device.calls["stream"] <= 2
    assert device.pinned == device.calls["pin"]
    device.assert_clean()


def kept(device: FakeDevice, count: int = 1, kits: Kits | None = None) -> tuple[Kits, list[Kit]]:
    """Kits of one slot each, given one after the other."""
    kits, size = kits or Kits(), Staging(Methods([]), 64 << 10)
    made = [kits.take(device, size) for _ in range(count)]
    for kit in made:
        kit.slots.append(PinnedSlot(device, size))
        kit.streams[device.name] = device.stream()
    for kit in made:
        kits.give(device, kit)
    return kits, made


def test_the_oldest_go_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [FakeDevice(name=f"fake:{n}") for n in range(2)]
    probe, (one,) = kept(devices[0])
    monkeypatch.setattr(staging, "KEPT", 3 * sum(one.nbytes))
    probe.close()
    kits, _ = kept(devices[0], 2)
    kept(devices[1], 2, kits)
    assert [device.pinned for device in devices] == [1, 2]
    kits.close()
    for device in devices:
        device.assert_clean()


def test_what_is_idle_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "IDLE", 0.1)
    device = FakeDevice()
    begun = time.monotonic()
    kits, _ = kept(device, 3)
    while device.pinned and time.monotonic() < begun + 10:
        time.sleep(0.01)
    assert time.monotonic() >= begun + 0.1
    assert device.pinned == device.streams == 0
    kept(device, 1, kits)  # Those that come after it, too.
    while device.pinned and time.monotonic() < begun + 10:
        time.sleep(0.01)
    device.assert_clean()


def test_each_load_says_that_its_slots_are_not_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(fail={"pin": 1})
    land(monkeypatch, device)
    for _ in range(2):
        report = mfload.Report()
        mfload.load(path, "numpy", options=mfload.Options(threads=1), report=report)
        assert "from pageable memory" in str(report)
    assert device.calls["pin"] <= staging.DEPTH
    device.assert_clean()


def test_no_thread_waits_for_what_was_given_back() -> None:
    device, kits = FakeDevice(), Kits()
    for _ in range(2):
        kept(device, 2, kits)
        assert "mfload-idle" in watch.readers()
        kits.give_back()
        assert kits._timer is None
        assert watch.wait_for(lambda: "mfload-idle" not in watch.readers())
    device.assert_clean()


def _use(kits: Kits, device: FakeDevice) -> None:
    kits.keep_within([device], 1, (float("inf"), float("inf")))
    kits.give(device, kits.take(device, Staging(Methods([]), 64 << 10)))
    kits.give_back()


def _interrupted(at: int, call: Callable[[], object]) -> bool:
    """Whether Ctrl-C came at a line of `Kits`, of so many that are run before."""
    left = [at]

    def line(_: Any, event: str, __: Any) -> Any:
        left[0] -= event == "line"
        if left[0] < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: line if frame.f_code.co_qualname.startswith("Kits.") else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_loses_nothing() -> None:
    before, at, interrupted = memory.live_bytes(), 0, True
    while interrupted:
        device = FakeDevice()
        kits, made = kept(device, 2)
        made.clear()
        interrupted = _interrupted(at, partial(_use, kits, device))
        kits.close()
        gc.collect()
        assert memory.live_bytes() == before, at
        device.assert_clean()
        at += 1
    assert at > 30


def test_what_is_in_use_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "IDLE", 0.05)
    device = FakeDevice()
    kits, _ = kept(device, 2)
    kit = kits.take(device, Staging(Methods([]), 64 << 10))
    end = time.monotonic() + 10
    while device.pinned > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert [slot._forked is None for slot in kit.slots] == [False]
    kits.give(device, kit)
    kits.close()
    device.assert_clean()


def test_a_process_without_threads_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _no_threads)
    device = FakeDevice()
    kept(device)
    assert device.pinned == 0
    device.assert_clean()


@pytest.mark.parametrize("first", [64 << 10, 1 << 20], ids=["small", "large"])
def test_what_is_kept_counts_for_limits(
    path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A load that has a limit holds no more than that, whatever earlier loads left."""
    devices = [FakeDevice(name=f"fake:{n}") for n in range(2)]
    for device in devices:
        land(monkeypatch, device)
        with monkeypatch.context() as patch:
            patch.setattr(staging, "SLOT", first)
            with mfload.open(path, "numpy", options=mfload.Options(threads=4)) as opened:
                opened.get_tensors()
    limit = 500_000
    assert locked() > limit
    most: list[int] = []
    real = Ring.take

    def take(self: Any) -> Any:
        slot = real(self)
        most.append(locked())
        return slot

    monkeypatch.setattr(Ring, "take", take)
    options = mfload.Options(threads=2, max_host_overhead=limit)
    pins = devices[1].calls["pin"]
    for _ in range(2):
        samples.assert_same(mfload.load(path, "numpy", options=options), MODEL)
        assert 0 < max(most) <= limit
    assert devices[1].calls["pin"] - pins <= 2 * staging.DEPTH
    for device in devices:
        device.assert_clean()


def locked() -> int:
    """Bytes that are page-locked."""
    return sum(span.end - span.start for span, _ in fake._pinned.values())


def test_what_is_kept_is_not_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But by each load that uses it."""
    device = FakeDevice()
    land(monkeypatch, device)
    peaks: list[int] = []
    for _ in range(3):
        report = mfload.Report()
        options = mfload.Options(threads=1)
        found = mfload.load(path, "numpy", options=options, report=report)
        peaks.append(report.peak_bytes)
        assert mfload.live_bytes() == report.result_bytes
        del found
        assert mfload.live_bytes() == buffers.live_bytes() == 0
    assert peaks[0] == peaks[1] == peaks[2] == locked() > 0
    buffers.peak_bytes(reset=True)
    device.assert_clean()
    assert buffers.peak_bytes() == buffers.live_bytes() == 0


def test_what_is_kept_gives_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, and on a device, where there would be room without it."""
    device = FakeDevice()
    land(monkeypatch, device)
    mfload.load(path, "numpy")
    assert device.pinned

    def room(**_: Any) -> tuple[int, str]:
        return (0 if device.pinned else 1 << 30), "machine"

    with monkeypatch.context() as patch:
        patch.setattr(probes, "memory_room", room)
        patch.setattr(allocate, "_WORTH_ASKING", 0)
        patch.setattr(allocate, "_WORTH_LOOKING", 0)
        samples.assert_same(mfload.load(path, "numpy"), MODEL)
    real = FakeDevice.memory_info

    def memory_info(self: Any) -> Any:
        return real(self)._replace(free=0) if self.pinned else real(self)

    monkeypatch.setattr(FakeDevice, "memory_info", memory_info)
    monkeypatch.setattr(FakeDevice, "allocate", _allocate)
    assert device.pinned
    samples.assert_same(mfload.load(path, "numpy"), MODEL)
    device.taken = device.total
    with pytest.raises(errors.MemoryLimitError):
        mfload.load(path, "numpy")
    device.taken = 0
    device.assert_clean()


def _allocate(self: Any, nbytes: int) -> Any:
    memory = fake._Memory(self, nbytes)
    return DeviceBuffer(self, memory.address, nbytes, memory)


def test_readers_begin_before_the_memory_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only copies wait for it."""
    device = FakeDevice()
    land(monkeypatch, device)
    read = threading.Event()
    real = OpenFile.read

    def reads(self: Any, *given: Any) -> Any:
        try:
            return real(self, *given)
        finally:
            read.set()

    allocates = FakeDevice.allocate

    def allocated(self: Any, nbytes: int) -> Any:
        assert read.wait(10)
        assert not device.calls["copy_in"]
        return allocates(self, nbytes)

    monkeypatch.setattr(OpenFile, "read", reads)
    monkeypatch.setattr(FakeDevice, "allocate", allocated)
    options = mfload.Options(threads=2)
    samples.assert_same(mfload.load(path, "numpy", options=options), MODEL)
    device.assert_clean()


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_is_refused_while_readers_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    device = FakeDevice(fail={"allocate": 1})
    land(monkeypatch, device)
    with pytest.raises(errors.MemoryLimitError) as caught:
        mfload.load(path, "numpy", options=mfload.Options(threads=threads))
    assert (caught.value.file, caught.value.tensor) == (None, "w0")
    assert not device.calls["copy_in"]
    device.assert_clean()


def test_memory_is_made_where_no_thread_starts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    monkeypatch.setattr(threading.Thread, "start", _no_threads)
    found = mfload.load(path, "numpy", options=mfload.Options(threads=2))
    samples.assert_same(found, MODEL)
    device.assert_clean(result=True)


def _no_threads(_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_child_has_no_slots_of_its_parent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads with its own, and what it frees of the parent's is not its memory."""
    device = FakeDevice()
    land(monkeypatch, device)
    mfload.load(path, "numpy", options=mfload.Options(threads=1))
    pins = device.calls["pin"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # The idle are waited for by a thread.
        child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            device.pageable.append(Span(0, 1 << 62))
            samples.assert_same(
                mfload.load(path, "numpy", options=mfload.Options(threads=1)), MODEL
            )
            gc.collect()
            status = int(not (device.calls["pin"] > pins and device.calls["unpin"] == 0))
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (device.calls["pin"], device.pinned) == (pins, pins)
    device.assert_clean()


def test_at_exit_all_is_given_back(path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import mfload
from devices import arrays
from devices.fake import FakeDevice
from mfload import frameworks
device = FakeDevice()
frameworks.get = lambda *_: arrays.Arrays(device)
import atexit
from mfload.cuda import staging
mfload.load({str(path)!r}, "numpy")
assert device.pinned
real = device.unpin
device.unpin = lambda array: (real(array), print("left", device.pinned))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[-2] == "left 0"
    assert not ran.stderr


def test_a_checkpoint_that_is_not_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    opened = mfload.open(path, "numpy")
    array = opened.get_tensor("w3")
    del opened
    gc.collect()
    assert samples.same(array, MODEL["w3"])
    del array
    device.assert_clean()


def test_a_read_that_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    real = OpenFile.read
    with mfload.open(path, "numpy", options=mfload.Options(threads=2)) as opened:
        opened.get_tensor("w0")
        kept = device.pinned

        def read(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(OpenFile, "read", read)
        with pytest.raises(errors.ReadError):
            opened.get_tensor("w1")
        assert device.pinned < kept
        monkeypatch.setattr(OpenFile, "read", real)
        assert samples.same(opened.get_tensor("w1"), MODEL["w1"])
    device.assert_clean()


def test_threads_that_read_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(mode="thread")
    land(monkeypatch, device)
    with mfload.open(path, "numpy") as opened, ThreadPoolExecutor(4) as pool:
        names = [*MODEL] * 5
        found = list(pool.map(opened.get_tensor, names))
    assert all(samples.same(one, MODEL[name]) for one, name in zip(found, names, strict=True))
    del found
    device.assert_clean()


def test_devices_keep_what_is_theirs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [FakeDevice(name=f"fake:{n}") for n in range(2)]
    kits, size = Kits(), Staging(Methods([]), 64 << 10)
    used: list[Kit] = []
    for device in devices:
        kit = kits.take(device, size)
        kit.slots.append(PinnedSlot(device, size))
        kit.streams[device.name] = device.stream()
        kits.give(device, kit)
        used.append(kit)
    assert [kits.take(device, size) for device in reversed(devices)] == used[::-1]
    for device, kit in zip(devices, used, strict=True):
        kits.give(device, kit)
    kits.close()
    assert not any(kit.slots or kit.streams for kit in used)
    for device in devices:
        device.assert_clean()


@pytest.mark.parametrize(
    "more",
    [lambda s: s._replace(block=s.block + buffers.PAGE), lambda s: s._replace(spare=1)],
    ids=["block", "spare"],
)
def test_a_slot_that_is_too_small_goes(more: Callable[[Staging], Staging]) -> None:
    device, kits, size = FakeDevice(), Kits(), Staging(Methods([]), 64 << 10)
    kit = kits.take(device, size)
    kit.slots.append(PinnedSlot(device, size))
    kits.give(device, kit)
    assert kits.take(device, size) is kit
    kits.give(device, kit)
    found = kits.take(device, more(size))
    assert (found.slots, device.pinned) == ([], 0)
    device.assert_clean()


def test_what_comes_after_the_end_is_closed() -> None:
    device, kits, size = FakeDevice(), Kits(), Staging(Methods([]), 64 << 10)
    kit = kits.take(device, size)
    kit.slots.append(PinnedSlot(device, size))
    kits.close()
    kits.give(device, kit)
    device.assert_clean()


def test_a_slot_that_nobody_closed_is_unlocked() -> None:
    """Else the driver would take the next map at its address for what is locked."""
    device = FakeDevice()
    slot = PinnedSlot(device, Staging(Methods([]), 64 << 10))
    assert device.pinned == 1
    del slot
    device.assert_clean()


def test_whole_tensors_and_slices_in_turns_use_the_same_slots(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    with mfload.open(path, "numpy", options=mfload.Options(threads=1)) as opened:
        made: list[int] = []
        for _ in range(6):
            opened.get_tensor("w0")
            opened.get_slice("w1")[:, ::7]
            made.append(device.calls["pin"])
    assert made[-1] == made[1]
    device.assert_clean()


def test_a_small_read_asks_for_small_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(monkeypatch, FakeDevice())
    path = samples.save(tmp_path / "m.safetensors", {"w": samples.numbers((64, 1024), np.float32)})
    monkeypatch.setattr(probes, "memory_room", lambda **_: (30 << 20, "machine"))
    with mfload.open(path, "numpy") as opened:
        opened.get_tensor("w")
        assert buffers.live_bytes() < 4 << 20


def test_each_read_of_an_open_checkpoint_has_its_route(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a small one says nothing of the file, nor that of what lands on the host."""
    device = FakeDevice()
    land(monkeypatch, device)
    monkeypatch.setattr(routing, "SMALL", 200_000)
    with mfload.open(path, "numpy") as opened:

        def route(names: list[str], picks: Any = None) -> tuple[str, str]:
            report = mfload.Report()
            requests = [Request(opened.info(name), opened.info(name).dtype) for name in names]
            if picks is not None:
                requests = [each._replace(selection=select(each.info, picks)) for each in requests]
            opened.load(requests, report)
            ((_, engine, why),) = report.route
            return engine, why

        assert route(["w0"], (slice(0, 2),)) == ("pinned", "buffered: small read")
        assert route([*MODEL], (slice(None), [0, 5, 7]))[0] == "pread"
        assert "in the page cache" in route([*MODEL])[1]
        assert route([*MODEL])[0] == "pinned"
    device.assert_clean()


def test_a_checkpoint_that_is_closed_while_a_read_begins(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    opened = mfload.open(path, "numpy")
    real = lazy.Shared

    def late(*given: Any) -> Any:
        opened.close()
        return real(*given)

    monkeypatch.setattr(lazy, "Shared", late)
    with suppress(errors.MfloadError):
        opened.get_tensor("w0")
    gc.collect()
    device.assert_clean()


def test_a_child_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    slot = PinnedSlot(device, Staging(Methods([]), 64 << 10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        slot.close()
    assert device.calls["unpin"] == 0
    device.unpin(slot._memory)


def test_memory_that_is_there_needs_no_room(path: Path) -> None:
    """On the host and on a device, whose framework has no room left."""
    device = FakeDevice()
    new = arrays.Arrays(device, pool=base.Pool(0, "there is none"))
    held = [np.zeros(each.nbytes, np.uint8) for each in (MODEL["w0"], MODEL["w1"])]
    there = base.memory_at(held[0], held[0].ctypes.data, held[0].nbytes, device)
    adapter = InPlaceAdapter(new, {0: there, 1: held[1]})
    index, sources = checkpoint.read(path)
    rows = [index["w0"], index["w1"]]
    requests = [Request(info, info.dtype, devices=(n,)) for n, info in enumerate(rows)]
    Loader(index, sources, adapter, LoadOptions()).load(requests)
    assert [each.tobytes() for each in held] == [MODEL[name].tobytes() for name in ("w0", "w1")]
    assert device.nbytes["copy_in"] == held[0].nbytes
    device.assert_clean()
