"""One measurement, in a process of its own: the job on stdin and its result on stdout are JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

from mfload.bench import ceilings, loaders, machine
from mfload.bench.loaders import SPAN, LoaderCall, Span, touch
from mfload.report import Report

Job = dict[str, Any]
"""`name` of a loader or a pattern, `cold`, `threads`, `warmup` (a tiny checkpoint that is loaded
before the clock starts), `path`, `files`, `names` of tensors (None for all), how many `tensors` of
how many `nbytes` these are, and `extents` that a pattern reads."""

_PR_SET_PDEATHSIG = 1


def measure(job: Job) -> dict[str, Any]:
    """Loads, touches what was loaded, and notes seconds, CPU seconds and bytes of memory."""
    tiny = [job["warmup"]]
    first = job | {"path": tiny, "files": tiny, "names": None, "extents": []}
    made = _load(first, None)
    touch(_spans(job, made))
    del made
    job["extents"] = [ceilings.Extent(*each) for each in job["extents"]]
    machine.prepare(job["extents"], job["nbytes"], cold=job["cold"])
    gc.collect()
    report = Report() if job["name"].startswith("mfload-") else None
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    cpu, start = time.process_time(), time.perf_counter()
    made = _load(job, report)
    loaded = time.perf_counter()
    touch(_spans(job, made))
    end, cpu_end = time.perf_counter(), time.process_time()
    if not isinstance(made, ceilings.Bytes) and len(made) != job["tensors"]:
        raise RuntimeError(f"{len(made)} tensors of {job['tensors']} were loaded")
    return {
        "load_s": loaded - start,
        "touch_s": end - loaded,
        "seconds": end - start,
        "cpu_s": cpu_end - cpu,
        "peak_over": machine.memory_status("VmHWM") - before - job["nbytes"],
        "explained": None if report is None else _explained(report),
    }


def _load(job: Job, report: Report | None) -> Any:
    """Arrays by name, or the bytes of a ceiling's pattern."""
    if job["name"] in ceilings.PATTERNS:
        return ceilings.read(job["extents"], ceilings.PATTERNS[job["name"]])
    loader = loaders.find(job["name"])
    call = LoaderCall(job["path"], job["files"], job["names"], job["threads"], report)
    arrays = loader.load(call)
    if loader.framework == "jax":
        # JAX returns before its copies end.
        sys.modules["jax"].block_until_ready(list(arrays.values()))
    return arrays


def _spans(job: Job, made: Any) -> list[Span]:
    if isinstance(made, ceilings.Bytes):
        return made.spans
    span = SPAN[loaders.find(job["name"]).framework]
    return [span(array) for array in made.values()]


def _explained(report: Report) -> dict[str, Any]:
    """How mfload went about a load: (engine, why, files) each, threads and notes."""
    legs = Counter((engine, why) for _, engine, why in report.route)
    route = [(engine, why, files) for (engine, why), files in legs.most_common()]
    return {"route": route, "threads": report.threads, "notes": list(report.notes)}


def main() -> None:
    """Serves one job and exits."""
    # The kernel ends this process when its parent is gone, however that ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the parent has gone")
    # What libraries print goes to the log, the result to the parent alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        print(json.dumps(measure(json.load(sys.stdin))), file=out, flush=True)
    except machine.UnfitError as error:
        raise SystemExit(str(error)) from None
    os._exit(0)  # Frameworks take seconds to tear down, and some crash in it.


if __name__ == "__main__":
    main()
