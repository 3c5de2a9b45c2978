"""Streams: order, memory, early ends, errors in the middle, and lazy tensors of NumPy."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from calls import as_options
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.io import buffers
from mfload.loading import stream as streaming

MODEL = samples.model()
MIB = 1 << 20
# 24 tensors of 256 KiB in two files, and one of 3 MiB.
LARGE = [
    {f"t{n:02}": samples.numbers((256, 256), np.float32, n) for n in range(12)},
    {f"t{n:02}": samples.numbers((256, 256), np.float32, n) for n in range(12, 24)}
    | {"u": samples.numbers((3, 256, 1024), np.float32, 99)},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    for number, arrays in enumerate(LARGE):
        samples.save(folder / f"{number}.safetensors", arrays)
    return folder


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread and no open file of a stream outlives it."""
    gc.collect()  # Of tests before.
    files = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    _wait_for_threads()
    assert len(os.listdir("/proc/self/fd")) == files


def _stream(path: Path, **given: Any) -> Any:
    return mfload.stream(path, "numpy", **as_options(given))


@pytest.mark.parametrize("engine", ["auto", "pread", "direct", "mmap"])
@pytest.mark.parametrize("limit", [None, 4 * MIB])
def test_all_tensors_come_in_the_order_of_the_file(
    path: Path, engine: str, limit: int | None
) -> None:
    loaded = mfload.load(path, "numpy")
    streamed = dict(_stream(path, engine=engine, max_host_overhead=limit))
    assert list(streamed) == list(loaded)
    samples.assert_same(streamed, MODEL)


def test_many_small_tensors_are_read_together(tmp_path: Path) -> None:
    arrays = {f"{n:05}": np.full((5,), n, np.int16) for n in range(3000)}
    path = samples.save(tmp_path / "many.safetensors", arrays)
    report = mfload.Report()
    samples.assert_same(dict(_stream(path, report=report)), arrays)
    assert (report.tensors, report.read_bytes) == (3000, 30_000)


def test_the_order_may_be_given(large: Path) -> None:
    every = [name for arrays in LARGE for name in arrays]
    order = every[::-2]
    pairs = list(_stream(large, order=order, max_host_overhead=4 * MIB))
    assert [name for name, _ in pairs] == order
    samples.assert_same(dict(pairs), {name: (LARGE[0] | LARGE[1])[name] for name in order})
    assert [name for name, _ in _stream(large, names="t0", order=iter(every[9::-1]))] == every[
        9::-1
    ]


@pytest.mark.parametrize(
    "order", [["t00"], ["t00", "t01", "t02"], ["t00", "t01", "t01"], [], 5, "t00", [["t00"], "t01"]]
)
def test_an_order_names_each_tensor_once(large: Path, order: Any) -> None:
    with pytest.raises(errors.UsageError, match="order= does not fit"):
        _stream(large, names=["t00", "t01"], order=order)
    with pytest.raises(errors.TensorNotFoundError):
        _stream(large, order=["nothing"])
    for odd in (5, object(), [[]]):
        with pytest.raises(errors.UsageError):
            _stream(large, order=odd)


def test_names_and_dtypes_are_those_of_load(path: Path) -> None:
    given: dict[str, Any] = {"names": "layer|embed", "dtype": [("norm", "float64")]}
    samples.assert_same(dict(_stream(path, **given)), mfload.load(path, "numpy", **given))


def test_memory_is_bounded(large: Path) -> None:
    limit = 4 * MIB  # A batch is 1 MiB.
    buffers.peak_bytes(reset=True)
    held, peak = [], 0
    for name, _ in _stream(large, max_host_overhead=limit, threads=2):
        held.append(buffers.live_bytes())
        if name != "u":
            peak = buffers.peak_bytes()
        time.sleep(0.002)
    assert peak <= limit
    # The large one is read when it is asked for, and is not beside the others.
    assert buffers.peak_bytes() <= limit + 3 * MIB
    assert 512 << 10 < max(held) <= limit + 3 * MIB


def test_nothing_is_read_far_ahead_and_what_is_kept_stays(large: Path) -> None:
    stream = _stream(large, max_host_overhead=4 * MIB, threads=1)
    _, first = next(stream)
    time.sleep(0.1)
    assert buffers.live_bytes() <= 3 * MIB  # Of 9 MiB.
    copy = first.copy()
    rest = dict(stream)
    assert samples.same(first, copy)
    samples.assert_same(rest | {"t00": first}, LARGE[0] | LARGE[1])
    del rest
    gc.collect()
    assert buffers.live_bytes() <= MIB + 8192  # The batch of the first.


