"""Devices that have the memory of the host, simulated: arrays lie there, and nothing is copied."""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from calls import as_options
from conformance.suite import no_gpu
from devices import arrays
from devices.cupy_stub import Machine
from devices.fake import FakeDevice

import mfload
from mfload import errors
from mfload.cuda import discovery, memory
from mfload.cuda.cupy_device import CupyDevice
from mfload.frameworks.several import SeveralAdapter
from mfload.io import buffers, probes, route
from mfload.loading import allocate

torch = pytest.importorskip("torch")
TorchAdapter: Any = importlib.import_module("mfload.frameworks.torch_adapter").TorchAdapter
MODEL = {**samples.model(), "large": samples.numbers((9 << 20,), np.uint8)}
WANTED = {name: array for name, array in MODEL.items() if array.dtype.name != "bfloat16"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", WANTED)


def _adapter(device: FakeDevice) -> Any:
    made = TorchAdapter(torch.device("cpu"), device)
    made.on_host = False  # As on a GPU: what lies on the host is copied.
    return made


def _load(path: Any, **how: Any) -> dict[str, Any]:
    return mfload.load(path, framework="torch", **as_options(how))


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    samples.assert_same({name: each.numpy() for name, each in found.items()}, wanted)


@pytest.mark.parametrize("engine", ["auto", "pread", "direct"])
@pytest.mark.parametrize("allocator", ["auto", "mfload"])
@pytest.mark.parametrize("timeout", [None, 60])
def test_it_is_read_where_it_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, allocator: Any, timeout: Any
) -> None:
    device, report = FakeDevice(unified=True, total=1 << 20), mfload.Report()
    arrays.take(monkeypatch, _adapter(device))
    found = _load(path, engine=engine, allocator=allocator, timeout=timeout, report=report)
    _same(found, WANTED)
    assert {name: each.data_ptr() % 256 for name, each in found.items() if each.numel()} == (
        dict.fromkeys((name for name, each in found.items() if each.numel()), 0)
    )
    assert device.nbytes["copy_in"] == device.streams == 0
    assert device.pinned > 0
    assert {leg[1] for leg in report.route} <= {"pread", "direct"}
    assert any("fake:0 and the host share" in note for note in report.notes)
    assert report.aliased_bytes == report.result_bytes
    assert 0 < buffers.live_bytes() < report.result_bytes + (1 << 20)
    large = found.pop("large")
    del found
    gc.collect()
    assert device.pinned == 1
    assert large.sum(dtype=torch.int64) == WANTED["large"].sum(dtype="i8")
    del large
    device.assert_clean()
    assert memory.live_bytes() == 0


@pytest.mark.parametrize(
    "how", [{"engine": "pinned"}, {"engine": "mmap"}, {"allocator": "framework"}]
)
def test_other_ways_are_as_elsewhere(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    device, report = FakeDevice(unified=True), mfload.Report()
    arrays.take(monkeypatch, _adapter(device))
    _same(_load(path, report=report, **how), WANTED)
    assert not any("share" in note for note in report.notes)
    device.assert_clean()


def test_among_several_devices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of the host are for all of them, so that one can't have them locked."""
    device = FakeDevice(unified=True)
    several = SeveralAdapter([_adapter(device), TorchAdapter(torch.device("cpu"))])
    arrays.take(monkeypatch, several)
    found = _load(path)
    for number in (0, 1):
        _same({name: each[number] for name, each in found.items()}, WANTED)
    del found
    device.assert_clean()


def test_pages_that_the_driver_does_not_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, report = FakeDevice(unified=True, fail={"pin": 1}), mfload.Report()
    arrays.take(monkeypatch, _adapter(device))
    _same(_load(path, report=report), WANTED)
    assert any("copied to fake:0, which shares" in note for note in report.notes)
    device.assert_clean()


def test_a_load_that_does_not_fit_in_the_host(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "memory_room", lambda *_, **__: (8 << 20, "available memory"))
    monkeypatch.setattr(allocate, "_WORTH_ASKING", 8 << 20)
    device = FakeDevice(unified=True)
    arrays.take(monkeypatch, _adapter(device))
    with pytest.raises(errors.MemoryLimitError, match="available memory"):
        _load(path)
    device.assert_clean()


def test_the_page_cache_keeps_no_second_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "cached_share", lambda *_: 0.0)
    monkeypatch.setattr(probes, "memory_room", lambda *_, **__: (1 << 40, "available memory"))
    ways: list[tuple[bool, Any, Any, str, bool]] = [
        (False, "auto", "auto", "pinned", False),
        (True, "auto", "auto", "direct", True),
        (True, "keep", "auto", "pread", False),
        (True, "auto", "framework", "pinned", True),
        (True, "keep", "framework", "pinned", False),
    ]
    for unified, kept, allocator, engine, direct in ways:
        arrays.take(monkeypatch, _adapter(FakeDevice(unified=unified)))
        options = mfload.Options(page_cache=kept, allocator=allocator)
        (leg,) = mfload.plan(path, "torch", options=options).route
        assert (leg.engine, leg.direct) == (engine, direct)
    assert path.stat().st_size >= route.SMALL


