"""PyTorch in several processes with a fake device each: what is exchanged travels between these."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest
import torch_cases
from conformance.suite import no_gpu
from world import model

SCRIPT = Path(__file__).with_name("torch_device_cases.py")


@pytest.mark.parametrize("count", [2, 3])
def test_bytes_travel_between_devices(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    torch_cases.zoo(tmp_path)
    values = [
        "values:columns:lazy:mfload",
        "values:columns:thread:framework",
        "values:rows:lazy:auto",
        "values:replicated:mixed:auto",
    ]
    names = [
        *values,
        "grid",
        "dtypes",
        "converted",
        "shards",
        "by_host:one",
        "by_host:limit",
        "by_host:none",
        "by_host:nothing",
        "unconnected:late",
        "unconnected:alone",
        "moved",
    ]
    disks = ["disk:0", "disk:1000000"]
    late = {"device:copy_in:2:fail": "DeviceError", "device:copy_in:2:fail_later": "DeviceError",
            "device:allocate:1:fail": "MemoryLimitError"}  # fmt: skip
    for case in [*disks, *late]:
        names += [case]
    names += ["values:columns:mixed:auto"]
    ended = launching.launch(tmp_path, names, count=count, seconds=200, script=SCRIPT)
    launching.assert_ended(ended, names, dict.fromkeys(disks, "ReadError") | late)
    for name in [*disks, *late]:
        assert all(each.said[name]["seconds"] < 10 for each in ended), name
    for name in values:
        lines = [each.said[name] for each in ended]
        assert sum(line["read_bytes"] for line in lines) == total
        # Parts of columns lie apart in the file; of rows each process reads its own.
        moved = sum(line["moved"] for line in lines)
        assert (moved > total // 3) == ("rows" not in name), (name, moved)


def test_a_killed_process_is_missed(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["killed"], count=3, seconds=90, script=SCRIPT)
    assert ended[1].code == -9, ended[1].log
    for each in (ended[0], ended[2]):
        line = each.said.get("killed", {"error": each.log})
        assert line["error"] == "ProcessError", line
        assert line["seconds"] < 15, line


@pytest.mark.gpu
def test_on_a_gpu_that_two_processes_share(tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    model(tmp_path / "model")
    names = ["gpu:columns", "gpu:replicated"]  # Of rows nothing travels.
    ended = launching.launch(tmp_path, names, count=2, seconds=200, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
        assert [line["error"] for line in each.said.values()] == [None, None], each.said
