"""Loads onto devices: bit for bit in every order that streams allow, within what was allowed."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import serving
from calls import as_options
from devices import arrays
from devices.fake import FakeDevice, FakeEvent, FakeStream
from devices.queues import MODES
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.cuda import memory, numa, staging
from mfload.cuda.engine import DeviceWorker
from mfload.cuda.memory import DeviceBuffer
from mfload.cuda.staging import Kits, PinnedSlot, Ring
from mfload.formats import checkpoint
from mfload.frameworks import base
from mfload.frameworks.base import Pool
from mfload.frameworks.several import SeveralAdapter
from mfload.io import buffers
from mfload.loading import session
from mfload.options import LoadOptions
from mfload.planning import plan as planning
from mfload.planning.request import Request
from mfload.planning.slicing import select

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)


def _load(path: Any, **how: Any) -> dict[str, Any]:
    return mfload.load(path, framework="numpy", **as_options(how))


def _settled(device: FakeDevice) -> None:
    device.assert_clean()
    assert buffers.live_bytes() == 0
    assert memory.live_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["auto", "pinned", "pread", "direct", "gds"])
@pytest.mark.parametrize("allocator", ["auto", "mfload", "framework"])
def test_bit_for_bit(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_slots: None,
    mode: Any,
    engine: Any,
    allocator: Any,
) -> None:
    device = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    found = _load(path, engine=engine, allocator=allocator, threads=3, report=report)
    samples.assert_same(found, MODEL)
    device.assert_clean(result=True)
    assert {engine for _, engine, _ in report.route} == {"pinned"}
    assert report.read_bytes == sum(a.nbytes for a in MODEL.values())
    assert device.nbytes["copy_in"] == report.read_bytes
    if allocator != "framework":
        assert report.device_peak_bytes >= report.result_bytes
    del found
    _settled(device)


@pytest.mark.parametrize("engine", ["auto", "pinned", "direct", "gds", "mmap"])
@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_what_is_not_one_raw_range_lands_through_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_slots: None, engine: Any, allocator: Any
) -> None:
    """Beside tensors that do not, whose slots hold no encoded block."""
    array = np.random.default_rng(0).normal(size=(500, 700))
    forms = {"c": array, "f": np.asfortranarray(array), "b": array.astype(">f8")}
    np.savez(tmp_path / "plain.npz", **forms)
    np.savez_compressed(tmp_path / "packed.npz", **{f"{n}2": each for n, each in forms.items()})
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    files: Any = [tmp_path / "plain.npz", tmp_path / "packed.npz"]
    found = _load(files, engine=engine, allocator=allocator, threads=3, report=report)
    names = ["c", "f", "b", "c2", "f2", "b2"]
    samples.assert_same(found, dict.fromkeys(names, array))
    if engine != "mmap":
        assert any("in host memory" in note for note in report.notes)
    del found
    _settled(device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", [("steps|layer.1", "int8")]])
def test_conversions(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_slots: None,
    mode: Any,
    dtype: Any,
) -> None:
    expected = None
    if isinstance(dtype, str):
        expected = {name: array.copy() for name, array in _load(path, dtype=dtype).items()}
    device = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(device))
    if expected is None:
        with pytest.raises(errors.LossyCastError) as caught:
            _load(path, dtype=dtype)
        assert caught.value.tensor in ("steps", "layer.1.q")
        assert caught.value.file == str(path)
    else:
        samples.assert_same(_load(path, dtype=dtype), expected)
    _settled(device)


def test_every_tensor_lies_on_256_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    found = _load(path)
    assert {a.ctypes.data % 256 for a in found.values() if a.nbytes} == {0}


def test_norms_keep_no_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies below 1 MiB shares no buffer with what is larger, in whatever order they come."""
    model = {f"{n:02}.{kind}": samples.numbers((size,), np.uint8) for n in range(20) for kind, size
             in [("a", 1 << 20), ("norm", 4 << 10), ("b", 3 << 20), ("bias", 100)]}  # fmt: skip
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    found = _load(samples.save(tmp_path / "m.safetensors", model))
    samples.assert_same(found, model)
    small = {name: array for name, array in found.items() if array.nbytes < 1 << 20}
    del found
    assert sum(device.memory.values()) < 20 * (8 << 10)
    del small
    _settled(device)


