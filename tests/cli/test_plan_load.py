"""`mfload plan` and `mfload load`: what would happen, and what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run, process

import mfload
from mfload.cli import terminal
from mfload.cli.terminal import fancy
from mfload.loading import execute


def test_a_plan_is_the_librarys(run: Run, model: Path) -> None:
    data = run("plan", model, "--json").json
    assert data == _plain(mfload.plan(model).as_dict())
    assert data["tensors"] == 6
    ran = run("plan", model)
    assert ran.out.rstrip() == str(mfload.plan(model))
    assert (ran.code, ran.err) == (0, "")


def _plain(data: dict[str, object]) -> object:
    import json

    return json.loads(json.dumps(data))


@pytest.mark.parametrize("name", ["plan", "load"])
def test_devices_in_the_plural(
    run: Run, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    real = getattr(mfload.api, name)

    def asked(*given: object, device: object, **options: object) -> object:
        seen.append(device)
        return real(*given, device=None, **options)

    monkeypatch.setattr(mfload.api, name, asked)
    for words in (["cpu"], ["cpu", "cpu:1"], ["a=cpu", "^b=x=cpu:1"]):
        assert run(name, model, *(w for word in words for w in ("--device", word))).code == 0
    assert seen == ["cpu", ["cpu", "cpu:1"], [("a", "cpu"), ("^b=x", "cpu:1")]]
    ran = run(name, model, "--device", "a=cpu", "--device", "cpu:1")
    assert "--device takes a regex each time" in ran.err


@pytest.mark.parametrize("name", ["plan", "load"])
def test_options_reach_the_library(
    run: Run, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: str) -> dict[str, object]:
        data = run(name, model, "--json", *arguments).json
        return data["runs"][0] if name == "load" else data

    assert asked("--names", "q")["tensors"] == 4
    assert asked("--engine", "mmap")["mapped_bytes"]
    with monkeypatch.context() as patched:  # So little is read by one.
        patched.setattr(execute, "count_readers", lambda _, route, threads, *__, **more: threads)
        assert asked("--threads", "3")["threads"] == 3
    assert asked("--framework", "np")["framework"] == "numpy"
    whole = asked()["result_bytes"]
    assert asked("--dtype", "float64")["result_bytes"] > whole
    by_name = asked("--dtype", "embed=float64", "--dtype", "q=float64")
    assert by_name["result_bytes"] == asked("--dtype", "float64")["result_bytes"]
    assert asked("--dtype", "steps=complex64")["result_bytes"] == whole
    assert asked("--names", "bias", "--dtype", "bias=bf16")["result_bytes"] == 32
    assert asked("--allocator", "mfload")["result_bytes"] == whole
    assert (
        asked("--max-host-overhead", "8MiB", "--timeout", "60", "--device", "cpu")["tensors"] == 6
    )
    assert run(name, model, "--max-host-overhead", "1kB").code == 2


def test_a_load_says_what_happened(run: Run, model: Path) -> None:
    ran = run("load", model)
    assert (ran.code, ran.err) == (0, "")
    names = [line.split()[0] for line in ran.out.splitlines()]
    assert names == [
        "loaded",
        "time",
        "stages",
        "CPU",
        "read",
        "mapped",
        "aliased",
        "peak",
        "threads",
        "route",
    ]
    assert ran.out.startswith("loaded   6 numpy tensors, 5.07 KiB\n")
    data = run("load", model, "--json").json["runs"][0]
    assert data["result_bytes"] == 5192
    assert data["route"] == [[str(model), "pread", "small read"]]


def test_repeats_are_told_one_by_one(run: Run, model: Path) -> None:
    ran = run("load", model, "--repeat", "3")
    rows = [line.split() for line in ran.out.split("\n\n")[1].splitlines()]
    assert [row[0] for row in rows] == ["run", "1", "2", "3", "median"]
    heads = ["run", "seconds", "GiB/s", "import", "user", "system", "page", "faults"]
    assert rows[0] == heads
    # Each run has its own CPU seconds and page faults.
    assert all(float(row[4]) >= 0 and int(row[6]) >= 0 for row in rows[1:4])
    assert len(run("load", model, "--repeat", "3", "--json").json["runs"]) == 3


def test_a_manifest_is_checked_on_the_way(run: Run, model: Path) -> None:
    pytest.importorskip("xxhash")
    mfload.verify(model, mode="write")
    manifest = next(model.parent.glob("*.checksums.json"))
    ran = run("load", model, "--verify", manifest)
    assert ran.code == 0
    assert "6 tensors verified" in ran.out
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(raw)
    ran = run("load", model, "--verify", manifest)
    assert (ran.code, ran.out) == (1, "")
    assert run("load", model, "--verify", model.parent / "gone").code == 3


def test_a_framework_prints_nothing_on_standard_output(model: Path) -> None:
    ran = process("load", model, "--framework", "torch", "--json")
    assert ran.json["runs"][0]["framework"] == "torch"


class _Screen:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


def test_a_bar_waits_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.bar("reading") as shown:
        assert shown
        shown(1, 10)
        shown(10, 10)
    assert screen.text == ""
    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)
    with terminal.bar("reading") as shown:
        assert shown
        shown(1 << 30, 10 << 30)
        # Its threads may be many, and the total may grow.
        shown(2 << 30, 11 << 30)
    assert "reading" in screen.text
    # Nothing is drawn after its end.
    ended = screen.text
    shown(3 << 30, 11 << 30)
    assert screen.text == ended


def test_where_nobody_looks_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal.bar("reading") as shown:
        assert shown is False
    monkeypatch.setattr("sys.stderr", _Screen())
    monkeypatch.setenv("TERM", "dumb")
    assert not fancy(_Screen())
    with terminal.bar("reading") as shown:
        assert shown is False


def test_names_of_options_are_those_of_the_library() -> None:
    import inspect

    from mfload.cli import options
    from mfload.cli.commands import load, plan

    # Meshes are objects of a program, and shards are for its processes.
    meshes = {"mesh", "shardings", "shard", "unmatched"}
    fields = {*mfload.Options.__dataclass_fields__} - {"exchange", "peer"}
    network = {*inspect.signature(options.network).parameters}
    assert network <= {*mfload.PeerOptions.__dataclass_fields__} | fields
    ours = {*inspect.signature(load).parameters}
    assert fields | network <= ours
    rest = {"progress", "report", "options"} | meshes
    assert {*inspect.signature(mfload.load).parameters} - ours <= rest
    planned = {*inspect.signature(mfload.plan).parameters} - meshes - {"options"} | fields
    assert planned <= {*inspect.signature(plan).parameters}
