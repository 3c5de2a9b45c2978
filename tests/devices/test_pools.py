"""Several devices at once: who reads what, in which order, and in how much memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import given, strategies as st

import mfload
from mfload.cuda import engine, staging
from mfload.formats import checkpoint
from mfload.loading import session
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.planning.slicing import select


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of those that were given a block, one each."""
    made: list[int] = []
    real = engine.DeviceWorker.fill

    def fill(self: Any, block: Any) -> None:
        if not hasattr(self, "seen"):
            self.seen = True
            made.append(threading.get_ident())
        real(self, block)

    monkeypatch.setattr(engine.DeviceWorker, "fill", fill)
    return made


def _devices(count: int, mode: Any = "lazy", **how: Any) -> list[FakeDevice]:
    return [FakeDevice(name=f"fake:{n}", mode=mode, seed=n, **how) for n in range(count)]


def _columns(info: Any, count: int) -> list[Request]:
    step = info.shape[1] // count
    return [
        Request(info, info.dtype, select(info, (..., slice(n * step, (n + 1) * step))),
             devices=(n,))
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["replicas", "columns"])
def test_all_crews_read(tmp_path: Path, workers: list[int], way: str) -> None:
    whole = samples.numbers((512, 6 * 512), np.float32)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    index, sources = checkpoint.read(path)
    info = index["w"]
    there = _devices(6)
    requests = (
        _columns(info, 6)
        if way == "columns"
        else [Request(info, info.dtype, devices=tuple(range(6)))]
    )
    loader = session.Loader(index, sources, arrays.Arrays(*there), LoadOptions(threads=6))
    report = mfload.Report(stages={})
    found = loader.load(requests, report=report)
    expected = np.split(whole, 6, 1) if way == "columns" else [whole]
    for parts, right in zip(found, expected, strict=True):
        assert all(samples.same(part, np.ascontiguousarray(right)) for part in parts)
    assert len(workers) == report.threads == 6
    assert report.read_bytes == whole.nbytes
    del found, parts


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_more_readers_than_were_asked_for(
    tmp_path: Path, workers: list[int], threads: int
) -> None:
    whole = samples.numbers((512, 6 * 512), np.float32)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    index, sources = checkpoint.read(path)
    options = LoadOptions(threads=threads, max_host_overhead=2 << 20)
    loader = session.Loader(index, sources, arrays.Arrays(*_devices(6)), options)
    requests = _columns(index["w"], 6)
    stated = loader.preview(requests)
    report = mfload.Report(stages={})
    done: list[int] = []
    found = loader.load(requests, report=report, advance=done.append)
    assert len(workers) <= threads
    assert report.peak_bytes <= stated.overhead_bytes <= 2 << 20
    assert sum(done) == whole.nbytes
    del found


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.timeout(60)
def test_a_witness_sees_bytes_in_order(tmp_path: Path, threads: int) -> None:
    """It waits for those before; so whoever reads those must not wait for it."""
    pytest.importorskip("xxhash")
    whole = samples.numbers((64, 8192), np.float32)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    mfload.verify(path, mode="write")
    index, sources = checkpoint.read(path)
    manifest = tmp_path / "m.safetensors.checksums.json"
    options = session.verifying(manifest, LoadOptions(threads=threads), index, sources)
    loader = session.Loader(index, sources, arrays.Arrays(*_devices(2)), options)
    found = loader.load(_columns(index["w"], 2))
    assert samples.same(found[1][0], np.ascontiguousarray(whole[:, 4096:]))
    del found


def test_nothing_but_empty_tensors_lands_on_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"a": samples.numbers((10,), np.float32), "e": samples.numbers((0, 4), np.int64)}
    path = samples.save(tmp_path / "m.safetensors", model)
    arrays.take(monkeypatch, arrays.Arrays(FakeDevice(), on_host=["F32"]))
    samples.assert_same(mfload.load(path, framework="numpy"), model)


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_waits_for_the_slowest_device(tmp_path: Path, mode: Any) -> None:
    """One device is done at once, the other when somebody waits: the slot belongs to both."""
    whole = samples.numbers((400_000,), np.float32)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    index, sources = checkpoint.read(path)

    class Quick(FakeDevice):
        def stream(self) -> Any:
            made = super().stream()
            record = made.record

            def recorded() -> Any:
                made.synchronize()
                return record()

            made.record = recorded
            return made

    for there in ([Quick(name="a"), FakeDevice(name="b", mode=mode)],
                  [FakeDevice(name="a", mode=mode), Quick(name="b")]):  # fmt: skip
        loader = session.Loader(index, sources, arrays.Arrays(*there), LoadOptions(threads=1))
        (found,) = loader.load([Request(index["w"], index["w"].dtype, devices=(0, 1))])
        assert all(samples.same(each, whole) for each in found)
        for device in there:
            device.assert_clean(result=True)
        del found


def test_a_load_in_the_callers_thread_leaves_it_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.arange(3)})
    before = os.sched_getaffinity(0)
    seen: list[Any] = []
    monkeypatch.setattr("mfload.cuda.numa.cpus", lambda pci: frozenset([min(before)]))
    real = staging.Ring.take

    def take(self: Any) -> Any:
        seen.append(os.sched_getaffinity(0))
        return real(self)

    monkeypatch.setattr(staging.Ring, "take", take)
    arrays.take(monkeypatch, arrays.Arrays(FakeDevice(pci="0000:01:00.0")))
    mfload.load(path, framework="numpy")
    assert seen == [before]