def test_a_stream_allocates_where_its_consumer_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the consumer let go of may come back only behind its work on that stream."""
    device, here = FakeDevice(), threading.local()
    seen: list[str] = []

    class OnStreams(arrays.Arrays):
        @contextlib.contextmanager
        def on(self, name: str) -> Iterator[None]:
            before, here.stream = getattr(here, "stream", "default"), name
            yield
            here.stream = before

        def follow(self) -> Any:
            return self.on(here.stream)

        def lend(self, requests: Any) -> Any:
            seen.append(getattr(here, "stream", "default"))
            return super().lend(requests)

    parts = [OnStreams(device), OnStreams(device)]
    each = SeveralAdapter(parts, lambda _: 0)
    for adapter in (parts[0], each):
        arrays.take(monkeypatch, adapter)
        options = mfload.Options(allocator="framework", max_host_overhead=2 << 20, threads=1)
        with parts[0].on("side"):
            for _ in mfload.stream(path, "numpy", options=options):
                pass
        assert len(seen) > 2
        assert set(seen) == {"side"}
        seen.clear()
    _settled(device)


class Pooled(arrays.Arrays):
    """Its buffers come from an allocator of its own: one that CUDA need not be asked for.

    Attributes:
        done: What was called for it, and in which of the streams of this thread.
    """

    allocates, alone = True, 1 << 16
    here = threading.local()

    def __init__(self, *devices: Any, **how: Any) -> None:
        super().__init__(*devices, **how)
        self.done: list[tuple[str, str]] = []

    def note(self, what: str) -> None:
        self.done.append((what, getattr(self.here, "stream", "default")))

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.here.stream = getattr(self.here, "stream", "default"), name
        yield
        self.here.stream = before

    def follow(self) -> Any:
        return self.on(getattr(self.here, "stream", "default"))

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        assert not self.devices[0].calls["copy_in"]
        yield
        self.note("settled")

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        def allocate(nbytes: int) -> DeviceBuffer:
            self.note("allocate")
            held = np.full(nbytes + 256, 0xA5, np.uint8)[256:]
            return base.memory_at(held, held.ctypes.data, nbytes, self.devices[number])

        return allocate


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("few", [0, len(MODEL)])
def test_buffers_of_the_framework(
    path: Path, monkeypatch: pytest.MonkeyPatch, few: int, timeout: Any, parts: int
) -> None:
    """On the stream of the caller's thread, and nothing is written before they are settled."""
    monkeypatch.setattr(planning, "FEW", few)
    total = sum(array.nbytes for array in MODEL.values())
    device, report = FakeDevice(total=total // 2), mfload.Report()
    made = [Pooled(device, pool=Pool(2 * total, "")) for _ in range(parts or 1)]
    arrays.take(monkeypatch, SeveralAdapter(made, lambda _: 0) if parts else made[0])
    with made[0].on("side"):
        found = _load(path, timeout=timeout, report=report)
    if parts:  # The stand-in makes a tuple of one itself.
        found = {name: array for name, (array,) in found.items()}
    samples.assert_same(found, MODEL)
    large = [array for array in MODEL.values() if array.nbytes >= Pooled.alone]
    *rest, owner = made  # They share the device.
    count = len(MODEL) if few else len(large) + 1
    assert owner.done == [("allocate", "side")] * count + [("settled", "side")]
    assert all(one.done == [("settled", "side")] for one in rest)
    assert report.device_peak_bytes == memory.live_bytes() == device.calls["allocate"] == 0
    # What mfload allocates itself, CUDA has to have.
    with pytest.raises(errors.MemoryLimitError, match="beside what numpy holds"):
        _load(path, allocator="mfload")
    del found
    _settled(device)


def test_a_url(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no local file goes through page-locked memory."""
    device, report = FakeDevice(), mfload.Report()
    expected = {name: a.copy() for name, a in mfload.load(path, framework="numpy").items()}
    arrays.take(monkeypatch, arrays.Arrays(device))
    with serving.serving({"/m.safetensors": path.read_bytes()}) as served:
        samples.assert_same(_load(served.url("/m.safetensors"), report=report), expected)
        with pytest.raises(errors.UsageError, match="reads local files alone"):
            _load(served.url("/m.safetensors"), engine="gds")
    assert [leg[1] for leg in report.route] == ["pinned"]
    _settled(device)


@st.composite
def _index(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    parts: list[Any] = []
    for length in shape:
        start, stop = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
        parts.append(slice(start, stop, step) if step > 0 else slice(None, None, step))
    return tuple(parts)


@arrays.FEW
@given(st.data())
def test_parts_of_tensors(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Any slice, as many times as one likes, on any of three devices: each byte is read once."""
    kind = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.uint8, np.float64]))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    model = {"w": samples.numbers(shape, kind), "v": samples.numbers((3000,), np.uint8)}
    path = samples.save(tmp_path_factory.mktemp("parts") / "m.safetensors", model)
    mode = data.draw(st.sampled_from(MODES))
    there = [FakeDevice(mode=mode, name=f"fake:{n}", seed=n) for n in range(3)]
    index, sources = checkpoint.read(path)
    wants: list[tuple[Request, Any]] = []
    for name in data.draw(st.lists(st.sampled_from(["w", "w", "v"]), min_size=1, max_size=4)):
        at = data.draw(_index(model[name].shape))
        info = index[name]
        numbers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        request = Request(info, info.dtype, select(info, at), devices=tuple(numbers))
        wants.append((request, model[name][at]))
    options = LoadOptions(threads=data.draw(st.integers(1, 3)))
    report = mfload.Report(stages={})
    loader = session.Loader(index, sources, arrays.Arrays(*there), options)
    found = loader.load([request for request, _ in wants], report=report)
    for (request, expected), tuple_ in zip(wants, found, strict=True):
        assert len(tuple_) == len(request.devices)
        for array in tuple_:
            assert samples.same(array, np.ascontiguousarray(expected).reshape(expected.shape))
    for device in there:
        device.assert_clean(result=True)
    boxes = [request for request, _ in wants if all(a.step == 1 for a in request.selection or ())]
    if len(boxes) == len(wants):
        assert report.read_bytes <= sum(array.nbytes for array in model.values())


def test_replicas_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [FakeDevice(name=f"fake:{n}") for n in range(4)]
    index, sources = checkpoint.read(path)
    requests = [Request(info, info.dtype, devices=(0, 1, 2, 3)) for info in index.tensors.values()]
    report = mfload.Report(stages={})
    loader = session.Loader(index, sources, arrays.Arrays(*there), LoadOptions(threads=4))
    found = loader.load(requests, report=report)
    for request, replicas in zip(requests, found, strict=True):
        assert all(samples.same(each, MODEL[request.info.name]) for each in replicas)
    total = sum(array.nbytes for array in MODEL.values())
    assert report.read_bytes == total
    assert [device.nbytes["copy_in"] for device in there] == [total] * 4


def test_each_device_has_readers_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch, small_slots: None
) -> None:
    """Tensors on two devices; each is read by threads on the cores next to its device."""
    there = [FakeDevice(name=f"fake:{n}", pci=f"0000:0{n}:00.0") for n in range(2)]
    cores = sorted(os.sched_getaffinity(0))
    near = {f"0000:0{n}:00.0": frozenset([cores[n % len(cores)]]) for n in range(2)}
    monkeypatch.setattr(numa, "cpus", near.__getitem__)
    seen: dict[str, set[frozenset[int]]] = {}
    real = Ring.take

    def take(ring: Any) -> Any:
        slot = real(ring)
        where = frozenset(os.sched_getaffinity(0))
        seen.setdefault(slot._device.name, set()).add(where)
        return slot

    monkeypatch.setattr(Ring, "take", take)
    index, sources = checkpoint.read(path)
    infos = list(index.tensors.values())
    requests = [Request(info, info.dtype, devices=(n % 2,)) for n, info in enumerate(infos)]
    loader = session.Loader(index, sources, arrays.Arrays(*there), LoadOptions(threads=2))
    found = loader.load(requests)
    assert all(samples.same(one, MODEL[i.name]) for (one,), i in zip(found, infos, strict=True))
    assert seen == {f"fake:{n}": {near[f"0000:0{n}:00.0"]} for n in range(2)}
    assert frozenset(os.sched_getaffinity(0)) == frozenset(cores)


