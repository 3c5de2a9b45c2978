"""One measurement, in a process of its own.

The parent sends a job, one line of JSON, and waits for `ready`: imports and a first load are done.
It then prepares page cache and memory, and says `go`. The result comes back as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypedDict

from benchmarks import ceilings, memory
from benchmarks.loaders import LOADERS
from benchmarks.touch import SPAN, Span, touch


class Job(TypedDict):
    """What to measure."""

    name: str
    """Of a loader or of a ceiling's pattern."""
    paths: list[str]
    warmup: list[str]
    """Paths of a tiny checkpoint, to load before anything is measured."""
    nbytes: int
    tensors: int
    page_sum: int
    file_sum: int


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


Prepared = tuple[Callable[[Sequence[str]], Any], Callable[[Any], list[Span]]]


def _ceiling(pattern: ceilings.Pattern) -> Prepared:
    """How to read by a pattern and find what it read."""
    return (lambda paths: ceilings.read(paths, pattern)), (lambda found: found.spans)


def _loader(name: str) -> Prepared:
    """How to load by a loader, until the arrays are ready, and find them."""
    loader = LOADERS[name]
    span = SPAN[loader.framework]

    def load(paths: Sequence[str]) -> Any:
        arrays = loader.load(paths)
        if loader.framework == "jax":
            import jax

            jax.block_until_ready(list(arrays.values()))  # JAX may copy behind our back
        return arrays

    return load, lambda arrays: [span(array) for array in arrays.values()]


def _check(found: Any, total: int, job: Job) -> None:
    """Refuse a measurement of something that did not load the checkpoint."""
    if isinstance(found, ceilings.Bytes):
        expected = job["file_sum"] if found.whole else total
    else:
        expected = job["page_sum"]
        if len(found) != job["tensors"]:
            raise RuntimeError(f"{len(found)} tensors of {job['tensors']} were loaded")
    if total != expected:
        raise RuntimeError(f"the pages sum up to {total}, the checkpoint's to {expected}")


def measure(job: Job, wait: Callable[[], None]) -> Result:
    """Load, touch, and note time, CPU and memory.

    Args:
        job: What to measure.
        wait: Called when all is ready; returns when the clock may start.

    Returns:
        The figures.

    Raises:
        RuntimeError: What was loaded is not the checkpoint.
    """
    pattern = ceilings.PATTERNS.get(job["name"])
    load, spans_of = _loader(job["name"]) if pattern is None else _ceiling(pattern)
    found = load(job["warmup"])
    touch(spans_of(found))
    del found
    gc.collect()
    wait()
    before = memory.status("VmRSS")
    memory.reset_peak()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = time.process_time()
    start = time.perf_counter()
    found = load(job["paths"])
    loaded, cpu_loaded = time.perf_counter(), time.process_time()
    total = touch(spans_of(found))
    end, cpu_end = time.perf_counter(), time.process_time()
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = memory.status("VmHWM")
    _check(found, total, job)
    return Result(
        load_s=loaded - start,
        touch_s=end - loaded,
        seconds=end - start,
        cpu_load_s=cpu_loaded - cpu,
        cpu_s=cpu_end - cpu,
        cpu_user_s=used.ru_utime - usage.ru_utime,
        cpu_system_s=used.ru_stime - usage.ru_stime,
        peak_over=peak - before - job["nbytes"],
    )


def main() -> None:
    """Serve one job and exit."""
    # Libraries print what they like: their output goes to the log, ours to the parent alone.
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def wait() -> None:
        print("ready", file=answers)
        if sys.stdin.readline().strip() != "go":
            raise SystemExit("the parent has gone")

    job: Job = json.loads(sys.stdin.readline())
    print(json.dumps(measure(job, wait)), file=answers)
    answers.flush()
    os._exit(0)  # frameworks take seconds to tear down, and some crash in it; all is said


if __name__ == "__main__":
    main()
