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
from collections.abc import Callable
from typing import Any

from mfload.bench import ceilings, loaders, machine
from mfload.bench.loaders import SPAN, LoaderCall, Span, touch
from mfload.report import Report

Job = dict[str, Any]
"""`name` of a loader or a pattern, `cold`, `threads`, `warmup` (a tiny checkpoint that is loaded
before the clock starts), and the fields of `measuring.Subject`."""

_PR_SET_PDEATHSIG = 1


def measure(job: Job) -> dict[str, Any]:
    """Loads, touches what was loaded, and notes seconds, CPU seconds and bytes of memory."""
    call = _task(job["name"])
    tiny = [job["warmup"]]
    made, spans, _ = call(job | {"path": tiny, "files": tiny, "names": None, "extents": []})
    touch(spans())
    del made, spans
    extents = [ceilings.Extent(*each) for each in job["extents"]]
    machine.prepare(extents, job["nbytes"], cold=job["cold"])
    gc.collect()
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    cpu, start = time.process_time(), time.perf_counter()
    made, spans, report = call(job | {"extents": extents})
    loaded = time.perf_counter()
    touch(spans())
    end, cpu_end = time.perf_counter(), time.process_time()
    if not job["name"].startswith("ceiling-") and len(made) != job["tensors"]:
        raise RuntimeError(f"{len(made)} tensors of {job['tensors']} were loaded")
    return {
        "load_s": loaded - start,
        "touch_s": end - loaded,
        "seconds": end - start,
        "cpu_s": cpu_end - cpu,
        "peak_over": machine.memory_status("VmHWM") - before - job["nbytes"],
        "explained": _explained(report),
    }


_Made = tuple[Any, Callable[[], list[Span]], Report | None]


def _task(name: str) -> Callable[[Job], _Made]:
    """A call that reads or loads; it gives what was made, where that lies, and mfload's report."""
    if name in ceilings.PATTERNS:

        def read(job: Job) -> _Made:
            made = ceilings.read(job["extents"], ceilings.PATTERNS[name])
            return made, lambda: made.spans, None

        return read
    loader = loaders.find(name)

    def load(job: Job) -> _Made:
        report = Report() if loader.ours else None
        wanted = LoaderCall(job["path"], job["files"], job["names"], job["threads"], report)
        arrays = loader.load(wanted)
        if loader.framework == "jax":
            # JAX returns before its copies end.
            sys.modules["jax"].block_until_ready(list(arrays.values()))
        return arrays, lambda: [SPAN[loader.framework](each) for each in arrays.values()], report

    return load


def _explained(report: Report | None) -> dict[str, Any] | None:
    """How mfload went about a load: (engine, why, files) each, threads and notes."""
    if report is None:
        return None
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
