"""The timeline of a report: what each thread did when, and its picture."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from calls import as_options

import mfload
from mfload.loading import execute
from mfload.planning import blocks
from mfload.report import Report
from mfload.timeline import LOAD, MOST, Span, Track, bounded

ARRAYS = {f"w{n}": np.arange(60_000, dtype=np.float32) + n for n in range(8)}
DATA = sum(array.nbytes for array in ARRAYS.values())


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = blocks.Costs(block=64 << 10)
    monkeypatch.setattr("mfload.sources.local.LocalFile.costs", small)
    return samples.save(tmp_path / "model.safetensors", ARRAYS)


def _loaded(path: Path, **options: Any) -> Report:
    report = Report()
    mfload.load(path, framework="numpy", report=report, **as_options(options))
    return report


def _bytes(report: Report) -> Counter[str]:
    found: Counter[str] = Counter()
    for span in report.timeline:
        found[span.kind] += span.nbytes
    return found


@pytest.mark.parametrize("engine", ["pread", "direct", "auto"])
def test_reads_add_up_to_what_was_read(path: Path, engine: str) -> None:
    report = _loaded(path, engine=engine, threads=2)
    reads = [span for span in report.timeline if span.kind == "read"]
    # A direct read takes whole units of the disk.
    assert report.read_bytes <= sum(span.nbytes for span in reads) < report.read_bytes * 1.2
    assert {span.file for span in reads} == {str(path)}
    assert {span.thread for span in reads} <= {"reader 1", "reader 2"}
    transfer = next(span for span in report.timeline if span.kind == "transfer")
    for span in reads:
        assert transfer.start <= span.start <= span.stop <= transfer.stop


def test_spans_of_a_thread_do_not_overlap(path: Path) -> None:
    report = _loaded(path, threads=3, dtype="float64")
    for thread in {span.thread for span in report.timeline}:
        mine = sorted((s.start, s.stop) for s in report.timeline if s.thread == thread)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine)), thread


def test_stages_are_those_of_the_report(path: Path) -> None:
    report = _loaded(path)
    stages: Counter[str] = Counter()
    for span in report.timeline:
        if span.thread == LOAD:
            stages[span.kind] += span.stop - span.start  # pyright: ignore
    assert stages == pytest.approx(report.stages)


def test_a_conversion_is_a_copy(path: Path) -> None:
    assert "copy" not in _bytes(_loaded(path, engine="pread"))
    assert _bytes(_loaded(path, dtype="float64", engine="pread"))["copy"] > 0


def test_what_is_copied_out_of_the_page_cache_counts_as_read(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"w": np.ones((1024, 1024), np.float32)})
    mfload.load(path, framework="numpy")  # The page cache has it.
    report = _loaded(path, dtype="float64", engine="pread")
    found = _bytes(report)
    assert found["map"] + found["read"] == report.read_bytes


def test_a_check_is_shown(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    manifest = mfload.verify(path, mode="write").manifest
    assert "check" in _bytes(_loaded(path, verify=manifest, threads=2))


def test_an_encoded_tensor_is_decoded(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", **ARRAYS)
    found = _bytes(_loaded(tmp_path / "a.npz"))
    assert found["decode"] == DATA
    assert found["read"] > 0


def test_without_a_report_nothing_is_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = execute.Transfer

    def run(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        given.append(made.recorder)
        return made

    monkeypatch.setattr(execute, "Transfer", run)
    mfload.load(path, framework="numpy")
    _loaded(path)
    assert given[0] is None
    assert given[1] is not None


def test_a_stream_adds_its_batches(path: Path) -> None:
    report = Report()
    with mfload.stream(
        path, framework="numpy", report=report, options=mfload.Options(max_host_overhead=4 << 20)
    ) as tensors:
        assert len(list(tensors)) == len(ARRAYS)
    assert _bytes(report)["read"] == DATA
    assert sum(span.kind == "transfer" for span in report.timeline) > 1


def test_many_spans_are_merged_and_sums_stay() -> None:
    track = Track("reader 1", ["a", "b"])
    for n in range(10_000):
        track.work = "copy" if n % 3 else ""
        track.read(0.0, 1, n % 2)
    spans = track.spans()
    assert len(spans) <= MOST
    assert sum(span.nbytes for span in spans) == 10_000


def test_parts_of_a_load_are_merged_and_seconds_stay() -> None:
    spans = [Span("reader 1", "read", n, n + 0.5, 2, f"file {n}") for n in range(5000)]
    made = bounded([*spans, Span("reader 2", "read", 0, 1, 7, "x")])
    assert len(made) <= MOST + 1
    assert sum(span.nbytes for span in made) == 10_007
    assert sum(s.stop - s.start for s in made if s.thread == "reader 1") == pytest.approx(2500)


def test_an_old_timeline_goes(path: Path) -> None:
    report = _loaded(path)
    count = len(report.timeline)
    mfload.load(path, framework="numpy", names=["w0"], report=report)
    assert 0 < len(report.timeline) < count
    report.clear()
    assert report.timeline == ()
    assert "timeline" not in report.as_dict()


def test_a_plot_needs_a_load() -> None:
    with pytest.raises(mfload.errors.UsageError, match="nothing was loaded with this report"):
        Report().plot()


def test_a_plot_without_matplotlib_says_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _loaded(path)
    for name in [n for n in sys.modules if n.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mfload.timeline_figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(mfload.errors.FrameworkMissingError, match="pip install 'matplotlib>="):
        report.plot()


def test_a_plot_has_a_lane_a_thread_and_the_ceiling(path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = _loaded(path, threads=2, dtype="float64")
    figure = report.plot(ceiling=12.5)
    lanes, rate = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == list(
        dict.fromkeys(["load", *sorted({s.thread for s in report.timeline} - {"load"})])
    )
    assert {text.get_text() for text in lanes.get_legend().get_texts()} == {"read", "copy"}
    assert "ceiling: 12.5 GiB/s" in {text.get_text() for text in rate.texts}
    assert figure._repr_png_().startswith(b"\x89PNG")
