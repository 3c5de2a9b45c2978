"""`mfload serve` and `mfload planner`: the URL alone on stdout, the rest on stderr."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run, command, environment

import mfload

if sys.platform != "linux":
    pytest.skip("seeds need Linux", allow_module_level=True)


@contextlib.contextmanager
def _running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(*arguments), text=True, env=environment(), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_how_often_it_is_read(run: Run, model: Path) -> None:
    with _running("serve", model, "--model", "org/name") as process:
        assert process.stdout
        assert process.stderr
        url = process.stdout.readline().strip()
        assert process.stderr.readline() == "mfload: ready; Ctrl-C ends it\n"
        assert run("ls", url).code == 0
        said = process.stderr.readline()
        assert said.startswith("mfload: read 1 time so far, ")
        assert "open now" in said
        mfload.load(url, "numpy")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert out == ""
        assert err.endswith("mfload: read 2 times in all\n")


def test_a_planner_says_how_to_end_it() -> None:
    with _running("planner") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert process.stderr.readline() == "mfload: ready; Ctrl-C ends it\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
