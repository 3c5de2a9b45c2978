"""The direct reader: past the page cache, in place where it can, and back out loud."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from calls import as_options

import mfload
from mfload import errors
from mfload.io import probes
from mfload.sources.local import OpenFile

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Path, report: mfload.Report | None = None, **options: Any) -> dict[str, Any]:
    return mfload.load(
        path, framework="numpy", report=report, **as_options({"engine": "direct", **options})
    )


def test_reads_go_past_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = watch.spy(monkeypatch)
    report = mfload.Report()
    samples.assert_same(_load(path, report), MODEL)
    assert any(read.direct for read in reads)
    assert report.route == ((os.fspath(path), "direct", "asked for"),)
    assert report.notes == ()


def test_what_is_read_directly_is_aligned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "direct_alignment", lambda _: (4096, 4096))
    reads = watch.spy(monkeypatch)
    samples.assert_same(_load(path), MODEL)
    for read in reads:
        if read.direct:
            assert (read.offset % 4096, read.nbytes % 4096) == (0, 0)


def test_large_segments_that_lie_askew_go_through_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eight bytes an element, and data at 41: NumPy's place is one byte before the file's.
    array = samples.numbers((300_001,), np.int64)
    rows = [("a", "I64", array.shape, array.tobytes())]
    path = samples.save_raw(tmp_path / "a.safetensors", rows, 41)
    reads = watch.spy(monkeypatch)
    report = mfload.Report()
    assert samples.same(_load(path, report)["a"], array)
    assert report.notes == ()
    assert all(read.direct for read in reads)
    assert report.peak_bytes > array.nbytes + 100_000


@pytest.mark.parametrize("start", [0, 8, 40])
@pytest.mark.parametrize("unit", [512, 4096])
def test_large_segments_land_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, unit: int
) -> None:
    array = samples.numbers((300_001,), np.float32)
    path = samples.save_raw(
        tmp_path / "a.safetensors", [("a", "F32", array.shape, array.tobytes())], start
    )
    monkeypatch.setattr(probes, "direct_alignment", lambda _: (unit, unit))
    reads = watch.spy(monkeypatch)
    report = mfload.Report()
    assert samples.same(_load(path, report, threads=1)["a"], array)
    assert report.notes == ()
    # NumPy takes data at any place, so the inner part needs no slot and the ends come apart.
    inner = [read for read in reads if read.direct]
    assert len(inner) == 1
    assert inner[0].nbytes > array.nbytes - 2 * unit
    assert report.peak_bytes < array.nbytes + 2 * 4096


def test_a_tensor_may_be_shorter_than_the_unit_of_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = samples.numbers((300 << 10,), np.uint8)
    rows = [("a", "U8", array.shape, array.tobytes())]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    monkeypatch.setattr(probes, "direct_alignment", lambda _: (1, 1 << 20))
    assert samples.same(_load(path)["a"], array)


def test_memory_that_does_not_suit_goes_through_a_slot(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = OpenFile.read

    def count(self: OpenFile, vector: list[Any], *args: Any, **more: Any) -> int:
        read.append(vector[0].ctypes.data % 4096)
        return real(self, vector, *args, **more)

    monkeypatch.setattr(OpenFile, "read", count)
    assert samples.same(_load(path, names=["odd"])["odd"], MODEL["odd"])
    assert read == [0]


def _refuse_reads(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    import fcntl

    real = os.preadv

    def preadv(fd: int, vector: list[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(fd, vector, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def _refuse_opens(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("refuse", [_refuse_reads, _refuse_opens])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_takes_no_direct_reads_falls_back_out_loud(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Any,
    number: int,
    threads: int,
) -> None:
    refuse(monkeypatch, number)
    report = mfload.Report()
    caplog.set_level(logging.WARNING, "mfload")
    with watch.nothing_left():
        samples.assert_same(_load(path, report, threads=threads), MODEL)
    said = f"{path}: fell back from direct to pread: {os.strerror(number)}"
    assert report.notes == (said,)
    assert [record.message for record in caplog.records] == [said]
    assert said in str(report)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_other_errors_are_errors(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    _refuse_reads(monkeypatch, number)
    with watch.nothing_left(), pytest.raises(errors.SourceError) as info:
        _load(path)
    assert info.value.errno == number
    del info


def test_a_file_without_direct_reads_is_read_otherwise(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probes, "direct_alignment", lambda _: None)
    caplog.set_level(logging.WARNING, "mfload")
    report = mfload.Report()
    samples.assert_same(_load(path, report), MODEL)
    ((_, engine, why),) = report.route
    assert (engine, why) == ("pread", "direct asked for; the file takes no O_DIRECT")
    assert "no O_DIRECT" in caplog.text
