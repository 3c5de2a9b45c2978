"""Whether it holds under load: memory is given back, failures are told."""

from __future__ import annotations

import errno
import gc
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import gpu_facts, gpu_memory
from benchmarks.gpu_given import Given, Row, landings, write
from benchmarks.gpu_memory import MIB
from mfload import errors

_SLACK = 16 * MIB
_PATIENCE = 5.0
"""Seconds until memory must be back: XLA lets go of it on a thread of its own."""
_PAUSE = 0.02


def _let_go() -> None:
    """Gives back the slots that the process keeps for its next load."""
    kits: Any = getattr(import_module("mfload.cuda.staging"), "KITS", None)
    if kits is not None:
        kits.give_back()


def _free(given: Given) -> int:
    """What the device can give when mfload holds nothing more; waits for that."""
    import mfload

    _let_go()
    end = time.monotonic() + _PATIENCE
    gc.collect()
    while mfload.live_bytes() and time.monotonic() < end:
        time.sleep(_PAUSE)
        gc.collect()
    return gpu_memory.free(given.device)


def _given_back(given: Given, before: int, after: str) -> int:
    """Waits until all memory is back; gives what the device lacks.

    Args:
        given: The trial's surroundings.
        before: What the device could give.
        after: After what, in words.
    """
    import mfload

    end = time.monotonic() + _PATIENCE
    while True:
        lost = before - _free(given)
        if lost <= _SLACK or time.monotonic() >= end:
            break
        time.sleep(_PAUSE)
    if mfload.live_bytes():
        raise AssertionError(f"mfload still holds {mfload.live_bytes()} bytes after {after}")
    if lost > _SLACK:
        raise AssertionError(f"the device lacks {lost} bytes after {after}")
    return lost


def lifetime(given: Given, framework: str, engine: str) -> str:
    """Loads and forgets again and again: mfload holds nothing then, and the device has it back."""
    given.try_engine(framework, engine)
    path = given.folder / "life.safetensors"
    write(path, [Row(f"w.{i}", "F32", (4 * MIB,)) for i in range(4)], 1)
    said = [_lifetime(given, path, framework, engine, each) for each in landings(framework)]
    return "; ".join(said)


def _lifetime(given: Given, path: Path, framework: str, engine: str, allocator: str) -> str:
    import mfload

    def once() -> int:
        arrays = given.load(path, framework, engine=engine, allocator=allocator)
        held = mfload.live_bytes()
        gpu_memory.synchronize(framework, arrays, given.device)
        arrays.clear()
        return held

    once()  # Contexts, kernels and pools are there afterwards.
    before = _free(given)
    most = max(once() for _ in range(6))
    lost = _given_back(given, before, f"six loads into memory of {allocator}")
    return (
        f"{allocator}: {most / MIB:.0f} MiB held while arrays lived, 0 after; "
        f"the device lacks {lost} bytes"
    )


def pins(given: Given, framework: str, engine: str) -> str:
    """What is page-locked during a load is unlocked once the slots that are kept are given back."""
    given.need_gpu()
    given.try_engine(framework, engine)
    runtime = gpu_memory.cupy().cuda.runtime
    locked: dict[int, int] = {}
    total = 0
    register, unregister = runtime.hostRegister, runtime.hostUnregister

    def registering(address: int, nbytes: int, *flags: int) -> object:
        nonlocal total
        done = register(address, nbytes, *flags)
        locked[address] = nbytes
        total += nbytes
        return done

    def unregistering(address: int) -> object:
        locked.pop(address, None)
        return unregister(address)

    path = given.folder / "pins.safetensors"
    write(path, [Row(f"w.{i}", "F32", (8 * MIB,)) for i in range(4)], 1)
    given.load(path, framework, engine=engine)  # Whoever keeps something for ever has it now.
    _let_go()
    before = gpu_facts.kernel_pins()
    runtime.hostRegister, runtime.hostUnregister = registering, unregistering
    try:
        arrays = given.load(path, framework, engine=engine)
        _let_go()
    finally:
        runtime.hostRegister, runtime.hostUnregister = register, unregister
    after = gpu_facts.kernel_pins()
    del arrays
    if locked:
        raise AssertionError(f"{sum(locked.values())} bytes are still registered")
    if after != before:
        raise AssertionError(f"the kernel counted {before} KiB before the load and {after} after")
    if engine == "pinned" and not total:
        raise AssertionError("nothing was registered by cupy.cuda.runtime.hostRegister at all")
    return f"{total / MIB:.0f} MiB registered during the load, 0 after"


def truncated(given: Given, framework: str, engine: str) -> str:
    """A file that ends early: a typed error, and all memory back."""
    given.try_engine(framework, engine)
    path = given.folder / "whole.safetensors"
    write(path, [Row(f"w.{i}", "F32", (4 * MIB,)) for i in range(4)], 1)
    given.load(path, framework, engine=engine).clear()
    before = _free(given)
    short = given.folder / "short.safetensors"
    short.write_bytes(path.read_bytes()[: -9 * MIB])
    try:
        given.load(short, framework, engine=engine)
    except errors.MfloadError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    _given_back(given, before, said)
    return said


def failing(given: Given, framework: str) -> str:
    """A disk that fails in the middle of a load: a typed error, and all memory back."""
    path = given.folder / "failing.safetensors"
    write(path, [Row(f"w.{i}", "F32", (4 * MIB,)) for i in range(4)], 1)
    preadv = os.preadv
    calls = 0
    last = 1 << 30

    def reading(*given: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*given)

    os.preadv = reading
    given.load(path, framework).clear()
    before = _free(given)
    try:
        last, calls = calls - 2, 0
        given.load(path, framework)
    except errors.MfloadError as error:
        said = f"{type(error).__name__} after {last} reads: {error}"
    else:
        raise AssertionError("no error")
    finally:
        os.preadv = preadv
    _given_back(given, before, said)
    return said


def overhead(given: Given, framework: str, engine: str) -> str:
    """`max_device_overhead=` is held: what mfload has on the device beside the arrays."""
    import mfload

    given.need_gpu()
    given.try_engine(framework, engine)
    path = given.folder / "overhead.safetensors"
    rows = [Row(f"w.{i}", "F32", (8 * MIB,)) for i in range(8)]
    write(path, rows, 1)
    limit = 64 * MIB
    report = mfload.Report()
    arrays = given.load(
        path, framework, engine=engine, allocator="mfload", dtype="bfloat16",
        max_device_overhead=limit, report=report,
    )  # fmt: skip
    del arrays
    peak = int(getattr(report, "device_peak_bytes"))  # noqa: B009  Older ones have none.
    beside = peak - sum(row.nbytes for row in rows) // 2
    if beside > limit:
        raise AssertionError(f"{beside} bytes beside the arrays, {limit} allowed")
    return f"{beside / MIB:.1f} MiB beside the arrays, {limit / MIB:.0f} allowed"


def names(frameworks: list[str], engines: tuple[str, ...]) -> list[str]:
    """The trials of this module that may run side by side, by name; all need a GPU."""
    return [
        f"{what}/{frameworks[0]}/{engine}" for engine in engines for what in ("pins", "overhead")
    ]


def alone(frameworks: list[str], engines: tuple[str, ...]) -> list[str]:
    """Those that look at the device's memory, so that nobody else may use it meanwhile."""
    found = [f"lifetime/{framework}/{engine}" for framework in frameworks for engine in engines]
    return [
        *found,
        *(f"truncated/{frameworks[0]}/{engine}" for engine in engines),
        f"failing/{frameworks[0]}",
    ]
