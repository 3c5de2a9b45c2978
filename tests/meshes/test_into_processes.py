"""Loads into a target by several processes at once."""

from __future__ import annotations

from pathlib import Path

import into_cases
import launching
import pytest

CASES = [
    f"{spec}:{exchange}{cap}"
    for spec in into_cases.SPECS
    for exchange in ("never", "once", "auto")
    for cap in ("", ":1500000")
]


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "SCRIPT", Path(into_cases.__file__))


@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 2)])
def test_the_same_as_on_one_process(tmp_path: Path, count: int, devices: int) -> None:
    cases = CASES if count == 2 else [case for case in CASES if "auto" not in case]
    ended = launching.launch(tmp_path, cases, count=count, devices=devices, seconds=150)
    total = sum(array.nbytes for array in into_cases.stored().values())
    for each in ended:
        assert each.code == 0, each.log
        for case in cases:
            line = each.said[case]
            assert line["error"] is None, (case, line["error"], line["text"])
            assert (line["live"], line["processes"]) == (0, count)
            if case.endswith(":1500000"):
                assert line["peak"] < (2 << 20) + total
    for case in cases:
        read = sum(each.said[case]["read"] for each in ended)
        if ":once" in case:
            # In stretches, what two of them share is read for each.
            assert read <= (1.35 if case.endswith("0") else 1.0) * total, case
            assert case.startswith("rows") or ended[0].said[case]["exchanged"], case


def test_leaves_of_numpy_beside_sharded_ones(tmp_path: Path) -> None:
    for each in launching.launch(tmp_path, ["numpy", "rows:once"], count=2, devices=2, seconds=90):
        assert each.code == 0, each.log
        assert each.said["numpy"]["error"] is None, each.said["numpy"]["text"]


def test_a_leaf_of_one_process_beside_others(tmp_path: Path) -> None:
    cases = ["apart:auto", "apart:once", "apart:never"]
    for each in launching.launch(tmp_path, cases, count=2, devices=2, seconds=90):
        assert each.code == 0, each.log
        for case in cases:
            assert each.said[case]["error"] is None, (case, each.said[case]["text"])


def test_what_fails_in_one_fails_in_all(tmp_path: Path) -> None:
    cases = ["map", "rows:once", "target", "grid:never", "own"]
    ended = launching.launch(tmp_path, cases, count=2, devices=2, seconds=90)
    for each in ended:
        assert each.code == 0, each.log
    for case, errors in {
        "map": ("ProcessError", "MappingError"),
        "target": ("MappingError", "ProcessError"),
        "rows:once": (None, None),
        "grid:never": (None, None),
        "own": (None, None),
    }.items():
        lines = [each.said[case] for each in ended]
        found = tuple(line["error"] for line in lines)
        if case == "target":
            # Both are wrong, and each has its own error, or hears of the other's first.
            assert set(found) <= {"MappingError", "UsageError", "ProcessError"}, lines
            assert all(line["typed"] for line in lines)
            continue
        assert found == errors, (case, lines)
