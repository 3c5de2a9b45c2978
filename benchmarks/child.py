"""Measurements in a process of their own, mostly one.

The parent sends a job, one line of JSON, and waits for `ready`: imports and a first load are done.
It then prepares page cache and memory, and says `go`. The result comes back as one line of JSON,
and another job may follow.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO, TypedDict

from benchmarks.tasks import Explained, Found, Job, Task, warmup
from mfload.bench import machine
from mfload.bench.child import explained
from mfload.bench.loaders import touch

_PR_SET_PDEATHSIG = 1


class Result(TypedDict):
    """What was measured. Seconds, and bytes."""

    load_s: float
    """The call, and waiting until the arrays are ready."""
    touch_s: float
    """Reading one byte of every page after it."""
    seconds: float
    """Both."""
    cpu_load_s: float
    """CPU time of the process, user and system, all threads, for the call."""
    cpu_s: float
    """The same for call and touching."""
    cpu_user_s: float
    cpu_system_s: float
    peak_over: int
    """Peak of resident memory until all is touched, less that before, less the data."""


class Explaining(Result):
    """The same, with how mfload went about it."""

    explained: Explained | None


def _check(found: Found, total: int, job: Job) -> None:
    """Refuse a measurement of something that did not load the checkpoint."""
    if found.tensors is None:
        # Slots that were used again hold the last blocks only.
        kept = sum(nbytes for _, nbytes in found.spans) == _extent_bytes(job)
        expected = job["file_sum"] if kept else None
    else:
        if found.tensors != job["tensors"]:
            raise RuntimeError(f"{found.tensors} tensors of {job['tensors']} were loaded")
        expected = job["page_sum"]
    if expected is not None and total != expected:
        raise RuntimeError(f"the pages sum up to {total}, the checkpoint's to {expected}")


def _extent_bytes(job: Job) -> int:
    return sum(stop - start for _, start, stop in job["extents"])


def measure(job: Job, wait: Callable[[], None]) -> Result:
    """Run a task, touch what came of it, and note time, CPU and memory.

    Args:
        job: What to measure.
        wait: Called when all is ready; returns when the clock may start.

    Returns:
        The figures.

    Raises:
        RuntimeError: What was loaded is not the checkpoint.
    """
    task: Task = import_module(job["tasks"]).find(job["name"])
    made = task.run(warmup(job))
    touch(task.find(made).spans)
    del made
    task.prepare(job)
    gc.collect()
    wait()
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = time.process_time()
    start = time.perf_counter()
    made = task.run(job)
    loaded, cpu_loaded = time.perf_counter(), time.process_time()
    found = task.find(made)
    touching, cpu_touching = time.perf_counter(), time.process_time()
    touched = touch(found.spans)
    touch(found.copies)
    end, cpu_end = time.perf_counter(), time.process_time()
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = machine.memory_status("VmHWM")
    _check(found, touched if found.total is None else found.total, job)
    result = Result(
        load_s=loaded - start,
        touch_s=end - touching,
        seconds=loaded - start + end - touching,
        cpu_load_s=cpu_loaded - cpu,
        cpu_s=cpu_loaded - cpu + cpu_end - cpu_touching,
        cpu_user_s=used.ru_utime - usage.ru_utime,
        cpu_system_s=used.ru_stime - usage.ru_stime,
        peak_over=peak - before - job["nbytes"],
    )
    if not job["explain"]:
        return result
    how: Any = None if found.report is None else explained(found.report)
    return Explaining(**result, explained=how)


def _die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent has gone")


def main() -> None:
    """Serve jobs until no more come, and exit."""
    _die_with_parent(int(sys.argv[1]))
    # Libraries print what they like: their output goes to the log, ours to the parent alone.
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def wait() -> None:
        print("ready", file=answers)
        if sys.stdin.readline().strip() != "go":
            raise SystemExit("the parent has gone")

    while line := sys.stdin.readline():
        job: Job = json.loads(line)
        print(json.dumps(measure(job, wait)), file=answers, flush=True)
    os._exit(0)  # frameworks take seconds to tear down, and some crash in it; all is said


if __name__ == "__main__":
    main()
