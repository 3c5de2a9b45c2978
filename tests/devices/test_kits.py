"""Slots and streams that the loads of an open checkpoint leave to each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES

import mfload
from mfload import errors
from mfload.cuda import staging
from mfload.cuda.copies import Methods
from mfload.cuda.staging import Kit, Kits, PinnedSlot, Staging
from mfload.formats import checkpoint
from mfload.frameworks import base
from mfload.frameworks.several import InPlaceAdapter
from mfload.io import buffers, probes, route as routing
from mfload.load_options import LoadOptions
from mfload.loading import lazy
from mfload.loading.session import Loader
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
    with mfload.open(path, "numpy", options=mfload.Options(threads=2)) as opened:
        for _ in range(4):
            for name, wanted in MODEL.items():
                assert samples.same(opened.get_tensor(name), wanted)
                assert samples.same(opened.get_slice(name)[3:40, ::2], wanted[3:40, ::2])
        # Two threads, each with a stream and two slots, which are made anew for the first slice.
        assert 0 < device.calls["pin"] + device.calls["stream"] <= 2 * 3 * 2
        assert device.pinned > 0
    assert device.pinned == 0
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


def test_a_load_leaves_nothing_to_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    land(monkeypatch, device)
    for count in (1, 2):
        samples.assert_same(mfload.load(path, "numpy"), MODEL)
        assert device.pinned == 0
        assert device.calls["stream"] >= count


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


def test_a_forked_process_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kits, size = FakeDevice(), Kits(), Staging(Methods([]), 64 << 10)
    kit = kits.take(device, size)
    kit.slots.append(PinnedSlot(device, size))
    kits.give(device, kit)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert kits.take(device, size) is not kit
        kits.close()  # Of the parent, nothing is touched.
        assert device.pinned == 1
    kits.close()
    device.assert_clean()


def test_a_slot_that_nobody_closed_is_unlocked() -> None:
    """Else the driver would take the next map at its address for what is locked."""
    device = FakeDevice()
    slot = PinnedSlot(device, Staging(Methods([]), 64 << 10))
    assert device.pinned == 1
    del slot
    device.assert_clean()


def test_no_more_is_kept_than_one_load_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(mode="thread")
    land(monkeypatch, device)
    with mfload.open(path, "numpy", options=mfload.Options(threads=2)) as opened:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(opened.get_tensor, [*MODEL] * 6))
        assert device.pinned <= 2 * staging.DEPTH
        assert device.streams <= 2
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
    assert (device.pinned, device.streams) == (0, 0)


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
