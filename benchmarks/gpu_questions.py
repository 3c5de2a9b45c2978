"""What nobody could say without a GPU; each question is a trial in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_given import Given, Row, SkipError, write
from benchmarks.gpu_memory import MIB

OFFSETS = (4, 8, 16, 32, 64, 128, 256)
"""Bytes behind a boundary of 512 that JAX is handed arrays at."""


def alignment(given: Given, offset: str) -> str:
    """Whether XLA computes with an array that lies so many bytes behind a boundary of 512."""
    import jax
    import jax.numpy as jnp

    side, at = 256, int(offset)
    values = np.random.default_rng(at).standard_normal((side, side), np.float32)
    if given.gpu:
        memory: Any = gpu_memory.cupy().zeros(values.nbytes + 1024, np.uint8)
        start = -memory.data.ptr % 512 + at
        memory[start : start + values.nbytes].set(values.reshape(-1).view(np.uint8))
    else:
        memory = np.zeros(values.nbytes + 1024, np.uint8)
        start = -memory.ctypes.data % 512 + at
        memory[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
    view = memory[start : start + values.nbytes].view(np.float32).reshape(side, side)
    array = jax.dlpack.from_dlpack(view)
    where = array.unsafe_buffer_pointer()
    aliased = where % 512 == at
    products: Any = jax.jit(lambda a: (a + 1, a @ a, a.T.sum(0), jnp.exp(a).astype(jnp.bfloat16)))
    plus, times, sums, _ = jax.block_until_ready(products(array))
    exact = np.asarray(plus).tobytes() == (values + 1).tobytes()
    close = np.allclose(times, values @ values, rtol=2e-2, atol=0.3)
    if not (exact and close and np.allclose(sums, values.sum(1), rtol=1e-3, atol=1e-2)):
        raise AssertionError("wrong values")
    return "computes in place" if aliased else "computes on a copy that JAX made"


def xla_owned(given: Given, preallocate: str) -> str:
    """Whether memory that XLA owns can be written from outside, and be donated afterwards."""
    import jax
    import jax.numpy as jnp

    device = jax.devices("cuda" if given.gpu else "cpu")[0]
    make: Any = jax.jit(
        lambda: jnp.zeros(1_000_003, jnp.float32),
        out_shardings=jax.sharding.SingleDeviceSharding(device),
    )
    step: Any = jax.jit(lambda a: a * 2 + 1, donate_argnums=0)
    kept = 0
    for turn in range(20):
        values = np.random.default_rng(turn).standard_normal(1_000_003, np.float32)
        array = jax.block_until_ready(make())
        address = array.unsafe_buffer_pointer()
        gpu_memory.write(address, values, given.device)
        if not np.array_equal(array + 0, values):
            raise AssertionError(f"turn {turn}: JAX does not see what was written")
        out = step(array)
        if not np.allclose(out, values * 2 + 1, rtol=1e-6):
            raise AssertionError(f"turn {turn}: wrong after donation")
        kept += out.unsafe_buffer_pointer() == address
    stats: dict[str, Any] = device.memory_stats() or {}
    pool = stats.get("pool_bytes") or stats.get("bytes_reserved") or stats.get("bytes_limit") or 0
    how = "with preallocation" if preallocate == "on" else "without preallocation"
    return f"values right, {kept} of 20 donations in place, {how}, pool {pool / MIB:.0f} MiB"


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


def names(frameworks: list[str], *, gpu: bool) -> list[str]:
    """The trials of this module that may run side by side, by name."""
    jax = "jax" in frameworks
    found = [f"jax-alignment/{offset}" for offset in OFFSETS] if jax else []
    found += ["xla-owned/off", *(["xla-owned/on"] if gpu else [])] if jax else []
    return [*found, *(["gds"] if gpu else [])]
