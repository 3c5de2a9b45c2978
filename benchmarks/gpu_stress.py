"""Whether it holds under load: memory given back, streams that are busy, files that end early."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import gpu_facts, gpu_memory
from benchmarks.gpu_given import Given, Row, doubled, floats, write, wrong
from benchmarks.gpu_memory import MIB
from mfload import errors

_ELEMENTS = 1_000_003
"""Floats of a tensor: no multiple of anything, and several to a slot."""
_BUSY = 600_000_000
"""Cycles that a stream is kept busy: a third of a second or so."""
_SLACK = 16 * MIB


def lifetime(given: Given, framework: str, engine: str, landing: str) -> str:
    """Loads and forgets again and again: mfload holds nothing then, and the device has it back."""
    import mfload

    given.try_engine(framework, engine)
    path = given.folder / "life.safetensors"
    write(path, [Row(f"w.{i}", "F32", (4 * MIB,)) for i in range(4)], 1)

    def once() -> int:
        arrays = given.load(path, framework, engine=engine, landing=landing)
        held = mfload.live_bytes()
        gpu_memory.synchronize(framework, arrays, given.device)
        arrays.clear()
        gc.collect()
        return held

    once()  # Contexts, kernels and pools are there afterwards.
    before = gpu_memory.free(given.device)
    most = max(once() for _ in range(6))
    lost = before - gpu_memory.free(given.device)
    if mfload.live_bytes():
        raise AssertionError(f"mfload still holds {mfload.live_bytes()} bytes")
    if lost > _SLACK:
        raise AssertionError(f"the device lacks {lost} bytes after six loads")
    return f"{most / MIB:.0f} MiB held while arrays lived, 0 after; the device lacks {lost} bytes"


def pins(given: Given, framework: str, engine: str) -> str:
    """What is page-locked during a load is unlocked after it."""
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
    before = gpu_facts.kernel_pins()
    runtime.hostRegister, runtime.hostUnregister = registering, unregistering
    try:
        arrays = given.load(path, framework, engine=engine)
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
    import mfload

    given.try_engine(framework, engine)
    path = given.folder / "whole.safetensors"
    write(path, [Row(f"w.{i}", "F32", (4 * MIB,)) for i in range(4)], 1)
    given.load(path, framework, engine=engine).clear()
    gc.collect()
    before = gpu_memory.free(given.device)
    short = given.folder / "short.safetensors"
    short.write_bytes(path.read_bytes()[: -9 * MIB])
    try:
        given.load(short, framework, engine=engine)
    except errors.MfloadError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    gc.collect()
    if mfload.live_bytes():
        raise AssertionError(f"mfload still holds {mfload.live_bytes()} bytes after {said}")
    lost = before - gpu_memory.free(given.device)
    if lost > _SLACK:
        raise AssertionError(f"the device lacks {lost} bytes after {said}")
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
        path, framework, engine=engine, landing="mfload", dtype="bfloat16",
        max_device_overhead=limit, report=report,
    )  # fmt: skip
    del arrays
    peak = int(getattr(report, "device_peak_bytes"))  # noqa: B009  Older ones have none.
    beside = peak - sum(row.nbytes for row in rows) // 2
    if beside > limit:
        raise AssertionError(f"{beside} bytes beside the arrays, {limit} allowed")
    return f"{beside / MIB:.1f} MiB beside the arrays, {limit / MIB:.0f} allowed"


def streams(given: Given, framework: str, landing: str) -> str:
    """Loads while the consumer's stream is busy; uses, frees and loads again at once."""
    busy = {"torch": _torch, "jax": _jax, "cupy": _cupy}[framework]
    first, second = given.folder / "1.safetensors", given.folder / "2.safetensors"
    values = [floats(path, 5, _ELEMENTS, seed) for seed, path in enumerate((first, second))]
    paths = (first, second)
    rounds = 4 if given.gpu else 2

    def load(number: int) -> dict[str, Any]:
        return given.load(paths[number], framework, landing=landing)

    for turn in range(rounds):
        for number, found in busy(given, load):
            twice = {name: value + value for name, value in values[number].items()}
            bad = wrong(found, twice)
            if bad:
                raise AssertionError(f"round {turn + 1}, load {number + 1}: wrong {', '.join(bad)}")
    return f"{rounds} rounds"


