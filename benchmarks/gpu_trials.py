"""Trials as their parent sees them: which there are, how they run, what came of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TypedDict

from benchmarks import gpu_checks, gpu_costs, gpu_questions, gpu_streams, gpu_stress
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_memory import HOST

CHECK, QUESTION = "check", "question"
_LONGEST = 90.0
_GUESS = 15.0
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


def questions(device: str, cores: int) -> Group:
    """What is asked first: what else is tried depends on whether cuFile is real."""
    names = gpu_questions.names(_installed(device), gpu=device != HOST)
    return {"kind": QUESTION, "names": names, "abreast": _abreast(cores)}


def costs(device: str) -> Group:
    """Questions whose answer is a speed, so that nobody else may be at work."""
    return {"kind": QUESTION, "names": gpu_costs.names(gpu=device != HOST), "abreast": 1}


def checks(device: str, cores: int, *, gds: bool) -> list[Group]:
    """The checks for a device, in the order of their weight.

    Args:
        device: What is tried.
        cores: How many there are.
        gds: Whether cuFile is real here.
    """
    gpu = device != HOST
    found = _installed(device)
    well = [name for name in found if name not in ("tensorflow", "paddle")]
    rest = [name for name in found if name not in well]
    engines = ("pinned", *(("gds",) if gds else ())) if gpu else ("auto",)
    side = gpu_checks.names(well, engines, gpu=gpu) + gpu_streams.names(well)
    side += gpu_stress.names(well, engines) if gpu else []
    side += [f"dtypes/{name}/{engines[0]}/auto" for name in rest]
    return [
        {"kind": CHECK, "names": side, "abreast": _abreast(cores)},
        {"kind": CHECK, "names": gpu_stress.alone(well, engines), "abreast": 1},
    ]


def _installed(device: str) -> list[str]:
    on_gpu = ("torch", "jax", "cupy", "tensorflow", "paddle")
    wanted = ("torch", "jax", "numpy") if device == HOST else on_gpu
    return [name for name in wanted if find_spec(name)]


def _abreast(cores: int) -> int:
    return max(1, min(6, cores // 2))


def run(
    group: Group,
    device: str,
    env: Mapping[str, str],
    budget: Budget,
    root: Path,
    noted: Callable[[Outcome], None],
) -> None:
    """Runs a group, as far as the time goes.

    Args:
        group: What to run.
        device: What is tried.
        env: The environment of each process.
        budget: The time there is.
        root: Where their files go: the disk that is measured.
        noted: Called with each outcome.
    """
    with ThreadPoolExecutor(group["abreast"]) as pool:
        running = [
            pool.submit(
                _one, group["kind"], name, device, {**env, **_ENV, **_own(name)}, budget, root
            )
            for name in group["names"]
        ]
        for each in running:
            outcome = each.result()
            if outcome is not None:
                noted(outcome)


def _own(name: str) -> dict[str, str]:
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"} if name == "xla-owned/on" else {}


def _one(
    kind: str, name: str, device: str, env: Mapping[str, str], budget: Budget, root: Path
) -> Outcome | None:
    key = name.partition("/")[0]
    if not budget.allows(budget.cost(key, _GUESS), f"trial {name}"):
        return None
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trial-", dir=root) as folder:
        command = [sys.executable, "-P", "-m", "benchmarks.gpu_trial", name, device, folder]
        status, said = ask(command, env, min(_LONGEST, max(10.0, budget.left)))
    said = said.replace(f"{folder}/", "")  # What is kept names no path of the machine.
    if kind == QUESTION and status == "fail":
        status = "no"  # What XLA refuses at an address, say, is an answer.
    seconds = time.monotonic() - begun
    budget.note(key, seconds)
    return {"kind": kind, "name": name, "status": status, "said": said, "seconds": seconds}


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
