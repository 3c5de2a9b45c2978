"""JAX in several processes with fake devices: what is exchanged travels between these."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest
from world import model

SCRIPT = Path(__file__).with_name("device_cases.py")


@pytest.mark.parametrize(("count", "devices"), [(2, 1), (4, 2)])
def test_bytes_travel_between_devices(tmp_path: Path, count: int, devices: int) -> None:
    """From one device of each process, onto all of them; who fails, fails for all."""
    total = model(tmp_path / "model")
    values = [
        "values:columns:lazy:mfload",
        "values:columns:thread:framework",
        "values:rows:lazy:auto",
        "values:across:mixed:mfload",
        "values:replicated:mixed:auto",
    ]
    names = [*values, "by_host:limit", "by_host:none", "auto"]
    disks = ["disk:0", "disk:1000000"]
    late = {"device:copy_in:2:fail": "DeviceError", "device:copy_in:2:fail_later": "DeviceError",
            "device:allocate:1:fail": "MemoryLimitError"}  # fmt: skip
    names += [*disks, *late, "values:columns:mixed:auto"]
    ended = launching.launch(
        tmp_path, names, count=count, devices=devices, seconds=200, script=SCRIPT
    )
    launching.assert_ended(ended, names, dict.fromkeys(disks, "ReadError") | late)
    for name in values:
        lines = [each.said[name] for each in ended]
        assert sum(line["read_bytes"] for line in lines) == total
        # Of rows each process reads its own.
        assert all(line["swaps"] for line in lines) or "rows" in name, (name, lines)


def test_a_killed_process_is_missed(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["killed"], count=2, seconds=90, script=SCRIPT)
    assert ended[1].code == -9, ended[1].log
    line = ended[0].said.get("killed", {"error": ended[0].log})
    assert line["error"] == "ProcessError", line
    assert line["seconds"] < 15, line
