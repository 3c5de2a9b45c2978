"""The table of steps, at a small geometry: its traces, and that it can be run and redrawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ondemand_table as table


def test_traces_are_as_the_page_says() -> None:
    made = table.trace(3, 30)
    for number in range(table.WINDOW, 30):
        asked = made[number]
        before = np.unique(np.concatenate(made[number - table.WINDOW : number]))
        assert asked.size == np.unique(asked).size == round(table.ASKED * table.NEURONS)
        new = np.setdiff1d(asked, before).size
        assert new == round(table.NEW * table.NEURONS)
        assert before.size < table.ROOM * table.NEURONS
    assert np.array_equal(made[7], table.trace(3, 8)[7])


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WIDTH": 2048, "NEURONS": 256, "_BLOCK": 1 << 20}.items():
        monkeypatch.setattr(table, name, value)
    predicted: list[int] = []
    monkeypatch.setattr(table.ondemand.Predictor, "predict", lambda _, x: predicted.append(x.size))
    given = ["--out", f"{tmp_path}/out", "--workdir", f"{tmp_path}/work", "--rounds", "2"]
    given += ["--layers", "2", "--product-layers", "1", "--tokens", "3"]
    try:
        table.main(given)
    except SystemExit as error:
        pytest.skip(str(error))
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "ondemand_table.json").read_text())
    whole = 2 * (4 * 2048 * 2048 + 2 * 256 * 2048) * 2
    new, asked = round(table.NEW * 256), round(table.ASKED * 256)
    nbytes = [
        whole,
        2 * 256 * 2048 * 2 * 2 * 3 // 4,
        *(2 * n * 2 * 4096 for n in (asked, new, new)),
    ]
    assert [found["io"][name][0]["nbytes"] for name in table.ROWS] == nbytes
    assert [len(found["total"][name]) for name in table.ROWS] == [2] * 5
    assert found["total"]["naive"][0]["compute"] > 0 == found["io"]["naive"][0]["compute"]
    held = {name: found["total"][name][0]["held"] for name in ("naive", "+ predictor")}
    predictor = 4 * (2048 * 128 + 128 * 256 + 256)
    assert held["+ predictor"] - 2 * asked * 2048 * 4 - 4 * 2048 * 2048 * 4 == predictor
    # Each token of three rows, in two rounds of one layer: three tokens behind five that warm up.
    assert len(predicted) == 3 * 2 * (3 + table.WINDOW)
    assert found["ratios"].keys() == table.ASKED_FOR.keys()
    assert not [*(tmp_path / "work").iterdir()]
    drawn = printed[printed.index("| I/O alone, 2 layers in f16") :]
    table.main([*given, "--redraw"])
    assert capsys.readouterr().out == drawn
    assert drawn.count("| + bundle") == 2
