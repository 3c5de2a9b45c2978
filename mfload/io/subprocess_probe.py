"""A probe that might hang or crash runs in a process of its own, for a bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The kernel ends the probe when its parent is gone, also one that spins in a library.
_BOOT = """
import ctypes, os, runpy, signal, sys
parent, module = int(sys.argv[1]), sys.argv[2]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    raise SystemExit("the parent has gone")
sys.argv[:] = sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_ROOT = Path(__file__).parents[2]


class Probed(NamedTuple):
    """The table that a probe printed, or what kept it from that."""

    data: Any
    trouble: str = ""


def ask(
    module: str,
    *arguments: str,
    given: object = None,
    timeout: float | None,
    environment: Mapping[str, str] | None = None,
) -> Probed:
    """Runs a module and reads the JSON table that it prints last.

    It reads what is `given` as JSON from its standard input. After `timeout` seconds it is killed
    with all that it has started. `environment` are variables that differ from those of this
    process.
    """
    if getattr(sys, "frozen", False):
        return Probed(None, "can't be asked: this program is frozen, and would start itself")
    command = [sys.executable, "-P", "-c", _BOOT, str(os.getpid()), module, *arguments]
    # An installed mfload is found without help, a source tree is not.
    paths = [] if _ROOT.name.endswith("-packages") else [str(_ROOT)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    path = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **path, **(environment or {})},
        )
    except OSError as error:
        return Probed(None, f"can't be started: {error.strerror or error}")
    try:
        printed, said = child.communicate(json.dumps(given).encode(), timeout)
    except subprocess.TimeoutExpired:
        _kill(child)
        return Probed(None, f"no answer within {round(timeout or 0, 2):g} s")
    except BaseException:
        _kill(child)
        raise
    if child.returncode < 0:
        number = -child.returncode
        name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
        killed = ", perhaps since memory ran out" if number == signal.SIGKILL else ""
        return Probed(None, f"crashed with {name}{killed}{_last(said)}")
    try:
        # Libraries may print before it.
        found = json.loads(printed.strip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return Probed(None, f"ended with {child.returncode}{_last(said)}")
    if not isinstance(found, dict):
        return Probed(None, "an answer that makes no sense")
    return Probed(found)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a process and its group. One that hangs in the kernel is left to it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        child.kill()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # Or Python would wait for it later.


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
