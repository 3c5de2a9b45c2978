"""CupyDevice on a GPU."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from conformance.suite import no_gpu
from devices.contract import Contract, download, flat, noise, pinned, streams, upload

import mfload
from mfload.cuda import discovery, staging
from mfload.cuda.device import DeviceRows
from mfload.cuda.memory import live_bytes
from mfload.cuda.staging import KITS
from mfload.io import buffers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]


@pytest.fixture
def device() -> Any:
    return discovery.find(0)


class TestContract(Contract):
    @pytest.fixture
    def device(self) -> Any:
        return discovery.find(0)

    @pytest.fixture
    def other(self) -> Any:
        if discovery.count() < 2:
            pytest.skip("there is one GPU only")
        return discovery.find(1)


def test_its_address_is_in_sysfs(device: Any) -> None:
    assert device.pci is not None
    assert len(device.pci.split(":")) == 3


def test_a_pitch_beyond_what_cuda_takes(device: Any) -> None:
    pitch = device.longest_pitch + 1
    if device.memory_info().free < 2 * pitch:
        pytest.skip("the device is too small")
    source = device.allocate(pitch + 1000)
    target = device.allocate(2000)
    data = upload(device, noise(2000))
    with streams(device) as stream:
        for n in range(2):
            stream.copy_within(source, n * pitch, data, n * 1000, flat(1000))
        stream.copy_within(target, 0, source, 0, DeviceRows(2, 1000, pitch))
    assert download(target).tobytes() == noise(2000).tobytes()


def test_rows_of_the_longest_pitch(device: Any) -> None:
    pitch = device.longest_pitch
    if device.memory_info().free < 2 * pitch:
        pytest.skip("the device is too small")
    source, target = device.allocate(pitch + 10), device.allocate(20)
    with streams(device) as stream:
        stream.copy_within(target, 0, source, 0, DeviceRows(2, 10, pitch))
        stream.synchronize()


def test_the_callers_device_is_left_as_it_was(device: Any) -> None:
    runtime: Any = importlib.import_module("cupy").cuda.runtime
    count = discovery.count()
    for number in range(count):
        runtime.setDevice(number)
        download(upload(discovery.find(count - 1 - number), noise(100)))
        assert runtime.getDevice() == number
    runtime.setDevice(0)


def test_a_thread_that_never_met_cuda(device: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(download(upload(device, noise(100)))))
    thread.start()
    thread.join()
    assert found[0].tobytes() == noise(100).tobytes()


def test_release_waits_for_the_work_of_others(device: Any) -> None:
    cupy: Any = importlib.import_module("cupy")
    memory, result = device.allocate(64 << 20), device.allocate(64 << 20)
    data = noise(64 << 20)
    with pinned(device, data.size) as stage, streams(device) as stream:
        stage[:] = data
        stream.copy_in(memory, 0, stage, flat(data.size))
        stream.synchronize()
        for _ in range(50):
            stream.copy_within(result, 0, memory, 0, flat(data.size))
        del memory
        gc.collect()
        assert stream.record().done(), "cudaFree returned while copies from the memory ran"
    assert download(result).tobytes() == data.tobytes()
    cupy.cuda.runtime.deviceSynchronize()


def test_a_capture_does_not_mind(device: Any) -> None:
    """In the strictest mode, with other threads at work."""
    cupy: Any = importlib.import_module("cupy")
    data, before = noise(1 << 20), live_bytes()
    values, kept = cupy.arange(100), device.allocate(1 << 20)
    out = cupy.empty_like(values)
    cupy.add(values, 1, out=out)  # Compiled before.

    def work() -> None:
        nonlocal kept
        assert download(upload(device, data)).tobytes() == data.tobytes()
        del kept
        gc.collect()

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, ThreadPoolExecutor(1) as pool:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        cupy.add(values, 2, out=out)
        try:
            pool.submit(work).result()
        finally:
            graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert (out == values + 2).all()
    assert live_bytes() == before


def test_arrays_of_cupy_over_its_memory(device: Any) -> None:
    cupy: Any = importlib.import_module("cupy")
    memory = upload(device, np.arange(1000, dtype="f4"))
    held = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory, 0)
    array = cupy.ndarray((1000,), "f4", cupy.cuda.MemoryPointer(held, 0))
    assert float(array.sum()) == 499_500


def test_nothing_stays_locked(device: Any) -> None:
    stage = buffers.allocate(4 << 20)
    for _ in range(5):
        device.pin(stage)
        device.unpin(stage)


def test_the_next_load_has_slots(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they have been idle for long enough; then they are unlocked, and locked again."""
    data, pins = noise(48 << 20), list[int]()
    path = samples.save(tmp_path / "m.safetensors", {"w": data})
    real = device.pin
    monkeypatch.setattr(device, "pin", lambda array: pins.append(array.nbytes) or real(array))
    KITS.give_back()
    for _ in range(3):
        found = mfload.load(path, "cupy", options=mfload.Options(threads=1))
        assert found["w"].get().tobytes() == data.tobytes()
        del found
        assert 0 < len(pins) <= staging.DEPTH
    assert KITS.give_back()
    assert not KITS.give_back()
    pins.clear()
    monkeypatch.setattr(staging, "IDLE", 0.2)
    for _ in range(2):
        found = mfload.load(path, "cupy", options=mfload.Options(threads=1))
        assert found["w"].get().tobytes() == data.tobytes()
        end = time.monotonic() + 10
        while KITS._idle and time.monotonic() < end:
            time.sleep(0.01)
        assert not KITS._idle
        assert pins
        pins.clear()


def test_a_forked_child_has_no_slots(device: Any, tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": noise(8 << 20)})
    found = mfload.load(path, "cupy")
    assert KITS._idle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # CUDA has threads.
        child = os.fork()
    if not child:
        os._exit(len(KITS._idle) or int(KITS.give_back()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found["w"].get().tobytes() == noise(8 << 20).tobytes()
    assert mfload.load(path, "cupy")["w"].get().tobytes() == noise(8 << 20).tobytes()
    assert KITS.give_back()
