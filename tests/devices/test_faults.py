"""What fails on the way to a device: the error names the tensor, and nothing stays behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
from calls import as_options
from devices import arrays
from devices.arrays import FEW
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.cuda import staging
from mfload.cuda.memory import live_bytes
from mfload.io.pread import PreadReader
from mfload.planning import layout
from mfload.sources.local import OpenFile

MODEL = samples.model()
CALLS = ("allocate", "pin", "stream", "copy_in", "record", "event_done", "event_wait")
WORK = ("copy_in",)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Path, **how: Any) -> dict[str, Any]:
    return mfload.load(
        path, framework="numpy", **as_options({"dtype": "float16", "threads": 2, **how})
    )


def _settled(device: FakeDevice) -> None:
    assert not [t for t in threading.enumerate() if t.name == "mfload-reader"]
    device.assert_clean()
    gc.collect()
    assert live_bytes() == 0  # At once.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("verb", CALLS)
def test_a_call_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int, mode: Any
) -> None:
    plain = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(plain))
    _load(path)
    number = min(number, plain.calls[verb])
    device = FakeDevice(mode=mode, fail={verb: number})
    arrays.take(monkeypatch, arrays.Arrays(device))
    failed: errors.MfloadError | None = None
    try:
        _load(path)
    except (errors.DeviceError, errors.MemoryLimitError) as error:
        failed = error
    if failed is None:
        # How often an event is asked, and whether each thread gets a block, is a matter of time.
        # What can't be locked stays pageable.
        assert device.calls[verb] < number or verb == "pin"
        assert verb not in ("copy_in", "record")
    else:
        assert failed.tensor in MODEL
        # Memory for a result is nothing of a file's.
        assert failed.file == (None if (verb, number) == ("allocate", 1) else str(path))
        failed = None
    _settled(device)
    device.fail.clear()
    assert set(_load(path)) == set(MODEL)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 4, -1])
@pytest.mark.parametrize("verb", WORK)
def test_work_fails_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int, mode: Any
) -> None:
    plain = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(plain))
    _load(path)
    number = plain.calls[verb] if number < 0 else number
    device = FakeDevice(mode=mode, fail_later={verb: number})
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises(errors.DeviceError) as caught:
        _load(path)
    assert caught.value.tensor in MODEL
    assert caught.value.file == str(path)
    del caught
    _settled(device)


@pytest.mark.parametrize("number", [1, 3, 20])
def test_a_read_fails(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real, count = PreadReader.land, iter(range(1, 10_000))

    def land(self: Any, block: Any, slot: Any) -> Any:
        if next(count) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, block, slot)

    monkeypatch.setattr(PreadReader, "land", land)
    device = FakeDevice(mode="thread")
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises(errors.ReadError) as caught:
        _load(path)
    assert caught.value.tensor in MODEL
    assert caught.value.file == str(path)
    del caught
    _settled(device)


@pytest.mark.parametrize("engine", ["pinned", "direct"])
def test_a_file_shrinks(path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    real = OpenFile.read
    done = threading.Event()

    def read(*args: Any, **more: Any) -> int:
        if not done.is_set():
            done.set()
            os.truncate(path, path.stat().st_size - 100_000)
        return real(*args, **more)

    monkeypatch.setattr(OpenFile, "read", read)
    device = FakeDevice(mode="mixed")
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises(errors.SourceChangedError) as caught:
        _load(path, engine=engine)
    assert caught.value.file == str(path)
    del caught
    _settled(device)


def test_time_runs_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs keeps its slot; what it holds goes when it ends."""
    real, go = PreadReader.land, threading.Event()

    def land(self: Any, block: Any, slot: Any) -> Any:
        go.wait(30)
        return real(self, block, slot)

    monkeypatch.setattr(PreadReader, "land", land)
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises(errors.LoadTimeoutError) as caught:
        _load(path, timeout=0.2)
    del caught
    assert device.pinned
    go.set()
    end = time.monotonic() + 20
    while device.pinned and time.monotonic() < end:
        time.sleep(0.01)
    while any(t.name == "mfload-reader" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    _settled(device)


class _Stop(BaseException):
    """What Ctrl-C is."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, _Stop])
def test_a_load_is_cancelled(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], mode: Any
) -> None:
    device = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(device))

    def progress(done: int, total: int) -> None:
        raise kind

    with pytest.raises(kind):
        _load(path, progress=progress)
    _settled(device)


def test_memory_for_the_result_names_its_tensor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(fail={"allocate": 1})
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises((errors.MemoryLimitError, errors.DeviceError)) as caught:
        _load(path)
    assert caught.value.tensor in MODEL
    del caught
    _settled(device)


def _opened(path: Path, name: str) -> Any:
    with mfload.open(path, "numpy", options=mfload.Options(threads=1)) as opened:
        return opened.get_tensor(name), opened.get_slice(name)[1:]


WAYS: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "stream": lambda path: dict(
        mfload.stream(path, "numpy", options=mfload.Options(threads=1, max_host_overhead=2 << 20))
    ),
    "open": lambda path: _opened(path, "layer.0.q"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["copy_in", "late copy_in", "allocate"])
def test_each_one_that_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch, way: str, verb: str
) -> None:
    """Each copy at the call or when it runs, and each allocation: it is told, and nothing stays."""
    how = "fail_later" if verb.startswith("late") else "fail"
    verb, load = verb.split()[-1], WAYS[way]
    plain = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(plain))
    load(path)
    assert plain.calls[verb]
    for number in range(1, plain.calls[verb] + 1):
        device = FakeDevice(**{how: {verb: number}})  # type: ignore[arg-type]
        arrays.take(monkeypatch, arrays.Arrays(device))
        with pytest.raises((errors.DeviceError, errors.MemoryLimitError)) as caught:
            load(path)
        assert "told to fail" in str(caught.value)
        assert caught.value.tensor in MODEL
        del caught
        gc.collect()
        assert live_bytes() == 0
        device.assert_clean()


@settings(FEW, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_the_rest_of_a_model_keeps(tmp_path: Path, data: st.DataObject) -> None:
    """When most of it is dropped: the buffers of what is left, and no others."""
    most = 64 << 10
    sizes = data.draw(st.lists(st.integers(1, 3 * most), min_size=4, max_size=30))
    model = {f"w{n:02}": samples.numbers((size,), "u1") for n, size in enumerate(sizes)}
    left = data.draw(st.lists(st.sampled_from(sorted(model)), max_size=3, unique=True))
    path, device = samples.save(tmp_path / "m.safetensors", model), FakeDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "DEVICE_BUFFER", most)
        arrays.take(patch, arrays.Arrays(device))
        found = mfload.load(path, "numpy")
    kept = {name: found[name] for name in left}
    del found
    held = sum(device.memory.values())
    page = 4096  # May come on top, as `layout.BUFFER` says.
    assert held <= sum(max(most, array.nbytes) + page for array in kept.values())
    samples.assert_same(kept, {name: model[name] for name in left})
    del kept
    device.assert_clean()
