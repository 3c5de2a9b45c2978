"""A measuring process as its parent sees it: started, made ready, let go, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from benchmarks import ROOT
from benchmarks.tasks import Job
from mfload.bench import machine
from mfload.bench.measuring import ENV

TIMEOUT = 300.0
"""Seconds after which a child counts as hung."""


class ChildError(Exception):
    """A measuring process failed or hung; the message says why, or is the end of its log."""


def last_words(code: int, log: str) -> str:
    """Why a process ended: the last line that it printed, or the signal."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if code > 0 and lines:
        return lines[-1][:300]
    # What a signal ends has had no last words; what it printed before says little.
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"{how}, perhaps since memory ran out" if code == -signal.SIGKILL else how


def environment(extra: Mapping[str, str], roots: Sequence[str]) -> dict[str, str]:
    """The environment of a measuring process.

    Args:
        extra: What else it is run with.
        roots: Where else it is to find modules.
    """
    places = [*roots, str(ROOT)]
    places += filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(dict.fromkeys(places))
    return {**os.environ, **ENV, **extra, **({"PYTHONPATH": path} if path else {})}


class Child:
    """A measuring process, from its start to its result.

    Args:
        log: Where what it prints goes; its last line says why it failed.
        env: Environment that it is run with, beside the parent's.
        roots: Where it finds modules, beside what is installed.
        timeout: Seconds that getting ready, and then the measured call, may take.
    """

    def __init__(
        self,
        log: IO[str],
        env: Mapping[str, str],
        roots: Sequence[str] = (),
        timeout: float = TIMEOUT,
    ) -> None:
        self._log = log
        self._timeout = timeout
        # A session of its own: Ctrl-C reaches the parent, who then ends it and all it started.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(env, roots),
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None

    def _answered(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _hear(self, seconds: float) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline() if self._answered(seconds) else None
        if line is None:
            raise ChildError(f"no answer within {self._timeout:g} s")
        if not line:
            raise ChildError(self._last_words())
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return last_words(code, self._log.read())

    def get_ready(self, job: Job) -> None:
        """Hand over the job and wait until only the measured call is left to do.

        Raises:
            ChildError: It failed, or takes too long.
        """
        self._say(json.dumps(job))
        self._hear(self._timeout)

    def run(self, *, watched: bool = False) -> dict[str, Any]:
        """Let the clock start and wait for the result.

        Args:
            watched: Whether private memory is watched meanwhile, which disturbs the time.

        Raises:
            ChildError: It failed, or takes too long.
        """
        before = machine.memory_status("RssAnon", self.pid) if watched else 0
        peak = before
        self._say("go")
        deadline = time.monotonic() + self._timeout
        # Polled from here, since a thread in the child would wait for its interpreter lock.
        while watched and not self._answered(0.001) and time.monotonic() < deadline:
            try:
                peak = max(peak, machine.memory_status("RssAnon", self.pid))
            except (KeyError, OSError):
                break
        result: dict[str, Any] = json.loads(self._hear(max(0.0, deadline - time.monotonic())))
        return {**result, "anon_peak": peak - before} if watched else result

    def end(self) -> None:
        """Make sure that it is gone, and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
