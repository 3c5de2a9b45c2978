"""One of several processes that load onto one mesh together.

Started by `mesh_processes`, which tells it by one line of JSON what to do. It loads a tiny
checkpoint, says `ready`, waits for `go`, and answers with one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO, TypedDict

from benchmarks.calls import as_options
from benchmarks.mesh_layouts import DEVICES, LAYOUTS
from benchmarks.mesh_tasks import mesh_of, rules_of, spans_of
from mfload.bench import machine
from mfload.bench.loaders import touch


class Job(TypedDict):
    """What a process is told."""

    rank: int
    processes: int
    port: int
    layout: str
    exchange: str
    folder: str
    warmup: str


class Answer(TypedDict):
    """What it answers. Seconds, and bytes."""

    load_s: float
    touch_s: float
    cpu_s: float
    read: int
    """What `preadv` gave while it loaded, headers among it."""
    exchanged: int
    """What mfload says it sent to and got from other processes."""
    notes: list[str]
    total: int
    """The sum of its shards' pages."""
    peak_over: int
    """Peak of resident memory, less that before, less its shards."""


class _Counted:
    """Counts what `os.preadv` gives, whoever calls it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._preadv = os.preadv
        os.preadv = self

    def __call__(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        got = self._preadv(fd, buffers, offset, flags)
        self.nbytes += got  # off by one call in a million, if two threads meet here
        return got


def _join(job: Job) -> Any:
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES // job['processes']}"
    )
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{job['port']}", job["processes"], job["rank"])
    return jax


def _measure(job: Job, answers: TextIO) -> Answer:
    jax = _join(job)
    import mfload

    layout = LAYOUTS[job["layout"]]
    given: dict[str, Any] = {
        "framework": "jax",
        "mesh": mesh_of(layout),
        "shardings": rules_of(layout),
        "exchange": job["exchange"],
    }
    jax.block_until_ready(mfload.load(job["warmup"], **as_options(given)))
    gc.collect()
    report, counted = mfload.Report(), _Counted()
    print("ready", file=answers)
    if sys.stdin.readline().strip() != "go":
        raise SystemExit("the parent has gone")
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    start, cpu = time.perf_counter(), time.process_time()
    arrays = jax.block_until_ready(mfload.load(job["folder"], report=report, **as_options(given)))
    loaded, cpu_loaded = time.perf_counter(), time.process_time()
    spans, copies = spans_of(arrays)
    touching = time.perf_counter()
    total = touch(spans)
    touch(copies)
    end = time.perf_counter()
    peak = machine.memory_status("VmHWM")
    said = report.as_dict()
    return {
        "load_s": loaded - start,
        "touch_s": end - touching,
        "cpu_s": cpu_loaded - cpu,
        "read": counted.nbytes,
        "exchanged": int(said.get("exchanged_bytes", 0)),
        "notes": [str(note) for note in said.get("notes", [])],
        "total": total,
        "peak_over": peak - before - sum(nbytes for _, nbytes in spans),
    }


def main() -> None:
    """Serve one job and exit."""
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job: Job = json.loads(sys.stdin.readline())
    print(json.dumps(_measure(job, answers)), file=answers)
    sys.stdin.readline()  # Nobody leaves before all are done: the others would be told to end.
    os._exit(0)


if __name__ == "__main__":
    main()
