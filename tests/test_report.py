"""Reports: what happened, in figures, as text and as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from calls import as_options

import mfload
from mfload.report import Report, html_table, human, table

MODEL = samples.model()
DATA = sum(array.nbytes for array in MODEL.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _report(path: Path, **options: Any) -> tuple[Report, dict[str, Any]]:
    report = mfload.Report()
    return report, mfload.load(path, framework="numpy", report=report, **as_options(options))


def test_a_report_is_filled(path: Path) -> None:
    report, loaded = _report(path, engine="pread", threads=2)
    assert report.framework == "numpy"
    assert report.tensors == len(MODEL)
    assert report.result_bytes == report.read_bytes == report.aliased_bytes == DATA
    assert report.over_read_bytes == report.mapped_bytes == 0
    assert report.aliased_share == 1.0
    assert DATA <= report.peak_bytes < DATA + 4096 * len(MODEL)
    assert report.threads == 1  # It is one block.
    assert report.route == ((str(path), "pread", "asked for"),)
    assert report.notes == ()
    assert {"headers", "plan", "allocate", "transfer", "arrays"} <= report.stages.keys()
    assert all(seconds >= 0 for seconds in report.stages.values())
    assert report.seconds == sum(report.stages.values()) > 0
    assert report.gib_per_s == pytest.approx(
        DATA / (report.seconds - report.stages["import"]) / 2**30
    )
    assert loaded


def test_figures_of_a_map_and_of_gaps(path: Path, tmp_path: Path) -> None:
    assert _report(path, engine="mmap")[0].mapped_bytes == DATA
    arrays = {f"t{n}": np.full(10, n, np.uint8) for n in range(4)}
    gaps = samples.save(tmp_path / "gaps.safetensors", arrays)
    report = _report(gaps, names=["t0", "t3"])[0]
    assert (report.read_bytes, report.over_read_bytes, report.result_bytes) == (40, 20, 20)


def test_a_cast_counts_what_is_delivered(path: Path) -> None:
    report = _report(path, names=["embed"], dtype="float64")[0]
    assert report.read_bytes == MODEL["embed"].nbytes
    assert report.result_bytes == 2 * MODEL["embed"].nbytes
    assert report.over_read_bytes == 0


def test_a_report_may_be_used_again(path: Path) -> None:
    report = _report(path)[0]
    stages = set(report.stages)
    mfload.load(path, framework="numpy", names=["odd"], report=report)
    assert report.tensors == 1
    assert "1 numpy tensor," in str(report)
    assert set(report.stages) == stages


def test_a_report_shows_itself(path: Path) -> None:
    report = Report()
    assert str(report) == "an empty report"
    assert "an empty report" in report._repr_html_()
    assert report.gib_per_s == 0
    assert report.aliased_share == 1.0
    report = _report(path, engine="direct")[0]
    text, page = str(report), report._repr_html_()
    for part in (
        f"{len(MODEL)} numpy tensors",
        "GiB/s",
        "direct (asked for)",
        "100.0%",
        "transfer",
    ):
        assert part in text
        assert part in page
    assert page.startswith("<table><tr><td>")


def test_a_report_is_plain_data(path: Path) -> None:
    report = _report(path)[0]
    data = report.as_dict()
    again = json.loads(json.dumps(data))
    assert again["result_bytes"] == DATA
    assert again["gib_per_s"] == report.gib_per_s
    assert again["seconds"] == report.seconds
    assert again["route"] == [list(leg) for leg in report.route]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"),
     (3 << 30, "3 GiB"), (5 << 40, "5 TiB"), (-2048, "-2 KiB")],
)  # fmt: skip
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(("faults", "text"), [(0, "0 page faults"), (1, "1 page fault")])
def test_numbers_agree_with_their_nouns(faults: int, text: str) -> None:
    assert str(Report(stages={"plan": 0.1}, page_faults=faults)).splitlines()[3].endswith(text)


def test_columns_are_aligned() -> None:
    assert table([("a", 1), ("long", "x")]) == "a     1\nlong  x"
    assert html_table([("<", 1)]) == "<table><tr><td>&lt;</td><td>1</td></tr></table>"


def test_an_opened_checkpoint_shows_its_tensors(tmp_path: Path) -> None:
    names = ["<b>a</b>", *(f"w{n:02}" for n in range(60))]
    path = samples.save(tmp_path / "a.safetensors", {n: np.zeros((2, 3), np.int8) for n in names})
    with mfload.open(path) as opened:
        page = opened._repr_html_()
    assert page.startswith("<table><tr><th>name</th><th>dtype</th><th>shape</th><th>size</th></tr>")
    assert "<td>&lt;b&gt;a&lt;/b&gt;</td><td>I8</td><td>[2, 3]</td><td>6 B</td>" in page
    assert page.count("<tr>") == 51
    assert page.endswith("<p>… and 11 more</p>")