def test_a_fork_goes_on_without_the_thread(large: Path) -> None:
    stream = _stream(large, max_host_overhead=4 * MIB)
    first = dict([next(stream)])
    child = os.fork()
    if child == 0:
        try:
            samples.assert_same(first | dict(stream), LARGE[0] | LARGE[1])
            os._exit(0)
        finally:
            os._exit(1)
    samples.assert_same(first | dict(stream), LARGE[0] | LARGE[1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_thread_is_refused_and_does_no_harm(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    real = streaming.Tensors.read

    def held(self: Any, batch: range, deadline: Any) -> list[Any]:
        begun.set()
        assert go.wait(30)
        return real(self, batch, deadline)

    monkeypatch.setattr(streaming.Tensors, "read", held)
    stream = _stream(large, max_host_overhead=4 * MIB)
    found: dict[str, Any] = {}
    other = threading.Thread(target=lambda: found.update(stream))
    other.start()
    assert begun.wait(30)
    for act in (stream.__next__, stream.close):
        with pytest.raises(errors.UsageError, match="in use"):
            act()
    go.set()
    other.join(30)
    samples.assert_same(found, LARGE[0] | LARGE[1])


def _broken(stream: Any) -> None:
    for _ in stream:
        break


def _raised(stream: Any) -> None:
    def consume() -> None:
        for _ in stream:
            raise KeyError

    with pytest.raises(KeyError):
        consume()


def _closed(stream: Any) -> None:
    next(stream)
    stream.close()
    assert list(stream) == []
    stream.close()


def _in_a_with(stream: Any) -> None:
    with stream as same:
        assert same is stream
        next(stream)
    assert list(stream) == []


def _not_begun(stream: Any) -> None:
    pass


@pytest.mark.parametrize("act", [_broken, _raised, _closed, _in_a_with, _not_begun])
def test_a_consumer_may_leave(
    large: Path, act: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once, also in the middle of a batch that a slow disk is read for."""
    true, reads = os.preadv, []

    def slow(*given: Any) -> int:
        reads.append(given[2])
        time.sleep(0.02 if len(reads) > 3 else 0)
        return true(*given)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr("mfload.planning.blocks.Costs.block", 64 << 10, raising=False)
    stream = _stream(large, max_host_overhead="64MiB", engine="pread", threads=1)
    start = time.monotonic()
    act(stream)
    del stream
    assert time.monotonic() - start < 5
    _wait_for_threads()
    done = len(reads)
    time.sleep(0.1)
    assert len(reads) == done


def _wait_for_threads() -> None:
    """Until none of mfload's is left; a stream that was dropped does not wait for its own."""
    end = time.monotonic() + 5
    while any(each.name.startswith("mfload") for each in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.005)


def test_a_dropped_stream_waits_for_nothing(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector drops it, while a read hangs and another thread holds its lock."""
    true, begun, go = os.preadv, threading.Event(), threading.Event()

    def hangs(*given: Any) -> int:
        if stream:
            begun.set()
            assert go.wait(30)
        return true(*given)

    stream: Any = None
    monkeypatch.setattr(os, "preadv", hangs)
    stream = _stream(large, engine="pread", max_host_overhead=4 * MIB)
    go.set()
    next(stream)
    ahead = stream._rows.gi_frame.f_locals["take"].__self__
    ahead._task.join()  # The second batch is at hand; what is read ahead of the third one hangs.
    go.clear()
    begun.clear()
    for _ in range(4):
        next(stream)
    assert begun.wait(30)
    del ahead
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    start = time.monotonic()
    stream = None
    del cycle
    gc.collect()
    assert time.monotonic() - start < 2
    assert [each for each in threading.enumerate() if each.name == "mfload-reader"]
    go.set()
    _wait_for_threads()


def test_close_leaves_a_read_that_hangs(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, begun, go, hangs = os.preadv, threading.Event(), threading.Event(), list[bool]()

    def preadv(*given: Any) -> int:
        if hangs:
            begun.set()
            assert go.wait(30)
        return true(*given)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(streaming, "_GRACE", 0.2)
    stream = _stream(large, engine="pread", max_host_overhead=4 * MIB)
    next(stream)
    stream._rows.gi_frame.f_locals["take"].__self__._task.join()  # The second batch is there.
    hangs.append(True)
    for _ in range(4):
        next(stream)
    assert begun.wait(30)
    start = time.monotonic()
    stream.close()
    assert 0.2 <= time.monotonic() - start < 2
    go.set()
    _wait_for_threads()


def test_reading_a_large_tensor_ahead_is_given_up_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"a": np.zeros(8, np.uint8), "b": samples.numbers((96, MIB), np.uint8)}
    path = samples.save(tmp_path / "large.safetensors", arrays)
    true, reads = os.preadv, []

    def slow(*given: Any) -> int:
        reads.append(given[2])
        time.sleep(0.05)
        return true(*given)

    monkeypatch.setattr(os, "preadv", slow)
    stream = _stream(path, engine="pread", threads=1)
    next(stream)
    end = time.monotonic() + 5
    while len(reads) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    stream.close()
    assert 2 <= len(reads) < 5  # Of 6 blocks.


def test_an_error_in_the_middle_names_file_and_tensor(large: Path) -> None:
    report = mfload.Report()
    stream = _stream(large, max_host_overhead=4 * MIB, report=report, engine="pread")
    damaged = large / "1.safetensors"
    os.truncate(damaged, damaged.stat().st_size - 5 * MIB)
    came = []
    with pytest.raises(errors.SourceError) as info:
        came.extend(name for name, _ in stream)
    assert info.value.file == str(damaged)
    assert came == list(LARGE[0])
    assert report.tensors == 12
    assert report.read_bytes == report.result_bytes == 12 * 256 * 1024
    assert list(stream) == []


def test_a_file_that_changes_is_found_out(large: Path) -> None:
    stream = _stream(large, max_host_overhead=4 * MIB)
    for name, _ in stream:
        if name == "t00":
            os.utime(large / "1.safetensors", ns=(1, 1))
        if name == "t11":
            break
    with pytest.raises(errors.SourceChangedError) as info:
        next(stream)
    assert info.value.file == str(large / "1.safetensors")


def test_a_timeout_is_for_each_batch(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _stream(large, max_host_overhead=4 * MIB, timeout=0.3, engine="pread")
    for _ in itertools.islice(stream, 12):
        time.sleep(0.05)
    true = os.preadv

    def hangs(*given: Any) -> int:
        time.sleep(1)
        return true(*given)

    monkeypatch.setattr(os, "preadv", hangs)
    with pytest.raises(errors.LoadTimeoutError):
        list(stream)
    time.sleep(1.2)


def test_a_kept_error_keeps_no_memory(large: Path) -> None:
    def fails(done: int, total: int) -> None:
        raise ValueError(f"{done} of {total}")

    for how in ({"progress": fails}, {"dtype": "int8"}):
        with pytest.raises((ValueError, errors.LossyCastError)) as kept:
            for _ in map(bool, _stream(large, **how)):
                pass
        assert mfload.live_bytes() == 0, kept


def test_what_was_read_ahead_stays_with_a_stream_that_is_held(large: Path) -> None:
    stream = _stream(large, max_host_overhead=4 * MIB)
    for _ in map(bool, stream):
        break
    assert mfload.live_bytes() > 0
    stream.close()
    assert mfload.live_bytes() == 0


def test_a_report_and_progress(large: Path) -> None:
    report, seen = mfload.Report(), list[tuple[int, int]]()
    given = {"report": report, "progress": lambda done, total: seen.append((done, total))}
    total = sum(array.nbytes for arrays in LARGE for array in arrays.values())
    for number, _ in enumerate(_stream(large, max_host_overhead=4 * MIB, **given)):
        assert len(seen) == number
    assert seen[-1] == (total, total)
    assert (report.tensors, report.result_bytes, report.read_bytes) == (25, total, total)
    assert report.framework == "numpy"
    assert {"headers", "import", "transfer"} <= report.stages.keys()
    assert MIB <= report.peak_bytes <= 7 * MIB
    kept = dict(_stream(large, max_host_overhead=4 * MIB, **given))
    assert total <= report.peak_bytes <= total + 4 * MIB
    del kept
    assert len(report.route) == 2


def test_a_system_without_threads_reads_in_the_consumer(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    samples.assert_same(dict(_stream(large, max_host_overhead=4 * MIB)), LARGE[0] | LARGE[1])


def test_several_devices_and_plain_shards(path: Path) -> None:
    several = dict(_stream(path, device=["cpu", "cpu"]))
    assert all(samples.same(each, MODEL[name]) for name in MODEL for each in several[name])
    shards = [
        dict(_stream(path, shardings=[("wide", 1)], shard=(rank, 4), max_host_overhead=4 * MIB))
        for rank in range(4)
    ]
    assert samples.same(np.concatenate([each["wide"] for each in shards], 1), MODEL["wide"])
    assert all(samples.same(each["embed"], MODEL["embed"]) for each in shards)


def test_an_empty_selection(path: Path) -> None:
    for names in ([], lambda _: False):
        for lazy in (False, True):
            with pytest.raises(errors.TensorNotFoundError, match="no tensor matches"):
                list(_stream(path, names=names, lazy=lazy))


def test_batches_hold_at_most_so_much() -> None:
    @given(st.lists(st.integers(0, 30)), st.integers(0, 20))
    def check(sizes: list[int], most: int) -> None:
        made = streaming.batches(sizes, most)
        assert [n for batch in made for n in batch] == list(range(len(sizes)))
        for batch, after in itertools.pairwise([*made, range(0)]):
            held = sum(sizes[n] for n in batch)
            assert len(batch) >= 1
            assert len(batch) == 1 or held <= most
            assert not after or held + sizes[after[0]] > most

    check()


# Lazy tensors.


def test_lazy_tensors_are_read_when_they_are_used(path: Path) -> None:
    report = mfload.Report()
    with _stream(path, lazy=True, report=report) as stream:
        lazy = dict(stream)
        assert report.read_bytes == 0
        for name, array in MODEL.items():
            each = lazy[name]
            assert (each.name, each.shape, each.dtype) == (name, array.shape, array.dtype)
            assert samples.same(each.read(), array)
            assert samples.same(np.asarray(each), array)
        assert report.read_bytes == 2 * sum(array.nbytes for array in MODEL.values())
        rows = lazy["embed"][100:200]
        assert len(rows) == 100
        before = report.read_bytes
        assert samples.same(rows.read(), MODEL["embed"][100:200])
        assert report.read_bytes - before == 100 * 129 * 4
        assert report.whole_reads == 0
    for each in (rows, lazy["odd"], lazy["odd"][0]):
        with pytest.raises(errors.UsageError, match="its stream was closed") as info:
            each.read()
        assert info.value.tensor == each.name
        assert info.value.file == str(path)


def test_lazy_tensors_outlive_the_iteration(path: Path) -> None:
    lazy = dict(_stream(path, lazy=True, names=["odd", "mask"]))
    assert samples.same(lazy["odd"][1, ::-2].read(), MODEL["odd"][1, ::-2])
    assert "odd: U8 [3, 5, 7], not read" in repr(lazy["odd"])
    with pytest.raises(ValueError, match="copied"):
        np.asarray(lazy["mask"], copy=False)


@given(st.data())
def test_parts_of_parts(data: st.DataObject) -> None:
    whole = samples.numbers((5, 6, 7), np.int16)
    with tempfile.TemporaryDirectory() as folder:
        path = samples.save(Path(folder) / "model.safetensors", {"w": whole})
        lazy, like = next(_stream(path, lazy=True))[1], whole
        for _ in range(3):
            items = [
                data.draw(st.one_of(st.slices(length), st.integers(-length, length - 1)))
                if length
                else slice(None)
                for length in like.shape[: data.draw(st.integers(0, like.ndim))]
            ]
            index = (*items, ...) if data.draw(st.booleans()) else tuple(items)
            lazy, like = lazy[index], like[index]
        assert lazy.shape == like.shape
        assert samples.same(lazy.read(), np.asarray(like))


def test_what_lazy_tensors_refuse(path: Path, tmp_path: Path) -> None:
    lazy = dict(_stream(path, lazy=True))
    for index in (5, (0, 0, 0, 0), [2, 0, 1], "a", None):
        with pytest.raises(errors.SliceError) as info:
            lazy["odd"][index]
        assert (info.value.tensor, info.value.file) == ("odd", str(path))
    packed = samples.save_raw(tmp_path / "f4.safetensors", [("w", "F4", (3, 8), bytes(range(12)))])
    ((_, four),) = _stream(packed, lazy=True)
    assert four.shape == (3, 4)
    assert four[1].read().tobytes() == bytes(range(4, 8))
    for index in ((slice(None), slice(1, 3)), (0, slice(0, 4)), (..., 0)):
        with pytest.raises(errors.SliceError, match=r"does not (fit|arrive)"):
            four[index]
    sharded = {"shardings": [("w", 0)], "shard": (0, 2)}
    for how in (sharded, {"mesh": object()}, {"progress": True}, {"device": ["cpu", "cpu"]}):
        with pytest.raises(errors.UsageError, match="lazy"):
            _stream(path, lazy=True, **how)


def test_lazy_tensors_convert(tmp_path: Path) -> None:
    array = samples.numbers((4, 6), ml_dtypes.bfloat16)
    path = samples.save(tmp_path / "b.safetensors", {"w": array})
    ((_, lazy),) = _stream(path, lazy=True, dtype="float32")
    assert lazy.dtype == np.float32
    assert samples.same(lazy[1:3].read(), array[1:3].astype(np.float32))
