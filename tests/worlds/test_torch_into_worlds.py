"""Modules of PyTorch with sharded parameters: each process fills its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launching
import pytest
import safetensors.torch
import torch
import torch_into_cases as cases

SCRIPT = Path(__file__).with_name("torch_into_cases.py")


def files(directory: Path) -> None:
    torch.manual_seed(0)
    net = cases.Net()
    for name, each in net.named_buffers():
        each.copy_(torch.arange(each.numel()) + len(name))
    state = {name: each for name, each in net.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, directory / "net.safetensors")
    state["blocks.0.fc.weight"] = state.pop("blocks.0.up.weight")
    safetensors.torch.save_file(state, directory / "hooked.safetensors")
    parts = {"part.0": torch.randn(90, 20), "part.1": torch.randn(90, 50)}
    safetensors.torch.save_file(parts, directory / "parts.safetensors")
    linear = torch.nn.Linear(8, 8).state_dict()
    safetensors.torch.save_file(linear, directory / "linear.safetensors")


def lines(ended: Any, name: str) -> list[Any]:
    found = [each.said.get(name, {"error": each.log}) for each in ended]
    assert [each["error"] for each in found] == [None] * len(found), found
    assert [each["live"] for each in found] == [0] * len(found), name
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_values_and_bytes(tmp_path: Path, count: int) -> None:
    files(tmp_path)
    total = sum(each.nbytes for each in cases_state(tmp_path).values())
    hows = ["fsdp", "tensor_parallel", "distributed"] + ["both", "hybrid"] * (count > 2)
    names = [
        f"values:{how}:{where}:{exchange}"
        for how in hows
        for where in ("held", "meta")
        for exchange in ("auto", "once")
    ]
    atomic = [f"values:{how}:held:{ex}:atomic" for how in hows for ex in ("auto", "once")]
    more = [*atomic, "mapped:auto", "mapped:once", "plain", "again"] + ["strided"] * (count > 2)
    ended = launching.launch(tmp_path, names + more, count=count, seconds=180, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
    for name in names:
        found = lines(ended, name)
        for line in found:
            assert line["counted"] == line["read"], name
            if name.endswith("auto"):
                assert line["read"] - line["over"] == line["mine"], name
        if name.endswith("once"):
            assert sum(line["read"] - line["over"] for line in found) == total, name
            assert sum(line["exchanged"] for line in found) > 0
    for name in (*atomic, "again"):
        lines(ended, name)
    assert count == 2 or "_StridedShard" in lines(ended, "strided")[0]["placements"]
    assert all(line["exchanged"] == 0 for line in lines(ended, "mapped:auto"))
    assert sum(line["exchanged"] for line in lines(ended, "mapped:once")) > 0
    assert sum(line["read"] for line in lines(ended, "plain")) == total


@pytest.mark.parametrize("count", [2, 4])
def test_modules_with_hooks(tmp_path: Path, count: int) -> None:
    files(tmp_path)
    hows = ["fsdp", "tensor_parallel"] + ["both"] * (count > 2)
    ways = [("held", "auto"), ("meta", "auto"), ("meta", "once")]
    names = [f"hooked:{how}:{where}:{exchange}" for how in hows for where, exchange in ways]
    ended = launching.launch(tmp_path, names, count=count, seconds=120, script=SCRIPT)
    for name in names:
        lines(ended, name)


def cases_state(directory: Path) -> dict[str, Any]:
    return safetensors.torch.load_file(directory / "net.safetensors")


def test_what_fails_in_one_fails_in_all(tmp_path: Path) -> None:
    files(tmp_path)
    disks = [f"disk:{where}:{how}" for where in ("held", "meta") for how in ("never", "once")]
    disks += [f"disk:held:{how}:atomic" for how in ("never", "once")]
    names = ["refused", "other", "some_ask", *disks, "values:fsdp:meta:once"]
    ended = launching.launch(tmp_path, names, count=2, seconds=120, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
    for each in ended:
        text = each.said["refused"]["text"]
        assert each.said["refused"]["error"] == "MappingError"
        assert "weight: Partial(sum)" in text or "Partial" in text
        assert text.count("misfit: ") == 2
    assert "process 1 did not come within 1 s" in ended[0].said["some_ask"]["text"]
    expected = {
        "other": ("ProcessError", "MappingError"),
        "some_ask": ("ProcessError", "ProcessError"),
    }
    expected |= dict.fromkeys(disks, ("ProcessError", "ReadError"))
    for case, kinds in expected.items():
        found = [each.said[case] for each in ended]
        assert tuple(line["error"] for line in found) == kinds, found
        assert all(line["seconds"] < 10 for line in found)
    for case in disks:
        for each in ended:
            notes = each.said[case]["notes"]
            # Buffers are in memory also where parameters are on meta.
            assert len(notes) == ("held" in case and "atomic" not in case), (case, notes)
    lines(ended, "values:fsdp:meta:once")