Found = list[tuple[int, dict[str, np.ndarray]]]


def _torch(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    import torch

    if not given.gpu:
        return [(number, doubled("torch", load(number))) for number in (0, 1)]
    side: Any = torch.cuda.Stream()
    # Memory that torch's allocator takes back while a kernel is still going to write there: a
    # load that lands in it must wait.
    stale = [torch.empty(_ELEMENTS, device=given.device) for _ in range(5)]
    torch.cuda._sleep(_BUSY)
    stale = [each.fill_(float("nan")) for each in stale]
    del stale
    arrays = load(0)
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY)
        first = {name: array + array for name, array in arrays.items()}
    # The arrays go while the stream has yet to read them, and their memory may be used again.
    while arrays:
        arrays.popitem()[1].record_stream(side)
    with torch.cuda.stream(side):
        arrays = load(1)
        second = {name: array + array for name, array in arrays.items()}
    torch.cuda.synchronize()
    return [(n, {name: a.cpu().numpy() for name, a in found.items()})
            for n, found in enumerate((first, second))]  # fmt: skip


def _jax(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    import jax
    import jax.numpy as jnp

    side = 6000 if given.gpu else 60
    slow: Any = jax.jit(lambda m: jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ m), m))
    twice: Any = jax.jit(lambda array: array + array)
    device = jax.devices("cuda" if given.gpu else "cpu")[0]
    found: Found = []
    matrix = jax.device_put(np.full((side, side), 1e-3, np.float32), device)
    for number in (0, 1):
        stale = [jnp.full(_ELEMENTS, jnp.nan) for _ in range(5)]
        running = slow(matrix)
        late = [each + running[0, 0] for each in stale]
        del stale
        arrays = load(number)  # The device is still at work on the matrix.
        outs = {name: twice(array) for name, array in arrays.items()}
        arrays.clear()
        again = load(1 - number)
        found.append((number, {name: np.asarray(out) for name, out in outs.items()}))
        outs = {name: twice(array) for name, array in again.items()}
        found.append((1 - number, {name: np.asarray(out) for name, out in outs.items()}))
        jax.block_until_ready(late)
    return found


def _cupy(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    given.need_gpu()
    cp = gpu_memory.cupy()
    stream = cp.cuda.Stream(non_blocking=True)
    source = "extern \"C\" __global__ void spin(long long n) { long long t = clock64(); "
    spin = cp.RawKernel(source + "while (clock64() - t < n) {} }", "spin")
    found: Found = []
    for number in (0, 1):
        with stream:
            spin((1,), (1,), (_BUSY,))
            arrays = load(number)
            outs = {name: array + array for name, array in arrays.items()}
            spin((1,), (1,), (_BUSY,))
            more = {name: array + array for name, array in arrays.items()}
            arrays.clear()
            again = load(1 - number)
            last = {name: array + array for name, array in again.items()}
        stream.synchronize()
        found += [(n, {name: a.get() for name, a in which.items()})
                  for n, which in ((number, outs), (number, more), (1 - number, last))]  # fmt: skip
    return found


def names(frameworks: list[str], engines: tuple[str, ...], *, gpu: bool) -> list[str]:
    """The trials of this module, by name; they look at the device's memory, so one at a time."""
    found: list[str] = []
    for framework in frameworks:
        landings = ("mfload",) if framework in ("cupy", "numpy") else ("mfload", "framework")
        if framework != "numpy":
            found += [f"streams/{framework}/{landing}" for landing in landings]
        for engine in engines:
            found += [f"lifetime/{framework}/{engine}/{landing}" for landing in landings]
    for engine in engines:
        found.append(f"truncated/{frameworks[0]}/{engine}")
        if gpu:
            found += [f"pins/{frameworks[0]}/{engine}", f"overhead/{frameworks[0]}/{engine}"]
    return found
