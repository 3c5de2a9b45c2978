"""TensorFlow with a fake device a client: what is exchanged travels between these."""

from __future__ import annotations

from pathlib import Path

import launching
from test_tensorflow_worlds import ports
from world import model

SCRIPT = Path(__file__).with_name("tensorflow_device_cases.py")


def test_bytes_travel_between_devices(tmp_path: Path) -> None:
    total = model(tmp_path / "model")
    ports(tmp_path, 2)
    values = ["values:replicated:mixed:mfload", "values:columns:lazy:framework"]
    values += ["values:columns:thread:mfload", "values:rows:lazy:auto"]
    late = {"disk:0": "ReadError", "device:copy_in:2:fail": "DeviceError",
            "device:copy_in:2:fail_later": "DeviceError"}  # fmt: skip
    names = [*values, "lent", *late, values[0]]
    ended = launching.launch(tmp_path, names, count=2, seconds=200, script=SCRIPT)
    launching.assert_ended(ended, names, late)
    for name in values:
        lines = [each.said[name] for each in ended]
        assert sum(line["read_bytes"] for line in lines) == total
        assert all(line["swaps"] for line in lines) or "rows" in name, (name, lines)
