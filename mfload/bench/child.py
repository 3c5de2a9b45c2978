"""One measurement, in a process of its own: the job on stdin and its result on stdout are JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from mfload.bench import loaders, machine
from mfload.bench.ceilings import ByteRange
from mfload.bench.loaders import Job, touch
from mfload.report import Report


def measure(job: Job) -> dict[str, Any]:
    """Loads, touches what was loaded, and notes seconds, CPU seconds and bytes of memory.

    Beside what a loader is told, the job has the loader's `name`, whether the page cache is to be
    `cold`, a tiny checkpoint to load before the clock starts (`warmup`), and how many `tensors` of
    how many `nbytes` the result has.
    """
    loader = loaders.find(job["name"])
    first = {"path": job["warmup"], "files": [job["warmup"]], "names": None, "extents": []}
    made = loader.run({**job, **first})
    touch(loader.spans(made))
    del made
    extents = [ByteRange(*each) for each in job["extents"]]
    report = Report() if loader.kind == "mfload" else None
    machine.prepare(extents, job["nbytes"], cold=job["cold"])
    gc.collect()
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    cpu, start = time.process_time(), time.perf_counter()
    made = loader.run(job, report)
    load_s, load_cpu = time.perf_counter() - start, time.process_time() - cpu
    spans = loader.spans(made)
    cpu, start = time.process_time(), time.perf_counter()
    touch(spans)
    touch_s, touch_cpu = time.perf_counter() - start, time.process_time() - cpu
    if loader.framework is not None and len(made) != job["tensors"]:
        raise RuntimeError(f"{len(made)} of {job['tensors']} were loaded")
    return {
        "load_s": load_s,
        "touch_s": touch_s,
        "seconds": load_s + touch_s,
        "cpu_s": load_cpu + touch_cpu,
        "peak_over": machine.memory_status("VmHWM") - before - job["nbytes"],
        "explained": None if report is None else explained(report),
    }


def explained(report: Report) -> dict[str, Any]:
    """How mfload went about a load: (engine, why, files) each, threads and notes."""
    legs = Counter((engine, why) for _, engine, why in report.route)
    route = [(engine, why, files) for (engine, why), files in legs.most_common()]
    return {"route": route, "threads": report.threads, "notes": list(report.notes)}


if __name__ == "__main__":
    print("\n" + json.dumps(measure(json.load(sys.stdin))), flush=True)
    os._exit(0)  # Frameworks take seconds to tear down, and some crash in it.
