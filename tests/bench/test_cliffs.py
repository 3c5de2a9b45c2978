"""The benchmark of the paths beside whole files, at a size at which its figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image

from benchmarks import ROOT
from benchmarks.cliffs import __main__ as cliffs


@pytest.mark.parametrize("topic", cliffs.TOPICS)
def test_both_sides_of_each_row_agree_and_are_timed(topic: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cliffs", "--topics", topic, "--rounds", "1"]
    command += ["--scale", "0.01", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "cliffs.json").read_text())
    assert len(found) > 0
    for row in found:
        assert row["topic"] == topic
        assert len(row["ours"]) == len(row["theirs"]) == 1
        assert f"| {row['name']} |" in done.stdout
    assert done.stdout.strip() in (tmp_path / "cliffs.md").read_text()
    drawn = image.imread(tmp_path / "cliffs.png")
    assert drawn.shape[0] > 100
    assert drawn.shape[1] > 500


def test_the_limit_of_a_row_counts() -> None:
    row = {"ours": [3.0, 2.0], "theirs": [1.0, 1.5], "limit": 1.5, "allowance": 0.5}
    assert cliffs.ratio(row) == 2
    assert cliffs.reached(row)
    assert not cliffs.reached(row | {"allowance": 0.4})
