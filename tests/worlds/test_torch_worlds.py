"""PyTorch in several processes: DTensors and plain shards, read alone or for each other."""

from __future__ import annotations

from pathlib import Path

import launching
import numpy as np
import pytest
import samples
import serving
import torch_cases
from world import model

from mfload.sources.http import _HEAD as HEAD, COSTS  # pyright: ignore[reportPrivateUsage]

SCRIPT = Path(__file__).with_name("torch_cases.py")
PEERS = ["peers:rows:columns", "peers:columns:replicated", "peers:replicated:rows"]
ONLY = {2: ["beside"], 4: ["five_rows_over_four_ranks", "strided", "fsdp", "submeshes", "lopsided"]}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_values_and_bytes(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    torch_cases.zoo(tmp_path)
    whole = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    samples.save(tmp_path / "five.safetensors", {"w": whole, "t.w": whole})
    shapes = {"0.weight": (24, 16), "0.bias": (24,), "1.weight": (12, 24), "1.bias": (12,)}
    linear = {name: samples.numbers(shape) for name, shape in shapes.items()}
    samples.save(tmp_path / "linear.safetensors", linear)
    names = [f"values:columns:{how}" for how in ("never", "once", "auto")]
    names += ["values:rows:once", "values:replicated:once", "shards:never", "shards:once", "grids"]
    names += PEERS
    names += ONLY.get(count, [])
    ended = launching.launch(tmp_path, names, count=count, seconds=200, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
        for name in names:
            assert each.said.get(name, {"error": each.log})["error"] is None, each.said[name]
    for name in names[:5]:
        lines = [each.said[name] for each in ended]
        for line in lines:
            assert line["counted"] == line["read_bytes"], name
        if ":once" in name:
            assert sum(line["read_bytes"] for line in lines) == total
    # Whatever the mesh, each byte is read once.
    nbytes = sum(
        row.size_of(shape) or 0
        for row in torch_cases.TABLE.values()
        for shape in torch_cases.SHAPES
    )
    for read in zip(*(each.said["grids"]["read"] for each in ended), strict=True):
        assert sum(read) == nbytes


@pytest.mark.parametrize("spec", ["columns", "replicated"])
def test_each_byte_comes_once_from_a_store(tmp_path: Path, spec: str) -> None:
    total = model(tmp_path / "model")
    files = {f"/{each.name}": each.read_bytes() for each in (tmp_path / "model").iterdir()}
    with serving.serving(files) as server:
        case = f"of_a_store:{spec}:{server.port}"
        ended = launching.launch(tmp_path, [case], count=4, seconds=100, script=SCRIPT)
        asked = server.asked
    lines = [each.said.get(case, {"error": each.log}) for each in ended]
    assert [line["error"] for line in lines] == [None] * 4
    assert sum(line["read_bytes"] for line in lines) == total
    assert all("every byte is read by one process" in str(line["notes"]) for line in lines)
    sent = 0
    for each in asked:
        first, last = map(int, (each.range or "").removeprefix("bytes=").split("-"))
        sent += min(last + 1, len(files[each.path])) - first
    headers = 4 * len(files) * HEAD  # Each process reads all headers.
    assert sent <= total + headers + len(asked) * COSTS.merge_gap


# After each failure a load works. (case, error of process 0, error of process 1)
FAILURES = [
    ("missing", "ProcessError", "ShardNotFoundError"),
    ("damaged", "ProcessError", "HeaderError"),
    ("alike", "ProcessError", "ProcessError"),
    ("other_arguments", "ProcessError", "ProcessError"),
    ("other_exchange", "ProcessError", "ProcessError"),
    ("disk:never:1000000", "ProcessError", "ReadError"),
    ("disk:once:0", "ProcessError", "ReadError"),
    ("disk:once:1000000", "ProcessError", "ReadError"),
    ("full", "ProcessError", "MemoryLimitError"),
    ("alone", "LoadTimeoutError", "ProcessError"),
    ("some_ask", "ProcessError", "ProcessError"),
    ("interrupted", "ProcessError", "KeyboardInterrupt"),
    *((f"wrong:{what}", "ProcessError", None) for what in torch_cases.WRONG),
    *((f"wrong_shard:{what}", "ProcessError", None) for what in torch_cases.WRONG_SHARD),
]
WORDS = {
    "damaged": ("process 1", "HeaderError", "model-00002"),
    "missing": ("process 1", "model-00002"),
    "alike": ("process 0: model-00001", "process 1: model-00001", "sampled"),
    "other_arguments": ("Shard(dim=0)", "Shard(dim=1)"),
    "other_exchange": ("once", "never"),
    "disk:once:1000000": ("process 1", "ReadError", "Input/output"),
    "wrong:placement": ("process 1", "does not say where values lie"),
    "some_ask": ("process 1 did not come within 1 s", "must load with exchange='once'"),
    "wrong_shard:rank": ("process 1", "same rank and size"),
    "wrong_shard:float": ("process 1", "shard is invalid"),
}
AFTER = ["without_a_store", "without_gloos_group", "remade", "silent", "out_of_step"]


def test_what_fails_in_one_fails_in_all_and_the_next_load_works(tmp_path: Path) -> None:
    model(tmp_path / "model")
    whole = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    samples.save(tmp_path / "five.safetensors", {"w": whole})
    names: list[str] = []
    for number, (case, *_) in enumerate(FAILURES):
        # Cases are kept by name, so that each load in between has one of its own.
        names += [f"values:columns:once:{number}", case]
    names += AFTER
    ended = launching.launch(tmp_path, names, count=2, seconds=200, script=SCRIPT)
    for each in ended:
        assert each.code == 0, each.log
        assert list(each.said) == names, each.log
    for case, *expected in FAILURES:
        for each, error in zip(ended, expected, strict=True):
            line = each.said[case]
            assert line["error"] == error or (error is None and line["error"]), (case, line)
            assert line["typed"] or line["error"] == "KeyboardInterrupt", (case, line)
            assert line["seconds"] < 8, (case, line)
        for word in WORDS.get(case, ()):
            assert word in ended[0].said[case]["text"], ended[0].said[case]
    for each in ended:
        for name in names:
            if name.startswith("values") or (name in AFTER and name != "silent"):
                assert each.said[name]["error"] is None, (name, each.said[name])
        line = each.said["silent"]
        assert line["error"] in ("LoadTimeoutError", "ProcessError"), line
        assert line["seconds"] < 8
    assert "LoadTimeoutError" in {each.said["silent"]["error"] for each in ended}


def test_ctrl_c_in_an_exchange_leaves_the_group_whole(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["signalled:8"], count=2, seconds=90, script=SCRIPT)
    launching.assert_ended(ended, ["signalled:8"], {})


@pytest.mark.parametrize("case", ["killed_reading", "killed_exchanging", "left"])
def test_a_process_that_is_gone_is_missed_at_once(tmp_path: Path, case: str) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, [case], count=3, seconds=90, script=SCRIPT)
    assert ended[1].code == (0 if case == "left" else -9), ended[1].log
    for each in (ended[0], ended[2]):
        line = each.said.get(case, {"error": each.log})
        assert line["error"] == "ProcessError", line
        assert line["seconds"] < 15, line


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shared_streams(tmp_path: Path, count: int) -> None:
    total = model(tmp_path / "model")
    names = [f"stream:{spec}:{how}" for spec in ("rows", "columns") for how in ("never", "once")]
    names += ["stream:replicated:once", "stream_shards:never", "stream_shards:once"]
    names += ["stream_all_leave:once", "stream_all_leave:never"]
    if count > 1:
        names += ["stream_orders", "stream_disk:once", "stream_disk:never"]
        names += [f"stream_leaves:{how}" for how in ("once:break", "never:break", "once:raise")]
        names += ["stream_leaves:never:unbegun", "stream_collected:once"]
        names += ["stream_collected:never", "values:rows:once"]
    last = ["stream_killed"] if count > 1 else []
    ended = launching.launch(tmp_path, names + last, count=count, seconds=180, script=SCRIPT)
    for rank, each in enumerate(ended):
        assert each.code == (-9 if rank == 1 else 0), each.log
        if last and rank != 1:
            line = each.said[last[0]]
            assert line["error"] == "ProcessError", line
            assert line["seconds"] < 15, line
    for name in names:
        lines = [each.said[name] for each in ended]
        expected: list[str | None] = [None] * count
        if name == "stream_orders":
            expected = ["ProcessError"] * count
        elif name.startswith("stream_disk"):
            expected = ["ReadError" if rank == 1 else "ProcessError" for rank in range(count)]
        elif name.startswith(("stream_leaves", "stream_collected")):
            expected = ["ProcessError"] * count
            expected[1] = "KeyError" if "raise" in name else None
            others = [line["text"] for line in lines if line["error"] == "ProcessError"]
            assert all("left a stream" in text for text in others), others
        assert [line["error"] for line in lines] == expected, lines
        assert all(line["live"] == 0 for line in lines), lines
        assert expected == [None] * count or all(line["seconds"] < 5 for line in lines), lines
        if name.startswith("stream:"):
            assert {line["processes"] for line in lines} == {count}
        if name.startswith("stream:") and "once" in name:
            assert sum(line["read_bytes"] for line in lines) == total