KINDS = [np.float32, ml_dtypes.bfloat16, np.uint8, np.float64, np.float16]
TARGETS = ["F32", "BF16", "F16", "F64"]


@arrays.FEW
@given(st.data())
def test_boxes_of_all_widths(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Rows wide enough for the device and narrower ones, backwards too, converted or not, with
    several wanted at once and with all too little memory to put them in order."""
    kind = data.draw(st.sampled_from(KINDS))
    shape = (
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from([1, 7, 64, 200, 600])),
    )
    with np.errstate(all="ignore"):
        whole = np.random.default_rng(0).uniform(0, 100, shape).astype(kind)
    path = samples.save(tmp_path_factory.mktemp("boxes") / "m.safetensors", {"w": whole})
    index, sources = checkpoint.read(path)
    info = index["w"]
    there = _devices(3, data.draw(st.sampled_from(MODES)))
    wants: list[tuple[Request, Any]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        cuts: list[slice] = []
        for length in shape:
            start = data.draw(st.integers(0, length - 1))
            stop = data.draw(st.integers(start + 1, length))
            step = data.draw(st.sampled_from([1, 1, 1, 1, -1, 2]))
            cuts.append(slice(start, stop, step) if step > 0 else slice(None, None, -1))
        target = data.draw(st.sampled_from([info.dtype.name, info.dtype.name, *TARGETS]))
        row = _row(target)
        numbers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        request = Request(info, row, select(info, tuple(cuts)), devices=tuple(numbers))
        with np.errstate(all="ignore"):
            right = whole[tuple(cuts)]
            right = right if row is info.dtype else right.astype(row.numpy)
        wants.append((request, np.ascontiguousarray(right).reshape(right.shape)))
    limit = data.draw(st.sampled_from([None, 4 << 20]))
    options = LoadOptions(threads=data.draw(st.integers(1, 2)), max_host_overhead=limit)
    loader = session.Loader(index, sources, arrays.Arrays(*there), options)
    requests = [request for request, _ in wants]
    stated = loader.preview(requests)
    report = mfload.Report(stages={})
    found = loader.load(requests, report=report)
    for (_, right), parts in zip(wants, found, strict=True):
        assert all(samples.same(part, right) for part in parts)
    assert report.peak_bytes <= stated.overhead_bytes
    if limit is not None:
        assert stated.overhead_bytes <= limit
    for device in there:
        device.assert_clean(result=True)


def _row(name: str) -> Any:
    from mfload.dtypes import TABLE

    return TABLE[name]


def test_what_is_put_in_order_takes_turns(tmp_path: Path) -> None:
    """Tiny tensors, each in a line of its own: far more than the slot has room for."""
    model = {f"t{n}": samples.numbers((3,), np.uint8, n) for n in range(3000)}
    path = samples.save(tmp_path / "m.safetensors", model)
    index, sources = checkpoint.read(path)
    for mode in MODES if arrays.SLOW else ("lazy", "thread"):
        device = FakeDevice(mode=mode)
        requests = [Request(info, _row("F32")) for info in index.tensors.values()]
        options = LoadOptions(threads=1, max_host_overhead=1 << 20)
        loader = session.Loader(index, sources, arrays.Arrays(device), options)
        stated = loader.preview(requests)
        report = mfload.Report(stages={})
        found = loader.load(requests, report=report)
        for request, array in zip(requests, found, strict=True):
            assert samples.same(array, model[request.info.name].astype(np.float32))
        assert report.peak_bytes <= stated.overhead_bytes <= 1 << 20
        device.assert_clean(result=True)
        del found, array


def test_one_tensor_in_several_dtypes(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).uniform(0, 9, (300, 700)).astype(np.float16)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    index, sources = checkpoint.read(path)
    device = FakeDevice()
    requests = [Request(index["w"], _row(name)) for name in ("F16", "F32", "F64", "BF16")]
    options = LoadOptions(threads=1, max_host_overhead=2 << 20)
    report = mfload.Report(stages={})
    found = session.Loader(index, sources, arrays.Arrays(device), options).load(
        requests, report=report
    )
    for request, array in zip(requests, found, strict=True):
        assert samples.same(array, whole.astype(request.dtype.numpy))
    assert report.peak_bytes <= 2 << 20
    del found, array


def test_direct_reads_that_begin_and_end_within_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, nbytes in ((8, 1 << 18), (40, 1 << 18), (8, 64 << 10)):
        whole = samples.numbers((nbytes,), np.uint8)
        rows = [("w", "U8", whole.shape, whole.tobytes())]
        path = samples.save_raw(tmp_path / "m.safetensors", rows, start)
        for unit in (512, 4096, 65536):
            monkeypatch.setattr("mfload.io.probes.direct_alignment", lambda _, u=unit: (512, u))
            device = FakeDevice()
            arrays.take(monkeypatch, arrays.Arrays(device))
            report = mfload.Report()
            found = mfload.load(
                path, framework="numpy", report=report, options=mfload.Options(engine="direct")
            )
            assert samples.same(found["w"], whole)
            assert ("O_DIRECT" in report.route[0][2].split(":")[0]) == (unit <= 4096)
            assert not report.notes
            del found