@pytest.mark.parametrize("kind", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_how_it_is_found(monkeypatch: pytest.MonkeyPatch, kind: tuple[int, int]) -> None:
    """By its attributes; what the page cache would give back is free there, though not to CUDA."""
    machine = Machine(total=1 << 30)
    machine.kind = kind
    device = CupyDevice(0, machine.cupy(), machine.driver())
    assert device.unified == (kind == (1, 1))
    seen: list[Any] = []
    monkeypatch.setattr(probes, "memory_room", lambda **how: seen.append(how) or (1 << 29, ""))
    assert device.memory_info() == ((1 << 29) if kind[0] else (1 << 30), 1 << 30)
    assert seen == [{"swap": False}] * kind[0]


def test_it_is_freed_behind_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the device is freed first, which waits for what runs there."""
    done: list[str] = []

    class Noted(FakeDevice):
        def unpin(self, array: Any) -> None:
            assert not self.memory
            done.append("unpin")
            super().unpin(array)

    device = Noted(unified=True)
    held = memory.share(device, buffers.allocate(5000))
    assert device.memory
    del held
    gc.collect()
    assert done == ["unpin"]
    device.assert_clean()


def test_a_child_that_drops_arrays_takes_no_memory_of_others() -> None:
    """It has no pages where they lie, so that the system may have given it others there."""
    device = FakeDevice(unified=True)
    held = memory.share(device, buffers.allocate(8 << 20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Other tests have threads.
        child = os.fork()
    if not child:
        there = held.address, held.address + held.nbytes
        found = [mmap.mmap(-1, 1 << 20) for _ in range(64)]
        addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in found]
        del held
        for each in found:
            each[0] = 1
        # Where there is none, this has shown nothing.
        os._exit(0 if any(there[0] <= each < there[1] for each in addresses) else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 3)
    del held
    device.assert_clean()


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_memory_of_the_host_on_a_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, framework: Any
) -> None:
    """Any GPU works on it, if slowly."""
    if reason := no_gpu():
        pytest.skip(reason)
    pytest.importorskip("cupy")
    if framework == "torch" and not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    monkeypatch.setattr(discovery.find(0), "unified", True)
    report = mfload.Report()
    found = mfload.load(path, framework, device="cuda:0", report=report)
    assert any("cuda:0 and the host share" in note for note in report.notes)
    for name, wanted in WANTED.items():
        back = found[name].get() if framework == "cupy" else found[name].cpu().numpy()
        assert back.tobytes() == wanted.tobytes(), name
    total = int((found["large"][: 1 << 20] + 0).sum())
    assert total == int(WANTED["large"][: 1 << 20].sum(dtype="u8"))
    del found
    gc.collect()
    assert mfload.live_bytes() == 0
