"""Reads through cuFile, on a kvikio that reads into a fake device's memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices.fake import FakeDevice
from devices.stub_kvikio import Kvikio
from hypothesis import HealthCheck, given, settings, strategies as st

from mfload import errors
from mfload.cuda import cufile
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile

NBYTES = 5 * 4096 + 321


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice((2, 0), "cuda:0")
    yield made
    made.assert_clean()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w"
    path.write_bytes(np.random.default_rng(0).bytes(NBYTES))
    return path


def block(offset: int, nbytes: int) -> Block:
    return Block(0, offset, nbytes, ())


def out_of(device: FakeDevice, buffer: DeviceBuffer, start: int, nbytes: int) -> bytes:
    found = np.empty(nbytes, np.uint8)
    stream = device.stream()
    stream.copy_out(found, buffer, start)
    stream.synchronize()
    stream.close()
    return found.tobytes()


def landed(device: FakeDevice, path: Path, *blocks: Block, nbytes: int = NBYTES) -> list[bytes]:
    slot = cufile.CufileSlot(device, nbytes)
    try:
        reader = cufile.CufileReader(LocalFile(path), device)
        try:
            found = []
            for each in blocks:
                start = reader.land(each, slot.buffer)
                found.append(out_of(device, slot.buffer, start, each.nbytes))
            return found
        finally:
            reader.close()
    finally:
        slot.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    start=st.integers(0, NBYTES),
    stop=st.integers(0, NBYTES),
    short=st.sampled_from([None, 4096, 5000]),
)
def test_any_part_of_a_file(
    kvikio: Kvikio, device: FakeDevice, file: Path, start: int, stop: int, short: int | None
) -> None:
    start, stop = min(start, stop), max(start, stop)
    kvikio.short = short
    (found,) = landed(device, file, block(start, stop - start))
    assert found == file.read_bytes()[start:stop]


def test_one_read_is_one_read(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    landed(device, file, block(5000, 9000), block(4096, 4096), block(NBYTES, 0))
    assert [(size, offset) for size, offset, _ in kvikio.reads] == [(12288, 4096), (4096, 4096)]


@pytest.mark.parametrize("configured", [True, False])
def test_reads_wait_for_no_work_of_the_default_stream(
    kvikio: Kvikio,
    device: FakeDevice,
    file: Path,
    configured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a configuration, kvikio has no other way that passes the host by."""
    if not configured:
        monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/none")
    data = file.read_bytes()
    assert landed(device, file, block(0, 9000), block(4096, 4096)) == [data[:9000], data[4096:8192]]
    assert len(set(kvikio.streams)) == 1
    assert all(kvikio.streams) is configured
    assert device.streams == 0


