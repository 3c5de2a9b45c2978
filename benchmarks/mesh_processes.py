"""Several processes that load onto one mesh together, as one measurement."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from benchmarks import ROOT
from benchmarks.mesh_layouts import Sums
from benchmarks.mesh_process import Answer, Job
from benchmarks.process import ChildError, environment
from benchmarks.runner import Case, Sample, prepare
from benchmarks.subject import Subject

PROCESSES = 2
EXCHANGES = ("auto", "never", "once")
_TIMEOUT = 120.0
_LONGEST = 300


class _Process:
    """One of them, as its parent sees it.

    Args:
        program: The module that it runs.
        job: What it is to do.
        log: Where what it prints goes.
    """

    def __init__(self, program: str, job: Mapping[str, Any], log: IO[str]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment({}, [str(ROOT)]),
            text=True,
            bufsize=1,
        )
        self.say(json.dumps(job))

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None

    def hear(self, until: float) -> str:
        assert self._process.stdout is not None
        left = max(0.0, until - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            raise ChildError(f"no answer within {_TIMEOUT:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self._last_words())
        return line

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        said = [f"ended with status {self._process.returncode}", *lines[-1:], *errors[-1:]]
        return said[-1][:_LONGEST]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def free_port() -> int:
    """A port that processes can meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(
    program: str, jobs: Sequence[Mapping[str, Any]], case: Case, subject: Subject
) -> tuple[list[Any], float | None]:
    """What processes that run a program answer, each to its job, and the share in the page cache.

    Raises ChildError if one fails or hangs.
    """
    with ExitStack() as stack:
        started: list[_Process] = []
        for job in jobs:
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            started.append(_Process(program, job, log))
            stack.callback(started[-1].end)
        until = time.monotonic() + _TIMEOUT
        for process in started:
            process.hear(until)
        cached = prepare(case, subject)
        for process in started:
            process.say("go")
        until = time.monotonic() + _TIMEOUT
        found: list[Any] = [json.loads(process.hear(until)) for process in started]
        for process in started:
            process.say("done")
    return found, cached


def sample(
    layout: str, exchange: str, case: Case, subject: Subject, sums: Sums, folders: tuple[str, str]
) -> Sample:
    """Measure once.

    Args:
        layout: Of the shards.
        exchange: As `mfload.load` takes it.
        case: Under which conditions.
        subject: What to load.
        sums: What its shards must yield.
        folders: Where it lies, and where a tiny one does.

    Returns:
        The sample; its time is that of the slower process.

    Raises:
        ChildError: A process failed, or hung, or the shards are not the checkpoint's.
        UnfitError: The page cache can't be brought into the state of the case.
    """
    port = free_port()
    jobs: list[Job] = [
        {
            "rank": rank,
            "processes": PROCESSES,
            "port": port,
            "layout": layout,
            "exchange": exchange,
            "folder": folders[0],
            "warmup": folders[1],
        }
        for rank in range(PROCESSES)
    ]
    found: list[Answer]
    found, cached = answers("benchmarks.mesh_process", jobs, case, subject)
    total = sum(each["total"] for each in found)
    expected = sums.cut + PROCESSES * sums.whole
    if total != expected:
        raise ChildError(f"the pages sum up to {total}, the checkpoint's to {expected}")
    return _sample(found, case, subject.nbytes) | {"name": f"{layout}/{exchange}", "cached": cached}


def _sample(found: list[Answer], case: Case, nbytes: int) -> dict[str, Any]:
    return {
        "case": case.name,
        "seconds": max(each["load_s"] + each["touch_s"] for each in found),
        "cpu_s": max(each["cpu_s"] for each in found),
        "peak_over": max(each["peak_over"] for each in found),
        "shares": [each["read"] / nbytes for each in found],
        "exchanged": [each["exchanged"] for each in found],
        "notes": found[0]["notes"],
    }
