"""A measuring process as its parent sees it: started, made ready, let go, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks import memory
from benchmarks.child import Job
from benchmarks.loaders import LOADERS

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300.0
"""Seconds after which a child counts as hung."""
_ENV = {
    # Host memory is what is measured here, also where there is a GPU.
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
}


class ChildError(Exception):
    """A measuring process failed or hung; the message is the end of its log."""


class Child:
    """A measuring process, from its start to its result."""

    def __init__(self, name: str, log: IO[str]) -> None:
        extra: Mapping[str, str] = LOADERS[name].env if name in LOADERS else {}
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, **_ENV, **extra},
            text=True,
            bufsize=1,
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
        if not line:
            raise ChildError("no answer in time" if line is None else self._last_words())
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with status {code}"

    def get_ready(self, job: Job) -> None:
        """Hand over the job and wait until only the measured call is left to do."""
        self._say(json.dumps(job))
        self._hear(TIMEOUT)

    def run(self, *, watched: bool) -> dict[str, Any]:
        """Let the clock start and wait for the result."""
        before = memory.status("RssAnon", self.pid) if watched else 0
        peak = before
        self._say("go")
        deadline = time.monotonic() + TIMEOUT
        # Polled from here, since a thread in the child would wait for its interpreter lock.
        while watched and not self._answered(0.001) and time.monotonic() < deadline:
            try:
                peak = max(peak, memory.status("RssAnon", self.pid))
            except (KeyError, OSError):
                break
        result: dict[str, Any] = json.loads(self._hear(max(0.0, deadline - time.monotonic())))
        return {**result, "anon_peak": peak - before} if watched else result

    def end(self) -> None:
        """Make sure that it is gone."""
        self._process.kill()
        self._process.communicate()
