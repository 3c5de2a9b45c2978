"""TensorFlow with several clients: DTensors and plain shards, read alone or for each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import launching
import numpy as np
import pytest
import samples
from world import every_dtype, model

SCRIPT = Path(__file__).with_name("tensorflow_cases.py")


def ports(directory: Path, count: int) -> None:
    """Gives each client a port of its own."""
    found: set[int] = set()
    while len(found) < count:
        found.add(launching.free_port())
    (directory / "ports").write_text(",".join(f"127.0.0.1:{port}" for port in sorted(found)))


def launch(
    directory: Path, names: Sequence[str], *, count: int, seconds: float
) -> list[launching.Ended]:
    """Runs cases in `count` clients."""
    ports(directory, count)
    return launching.launch(directory, names, count=count, seconds=seconds, script=SCRIPT)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_values_and_bytes(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    whole = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    samples.save(tmp_path / "five.safetensors", {"w": whole})
    specs = ("rows", "columns", "replicated")
    names = [f"values:{spec}:{how}" for spec in specs for how in ("never", "once", "auto")]
    names += ["peers:rows:columns", "peers:columns:replicated", "peers:replicated:rows"]
    samples.save_raw(
        tmp_path / "dtypes.safetensors",
        [(key, kind, shape, raw.tobytes()) for key, (kind, shape, raw) in every_dtype().items()],
    )
    dtypes = [f"dtypes:{spec}:once" for spec in ("rows", "columns")]
    names += [*dtypes, "usable", "shards:never", "shards:once"]
    ended = launch(tmp_path, names, count=count, seconds=240)
    for each in ended:
        assert each.code == 0, each.log
        for name in names:
            assert each.said[name]["error"] is None, each.said[name]
            assert each.said[name]["live"] == 0, name
        for name in dtypes:
            assert each.said[name]["exchanged"] > 0 or count == 1 or "rows" in name
            kinds = each.said[name]["kinds"]
            assert kinds["F8_E4M3"] == "float8_e4m3fn"
            assert (kinds["C64"], kinds["BF16"], kinds["BOOL"]) == ("complex64", "bfloat16", "bool")
    for name in names[:9]:
        lines = [each.said[name] for each in ended]
        for line in lines:
            assert line["counted"] == line["read_bytes"], name
        if ":once" in name:
            assert sum(line["read_bytes"] for line in lines) == total


FAILURES = {
    "missing": ("ProcessError", "ShardNotFoundError"),
    "misfit": ("ProcessError", "ShardingError"),
    "disk:never:1000000": ("ProcessError", "ReadError"),
    "disk:once:0": ("ProcessError", "ReadError"),
    "disk:once:2000000": ("ProcessError", "ReadError"),
}


def test_what_fails_in_one_fails_in_all_and_the_next_load_works(tmp_path: Path) -> None:
    """Until one gives up waiting: then its collectives are out of step."""
    model(tmp_path / "model")
    names = [*FAILURES, "values:columns:once", "late", "after"]
    ended = launch(tmp_path, names, count=2, seconds=180)
    for each in ended:
        assert each.code == 0, each.log
    for case, expected in FAILURES.items():
        for each, error in zip(ended, expected, strict=True):
            assert each.said[case]["error"] == error, each.said[case]
            assert each.said[case]["seconds"] < 10
    assert [each.said["values:columns:once"]["error"] for each in ended] == [None, None]
    assert ended[0].said["late"]["error"] == "LoadTimeoutError"
    assert ended[0].said["after"]["error"] == "ProcessError"
    assert ended[1].said["after"]["error"] in ("LoadTimeoutError", "ProcessError")


@pytest.mark.parametrize(("exchange", "count"), [("once", 4), ("never", 2)])
def test_a_killed_client_is_missed(tmp_path: Path, exchange: str, count: int) -> None:
    """TensorFlow hears of it after some ten seconds; the other clients live on."""
    model(tmp_path / "model")
    case = f"killed_reading:{exchange}"
    ended = launch(tmp_path, [case], count=count, seconds=150)
    assert ended[1].code == -9, ended[1].log
    for each in (ended[0], *ended[2:]):
        assert each.code == 0, each.log
        line = each.said.get(case, {"error": each.log})
        assert line["error"] == "ProcessError", line
        assert line["seconds"] < 45, line
