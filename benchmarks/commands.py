"""A whole command as one measurement: from its start to its end, the interpreter's own included."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from benchmarks import ROOT
from benchmarks.process import TIMEOUT, ChildError, environment
from benchmarks.runner import Case, Sample, prepare
from benchmarks.subject import Subject


def sample(
    name: str,
    command: Sequence[str],
    case: Case,
    subject: Subject,
    env: Mapping[str, str] | None = None,
) -> Sample:
    """Run a command once, its output thrown away.

    Args:
        name: What the sample is called.
        command: The program and its arguments.
        case: Under which conditions.
        subject: What the page cache is prepared for.
        env: Environment that it is run with, beside this process's.

    Returns:
        The sample: wall clock and CPU. No memory: what the system counts for a process begins
        with what its parent held.

    Raises:
        ChildError: It failed, or hung.
        UnfitError: The page cache can't be brought into the state of the case.
    """
    cached = prepare(case, subject)
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(env or {}, [str(ROOT)]),
    )
    limit = threading.Timer(TIMEOUT, process.kill)
    limit.start()
    try:
        with process:
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        limit.cancel()
        process.kill()  # where this process was interrupted; else it is gone already
    seconds = time.perf_counter() - started
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        # Our own command says it first, a traceback last.
        named = [line for line in lines if line.startswith("mfload:")]
        raise ChildError([*named[:1], *lines[-1:], f"status {process.returncode}"][0])
    return {
        "case": case.name,
        "name": name,
        "cached": cached,
        "seconds": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
    }
