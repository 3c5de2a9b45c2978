"""Paddle in several processes with a fake device each: what is exchanged travels between these."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest
from world import model

SCRIPT = Path(__file__).with_name("paddle_device_cases.py")


@pytest.mark.parametrize("count", [2, 3])
def test_bytes_travel_between_devices(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    values = ["values:replicated:mixed", "values:replicated:thread"]
    if count == 2:  # Three cut columns of 512 unevenly, which Paddle does not.
        values += ["values:columns:lazy", "values:rows:lazy"]
    late = {"disk:0": "ReadError", "device:copy_in:2:fail": "DeviceError",
            "device:copy_in:2:fail_later": "DeviceError"}  # fmt: skip
    names = [*values, *(late if count == 2 else [])]
    ended = launching.launch(tmp_path, names, count=count, seconds=200, script=SCRIPT)
    launching.assert_ended(ended, names, late)
    for name in values:
        lines = [each.said[name] for each in ended]
        assert sum(line["read_bytes"] for line in lines) == total
        assert all(line["swaps"] for line in lines) or "rows" in name, (name, lines)
