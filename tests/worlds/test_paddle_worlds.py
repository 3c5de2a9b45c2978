"""Paddle in several processes: distributed tensors and plain shards, by both ways of reading."""

from __future__ import annotations

import warnings
from pathlib import Path

import launching
import numpy as np
import pytest
import samples
from world import every_dtype, model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of compilers that Paddle does not find.
    import paddle_cases

SCRIPT = Path(__file__).with_name("paddle_cases.py")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_values_and_bytes(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    for rows, name in ((5, "five"), (7, "seven")):
        shape = (5, 7, 3) if rows == 5 else (7, 3)
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        samples.save(tmp_path / f"{name}.safetensors", {"w": whole})
    samples.save_raw(
        tmp_path / "dtypes.safetensors",
        [(key, kind, shape, raw.tobytes()) for key, (kind, shape, raw) in every_dtype().items()],
    )
    for turned in (False, True):
        samples.save(tmp_path / f"net.{turned}.safetensors", paddle_cases.stored(turned))
    nbytes = sum(array.nbytes for array in paddle_cases.stored(turned=False).values())
    specs = ("replicated",) if count in (3, 8) else ("rows", "columns", "replicated")
    values = [f"values:{spec}:{how}" for spec in specs for how in ("never", "once", "auto")]
    names = [*values, f"drawn:{count}", "shards:never", "shards:once"]
    names += ["peers:rows:columns", "peers:columns:replicated", "peers:replicated:rows"]
    names += ["uneven"] if count < 8 else []  # The groups that Paddle makes for it hang.
    names += ["refused"] if count == 4 else []
    filled: list[str] = []
    if count in (1, 2):
        names += [
            f"dtypes:{spec}:{how}" for spec in ("rows", "columns") for how in ("never", "once")
        ]
        hows = [how for how in paddle_cases.HOWS if count == 2 or "whole" not in how]
        filled = [f"into:{how}:{exchange}" for how in hows for exchange in ("auto", "once")]
    names += filled
    ended = launching.launch(tmp_path, names, count=count, seconds=200, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
        for name in names:
            assert each.said[name]["error"] is None, each.said[name]
        assert each.said[f"drawn:{count}"]["made"] > 6
        assert (each.said[f"drawn:{count}"]["refused"] > 0) == (count > 2)
    if count == 2:
        for each in ended:
            assert each.said["dtypes:columns:once"]["exchanged"] > 0
            kinds = each.said["dtypes:columns:once"]["kinds"]
            assert kinds["F8_E4M3"] == "paddle.float8_e4m3fn"
            assert kinds["C64"] == "paddle.complex64"
    for name in filled:
        lines = [each.said[name] for each in ended]
        assert all(line["counted"] == line["read"] for line in lines), name
        if name.endswith("once"):
            assert sum(line["read"] - line["over"] for line in lines) == nbytes, name
            assert (sum(line["exchanged"] for line in lines) > 0) == (count == 2), name
    for name in values:
        lines = [each.said[name] for each in ended]
        for line in lines:
            assert line["counted"] == line["read_bytes"], name
        if ":once" in name:
            assert sum(line["read_bytes"] for line in lines) == total


FAILURES = {
    "missing": ("ProcessError", "ShardNotFoundError"),
    "differs": ("ProcessError", "ProcessError"),
    "disk:never:1000000": ("ProcessError", "ReadError"),
    "disk:once:0": ("ProcessError", "ReadError"),
    "disk:once:2000000": ("ProcessError", "ReadError"),
    "into_disk:never": ("ProcessError", "ReadError"),
    "into_disk:once": ("ProcessError", "ReadError"),
}


def test_what_fails_in_one_fails_in_all_and_the_next_load_works(tmp_path: Path) -> None:
    model(tmp_path / "model")
    samples.save(tmp_path / "net.False.safetensors", paddle_cases.stored(turned=False))
    names = [*FAILURES, "signalled:6", "values:columns:once", "late", "after"]
    ended = launching.launch(tmp_path, names, count=2, seconds=120, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
    for case, expected in FAILURES.items():
        for each, error in zip(ended, expected, strict=True):
            assert each.said[case]["error"] == error, each.said[case]
            assert each.said[case]["seconds"] < 5
            assert "into" not in case or "load_into was filling" in each.said[case]["notes"][0]
    for name in ("signalled:6", "values:columns:once"):
        assert [each.said[name]["error"] for each in ended] == [None, None], ended[0].said[name]
    # One that does not come is waited for until the deadline; then the group is out of step.
    assert ended[0].said["late"]["error"] == "LoadTimeoutError"
    assert ended[0].said["late"]["seconds"] < 5
    for each in ended:
        assert each.said["after"]["error"] in ("ProcessError", "LoadTimeoutError")
        assert each.said["after"]["seconds"] < 25


def test_a_killed_process_is_missed(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["killed_reading"], count=4, seconds=60, script=SCRIPT)
    assert ended[1].code == -9, ended[1].log
    for each in (ended[0], *ended[2:]):
        line = each.said.get("killed_reading", {"error": each.log})
        assert line["error"] in ("ProcessError", "LoadTimeoutError"), line
        assert line["seconds"] < 25, line
