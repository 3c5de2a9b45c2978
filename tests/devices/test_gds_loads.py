"""Loads past host memory: the route takes it when it is real and cold, and says so if not."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from calls import as_options
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES
from devices.stub_kvikio import Kvikio
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import dtypes, errors
from mfload.cuda import discovery, gds, memory, staging
from mfload.cuda.copies import DeviceCopier
from mfload.cuda.gds import Verdict
from mfload.formats import checkpoint
from mfload.io import buffers, probes
from mfload.io.subprocess_probe import Probed
from mfload.loading import session
from mfload.options import LoadOptions
from mfload.planning.blocks import Block, Copy, Segment
from mfload.planning.request import Request
from mfload.planning.slicing import select
from mfload.runtime import Deadline

MODEL = samples.model()
VERDICT = gds.verdict


@pytest.fixture(autouse=True)
def says(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of the look whether it is real, which says yes."""
    asked: list[tuple[str, Any]] = []

    def verdict(path: Any, number: int, *, timeout: float | None, cold: int | None) -> Verdict:
        asked.append((number, cold))
        return Verdict(True, "seen to be real", works=True)

    monkeypatch.setattr(gds, "verdict", verdict)
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    return asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    found = mfload.load(path, framework="numpy", report=report, **as_options({"threads": 2, **how}))
    return found, report


@pytest.mark.parametrize("mode", MODES)
def test_bit_for_bit(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, mode: Any
) -> None:
    device = FakeDevice((2, 0), "cuda:0", mode=mode)
    found, report = _load(path, device, monkeypatch, engine="gds")
    samples.assert_same(found, MODEL)
    assert report.route == ((str(path), "gds", "small read; seen to be real"),)
    assert kvikio.reads
    assert not device.calls["copy_in"]
    assert report.peak_bytes == 0
    assert not report.notes
    del found
    device.assert_clean()


def test_loads_and_streams_register_memory_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    device = FakeDevice((2, 0), "cuda:0")
    registered: list[int] = []
    real = kvikio.memory_register
    monkeypatch.setattr(
        kvikio, "memory_register", lambda buf: registered.append(1) or real(buf), raising=False
    )
    for _ in range(3):
        found, _ = _load(path, device, monkeypatch, engine="gds")
        samples.assert_same(found, MODEL)
        del found
    options = mfload.Options(engine="gds", threads=2)
    samples.assert_same(dict(mfload.stream(path, "numpy", options=options)), MODEL)
    assert 0 < len(registered) <= 2 * staging.DEPTH
    assert kvikio.registered
    gc.collect()
    device.assert_clean()
    assert not kvikio.registered


def test_what_the_device_can_not_do_goes_by_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    device = FakeDevice((2, 0), "cuda:0")
    with np.errstate(over="ignore"):
        expected = {"embed": MODEL["embed"].astype("float16"), "odd": MODEL["odd"]}
    found, _ = _load(
        path, device, monkeypatch, engine="gds", dtype={"embed": "float16"}, names=["embed", "odd"]
    )
    samples.assert_same(found, expected)
    assert device.calls["copy_in"]
    assert device.calls["copy_within"]


@pytest.mark.parametrize("verb", ["open", "read", "register"])
def test_falling_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, verb: str
) -> None:
    kvikio.fails[verb] = RuntimeError("cuFile error 5030")
    device = FakeDevice((2, 0), "cuda:0")
    found, report = _load(path, device, monkeypatch, engine="gds")
    samples.assert_same(found, MODEL)
    assert report.notes
    start = f"{path}: fell back from gds to pinned: cuFile could not {verb}"
    assert all(note.startswith(start) for note in report.notes)
    del found
    device.assert_clean()


