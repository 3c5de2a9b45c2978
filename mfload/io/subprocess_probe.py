"""A probe that might hang or crash runs in a process of its own, for a bounded time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import UnionType
from typing import Any, NamedTuple

# A probe that its parent can't kill any more, because that was killed itself, ends by an alarm of
# the kernel's, also where it spins in a library.
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
    """What a probe said.

    Attributes:
        data: The table that it printed, None where it did not come to that.
        trouble: Why not: "timeout", "crash" and the like with what is known of it; else empty.
        late: Whether it was killed because it took too long.
    """

    data: Any
    trouble: str = ""
    late: bool = False

    def of(self, **kinds: type | UnionType) -> Answer:
        """The answer if it has what it should, else one that says that it makes no sense.

        Args:
            kinds: What it has where it tells of no error, by name.
        """
        if self.trouble:
            return self
        found = self.data
        if not isinstance(found, dict):
            return SENSELESS
        wanted = {"error": str} if "error" in found else kinds
        if all(name in found and isinstance(found[name], wanted[name]) for name in wanted):
            return self
        return SENSELESS


SENSELESS = Answer(None, "an answer that makes no sense")
"""What stands for an answer that is not what was asked for."""


def ask(
    module: str,
    *arguments: str,
    timeout: float | None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Runs a module and reads the table, as JSON, that it prints last.

    Args:
        timeout: Seconds; then it is killed with all that it has started. None for ever.
        environment: Variables that differ from those of this process.
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
        return Answer(None, f"no answer within {round(timeout or 0, 2):g} s", late=True)
    except BaseException:
        _kill(child)
        raise
    if child.returncode < 0:
        return Answer(None, f"crashed with {_signal(-child.returncode)}{_last(said)}")
    try:
        # Libraries may print before it.
        return Answer(json.loads(printed.strip().rpartition(b"\n")[2])).of()
    except (ValueError, RecursionError):
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
        child.returncode = -signal.SIGKILL  # Or Python would wait for it later.


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Real-time signals have no names.
        return f"signal {number}"


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
