"""`mfload.doctor` as a whole: it never hangs, never crashes, and says what would be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.io.subprocess_probe import Probed, ask


def _probe(folder: Path, code: str) -> None:
    (folder / "made_up_probe.py").write_text(textwrap.dedent(code))


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *([before] if before else [])])
    )
    return tmp_path


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("raise SystemExit('no driver')", "ended with 1: no driver"),
        ("print('no json')", "ended with 0"),
        ("print('null')", "an answer that makes no sense"),
        ("print('[1]')", "an answer that makes no sense"),
        ("print('[' * 200_000)", "ended with 0"),
        ("while True: pass", "no answer within 0.7 s"),
        # A driver's handler that shrugs off what it can.
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", "no answer"),
    ],
)
def test_probes_that_do_not_answer(probes: Path, code: str, trouble: str) -> None:
    _probe(probes, code)
    start = time.monotonic()
    # Time enough to end for those that do.
    answer = ask("made_up_probe", timeout=0.7001 if trouble.startswith("no answer") else 60)
    assert answer.data is None
    assert answer.trouble.startswith(trouble)
    assert time.monotonic() - start < 50


def test_a_probe_that_hangs_leaves_no_process(probes: Path) -> None:
    _probe(
        probes,
        """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        path = os.path.join(os.path.dirname(__file__), "pid")
        open(path + "-", "w").write(str(child.pid))
        os.rename(path + "-", path)
        time.sleep(60)
        """,
    )
    for timeout in (1, 5, 25):  # However slow it starts.
        assert ask("made_up_probe", timeout=timeout).data is None
        if (probes / "pid").exists():
            break
    pid = int((probes / "pid").read_text())
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the probe's child still runs")


def test_a_probe_ends_with_its_parent(probes: Path) -> None:
    """A loop that no exception of Python's would end, as in a driver's library."""
    _probe(
        probes,
        """
        import os
        path = os.path.join(os.path.dirname(__file__), "pid")
        open(path + "-", "w").write(str(os.getpid()))
        os.rename(path + "-", path)
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
        """,
    )
    asks = "from mfload.io.subprocess_probe import ask; ask('made_up_probe', timeout=1000)"
    parent = subprocess.Popen([sys.executable, "-c", asks])
    end = time.monotonic() + 60
    while not (probes / "pid").exists() and time.monotonic() < end:
        time.sleep(0.01)
    pid = int((probes / "pid").read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_probe_is_given_more_than_arguments_hold(probes: Path) -> None:
    _probe(probes, "import json, sys; print(json.dumps({'given': len(json.load(sys.stdin))}))")
    assert ask("made_up_probe", given="x" * 5_000_000, timeout=20) == Probed({"given": 5_000_000})


def test_a_probe_finds_the_source_tree(probes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the working directory leads to it, which a probe does not look into."""
    monkeypatch.setenv("PYTHONPATH", str(probes))
    monkeypatch.chdir(probes)
    _probe(probes, "import json, mfload; print(json.dumps({'file': mfload.__file__}))")
    assert ask("made_up_probe", timeout=20) == Probed({"file": mfload.__file__})


def test_a_frozen_program_does_not_start_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "frozen" in ask("made_up_probe", timeout=20).trouble


def test_what_libraries_print_before_the_answer_is_no_part_of_it(probes: Path) -> None:
    _probe(probes, "print('welcome'); print(); print('{}')")
    assert ask("made_up_probe", timeout=20) == Probed({})


def test_a_probe_that_answers(probes: Path) -> None:
    _probe(probes, "import json, sys; print(json.dumps({'given': sys.argv[1:]}))")
    assert ask("made_up_probe", "a", timeout=20) == Probed({"given": ["a"]})


def test_of_the_machine_alone() -> None:
    found = mfload.doctor()
    topics = {each.topic for each in found.findings}
    assert {"host", "gpu", "cufile", "frameworks"} <= topics
    assert found.route == ()
    assert json.loads(json.dumps(found.as_dict()))["well"] is found.well is bool(found)
    assert "cores" in str(found)
    assert "<table" in found._repr_html_()  # pyright: ignore[reportPrivateUsage]


def test_of_a_checkpoint(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros(8, np.float32)})
    found = mfload.doctor(path)
    assert [leg.file for leg in found.route] == [str(path)]
    assert found.route == mfload.plan(path).route
    assert any(each.what == "in the page cache" for each in found.findings)
    with pytest.raises(errors.SourceNotFoundError):
        mfload.doctor(tmp_path / "none")
    for senseless in (0, -1, "1"):
        with pytest.raises(errors.UsageError):
            mfload.doctor(timeout=senseless)  # type: ignore[arg-type]


def test_nothing_of_cuda_is_loaded_here() -> None:
    """Not even its library: a driver that hangs would take this process with it."""
    code = """
        import sys, mfload
        mfload.doctor()
        assert not {"kvikio", "cupy", "jax", "torch"} & set(sys.modules), sys.modules.keys()
        assert "libcuda" not in open("/proc/self/maps").read()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
