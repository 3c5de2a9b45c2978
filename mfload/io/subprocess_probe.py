"""A probe that might hang or crash runs in a process of its own, for a bounded time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

# If the parent is killed, the kernel's alarm ends the probe, even one that spins in a library.
_ALARMED = """
import runpy, signal, sys
seconds, module = int(sys.argv[1]), sys.argv[2]
if seconds and hasattr(signal, "alarm"):
    signal.alarm(seconds)
sys.argv[:] = sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_LATER = 2  # Seconds after the parent would have killed it.
_LONG = 1 << 20  # Seconds that an alarm takes.


class Answer(NamedTuple):
    """The table that a probe printed, or what kept it from that."""

    data: Any
    trouble: str = ""


def ask(
    module: str,
    *arguments: str,
    timeout: float | None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Runs a module and reads the JSON table that it prints last.

    After `timeout` seconds it is killed with all that it has started. `environment` are variables
    that differ from those of this process.
    """
    if getattr(sys, "frozen", False):
        return Answer(None, "can't be asked: this program is frozen, and would start itself")
    seconds = 0 if timeout is None else math.ceil(min(timeout, _LONG)) + _LATER
    command = [sys.executable, "-P", "-c", _ALARMED, str(seconds), module, *arguments]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        return Answer(None, f"can't be started: {error.strerror or error}")
    try:
        printed, said = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(child)
        return Answer(None, f"no answer within {round(timeout or 0, 2):g} s")
    except BaseException:
        _kill(child)
        raise
    if child.returncode < 0:
        number = -child.returncode
        name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
        return Answer(None, f"crashed with {name}{_last(said)}")
    try:
        # Libraries may print before it.
        found = json.loads(printed.strip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return Answer(None, f"ended with {child.returncode}{_last(said)}")
    if not isinstance(found, dict):
        return Answer(None, "an answer that makes no sense")
    return Answer(found)


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
