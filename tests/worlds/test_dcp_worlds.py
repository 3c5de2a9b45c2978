"""torch.distributed.checkpoint with mfload's reader, against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launching
import pytest
import world

SCRIPT = Path(__file__).with_name("dcp_cases.py")
HOWS = ("sharded", "plain", "replicated", "grid", "strided", "sharded-converted")


def lines(ended: Any, name: str) -> list[Any]:
    found = [each.said.get(name, {"error": each.log}) for each in ended]
    assert [each["error"] for each in found] == [None] * len(found), found
    assert [each["live"] for each in found] == [0] * len(found), name
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_values_and_bytes(tmp_path: Path, count: int) -> None:
    total = world.model(tmp_path / "model")
    exchanges = ["never", "auto"] + ["once"] * (count > 1)
    names = [f"values:{how}:model:{each}" for how in HOWS for each in exchanges]
    ended = launching.launch(tmp_path, names, count=count, seconds=180, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
    for name in names:
        found = lines(ended, name)
        if name.endswith("never"):
            assert all(line["exchanged"] == 0 for line in found)
        if name.endswith("auto") and count > 1:
            assert all("costs as much as reading" in "".join(line["notes"]) for line in found), name
        if name.endswith("once"):
            assert sum(line["exchanged"] for line in found) > 0, name
            assert sum(line["read"] for line in found) < 1.2 * total, name


def test_what_fails_in_one_fails_in_all(tmp_path: Path) -> None:
    world.model(tmp_path / "model")
    expected = {
        "damaged:missing": {"1": "AssertionError"},
        "damaged:cut": {"1": "AssertionError"},
        "damaged:other": {"0": "ProcessError", "1": "ProcessError"},
        "disk:once": {"0": "ProcessError", "1": "ReadError"},
        "disk:never": {"1": "ReadError"},
    }
    names = [*expected, "values:sharded:model:once"]
    ended = launching.launch(tmp_path, names, count=2, seconds=120, script=SCRIPT)
    for name, kinds in expected.items():
        for each in lines(ended, name):
            assert each["seconds"] < 15, name
            assert each["kinds"] == kinds, (name, each)
            # What fails before torch plans, it tells of as an assertion, with the text.
            texts = {"damaged:missing": "shards are missing", "damaged:cut": "is truncated"}
            assert texts.get(name, "") in each["texts"][0], (name, each)
    lines(ended, "values:sharded:model:once")
