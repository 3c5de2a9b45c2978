"""The buffered reader: short reads, long vectors, and conversions on the way."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import watch
from calls import as_options

import mfload
from mfload import errors
from mfload.formats import checkpoint
from mfload.io import buffers, convert, pread
from mfload.io.buffers import WorkerSlot
from mfload.planning.blocks import Block, Copy, Segment
from mfload.planning.reads import Reads
from mfload.planning.request import Request
from mfload.planning.slicing import select
from mfload.sources import local
from mfload.sources.local import LocalFile, OpenFile

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Path, **options: Any) -> dict[str, Any]:
    return mfload.load(path, framework="numpy", **as_options({"engine": "pread", **options}))


@pytest.mark.parametrize("most", [7, 4096, 100_000])
def test_short_reads_are_taken_up_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.preadv
    calls = 0

    def preadv(fd: int, vector: list[Any], offset: int) -> int:
        nonlocal calls
        calls += 1
        left, some = most, []
        for part in vector:
            some.append(part[:left])
            left -= some[-1].nbytes
            if not left:
                break
        return real(fd, some, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    names = ["odd", "scalar", "steps", "layer.0.norm"] if most < 100 else None
    loaded = _load(path, names=names)
    samples.assert_same(loaded, {name: MODEL[name] for name in names or MODEL})
    assert calls > sum(array.nbytes for array in loaded.values()) // most


def test_a_vector_may_be_longer_than_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every other tensor, of 1 or 3 bytes in turns: the gaps are read over in the same vector.
    sizes = [1 + n // 2 % 2 * 2 for n in range(3000)]
    arrays = {f"t{n:05}": samples.numbers((size,), np.uint8, n) for n, size in enumerate(sizes)}
    path = samples.save(tmp_path / "many.safetensors", arrays)
    reads = watch.spy(monkeypatch)
    names = [name for name in arrays if int(name[1:]) % 2]
    samples.assert_same(_load(path, names=names), {name: arrays[name] for name in names})
    assert len(reads) == 3
    assert max(read.parts for read in reads) <= os.sysconf("SC_IOV_MAX")


@pytest.mark.parametrize("limit", [16, 17])
def test_the_shortest_vector_that_a_system_may_take_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    arrays = {f"t{n:03}": samples.numbers((3,), np.uint8, n) for n in range(100)}
    path = samples.save(tmp_path / "many.safetensors", arrays)
    monkeypatch.setattr(pread, "IOV_MAX", limit)
    reads = watch.spy(monkeypatch)
    names = list(arrays)[::2]
    samples.assert_same(_load(path, names=names), {name: arrays[name] for name in names})
    assert 1 < max(read.parts for read in reads) <= limit


def test_reads_end_where_the_caller_says(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100)))
    target = np.zeros(200, np.uint8)
    with OpenFile(LocalFile(file)) as opened:
        assert opened.read([target[:150]], 10, least=90) == 90
        assert target[:90].tobytes() == bytes(range(10, 100))
        assert not target[90:].any()
        with pytest.raises(errors.SourceChangedError) as info:
            opened.read([target], 10)
        assert info.value.expected == "at least 210 bytes"
        assert info.value.found == "100 bytes"


def test_gaps_go_to_one_small_sink(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4)
    target = np.zeros(30, np.uint8)
    segments = (Segment(10, 10, 0, 20), Segment(25, 10, 0, 0), Segment(800, 10, 0, 10))
    slot = WorkerSlot()
    reader = pread.PreadReader(LocalFile(file))
    reader.fill(Block(0, 10, 800, segments), [target], slot)
    reader.close()
    data = file.read_bytes()
    assert target.tobytes() == data[25:35] + data[800:810] + data[10:20]
    assert mfload.live_bytes() == 4096


def _convert(values: Any, target: Any) -> Any:
    """What `place` makes of values that are asked for by name."""
    source = np.ascontiguousarray(values)
    raw = source.reshape(-1).view(np.uint8)
    out = np.zeros(source.size * np.dtype(target).itemsize, np.uint8)
    copy = Copy(source.shape, source.strides, 0, source.dtype, np.dtype(target), True)
    segment = Segment(0, raw.size, 0, 0, copy)
    pread.place(raw, 0, Block(0, 0, raw.size, (segment,)), [out])
    return out.view(target).reshape(source.shape)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int64])
def test_values_that_fit_are_exact(kind: Any) -> None:
    values = np.array([-128, -1, 0, 1, 100, 127]).astype(kind)
    assert _convert(values, np.int8).tolist() == [-128, -1, 0, 1, 100, 127]
    assert _convert(np.array([0, 1, 1], kind), np.bool_).tolist() == [False, True, True]


def test_fractions_are_cut_off_as_asked() -> None:
    assert _convert(np.array([-1.9, 1.9, 127.9, -128.9]), np.int8).tolist() == [-1, 1, 127, -128]


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (np.array([1, 128], np.int16), np.int8),
        (np.array([-129, 1], np.int32), np.int8),
        (np.array([-1], np.int8), np.uint64),
        (np.array([2**63], np.uint64), np.int64),
        (np.array([2**32], np.int64), np.uint32),
        (np.array([1.0, 2.0**63], np.float64), np.int64),
        (np.array([-(2.0**63) * 1.001], np.float64), np.int64),
        (np.array([300.0], ml_dtypes.bfloat16), np.uint8),
        (np.array([1, np.nan], np.float32), np.int32),
        (np.array([1, np.inf], np.float16), np.int64),
        (np.array([-np.inf], ml_dtypes.bfloat16), np.int8),
        (np.array([2], np.uint8), np.bool_),
        (np.array([0.5], np.float32), np.bool_),
    ],
)
def test_values_that_do_not_fit_stop_the_load(values: Any, target: Any) -> None:
    with pytest.raises(errors.LossyCastError):
        _convert(values, target)


def test_one_bad_value_among_many_is_found() -> None:
    values = np.ones(300_001, np.float32)
    assert _convert(values, np.int8).sum() == 300_001
    values[200_000] = 1e9
    with pytest.raises(errors.LossyCastError, match="1000000000"):
        _convert(values, np.int8)


def test_checking_takes_little_memory() -> None:
    import tracemalloc

    values, made = np.ones(4 << 20, ml_dtypes.float8_e4m3fn), np.empty(4 << 20, np.int8)
    tracemalloc.start()
    try:
        convert.convert(values, made, checked=True)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_reading_ahead_in_a_file_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_most_kept", lambda: 1)
    asked: list[str] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *_: asked.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    sources: list[LocalFile] = []
    for n in range(3):
        (tmp_path / str(n)).write_bytes(bytes(9))
        sources.append(LocalFile(tmp_path / str(n)))
    for _ in range(2):
        sources[0].keep(True)
        with sources[0].open() as opened:
            assert opened.fd >= 0
    assert pread.read_ahead(sources[1:]) == sources[1:]
    assert pread.read_ahead(sources) == []
    del asked[2:]
    assert asked == [os.path.realpath(source.name) for source in sources[1:]]


def test_pages_of_a_target_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fault for each costs a fifth of the time of a read into new memory."""
    made: list[tuple[int, int]] = []
    real = buffers.populate

    def populate(memory: Any) -> None:
        made.append((memory.ctypes.data, memory.nbytes))
        real(memory)

    monkeypatch.setattr(buffers, "populate", populate)
    whole, wide = (samples.numbers(shape, np.uint8, 5) for shape in ((1 << 19,), (512, 2048)))
    path = samples.save(tmp_path / "two.safetensors", {"whole": whole, "wide": wide})
    _load(path, shardings=[("wide", 1)], shard=(0, 2))
    assert not made  # Buffers of mfload lie in large pages.

    index, sources = checkpoint.read(path)
    wanted = {"whole": (...,), "wide": (slice(None), slice(0, 1024))}
    for name, part in wanted.items():
        row = index[name]
        request = Request(row, row.dtype, select(row, part))
        reads, memory = Reads(sources[0].costs), np.empty(request.nbytes, np.uint8)
        reads.parts([request], [None], [(0, 0)])
        reader = pread.PreadReader(sources[0])
        for block in reads.end():
            reader.fill(block, [memory], WorkerSlot())
        reader.close()
        assert made == [(memory.ctypes.data, memory.nbytes)]
        made.clear()
        np.testing.assert_array_equal(memory, {"whole": whole, "wide": wide}[name][part].ravel())


def test_readers_that_fail_together_keep_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.save(tmp_path / "w.safetensors", {"w": np.ones(32 << 20, np.uint8)})
    both = threading.Barrier(2, timeout=20)

    def preadv(*_: Any) -> int:
        both.wait()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(errors.ReadError):
            _load(path, threads=2)
        assert mfload.live_bytes() == 0
    finally:
        gc.enable()
