"""What Python costs on the way to a GPU: all that a load does for its blocks, and nothing else.

    python -m benchmarks.gpu_python

No GPU is needed. Reads, copies and CUDA's calls return at once and do nothing, so what is timed is
Python, most of it with the GIL held: readers can't share it out. Many readers at once can't be
faster than this, whatever their disk and their bus.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mfload.cuda.copies import Methods
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.engine import onto_devices
from mfload.cuda.staging import Staging
from mfload.io.buffers import WorkerSlot
from mfload.io.engine import Engine
from mfload.planning.blocks import Block, Segment
from mfload.runtime import Deadline

ROUNDS = 9
SLOTS = 2, 4, 8, 16
"""MiB that are tried."""
GIB = 4


def device() -> CupyDevice:
    """A device of which every call succeeds at once."""
    numbers = {
        "memcpyDefault": 4, "streamNonBlocking": 1, "eventBlockingSync": 1,
        "eventDisableTiming": 2, "cudaDevAttrMaxPitch": 11, "cudaDevAttrIntegrated": 18,
        "cudaDevAttrCanUseHostPointerForRegisteredMem": 91,
    }  # fmt: skip
    answers = {
        "deviceGetPCIBusId": "0000:00:00.0", "eventQuery": 0,
        "eventCreateWithFlags": 1, "streamCreateWithFlags": 1, "memGetInfo": (1 << 40, 1 << 40),
    }  # fmt: skip
    places = itertools.count(1 << 40, 1 << 36)
    runtime = SimpleNamespace(**numbers)
    for name in (
        *answers, "eventRecord", "eventSynchronize", "eventDestroy", "streamSynchronize",
        "streamDestroy", "memcpyAsync", "memcpy2DAsync", "hostRegister", "hostUnregister", "free",
    ):  # fmt: skip
        setattr(runtime, name, _saying(answers.get(name)))
    runtime.deviceGetAttribute = lambda kind, _: 1 << 31 if kind == 11 else 0
    runtime.malloc = lambda _nbytes: next(places)
    # A function in C that says 0, as the driver's do where all is well.
    zero = lambda: ctypes.pythonapi["PyErr_CheckSignals"]  # noqa: E731 - each with its types
    calls = (
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
        "cuThreadExchangeStreamCaptureMode", "cuMemcpyAsync",
    )  # fmt: skip
    driver = SimpleNamespace(**{name: zero() for name in calls})
    return CupyDevice(0, SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), driver)


def _saying(answer: object) -> Callable[..., object]:
    return lambda *_: answer


class Nothing:
    """Reads nothing (see `mfload.io.pread.PreadReader`)."""

    def land(self, block: Block, slot: WorkerSlot) -> Any:
        """What is in the slot."""
        return slot.bytes(block.nbytes)

    def close(self) -> None:
        """Nothing to give back."""


def seconds(slot: int) -> float:
    """Seconds for `GIB` in blocks of so many MiB, by one reader."""
    on = device()
    nbytes, length = GIB << 30, slot << 20
    memory = [on.allocate(nbytes)]
    blocks = [
        Block(0, at, length, (Segment(at, length, 0, at),)) for at in range(0, nbytes, length)
    ]
    staging = Staging(Methods([on]), length)
    readers: Any = lambda _: Nothing()  # noqa: E731
    engine = Engine(onto_devices(blocks, memory, staging, readers, 1, {}, print))
    start = time.perf_counter()
    engine.run(Deadline(None))
    return time.perf_counter() - start


def main() -> None:
    """Prints a table."""
    found = [{slot: seconds(slot) for slot in SLOTS} for _ in range(ROUNDS)]
    print(f"{GIB} GiB, one reader, {ROUNDS} rounds; best and median")
    for slot in SLOTS:
        taken = sorted(each[slot] for each in found)
        blocks = (GIB << 10) // slot
        print(
            f"blocks of {slot:2} MiB: {taken[0] / blocks * 1e6:5.1f} µs a block "
            f"(median {statistics.median(taken) / blocks * 1e6:5.1f}), "
            f"{taken[0] / GIB * 1e3:5.2f} ms a GiB"
        )


if __name__ == "__main__":
    main()