def test_some_land_on_the_host(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device, on_host=["F32", "I64"]))
    report = mfload.Report()
    samples.assert_same(_load(path, report=report), MODEL)
    device.assert_clean()
    for engine in ("mmap",):
        samples.assert_same(_load(path, engine=engine), MODEL)
        assert not device.memory


def test_what_is_copied_on_the_device_comes_in_waves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    made = arrays.Arrays(device, copies=["F32", "BF16"])
    arrays.take(monkeypatch, made)
    largest = max(MODEL[n].nbytes for n in ("embed", "wide", "layer.0.q"))
    with pytest.raises(errors.MemoryLimitError, match="max_device_overhead") as caught:
        _load(path, max_device_overhead=largest - 1)
    assert caught.value.tensor == "wide"
    report = mfload.Report()
    samples.assert_same(_load(path, max_device_overhead=largest, report=report), MODEL)
    assert any("batches" in note for note in report.notes)
    plain = sum(a.nbytes for a in MODEL.values() if a.dtype.name not in ("float32", "bfloat16"))
    assert report.device_peak_bytes <= plain + largest + 4096


@pytest.mark.parametrize("dtype", [None, "float32", "float64"])
def test_overheads_are_held_and_stated(
    path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    limits = {"max_host_overhead": 3 << 20, "max_device_overhead": 1 << 20}
    report = mfload.Report()
    stated = mfload.plan(path, dtype=dtype, **as_options({"threads": 2, **limits}))
    found = _load(path, dtype=dtype, threads=2, report=report, **limits)
    assert stated.overhead_bytes <= limits["max_host_overhead"]
    assert report.peak_bytes <= stated.overhead_bytes
    held = sum(array.nbytes for array in found.values())
    padding = 256 * len(found)
    assert stated.device_overhead_bytes <= limits["max_device_overhead"]
    assert report.device_peak_bytes <= held + padding + stated.device_overhead_bytes
    assert stated.as_dict()["device_bytes"] >= held
    assert "devices" in dict(stated.rows())
    device.assert_clean(result=True)


def test_overheads_that_are_too_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    with pytest.raises(errors.UsageError, match="max_host_overhead") as caught:
        _load(path, dtype="float16", max_host_overhead=1000)
    least = int(str(caught.value.expected).split()[0])
    samples.assert_same(
        _load(path, dtype="float16", max_host_overhead=least), _load(path, dtype="float16")
    )
    _settled(device)


def test_a_load_that_does_not_fit_never_begins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(array.nbytes for array in MODEL.values())
    device = FakeDevice(total=total // 2)
    pool = Pool(None, "set SOME_VARIABLE=false")
    arrays.take(monkeypatch, arrays.Arrays(device, pool=pool))
    with pytest.raises(errors.MemoryLimitError, match=r"fake:0.*SOME_VARIABLE=false") as caught:
        _load(path)
    assert str(total // 2) in str(caught.value.found)
    assert int(str(caught.value.expected).split()[0]) >= total
    assert not device.calls["allocate"]
    for kind, allocator in [(arrays.Arrays, "framework"), (Pooled, "framework"), (Pooled, "auto")]:
        arrays.take(monkeypatch, kind(device, pool=Pool(total - 1, "give it more")))
        with pytest.raises(errors.MemoryLimitError, match=r"memory that numpy has.*give it more"):
            _load(path, allocator=allocator)
    _settled(device)


def test_checksums_are_compared_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    mfload.verify(path, mode="write")
    manifest = path.with_name("model.safetensors.checksums.json")
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    samples.assert_same(_load(path, verify=manifest, engine="pinned"), MODEL)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    status = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(errors.ChecksumError):
        _load(path, verify=manifest)
    _settled(device)


def test_opened_checkpoints(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    arrays.take(monkeypatch, arrays.Arrays(device))
    with mfload.open(path) as opened:
        assert samples.same(opened.get_tensor("embed"), MODEL["embed"])
        part = opened.get_slice("embed")[3:500, ::-2]
        assert samples.same(part, np.ascontiguousarray(MODEL["embed"][3:500, ::-2]))
        part = opened.get_slice("embed")[::-3, [5, 1, 1, 90]]
        assert samples.same(part, np.ascontiguousarray(MODEL["embed"][::-3, [5, 1, 1, 90]]))
    del part
    _settled(device)


def test_threads_load_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(mode="thread")
    arrays.take(monkeypatch, arrays.Arrays(device))
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                samples.assert_same(_load(path), MODEL)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    _settled(device)


def test_what_processes_exchange_is_reported_as_copied(path: Path) -> None:
    """It is put together on the host, and copied onto the device from there."""

    class OnDevice(arrays.Arrays):
        on_host = False

    def exchange(plan: Any, memory: list[Any], *_: Any) -> session.Filled:
        assert not plan.device_bytes
        for request, buffer, at in plan.places:
            stored = np.ascontiguousarray(MODEL[request.info.name])
            memory[buffer][at : at + request.nbytes] = stored.reshape(-1).view(np.uint8)
        return [plan], (), 5

    index, sources = checkpoint.read(path)
    requests = [Request(info, info.dtype) for info in index.tensors.values()]
    for fill, share in ((exchange, 0), (None, 1)):
        device = FakeDevice()
        loader = session.Loader(
            index, sources, OnDevice(device), LoadOptions(by_host=fill is not None)
        )
        report = mfload.Report()
        found = loader.load(requests, report=report, fill=fill)
        names = [request.info.name for request in requests]
        samples.assert_same(dict(zip(names, found, strict=True)), MODEL)
        assert report.aliased_bytes == share * report.result_bytes
        assert report.exchanged_bytes == (5 if fill else 0)
        del found
        device.assert_clean()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("where", "late"), [(FakeStream, False), (FakeStream, True), (Ring, True), (PinnedSlot, True)]
)
def test_an_interrupt_of_the_end_gives_back_all_page_locks(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_slots: None,
    where: Any,
    late: bool,
    kept: bool,
) -> None:
    """That of a load that fails, or of one of which nothing is kept."""
    if not kept and where is Ring:
        pytest.skip("kits close their slots themselves")
    device = FakeDevice(mode="lazy", fail={"record": 3} if kept else {})
    monkeypatch.setattr(staging, "KEPT", 1 << 30 if kept else 0)
    arrays.take(monkeypatch, arrays.Arrays(device))
    real, calls = where.close, itertools.count()

    def close(self: Any) -> None:
        first = next(calls) == 0
        if late or not first:
            real(self)
        if first:
            raise KeyboardInterrupt

    monkeypatch.setattr(where, "close", close)
    with pytest.raises(KeyboardInterrupt):
        _load(path, threads=1)
    assert device.pinned == device.streams == 0
    _settled(device)


class TestTheSuiteSees:
    """Bugs planted in the engine: each must be caught."""

    def _caught(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "SLOT", 64 << 10)
        caught = 0
        for mode in MODES:
            device = FakeDevice(mode=mode)
            arrays.take(monkeypatch, arrays.Arrays(device))
            found = _load(path, threads=2)
            try:
                samples.assert_same(found, MODEL)
                device.assert_clean(result=True)
            except AssertionError:
                caught += 1
            del found
            device.misuse.clear()
        assert caught

    def test_a_slot_that_is_taken_too_early(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeEvent, "done", lambda self: True)
        self._caught(path, monkeypatch)

    def test_slots_that_go_while_copies_are_under_way(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def drain(self: Any) -> None:
            for _, _, block, _ in self._busy:
                self._share.done(block)

        def close(self: Any) -> None:
            while self._kit.slots:
                self._kit.slots.pop().close()
            self._readers.close()
            self._kit.close()

        monkeypatch.setattr(Kits, "give", lambda *_: None)
        monkeypatch.setattr(Ring, "drain", drain)
        monkeypatch.setattr(DeviceWorker, "close", close)
        self._caught(path, monkeypatch)
