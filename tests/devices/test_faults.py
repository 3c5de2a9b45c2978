"""What fails on the way to a device: the error names the tensor, and nothing stays behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import samples
from calls import as_options
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES

import mfload
from mfload import errors
from mfload.cuda import staging
from mfload.cuda.memory import live_bytes
from mfload.io.pread import PreadReader
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
