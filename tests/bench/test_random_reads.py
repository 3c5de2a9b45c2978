"""Random reads: what is read and counted, scratch files, and what stands in the way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mfload import errors
from mfload.bench import machine, random_reads
from mfload.io.gather import Gather, ReadColumns
from mfload.io.subprocess_probe import Probed


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path) -> None:
    if machine.file_system(tmp_path) in machine.MEMORY_FILE_SYSTEMS:
        pytest.skip("a file system in memory")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_reads, "_QUICK", ((4096, 65536), (1, 4)))
    monkeypatch.setattr(random_reads, "_QUICK_SECONDS", 0.1)
    monkeypatch.setattr(random_reads, "_ENOUGH", 1 << 20)


def _written(path: Path, nbytes: int) -> str:
    path.write_bytes(np.random.default_rng(0).bytes(nbytes))
    return str(path)


def _silent(*_: Any) -> None:
    pass


@pytest.mark.parametrize("engine", random_reads.ENGINES)
def test_points_count_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    files = [_written(tmp_path / "a", 300_000), _written(tmp_path / "b", 70_001)]
    seen: list[tuple[int, int, ReadColumns]] = []
    read = Gather.read

    def noted(self: Gather, reads: ReadColumns) -> None:
        seen.append((self.depth, int(reads.nbytes[0, 0]), reads))
        read(self, reads)

    monkeypatch.setattr(Gather, "read", noted)
    made = random_reads.measure(files, engine, (4096, 65536), (1, 4), 0.05)
    assert made["why"] == ""
    cases = [(point["block"], point["depth"]) for point in made["points"]]
    assert cases == [(4096, 1), (4096, 4), (65536, 1), (65536, 4)]
    for point in made["points"]:
        assert point["engine"] == engine
        assert point["gb_per_s"] > 0
        assert point["cpu_us"] >= 0
    for block, depth in cases:
        own = [reads for d, b, reads in seen if (d, b) == (depth, block)]
        # Both files, whole blocks inside them, and never two at once in one place of memory.
        source, offset = (np.concatenate([getattr(r, what) for r in own])
                          for what in ("source", "offset"))  # fmt: skip
        assert set(source) == {0, 1}
        assert set(offset % block) == {0}
        assert (offset + block <= np.array([300_000, 70_001])[source]).all()
        assert len({*own[0].address[:depth, 0].tolist()}) == depth
    whole = {int(o) for d, b, reads in seen if b == 4096 for o in reads.offset[reads.source == 1]}
    assert whole <= set(range(0, 70_001 - 4096, 4096))
    assert len(whole) > 5  # Of 17.


def test_a_curve_has_what_engines_can_do(tmp_path: Path) -> None:
    path = _written(tmp_path / "a", 100_000)
    made = random_reads.measure([path], "threads", (4096,), (1, 64), 0.01)
    assert [point["depth"] for point in made["points"]] == [1]  # At most 32 threads.
    made = random_reads.measure([path], "threads", (1 << 20,), (1,), 0.01)
    assert made == {"points": [], "why": "the files are shorter than 1 MiB"}
    made = random_reads.measure([_written(tmp_path / "b", 9)], "auto", (4096,), (1,), 0.01)
    assert made["points"] == []


def test_what_takes_no_direct_reads_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mfload.io import probes

    monkeypatch.setattr(probes, "direct_alignment", lambda fd: None)
    made = random_reads.measure([_written(tmp_path / "a", 9000)], "threads", (4096,), (1,), 0.01)
    assert made["points"] == []
    assert "no O_DIRECT" in made["why"]


@pytest.mark.usefixtures("brief")
def test_a_scratch_file_is_written_measured_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, looked = random_reads.ask, list[tuple[str, int, bytes]]()

    def watched(*given: Any, **more: Any) -> Probed:
        (path,) = more["given"]["files"]
        with open(path, "rb") as file:
            looked.append((path, os.path.getsize(path), file.read(4096)))
        return ask(*given, **more)

    monkeypatch.setattr(random_reads, "ask", watched)
    found = random_reads.bench(
        [],
        _silent,
        folder=str(tmp_path),
        engines=("threads", "io_uring"),
        quick=True,
        max_bytes=3 << 20,
    )
    assert {point["engine"] for point in found["points"]} == {"threads", "io_uring"}
    assert len(found["points"]) == 8
    assert found["file"] == {"path": str(tmp_path), "nbytes": 3 << 20, "scratch": True}
    assert [size for _, size, _ in looked] == [3 << 20] * 2
    assert len(set(looked[0][2])) > 200  # Bytes that no disk packs.
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(looked[0][0])
    assert json.loads(json.dumps(found)) == found
    assert any("past the page cache" in said for said in found["conditions"])
    picture = tmp_path / "x.png"
    assert random_reads.draw(found, picture)
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("brief")
def test_an_engine_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "a", 100_000)
    before = Path(path).stat().st_mtime_ns
    answers = {
        "io_uring": Probed({"points": [], "why": "Operation not permitted"}),
        "threads": Probed(None, "crashed with SIGSEGV"),
    }
    monkeypatch.setattr(random_reads, "ask", lambda *_, given, **__: answers[given["engine"]])
    found = random_reads.bench([path], _silent, quick=True)
    assert found["points"] == []
    assert found["impossible"] == {
        "io_uring": "Operation not permitted",
        "threads": "crashed with SIGSEGV",
    }
    assert "threads: not measured: crashed with SIGSEGV." in found["conditions"]
    assert any("the disk may answer from a cache" in said for said in found["conditions"])
    assert not random_reads.draw(found, tmp_path / "x.png")
    assert Path(path).stat().st_mtime_ns == before


def test_what_can_not_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(tmp_path / "a", 9000)
    with pytest.raises(errors.UsageError, match="unknown engine"):
        random_reads.bench([path], _silent, engines=("pread",))
    monkeypatch.setattr(machine, "MEMORY_FILE_SYSTEMS", {machine.file_system(path)})
    with pytest.raises(errors.UsageError, match="keeps its files in memory") as met:
        random_reads.bench([path], _silent)
    assert met.value.file == path


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("most", "free"), [(300_000, 1 << 40), (1 << 40, 1_200_000), (9, 0)])
def test_a_scratch_file_is_no_larger_than_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, free: int
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(random_reads.shutil, "disk_usage", lambda _: usage)
    found = random_reads.bench(
        [], _silent, folder=str(tmp_path), engines=("threads",), quick=True, max_bytes=most
    )
    assert found["file"]["nbytes"] == min(most, free // 4)
    assert bool(found["points"]) == (free > 0)
    assert ("threads" in found["impossible"]) == (free == 0)


@pytest.mark.usefixtures("brief")
def test_a_full_disk_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_reads.os, "fsync", full)
    with pytest.raises(errors.WriteError, match="could not write a scratch file: No space left"):
        random_reads.bench([], _silent, folder=str(tmp_path), quick=True, max_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []
