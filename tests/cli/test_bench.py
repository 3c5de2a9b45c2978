"""`mfload bench`: small runs, whatever can be in its way, and what it must leave alone."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import samples

from mfload.bench import machine, measuring, random_reads, results
from mfload.cli import bench, run
from mfload.io.subprocess_probe import Probed

QUICK = ("--quick", "--rounds", "1", "--frameworks", "numpy")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what only matters to figures."""
    monkeypatch.setattr(machine, "prime", lambda nbytes: True)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that no process was started for."""

    def ask(*_: str, given: dict[str, Any], **__: object) -> Probed:
        ours = given["name"].startswith("mfload-")
        legs = {"route": [("pread", "small read", 1)], "threads": 1, "notes": []}
        found = {
            "load_s": 0.25, "touch_s": 0.25, "seconds": 0.5, "cpu_s": 0.5, "peak_over": 1 << 20,
            "explained": legs if ours else None,
        }  # fmt: skip
        return Probed(found)

    monkeypatch.setattr(measuring, "ask", ask)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    samples.save(folder / "model-00001-of-00002.safetensors", samples.model())
    more = {"more": samples.numbers((1000, 700))}
    samples.save(folder / "model-00002-of-00002.safetensors", more)
    return folder


def _state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def _fake(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a framework of that name before all others, here and in child processes."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def _rows(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(capsys.readouterr().out)
    return {(row["case"], row["name"]): row for row in found["rows"]}


def test_a_bench_writes_table_json_and_plot(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _state(model)
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = [
        *QUICK,
        "--engines",
        "auto,mmap",
        "--peers",
        "--out",
        str(out),
        "--plot",
        str(plot),
    ]
    assert run(["bench", str(model), *arguments]) == 0
    printed = capsys.readouterr()
    assert "mfload → numpy, engine mmap" in printed.out
    assert "safetensors.numpy" in printed.out
    assert "a fresh process for each sample" in printed.out
    assert "The load average was " in printed.out
    assert "mfload: warm" in printed.err
    assert _state(model) == before
    _check_schema(json.loads(out.read_text()))
    _check_picture(plot)


def _check_schema(found: dict[str, Any]) -> None:
    assert list(found) == [
        "schema", "machine", "run", "checkpoint", "conditions", "impossible", "rows", "samples",
        "failed",
    ]  # fmt: skip
    assert found["schema"] == 3
    assert {"processor", "kernel", "cores", "memory", "file system", "numpy"} < set(
        found["machine"]
    )
    assert found["failed"] == []
    assert found["checkpoint"]["whole"] is True
    cases = {"warm", "cold"} - found["impossible"].keys()
    for case in cases:
        rows = {row["name"]: row for row in found["rows"] if row["case"] == case}
        assert {"mfload-numpy", "mfload-numpy-mmap", "safetensors-numpy"} < set(rows)
        assert {row["kind"] for row in rows.values()} == {"ceiling", "mfload", "peer"}
        for row in rows.values():
            assert list(row) == [
                "case", "name", "label", "kind", "framework", "measured", "rounds", "best_s",
                "median_s", "gb_per_s", "over_ceiling", "cpu_s", "peak_over_bytes", "engines",
                "explanation",
            ]  # fmt: skip
            assert row["measured"]
            assert row["rounds"] == 1
            assert 0 < row["best_s"] <= row["median_s"]
            assert "GB/s" in row["explanation"]
            assert "of the ceiling's time" in row["explanation"]
        assert min(row["over_ceiling"] for row in rows.values() if row["kind"] == "ceiling") == 1
        assert rows["mfload-numpy-mmap"]["engines"] == ["mmap"]
        assert "(asked for)" in rows["mfload-numpy-mmap"]["explanation"]


def _check_picture(path: Path) -> None:
    from matplotlib import image

    drawn = image.imread(path)
    assert drawn.shape[0] > 200
    assert drawn.shape[1] > 500
    assert len({tuple(pixel) for pixel in drawn[::7, ::7].reshape(-1, drawn.shape[2])}) > 5


@pytest.mark.usefixtures("faked")
def test_json_goes_to_stdout_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(model), *QUICK, "--warm", "--json", "--names", "more"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["case"] for row in found["rows"]} == {"warm"}
    assert found["checkpoint"]["tensors"] == 1
    assert found["checkpoint"]["whole"] is False


@pytest.mark.usefixtures("faked")
def test_a_path_that_is_no_text_is_written(model: Path, tmp_path: Path) -> None:
    path, out = model.rename(tmp_path / os.fsdecode(b"\xff")), tmp_path / "out.json"
    assert run(["bench", str(path), *QUICK, "--warm", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["checkpoint"]["path"] == str(path)


def test_a_framework_that_fails_is_a_row(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fakes = tmp_path / "fakes"
    _fake(fakes, "torch", "raise RuntimeError('a broken build')", monkeypatch)
    _fake(fakes, "jax", "import os, sys\nprint(1, file=sys.stderr)\nos.abort()", monkeypatch)
    _fake(fakes, "paddle", "import time\ntime.sleep(100)", monkeypatch)
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # find_spec calls that missing
    wanted = "torch,jax,paddle,tf,cupy,numpy"
    arguments = [*QUICK[:3], "--frameworks", wanted, "--warm", "--json", "--timeout", "6"]
    assert run(["bench", str(model), *arguments]) == 0
    assert _children(os.getpid()) == []
    rows = _rows(capsys)
    assert rows["warm", "mfload-numpy"]["measured"]
    said = {name: row["explanation"] for (_, name), row in rows.items() if not row["measured"]}
    assert said.pop("mfload-cupy")
    assert said == {
        "mfload-torch": "ended with 1: RuntimeError: a broken build",
        "mfload-jax": "crashed with SIGABRT: 1",
        "mfload-paddle": "no answer within 6 s",
        "mfload-tensorflow": "not installed: tensorflow",
    }


@pytest.mark.usefixtures("faked")
def test_a_checkpoint_too_large_is_measured_in_part(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(model), *QUICK, "--warm", "--max-bytes", "300kB", "--peers"]) == 0
    printed = capsys.readouterr().out
    assert "what fits (--max-bytes 300 kB)" in printed
    assert "it loads whole files only" in printed


@pytest.mark.usefixtures("faked")
def test_what_lies_in_memory_is_not_called_cold(capsys: pytest.CaptureFixture[str]) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or machine.file_system(shm) != "tmpfs":
        pytest.skip("no tmpfs here")
    path = shm / f"mfload-test-{os.getpid()}.safetensors"
    try:
        samples.save(path, {"w": samples.numbers((500, 500))})
        assert run(["bench", str(path), *QUICK]) == 0
    finally:
        path.unlink()
    printed = capsys.readouterr().out
    assert "cold: not possible here, because tmpfs keeps its files in memory." in printed
    assert "\ncold " not in printed


def test_files_in_memory_alone_have_nothing_to_draw(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "MEMORY_FILE_SYSTEMS", {machine.file_system(model)})
    plot = tmp_path / "bench.png"
    assert run(["bench", str(model), *QUICK, "--cold", "--plot", str(plot)]) == 0
    assert "nothing was measured" in capsys.readouterr().err
    assert not plot.exists()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_reads, "_QUICK", ((4096, 16384), (1, 4)))
    monkeypatch.setattr(random_reads, "_QUICK_SECONDS", 0.1)


@pytest.mark.usefixtures("brief")
def test_random_reads_of_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if machine.file_system(model) in machine.MEMORY_FILE_SYSTEMS:
        pytest.skip("a file system in memory")
    before = _state(model)
    path, out, plot = next(model.iterdir()), tmp_path / "curve.json", tmp_path / "curve.png"
    more = ["--random", "--quick", "--engines", "threads,io_uring", "--out", str(out)]
    assert run(["bench", str(path), *more, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"threads, GB/s, by bytes of a read and reads at once\n +1 +4\n", printed)
    assert "io_uring, µs of CPU a read" in printed
    assert _state(model) == before
    _check_picture(plot)
    found = json.loads(out.read_text())
    assert {point["engine"] for point in found["points"]} == {"threads", "io_uring"}
    assert run(["bench", str(path), *more, "--json"]) == 0  # It replaces an earlier result.
    assert json.loads(capsys.readouterr().out)["kind"] == "random reads"


def test_random_reads_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def fake(files: list[str], *_: Any, **more: Any) -> dict[str, Any]:
        given.update(more, files=files)
        return {"points": [], "conditions": []}

    monkeypatch.setattr(random_reads, "bench", fake)
    assert run(["bench", str(tmp_path), "--random"]) == 0
    assert given == {
        "files": [], "folder": str(tmp_path), "engines": random_reads.ENGINES, "quick": False,
        "max_bytes": 4 << 30, "timeout": 300.0,
    }  # fmt: skip
    assert "could be drawn" not in capsys.readouterr().err
    assert run(["bench", str(tmp_path), "--random", "--max-bytes", "1MiB"]) == 0
    assert given["max_bytes"] == 1 << 20


@pytest.mark.parametrize(
    "wrong",
    [["--frameworks", "numpy"], ["--rounds", "1"], ["--cold"], ["--warm"], ["--names", "x"],
     ["--threads", "2"], ["--peers"], ["--engines", "pread"], ["--plot", "x.xyz"],
     ["--out", "x.safetensors"]],
)  # fmt: skip
def test_random_reads_take_no_other_options(model: Path, wrong: list[str]) -> None:
    assert run(["bench", str(next(model.iterdir())), "--random", "--quick", *wrong]) == 2


def test_random_reads_of_nothing(tmp_path: Path, model: Path) -> None:
    assert run(["bench", str(tmp_path / "nothing"), "--random"]) == 3
    path = next(model.iterdir())
    assert run(["bench", str(path), "--random", "--out", str(path)]) == 2


# What is refused ------------------------------------------------------------------------------


def test_damage_is_a_typed_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(model.iterdir())
    path.write_bytes(path.read_bytes()[:-7])
    assert run(["bench", str(model), *QUICK, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "HeaderError"


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    assert run(["bench", str(tmp_path / "nothing.safetensors")]) == 3


@pytest.mark.parametrize(
    "wrong",
    [["--frameworks", "nope"], ["--engines", "fast"], ["--rounds", "0"], ["--threads", "0"],
     ["--max-bytes", "0"], ["--names", "["], ["--frameworks"], ["--timeout", "nan"],
     ["--plot", "x.xyz"], ["--plot", "x"], ["--out", "x.safetensors"],
     ["--out", "x.safetensors.index.json"], ["--plot", "x.png", "--out", "x.png"]],
)  # fmt: skip
def test_bad_usage_is_refused_at_once(
    model: Path, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert run(["bench", str(model), *wrong]) == 2
    assert time.monotonic() - started < 20


def test_a_file_of_the_checkpoint_is_not_written_to(model: Path) -> None:
    before = _state(model)
    path = next(model.iterdir())
    for option in ("--out", "--plot"):
        assert run(["bench", str(model), *QUICK, option, str(path)]) == 2
        link = model.parent / f"link{option}"
        link.symlink_to(path)
        assert run(["bench", str(model), *QUICK, option, str(link)]) == 2
    assert _state(model) == before


def test_what_is_no_earlier_result_is_kept(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for kept in (b"notes", b"[1]", b'{"machine": 1}', b"\xff" * 99):
        other.write_bytes(kept)
        assert run(["bench", str(model), *QUICK, "--out", str(other)]) == 2
        assert other.read_bytes() == kept
    link = tmp_path / "fine.json"
    link.symlink_to(tmp_path / "gone.safetensors")
    assert run(["bench", str(model), *QUICK, "--out", str(link)]) == 2
    for fine in (b"", b'{\n "schema": 2,\n "machine": {}\n}'):
        other.write_bytes(fine)
        bench._check_earlier(other)
    bench._check_earlier(Path("/dev/null"))


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_picture_that_fails_loses_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    def fail(*given: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(given[-1]))

    def full(path: Path, _: str) -> None:
        fail(path)

    write_text = Path.write_text
    monkeypatch.setattr(results, "draw", fail)
    monkeypatch.setattr(Path, "write_text", full)
    more = ["--plot", str(tmp_path / "x.png"), "--out", str(tmp_path / "x.json")]
    json_ = ["--json"] if as_json else []
    assert run(["bench", str(model), *QUICK, "--warm", *more, *json_]) == 3
    printed = capsys.readouterr()
    for name in ("x.json", "x.png"):
        assert f"mfload: error: No space left on device: {tmp_path / name}\n" in printed.err
    if as_json:
        assert json.loads(printed.out)["rows"]
    else:
        assert "a fresh process for each sample" in printed.out
    monkeypatch.setattr(Path, "write_text", write_text)
    assert run(["bench", str(model), *QUICK, "--warm", *more, *json_]) == 3
    assert json.loads((tmp_path / "x.json").read_text())["rows"]


def test_a_place_that_can_not_be_written_is_refused_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(model), *QUICK, "--out", str(tmp_path / "no" / "x.json")]) == 3
    assert "can't be written" in capsys.readouterr().err
    assert run(["bench", str(model), *QUICK, "--out", str(tmp_path)]) == 3
    assert "warm" not in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert run(["bench", str(model), *QUICK, "--plot", str(tmp_path / "x.png")]) == 5
    assert "pip install 'matplotlib>=" in capsys.readouterr().err


# What is left behind ----------------------------------------------------------------------------


def _children(pid: int) -> list[int]:
    """Measuring processes that name this parent."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if b"mfload.bench.child" in words and str(pid).encode() in words and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A bench in the middle of its work, its child hanging in an import."""
    fake = tmp_path / "fakes" / "torch"
    fake.mkdir(parents=True)
    reached = tmp_path / "reached"
    code = f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(100)"
    (fake / "__init__.py").write_text(code)
    command = [sys.executable, "-P", "-m", "mfload", "bench", str(model), "--quick", "--warm",
               "--frameworks", "torch"]  # fmt: skip
    path = os.pathsep.join([str(fake.parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(_children(process.pid)) == 1
    yield process
    process.kill()
    process.wait()


def test_an_interrupt_leaves_nothing(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    assert _children(running.pid) == []
    assert list(tmp_path.glob("mfload-bench-*")) == []


def test_a_killed_bench_leaves_no_process(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    running.wait(30)
    deadline = time.monotonic() + 10
    while _children(running.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _children(running.pid) == []


@pytest.mark.usefixtures("faked")
def test_it_says_at_once_what_it_does(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    assert run(["bench", str(model), *QUICK, "--warm", "--out", str(out)]) == 0
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith(f"mfload: loads up to 512 MiB of {model} again and again")
    assert first.endswith(f"; takes a minute or more; writes {out}; Ctrl-C ends it")
    assert second == "mfload: reading headers"
    # Before anything is looked at.
    assert run(["bench", str(tmp_path / "missing"), "--random"]) == 3
    first = capsys.readouterr().err.splitlines()[0]
    assert "random reads of " in first
    assert "takes half a minute or more; writes no file that stays" in first