def test_falling_back_in_the_middle(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    def before() -> None:
        if len(kvikio.reads) == 5:
            kvikio.fails["read"] = RuntimeError("cuFile gave up")

    kvikio.before_read = before
    device = FakeDevice((2, 0), "cuda:0", mode="thread")
    found, report = _load(path, device, monkeypatch, engine="gds")
    samples.assert_same(found, MODEL)
    assert any("fell back from gds to pinned" in note for note in report.notes)
    assert device.calls["copy_in"]
    assert device.calls["copy_within"]
    del found
    device.assert_clean()


def test_a_copy_that_fails_is_no_reason_to_fall_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    device = FakeDevice((2, 0), "cuda:0", fail_later={"copy_within": 2})
    with pytest.raises(errors.DeviceError) as caught:
        _load(path, device, monkeypatch, engine="gds")
    assert caught.value.tensor in MODEL
    del caught
    device.assert_clean()


class TestRoute:
    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mfload.io.route.SMALL", 0)

    def _cached(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        monkeypatch.setattr(probes, "cached_share", lambda *_: share)

    def test_cold(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, says: Any
    ) -> None:
        self._cached(monkeypatch, 0.1)
        device = FakeDevice((2, 0), "cuda:0")
        _, report = _load(path, device, monkeypatch)
        assert report.route[0][1:] == ("gds", "10% in the page cache; seen to be real")
        assert says == [(0, sum(a.nbytes for a in MODEL.values()))]

    def test_warm(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, says: Any
    ) -> None:
        self._cached(monkeypatch, 0.9)
        device = FakeDevice((2, 0), "cuda:0")
        _, report = _load(path, device, monkeypatch)
        assert report.route[0][1:] == ("pinned", "buffered: 90% in the page cache")
        assert not says
        assert not kvikio.reads

    def test_not_real(self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio) -> None:
        self._cached(monkeypatch, 0.0)
        monkeypatch.setattr(gds, "verdict", lambda *_, **__: Verdict(False, "no nvidia-fs"))
        device = FakeDevice((2, 0), "cuda:0")
        for engine, said in (("auto", "no gds: no nvidia-fs"), ("gds", "gds asked for, but no n")):
            found, report = _load(path, device, monkeypatch, engine=engine)
            samples.assert_same(found, MODEL)
            ((_, took, why),) = report.route
            assert took == "pinned"
            assert why.startswith("buffered: 0% in the page cache, kept there: at most a quarter")
            assert said in why
        assert not kvikio.reads

    def test_somebody_sees_the_bytes(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
    ) -> None:
        mfload.verify(path, mode="write")
        device = FakeDevice((2, 0), "cuda:0")
        manifest = path.with_name("model.safetensors.checksums.json")
        found, report = _load(path, device, monkeypatch, engine="gds", verify=manifest)
        samples.assert_same(found, MODEL)
        assert report.route[0][1] == "pinned"
        assert "verify=" in report.route[0][2]

    @pytest.mark.parametrize("engine", ["pinned", "gds"])
    def test_nothing_lands_on_a_device(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
    ) -> None:
        self._cached(monkeypatch, 1.0)
        report = mfload.Report()
        found = mfload.load(
            path, framework="numpy", report=report, options=mfload.Options(engine=engine)
        )
        samples.assert_same(found, MODEL)
        assert report.route[0][1] == "pread"
        assert report.route[0][2].startswith(f"{engine} asked for, and nothing lands on a device")


def test_the_overhead_holds_the_slots(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    monkeypatch.setattr(staging, "SLOT", 8 << 20)
    device = FakeDevice((2, 0), "cuda:0")
    arrays.take(monkeypatch, arrays.Arrays(device))
    stated = mfload.plan(
        path, options=mfload.Options(engine="gds", threads=2, max_device_overhead=1 << 20)
    )
    found, report = _load(path, device, monkeypatch, engine="gds", max_device_overhead=1 << 20)
    samples.assert_same(found, MODEL)
    assert 0 < stated.device_overhead_bytes <= 1 << 20
    held = sum(a.nbytes for a in MODEL.values()) + 256 * len(MODEL)
    assert report.device_peak_bytes <= held + stated.device_overhead_bytes


@st.composite
def _index(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    parts: list[Any] = []
    for length in shape:
        start, stop = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        step = draw(st.sampled_from([1, 1, 1, 1, 1, 2, -1]))
        parts.append(slice(start, stop, step) if step > 0 else slice(None, None, step))
    return tuple(parts)


FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


@settings(arrays.FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_parts_of_tensors(
    tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, data: st.DataObject
) -> None:
    """Any slice in any dtype, on any of three devices, wherever its block landed."""
    monkeypatch.setattr(discovery, "count", lambda: 3)
    kind = data.draw(st.sampled_from([*FLOATS.values()]))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    # No NaNs: conversions may give them other bits.
    whole = np.random.default_rng(0).standard_normal(shape).astype(kind)
    model = {"w": whole, "v": samples.numbers((150_000,), np.uint8)}
    path = samples.save(tmp_path_factory.mktemp("parts") / "m.safetensors", model)
    mode = data.draw(st.sampled_from(MODES))
    there = [FakeDevice((2, n), f"cuda:{n}", mode=mode, seed=n) for n in range(3)]
    index, sources = checkpoint.read(path)
    wants: list[tuple[Request, Any]] = []
    for name in data.draw(st.lists(st.sampled_from(["w", "w", "w", "v"]), min_size=1, max_size=4)):
        at = data.draw(_index(model[name].shape))
        expected, dtype = model[name][at], index[name].dtype
        if name == "w":
            dtype = dtypes.lookup(data.draw(st.sampled_from([*FLOATS])))
            expected = expected.astype(dtype.numpy)
        numbers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        selection = select(index[name], at)
        request = Request(index[name], dtype, selection, devices=tuple(numbers))
        wants.append((request, expected))
    how = LoadOptions(engine="gds", threads=data.draw(st.integers(1, 3)))
    report = mfload.Report(stages={})
    loader = session.Loader(index, sources, arrays.Arrays(*there), how)
    reads = len(kvikio.reads)
    found = loader.load([request for request, _ in wants], report=report)
    for (request, expected), tuple_ in zip(wants, found, strict=True):
        assert len(tuple_) == len(request.devices)
        for array in tuple_:
            assert samples.same(array, np.ascontiguousarray(expected).reshape(expected.shape))
    for device in there:
        device.assert_clean(result=True)
    by_host = any(device.calls["copy_in"] for device in there)
    past = len(kvikio.reads) > reads
    assert past or by_host or not report.read_bytes
    # What is copied as it lies, or with a stride, never sees the host.
    boxes = all(a.step == 1 for request, _ in wants for a in (request.selection or ())[1:])
    forward = all(a.step > 0 for request, _ in wants for a in (request.selection or ()))
    same = all(request.dtype is request.info.dtype for request, _ in wants)
    if same and boxes and forward and len(shape) < 3:
        assert not by_host


@pytest.mark.parametrize("there", [0, 1])
def test_what_begins_within_its_segment(there: int) -> None:
    """Plans have it for steps backwards alone; whoever places has no such rule."""
    devices = [FakeDevice((2, n), f"cuda:{n}") for n in range(2)]
    landed, target = devices[0].allocate(4096), devices[there].allocate(4096)
    bytes_: Any = (ctypes.c_uint8 * 4096).from_address(landed.address)
    given = np.frombuffer(bytes_, np.uint8)
    given[:] = samples.numbers((4096,), np.uint8)
    copy = Copy((5, 6), (20, 1), 7, np.dtype("uint8"), np.dtype("uint8"))
    block = Block(0, 1000, 500, (Segment(1100, 200, 0, 512, copy),))
    copier = DeviceCopier([target], streams := {})
    for event in copier.copy(block, landed, 300):
        event.wait()
    first = 300 + 100 + 7
    expected = np.stack([given[first + 20 * n :][:6] for n in range(5)])
    found: Any = (ctypes.c_uint8 * expected.nbytes).from_address(target.address + 512)
    assert bytes(found) == expected.tobytes()
    for stream in streams.values():
        stream.close()
    del event, landed, target, copier, stream, streams
    for device in devices:
        device.assert_clean()


def _sharded(folder: Path) -> Path:
    folder.mkdir()
    for n, name in enumerate(("embed", "wide", "layer.0.q")):
        samples.save(folder / f"model-{n}.safetensors", {name: MODEL[name]})
    return folder


@pytest.mark.parametrize("verb", ["open", "read"])
def test_a_source_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, verb: str
) -> None:
    """Three files of many blocks and one reader with two slots, which has them back each time."""
    tried: list[str] = []
    setattr(kvikio, f"before_{verb}", lambda: tried.append(verb))
    kvikio.fails[verb] = RuntimeError("cuFile error 5030")
    path = _sharded(tmp_path / "model")
    device = FakeDevice((2, 0), "cuda:0")
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    found = mfload.load(
        path, framework="numpy", report=report, options=mfload.Options(engine="gds", threads=1)
    )
    samples.assert_same(found, {name: MODEL[name] for name in found})
    assert len(tried) == 3
    assert len([note for note in report.notes if "fell back" in note]) == 3
    assert device.calls["copy_in"] > 3
    del found
    device.assert_clean()


def test_an_earlier_copy_that_failed_is_no_reason_to_fall_back(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvikio: Kvikio,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It comes up when the next block wants a slot; the file of that one is not to blame."""
    caplog.set_level(logging.WARNING, "mfload")
    for number in (1, 2, 5):
        device = FakeDevice((2, 0), "cuda:0", fail_later={"copy_within": number})
        with pytest.raises(errors.DeviceError, match="told to fail late"):
            _load(path, device, monkeypatch, engine="gds")
        _settled(device)
    assert "fell back" not in caplog.text


def _settled(device: FakeDevice) -> None:
    gc.collect()
    device.assert_clean()
    assert memory.live_bytes() == 0
    assert buffers.live_bytes() == 0
    assert not [t for t in threading.enumerate() if t.name == "mfload-reader"]


@pytest.mark.parametrize("mode", MODES)
def test_a_file_shrinks(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvikio: Kvikio,
    caplog: pytest.LogCaptureFixture,
    mode: Any,
) -> None:
    """That is no reason to read it another way."""
    caplog.set_level(logging.WARNING, "mfload")

    def before() -> None:
        if len(kvikio.reads) == 3:
            os.truncate(path, 100_000)

    kvikio.before_read = before
    device = FakeDevice((2, 0), "cuda:0", mode=mode)
    with pytest.raises(errors.SourceChangedError) as caught:
        _load(path, device, monkeypatch, engine="gds")
    assert caught.value.file == str(path)
    assert not device.calls["copy_in"]
    assert "fell back" not in caplog.text
    del caught
    _settled(device)


@pytest.mark.parametrize("mode", MODES)
def test_a_load_is_cancelled(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, mode: Any
) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    device = FakeDevice((2, 0), "cuda:0", mode=mode)
    with pytest.raises(KeyboardInterrupt):
        _load(path, device, monkeypatch, engine="gds", progress=progress)
    assert kvikio.reads
    _settled(device)


def test_time_runs_out(path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio) -> None:
    """A read that hangs keeps its slot, registered; what it holds goes when it ends."""
    go = threading.Event()
    kvikio.before_read = lambda: go.wait(60)
    device = FakeDevice((2, 0), "cuda:0")
    try:
        with pytest.raises(errors.LoadTimeoutError) as caught:
            _load(path, device, monkeypatch, engine="gds", timeout=0.3)
        del caught
        assert kvikio.registered
    finally:
        go.set()
    end = time.monotonic() + 60
    while any(t.name == "mfload-reader" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not kvikio.registered
    _settled(device)


class TestLooks:
    """A look whether cuFile is real may hang: the load must still come."""

    @pytest.fixture
    def given(
        self, monkeypatch: pytest.MonkeyPatch, says: Any, kvikio: Kvikio, tmp_path: Path
    ) -> Any:
        """What each look was given, in seconds; all of them hang."""
        given: list[float] = []

        def ask(*_: str, timeout: float, environment: Any) -> Probed:
            given.append(timeout)
            return Probed(None, "no answer")

        def verdict(*args: Any, **how: Any) -> Verdict:
            return VERDICT(*args, **how, root=tmp_path)

        monkeypatch.setattr(gds, "ask", ask)
        monkeypatch.setattr(gds, "verdict", verdict)
        monkeypatch.setattr(gds, "ruled_out", lambda _: iter(()))
        monkeypatch.setattr("mfload.cuda.cufile.installed", lambda: True)
        gds._known.clear()
        yield given
        gds._known.clear()

    def test_it_leaves_time_for_the_load(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[float]
    ) -> None:
        path = _sharded(tmp_path / "model")
        device = FakeDevice((2, 0), "cuda:0")
        for _ in range(2):
            found, report = _load(path, device, monkeypatch, engine="gds", timeout=60)
            assert {leg[1] for leg in report.route} == {"pinned"}
            assert all("no answer" in leg[2] for leg in report.route)
            del found
        # Once for three files and two loads.
        assert len(given) == 1
        assert 10 < given[0] <= 15
        _load(path, device, monkeypatch, engine="gds", timeout=300)
        assert len(given) == 1
        _load(path, device, monkeypatch, engine="gds")
        assert len(given) == 1

    def test_with_no_bound_it_has_its_own(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, given: list[float]
    ) -> None:
        for timeout in (None, 3600):
            gds._known.clear()
            given.clear()
            device = FakeDevice((2, 0), "cuda:0")
            _load(path, device, monkeypatch, engine="gds", timeout=timeout)
            assert len(given) == 1
            assert 19 < given[0] <= gds.TIMEOUT

    @pytest.mark.parametrize("seconds", [1e-6, 1.0, 1.9])
    def test_too_little_time(self, path: Path, given: list[float], seconds: float) -> None:
        devices = [FakeDevice((2, 0), "cuda:0")]
        real, why = gds.check(devices, Deadline(seconds), None, str(path), None)
        assert (real, "too little time" in why) == (False, True)
        assert given == []
