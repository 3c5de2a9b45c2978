"""Trials as their parent sees them: which there are, how they run, what came of each."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TypedDict

from benchmarks import ROOT, gpu_checks, gpu_streams, gpu_stress
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_memory import HOST

CHECK, QUESTION = "check", "question"
_LONGEST = 90.0
_GUESS = 15.0
_LOG = 12_000
"""Characters of a failed suite that are kept."""
_NOTHING_CHOSEN = 5  # pytest's status where no test was.
_LOCK = threading.Lock()
_ENV = {
    # JAX would take most of the card for every trial, and trials run side by side.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Outcome(TypedDict):
    """What came of a trial."""

    kind: str
    name: str
    status: str
    """`pass`, `fail`, `skip`, `crash` or `timeout`; `no` for `fail` where it was a question."""
    said: str
    seconds: float


class Group(TypedDict):
    """Trials that may run side by side."""

    kind: str
    names: list[str]
    abreast: int


def groups(device: str, cores: int) -> dict[int, list[Group]]:
    """The trials of each step that has some, in the order of their weight.

    Args:
        device: What is tried.
        cores: How many there are.
    """
    gpu = device != HOST
    abreast = max(1, min(8, cores // 2))
    found = _installed(device)
    well = [name for name in found if name not in ("tensorflow", "paddle")]
    rest = [name for name in found if name not in well]
    engine = "pinned" if gpu else "auto"
    held = gpu_stress.names(well, (engine,)) if gpu else []
    more = [f"dtypes/{name}/{engine}/auto" for name in rest]
    more += gpu_checks.names(well, (engine,), gpu=gpu)
    suites = [f"suite/{path}" for path in _suites()] if gpu else []

    def checks(names: list[str], abreast: int = abreast) -> Group:
        return {"kind": CHECK, "names": names, "abreast": abreast}

    return {
        0: [
            checks(gpu_streams.names(well) + suites + held),
            checks(gpu_stress.alone(well, (engine,)), 1),
            {"kind": QUESTION, "names": ["gds"] if gpu else [], "abreast": 1},
            checks(more),
        ],
        1: [checks(gpu_streams.races(well, gpu=gpu))],
        8: [{"kind": QUESTION, "names": ["waking"] if gpu else [], "abreast": 1}],
    }


def _suites() -> dict[str, tuple[str, ...]]:
    """The tests that need a GPU: files, and what each requires."""
    return runpy.run_path(str(ROOT / "tests" / "on_gpu.py"))["NEEDS"]


def _installed(device: str) -> list[str]:
    on_gpu = ("torch", "jax", "cupy", "tensorflow", "paddle")
    wanted = ("torch", "jax", "numpy") if device == HOST else on_gpu
    return [name for name in wanted if find_spec(name)]


@dataclass(frozen=True)
class Trials:
    """Runs trials.

    Attributes:
        device: What is tried.
        env: The environment of each process.
        root: Where their files go: the disk that is measured.
        log: Where the last words of tests that failed are added.
        noted: Called with each outcome.
    """

    device: str
    env: Mapping[str, str]
    root: Path
    log: Path
    noted: Callable[[Outcome], None]

    def run(self, group: Group, budget: Budget) -> bool:
        """Runs a group as far as the time goes; whether nothing is left of it."""
        with ThreadPoolExecutor(group["abreast"]) as pool:
            running = [
                pool.submit(self._one, group["kind"], name, budget) for name in group["names"]
            ]
            found = [each.result() for each in running]
        return None not in found

    def _one(self, kind: str, name: str, budget: Budget) -> Outcome | None:
        what, _, rest = name.partition("/")
        if budget.cost(what, _GUESS) > budget.left:
            return None
        begun = time.monotonic()
        timeout = min(_LONGEST, max(10.0, budget.left))
        with tempfile.TemporaryDirectory(prefix="trial-", dir=self.root) as folder:
            if what == "suite":
                status, said = self._suite(rest, timeout)
            else:
                trial = [sys.executable, "-P", "-m", "benchmarks.gpu_trial"]
                status, said = ask([*trial, name, self.device, folder], self._env(), timeout)
        if status == "timeout" and timeout < _LONGEST:
            return None  # There was no time for it.
        said = said.replace(f"{folder}/", "")  # What is kept names no path of the machine.
        if kind == QUESTION and status == "fail":
            status = "no"
        seconds = time.monotonic() - begun
        if what != "suite":  # They differ too much.
            budget.note(what, seconds)
        outcome = Outcome(kind=kind, name=name, status=status, said=said, seconds=seconds)
        with _LOCK:
            self.noted(outcome)
        return outcome

    def _env(self) -> dict[str, str]:
        return {**self.env, **_ENV}

    def _suite(self, path: str, timeout: float) -> tuple[str, str]:
        """Runs the tests of a file, or a folder, that need a GPU."""
        missing = [name for name in ("pytest", *_suites()[path]) if find_spec(name) is None]
        if missing:
            return "skip", f"not installed: {', '.join(missing)}"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command.append(str(ROOT / path))
        code, printed = _printed(command, self._env(), timeout)
        lines = [line for line in printed.splitlines() if line.strip()]
        if code in (0, _NOTHING_CHOSEN):
            return "pass" if code == 0 else "skip", lines[-1]
        with _LOCK, self.log.open("a") as log:
            log.write(f"== {path}\n{printed[-_LOG:]}\n")
        if code is None:
            return "timeout", f"no end within {timeout:.0f} s"
        bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return "fail", "; ".join([*lines[-1:], *bad[:8]])


def _printed(
    command: Sequence[str], env: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """The exit status of a command, None where it was ended, and all that it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(timeout)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.seek(0)
        return code, log.read()


def failed(outcomes: Iterable[Outcome]) -> list[str]:
    """The names of the checks that did not pass; a question has no wrong answer."""
    bad = ("fail", "crash", "timeout")
    return [each["name"] for each in outcomes if each["kind"] == CHECK and each["status"] in bad]


def ask(command: Sequence[str], env: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """Runs a trial's process.

    Args:
        command: It and its arguments.
        env: Its environment.
        timeout: Seconds after which it is ended, with all that it started.

    Returns:
        Status, and what was said.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            env=env, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return "timeout", f"no answer within {timeout:.0f} s"
        finally:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        try:
            answer = json.loads(printed)
        except ValueError:
            return "crash", _last_words(child.returncode, log)
        return answer["status"], answer["said"]


def _last_words(code: int, log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"{how}; last it said: {lines[-1][:300]}" if lines else how
