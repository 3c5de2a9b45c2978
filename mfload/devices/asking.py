"""Asking: a probe that might hang or crash runs in a process of its own, for a bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a probe said.

    Attributes:
        data: What it printed, None where it did not come to that.
        trouble: Why not: "timeout", "crash" and the like with what is known of it; else empty.
    """

    data: Any
    trouble: str = ""


def ask(
    module: str,
    *arguments: str,
    timeout: float | None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Runs a module and reads the JSON that it prints last.

    Args:
        module: Its name, such as "mfload.checkup.probe_cuda".
        arguments: What it is given.
        timeout: Seconds; then it is killed with all that it has started. None for ever.
        environment: Variables that differ from those of this process.
    """
    if getattr(sys, "frozen", False):
        return Answer(None, "can't be asked: this program is frozen, and would start itself")
    command = [sys.executable, "-P", "-m", module, *arguments]
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
        return Answer(None, f"no answer within {timeout:g} s")
    except BaseException:
        _kill(child)
        raise
    if child.returncode < 0:
        return Answer(None, f"crashed with {_signal(-child.returncode)}{_last(said)}")
    try:
        # Libraries may print before it.
        return Answer(json.loads(printed.strip().rpartition(b"\n")[2]))
    except ValueError:
        return Answer(None, f"ended with {child.returncode}{_last(said)}")


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
        child.returncode = -signal.SIGKILL  # Nobody waits for it any more, Python neither.


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Real-time signals have no names.
        return f"signal {number}"


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