def test_short_reads_are_taken_up_again(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    kvikio.short = 4096 + 8
    assert landed(device, file, block(10, 12000)) == [file.read_bytes()[10:12010]]
    # Each begins on a whole unit, so what came beyond one is read again.
    assert [offset for _, offset, _ in kvikio.reads] == [0, 4096, 8192]


def test_closing_twice(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    slot = cufile.CufileSlot(device, 4096)
    reader = cufile.CufileReader(LocalFile(file), device)
    reader.close()
    reader.close()
    slot.close()


def test_a_file_that_shrank(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    kvikio.before_read = lambda: os.truncate(file, 8192)
    with pytest.raises(errors.SourceChangedError) as caught:
        landed(device, file, block(4096, 3 * 4096))
    assert (caught.value.file, caught.value.found) == (str(file), "8192 bytes")


@pytest.mark.parametrize(("stalls", "short", "found"), [(0, 4096, 0), (1, 4096, 4096), (9, 99, 99)])
def test_reads_that_bring_nothing_new(
    kvikio: Kvikio, device: FakeDevice, file: Path, stalls: int, short: int, found: int
) -> None:
    kvikio.stalls, kvikio.short = stalls, short
    with pytest.raises(errors.ReadError, match="no further") as caught:
        landed(device, file, block(0, 3 * 4096))
    assert caught.value.found == f"{found} bytes"
    assert len(kvikio.reads) <= 2


def test_another_file_at_the_path(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    source = LocalFile(file)
    before = file.read_bytes()
    other = file.with_name("other")
    other.write_bytes(bytes(NBYTES))
    slot = cufile.CufileSlot(device, NBYTES)
    # Between the look at it and cuFile's own: what is read is what was checked.
    kvikio.before_open = lambda: os.replace(other, file)
    reader = cufile.CufileReader(source, device)
    start = reader.land(block(0, 500), slot.buffer)
    assert out_of(device, slot.buffer, start, 500) == before[:500]
    reader.close()
    with pytest.raises(errors.SourceChangedError):
        cufile.CufileReader(source, device)
    slot.close()
    del slot, reader


def test_paths_that_are_no_text(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    odd = os.fsencode(file.parent) + b"/\xff"
    os.rename(file, odd)
    path = Path(os.fsdecode(odd))
    assert landed(device, path, block(0, 9)) == [path.read_bytes()[:9]]


def test_a_thread_of_its_own_has_a_device(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(landed(device, file, block(0, 99))))
    thread.start()
    thread.join()
    assert found == [file.read_bytes()[:99]]


@pytest.mark.parametrize(
    ("says", "what"),
    [
        ("cuFile error at: x.cpp:9: file descriptor is not registered", "5027"),
        ("cuFile error at: x.cpp:9: internal error", "mount a volume"),
        ("cuFile error at: x.cpp:9: GPUDirect Storage not supported on current file", "5008"),
        ("cuFile error at: x.cpp:9: access beyond maximum pinned size", "5016"),
        ("cuFile error at: x.cpp:9: nvidia-fs driver is not loaded. Set allow", "5001"),
        ("error 5030", "5030"),
        ("cuFile error at: x.cpp:9: Input/output error", "Input/output"),
        ("cuFile error at: x.cpp:9: batch internal error - retry later", "batch"),
        ("CUDA error at: x.cpp:9: CUDA_ERROR_ILLEGAL_ADDRESS(no)", "ILLEGAL"),
        ("", "RuntimeError"),
    ],
)
@pytest.mark.parametrize("verb", ["open", "read"])
def test_errors_say_what_to_do(
    kvikio: Kvikio, device: FakeDevice, file: Path, verb: str, says: str, what: str
) -> None:
    kvikio.fails[verb] = RuntimeError(says)
    with pytest.raises(errors.DeviceError, match=what) as caught:
        landed(device, file, block(0, 9))
    assert verb in caught.value.message


def test_memory_that_can_not_be_registered(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    kvikio.fails["register"] = RuntimeError(
        "cuFile error at: x:1: access beyond maximum pinned size"
    )
    with pytest.raises(errors.DeviceError, match="processes on one GPU"):
        cufile.CufileSlot(device, 4096)
    assert kvikio.reads == []


def test_a_failed_end_is_told_and_no_error(
    kvikio: Kvikio, device: FakeDevice, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kvikio.fails["close"] = RuntimeError("gone")
    assert landed(device, file, block(0, 9)) == [file.read_bytes()[:9]]
    assert "could not be closed" in caplog.text
    kvikio.fails = {"deregister": RuntimeError("gone")}
    landed(device, file, block(0, 9))
    assert "still registered" in caplog.text
    kvikio.registered.clear()


def test_devices_that_refuse(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    for make in (
        lambda: cufile.CufileReader(LocalFile(file), device),
        lambda: cufile.CufileSlot(device, 4096),
    ):
        device.fail["current"] = device.calls["current"] + 1
        with pytest.raises(errors.DeviceError, match="current"):
            make()


def test_no_reads_by_kvikio_itself(kvikio: Kvikio, device: FakeDevice, file: Path) -> None:
    kvikio.compat = True
    with pytest.raises(errors.DeviceError, match="KVIKIO_COMPAT_MODE"):
        cufile.CufileReader(LocalFile(file), device)


def test_no_kvikio(
    kvikio: Kvikio, device: FakeDevice, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(errors.FrameworkMissingError, match="pip install"):
        cufile.CufileReader(LocalFile(file), device)


@pytest.mark.parametrize("place", [(1, 0), (2, 1)])
def test_no_such_device(kvikio: Kvikio, file: Path, place: tuple[int, int]) -> None:
    with pytest.raises(errors.DeviceError):
        cufile.CufileReader(LocalFile(file), FakeDevice(place, "fake"))


def test_nothing_spins_without_a_driver(tmp_path: Path, file: Path) -> None:
    """cuFile without libcuda spins for ever, in C: so it is not even imported."""
    (tmp_path / "kvikio").mkdir()
    for name in ("__init__", "defaults"):
        (tmp_path / f"kvikio/{name}.py").write_text("while True:\n    pass\n")
    code = f"""
        import ctypes, sys
        real = ctypes.CDLL
        def none(name, *rest, **more):
            if name == "libcuda.so.1":
                raise OSError("libcuda.so.1: cannot open shared object file")
            return real(name, *rest, **more)
        ctypes.CDLL = none
        from mfload import errors
        from mfload.cuda import cufile, gds
        from mfload.sources.local import LocalFile
        class Device:
            name, place, pci = "cuda:0", (2, 0), None
        path, device = {os.fspath(file)!r}, Device()
        for call in (
            lambda: cufile.CufileReader(LocalFile(path), device),
            lambda: cufile.CufileSlot(device, 4096),
        ):
            try:
                call()
            except errors.DeviceError as error:
                assert "driver" in str(error), error
            else:
                raise AssertionError("it went through")
        assert not gds.verdict(path, 0, timeout=60).real
        gds.main(path, "0")
        assert "kvikio" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "driver" in done.stdout
