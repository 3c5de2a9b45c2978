"""What is asked of a machine; each question is a trial in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from benchmarks import gpu_memory
from benchmarks.gpu_given import Given, Row, SkipError, write
from benchmarks.gpu_memory import MIB

_COPIES = 200
_SIZES = 2, 8
"""MiB of a copy that is waited for."""


def gds(given: Given) -> str:
    """Whether cuFile is real here: what mfload finds, and whether it loads by it."""
    import mfload

    given.need_gpu()
    path = given.folder / "gds.safetensors"
    write(path, [Row(f"w.{i}", "F32", (16 * MIB,)) for i in range(4)], 1)
    looked = [f"{f.what}: {f.found}" for f in mfload.doctor(path).findings if f.topic == "cufile"]
    report = mfload.Report()
    given.load(path, "cupy", engine="gds", report=report)
    route = "; ".join(f"{engine} ({why})" for _, engine, why in report.route)
    said = f"loaded by {route}; {'; '.join(looked)}"
    if any(engine != "gds" for _, engine, _ in report.route):
        raise SkipError(said)
    return said


def waking(given: Given) -> str:
    """How much later a thread goes on that sleeps until a copy is done, against one that spins."""
    given.need_gpu()
    cp = gpu_memory.cupy()
    runtime, stream = cp.cuda.runtime, cp.cuda.Stream(non_blocking=True)
    source, target = gpu_memory.host_array(max(_SIZES) * MIB, given.device), cp.zeros(8 * MIB, "u1")
    asleep = runtime.eventCreateWithFlags(runtime.eventBlockingSync | runtime.eventDisableTiming)
    awake = runtime.eventCreateWithFlags(runtime.eventDisableTiming)

    def spin() -> None:
        while runtime.eventQuery(awake):
            pass

    def timed(nbytes: int, event: int, wait: Callable[[], object]) -> float:
        taken: list[float] = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            runtime.memcpyAsync(target.data.ptr, source.ctypes.data, nbytes, 1, stream.ptr)
            runtime.eventRecord(event, stream.ptr)
            wait()
            taken.append(time.perf_counter() - start)
        return median(taken) * 1e6

    parts: list[str] = []
    for mib in _SIZES:
        slept = timed(mib * MIB, asleep, lambda: runtime.eventSynchronize(asleep))
        waited = timed(mib * MIB, awake, lambda: runtime.eventSynchronize(awake))
        spun = timed(mib * MIB, awake, spin)
        parts.append(
            f"{mib} MiB: asleep {slept:.0f}, eventSynchronize of one that spins {waited:.0f}, "
            f"eventQuery {spun:.0f}"
        )
    return f"microseconds, median of {_COPIES} copies; " + "; ".join(parts)
