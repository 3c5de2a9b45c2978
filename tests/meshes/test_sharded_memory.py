"""Whose memory shards lie in, and how much is held beside them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from jax.sharding import NamedSharding, PartitionSpec as P
from leaks import left

import mfload
from mfload import errors
from mfload.io import buffers

# Numbers, none of them a NaN, which is free to change its bits where it is computed with.
MODEL = {
    "w": np.arange(128 * 256, dtype=np.float32).reshape(128, 256),
    "u": (np.arange(64 * 512).reshape(64, 512) % 251 - 125).astype(ml_dtypes.bfloat16),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P(("x", "y")), P("x"), P()])
def test_donated_shards_are_reused(path: Path, spec: P) -> None:
    mesh = shards.mesh((2, 4))
    loaded = mfload.load(
        path,
        framework="jax",
        mesh=mesh,
        shardings=spec,
        options=mfload.Options(allocator="framework"),
    )
    # None of it is ours, so that what becomes of it is JAX's affair.
    assert mfload.live_bytes() == 0
    before = {name: shards.pointers(array) for name, array in loaded.items()}
    assert all(len(set(where.values())) == 8 for where in before.values())
    step = jax.jit(lambda tree: {name: -x for name, x in tree.items()}, donate_argnums=0)
    stepped = step(loaded)
    assert {name: shards.pointers(array) for name, array in stepped.items()} == before
    assert all(array.is_deleted() for array in loaded.values())
    for name, array in stepped.items():
        shards.assert_sharded(array, -MODEL[name], NamedSharding(mesh, spec))


def test_replicas_in_the_frameworks_memory_are_read_once(path: Path) -> None:
    report = mfload.Report()
    options: dict[str, Any] = {"mesh": shards.mesh(), "allocator": "framework"}
    loaded = mfload.load(path, framework="jax", report=report, **as_options(options))
    nbytes = sum(array.nbytes for array in MODEL.values())
    assert (report.read_bytes, report.result_bytes) == (nbytes, 8 * nbytes)
    assert mfload.plan(path, "jax", **as_options(options)).as_dict()["read_bytes"] == nbytes
    for array in loaded.values():
        assert len(set(shards.pointers(array).values())) == 8


def test_by_default_shards_lie_in_the_buffers_that_were_read_into(path: Path) -> None:
    report = mfload.Report()
    mesh = shards.mesh((2, 4))
    options: dict[str, Any] = {"mesh": mesh, "shardings": P("x", "y"), "report": report}
    loaded = mfload.load(path, framework="jax", **as_options(options))
    assert report.aliased_share == 1.0
    assert mfload.live_bytes() >= sum(array.nbytes for array in MODEL.values())
    kept = loaded["w"]
    del loaded
    assert mfload.live_bytes() > 0
    del kept
    assert mfload.live_bytes() == 0
    kept = mfload.load(path, framework="jax", **as_options(options))["w"]
    assert samples.same(np.asarray(kept), MODEL["w"])
    del kept
    # JAX 0.11 lets go of what NumPy was given in a collection only.
    assert left() == 0


def test_other_kinds_of_memory_are_landed_in(path: Path) -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip("this version has no such memory")
    sharding = NamedSharding(shards.mesh(), P("x"), memory_kind="pinned_host")
    report = mfload.Report()
    options: dict[str, Any] = {"shardings": sharding, "engine": "pread"}
    loaded = mfload.load(path, framework="jax", report=report, **as_options(options))
    # Nothing was ever held besides.
    assert (mfload.live_bytes(), report.aliased_share, report.peak_bytes) == (0, 1.0, 0)
    shards.assert_loaded(loaded, MODEL, dict.fromkeys(MODEL, sharding))


@pytest.mark.parametrize("allocator", ["auto", "framework"])
@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y")), P("y"), P()])
def test_a_tensor_larger_than_the_cap(tmp_path: Path, spec: P, engine: Any, allocator: Any) -> None:
    whole = samples.numbers((1024, 4096), np.float32, 3)
    path = samples.save(tmp_path / "a.safetensors", {"w": whole})
    cap = 1 << 20
    options: dict[str, Any] = {
        "mesh": shards.mesh((2, 4)),
        "shardings": spec,
        "engine": engine,
        "allocator": allocator,
        "max_host_overhead": cap,
        "threads": 2,
    }
    preview = mfload.plan(path, "jax", **as_options(options))
    buffers.peak_bytes(reset=True)
    loaded = mfload.load(path, framework="jax", **as_options(options))
    held = 0 if allocator == "framework" else whole.nbytes
    assert buffers.peak_bytes() <= preview.peak_bytes
    assert preview.overhead_bytes <= cap
    # What leads to a tensor's place in its buffer comes on top.
    assert preview.peak_bytes <= held + cap + (64 << 10)
    shards.assert_sharded(loaded["w"], whole, NamedSharding(options["mesh"], spec))


def test_parts_of_a_tensor_share_a_wave_where_they_fit(tmp_path: Path) -> None:
    """Columns: every part of a tensor is read with all of it, so two waves would read it twice."""
    if not hasattr(jnp, "float4_e2m1fn"):
        pytest.skip("this version has no type that must be copied")
    raw = samples.numbers((3 << 19,), np.uint8, 4).tobytes()
    path = samples.save_raw(
        tmp_path / "a.safetensors", [(f"t{n}", "F4", (1 << 10, 3 << 10), raw) for n in range(3)]
    )
    options: dict[str, Any] = {
        "mesh": shards.mesh((8,)), "shardings": P(None, "x"), "max_host_overhead": 2 << 20,
    }  # fmt: skip
    report = mfload.Report()
    loaded = mfload.load(
        path, framework="jax", report=report, **as_options({"threads": 1, **options})
    )
    assert (
        report.read_bytes
        == mfload.plan(path, "jax", **as_options({"threads": 1, **options})).read_bytes
        == 9 << 19
    )
    for name, array in mfload.load(path, framework="jax").items():
        assert samples.same(np.asarray(loaded[name]), np.asarray(array))
    # Larger than the overhead, it can't be had so, and that is said.
    options["max_host_overhead"] = 1 << 20
    preview = mfload.plan(path, "jax", **as_options({"threads": 1, **options}))
    assert preview.read_bytes > 9 << 19
    assert any("read once a batch" in note and "3 tensors" in note for note in preview.notes)


def test_what_has_to_be_copied_comes_in_batches(tmp_path: Path) -> None:
    if not hasattr(jnp, "float4_e2m1fn"):
        pytest.skip("this version has no type that must be copied")
    raw = samples.numbers((1 << 20,), np.uint8, 4).tobytes()
    path = samples.save_raw(
        tmp_path / "a.safetensors", [(f"t{n}", "F4", (1 << 11, 1 << 10), raw) for n in range(4)]
    )
    mesh = shards.mesh((2, 4))
    options: dict[str, Any] = {
        "mesh": mesh, "shardings": P("x", "y"), "max_host_overhead": 1 << 20, "threads": 1,
    }  # fmt: skip
    preview = mfload.plan(path, "jax", **as_options(options))
    report = mfload.Report()
    loaded = mfload.load(path, framework="jax", report=report, **as_options(options))
    assert any("batches" in note for note in report.notes)
    assert mfload.live_bytes() == 0
    assert report.peak_bytes <= preview.peak_bytes <= (2 << 20) + (64 << 10)
    assert report.read_bytes == preview.read_bytes == 4 << 20
    for name, array in mfload.load(path, framework="jax").items():
        assert samples.same(np.asarray(loaded[name]), np.asarray(array))
    with pytest.raises(errors.MemoryLimitError) as info:
        mfload.load(path, framework="jax", **as_options(options | {"max_host_overhead": 80_000}))
    assert info.value.tensor == "t0"


@pytest.mark.parametrize(
    ("shape", "spec"), [((8,), "P('x')"), ((8,), "P(None, 'x')"), ((2, 4), "P('y', 'x')")]
)
def test_the_process_holds_no_more(tmp_path: Path, shape: Any, spec: str) -> None:
    path = tmp_path / "large.safetensors"
    rows = b"0123456789abcdef" * (1 << 16)
    samples.save_raw(path, [("w", "BF16", (8192, 16384), b"".join([rows] * 256))])
    code = """
        import os, resource, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        import jax, numpy as np, mfload
        from jax.sharding import Mesh, PartitionSpec as P

        def now():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        shape, spec = eval(sys.argv[2]), eval(sys.argv[3])
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])
        small = sys.argv[1] + ".small"
        mfload.save({"w": np.ones((64, 64), np.float32)}, small, overwrite=True)
        mfload.load(small, framework="jax", mesh=mesh, shardings=spec)
        open("/proc/self/clear_refs", "w").write("5")  # Sets the high-water mark back.
        before = now()
        loaded = mfload.load(
            sys.argv[1], framework="jax", mesh=mesh, shardings=spec,
            options=mfload.Options(max_host_overhead=32 << 20, engine="pread"),
        )
        lines = open("/proc/self/status").read().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        print(peak - before)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), repr(shape), spec],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    # The tensor itself, the cap, and a little for Python's objects and huge pages' ends.
    beside = int(ran.stdout) - (256 << 20)
    assert -(8 << 20) <= beside <= (32 << 20) + (16 << 20)
