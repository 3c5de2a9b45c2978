"""Whose memory a target's arrays lie in, and how much is held beside them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from jax.sharding import NamedSharding, PartitionSpec as P

import mfload
from mfload import errors
from mfload.io import probes
from mfload.trees import batches, host_leaves

W = np.arange(128 * 256, dtype=np.float32).reshape(128, 256)
V = (np.arange(64 * 512).reshape(64, 512) % 251 - 125).astype(ml_dtypes.bfloat16)
MAP = {"w": mfload.rule("turned", transpose=(1, 0)), "v": "plain"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", {"w": W, "v": V})


@pytest.fixture
def target() -> dict[str, Any]:
    return {
        "turned": jax.ShapeDtypeStruct(W.T.shape, W.dtype),
        "plain": jax.ShapeDtypeStruct(V.shape, V.dtype),
    }


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P(("x", "y")), P()])
def test_donated_leaves_are_reused(path: Path, target: Any, spec: P) -> None:
    mesh = shards.mesh((2, 4))
    made = mfload.load_into(
        target,
        path,
        mapping=MAP,
        mesh=mesh,
        shardings=spec,
        options=mfload.Options(allocator="framework"),
    )
    # None of it is ours, so that what becomes of it is JAX's affair.
    assert mfload.live_bytes() == 0
    before = {name: shards.pointers(array) for name, array in made.items()}
    assert all(len(set(where.values())) == 8 for where in before.values())
    step = jax.jit(lambda tree: {name: -x for name, x in tree.items()}, donate_argnums=0)
    stepped = step(made)
    assert {name: shards.pointers(array) for name, array in stepped.items()} == before
    shards.assert_sharded(stepped["turned"], -W.T, NamedSharding(mesh, spec))
    shards.assert_sharded(stepped["plain"], -V, NamedSharding(mesh, spec))


def test_what_was_transformed_can_be_donated_in_any_case(path: Path, target: Any) -> None:
    report = mfload.Report()
    mesh = shards.mesh((2, 4))
    made = mfload.load_into(
        target, path, mapping=MAP, mesh=mesh, shardings=P("x", "y"), report=report
    )
    # What is as it is stored lies in the buffer that was read into, and nothing else does.
    assert report.aliased_bytes == V.nbytes
    assert V.nbytes <= mfload.live_bytes() < V.nbytes + W.nbytes
    before = shards.pointers(made["turned"])
    turned = jax.jit(lambda x: -x, donate_argnums=0)(made["turned"])
    assert shards.pointers(turned) == before


def test_a_part_of_a_tensor_lands_as_it_is(tmp_path: Path) -> None:
    """No program runs where a shard is a box of what is stored, whatever its rule."""
    path = samples.save(tmp_path / "m.safetensors", {"q": W, "k": -W, "fused": W})
    rules = {
        "(q|k)": mfload.rule("qk", concat=(0, 1, ("q", "k"))),
        "fused": mfload.rule(["a", "b"], split=0),
    }
    halves = jax.ShapeDtypeStruct((64, 256), W.dtype)
    target = {"qk": jax.ShapeDtypeStruct((256, 256), W.dtype), "a": halves, "b": halves}
    report = mfload.Report()
    mesh = shards.mesh((2, 4))
    made = mfload.load_into(
        target, path, mapping=rules, mesh=mesh, shardings=P(("x", "y")), report=report
    )
    assert report.aliased_share == 1
    assert "transforms" not in report.stages
    shards.assert_sharded(made["qk"], np.concatenate([W, -W]), NamedSharding(mesh, P(("x", "y"))))
    shards.assert_sharded(made["b"], W[64:], NamedSharding(mesh, P(("x", "y"))))


@pytest.mark.parametrize("allocator", ["auto", "framework"])
@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y")), P("y"), P()])
def test_a_transformed_tensor_larger_than_the_cap(
    tmp_path: Path, spec: P, engine: Any, allocator: Any
) -> None:
    whole = np.arange(1024 * 4096, dtype=np.float32).reshape(1024, 4096)
    path = samples.save(tmp_path / "a.safetensors", {"w": whole})
    mesh = shards.mesh((2, 4))
    report = mfload.Report()
    made = mfload.load_into(
        {"w": jax.ShapeDtypeStruct((4096, 1024), np.float32)},
        path,
        mapping={"w": mfload.rule("w", transpose=(1, 0), scale=0.5)},
        mesh=mesh,
        shardings=spec,
        report=report,
        options=mfload.Options(
            engine=engine, allocator=allocator, max_host_overhead=4 << 20, threads=2
        ),
    )
    assert report.peak_bytes <= (4 << 20) - (512 << 10)
    assert report.read_bytes < 1.05 * whole.nbytes
    shards.assert_sharded(made["w"], whole.T * np.float32(0.5), NamedSharding(mesh, spec))


def test_a_result_that_does_not_fit_is_refused_before_a_byte_is_read(
    path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = W.nbytes + V.nbytes
    limit = probes.MemoryLimit("RLIMIT_AS", needed, 4096)
    monkeypatch.setattr(probes, "process_limits", lambda: [limit])
    calls: list[int] = []
    with pytest.raises(errors.MemoryLimitError, match="RLIMIT_AS"):
        mfload.load_into(target, path, mapping=MAP, progress=lambda done, _: calls.append(done))
    assert not any(calls)


def test_small_leaves_come_in_waves(tmp_path: Path) -> None:
    stored = {f"{n}": np.full((256, 256), n, np.float32) for n in range(16)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    calls: list[int] = []
    report = mfload.Report()
    made = mfload.load_into(
        {name: jax.ShapeDtypeStruct((256, 256), ml_dtypes.bfloat16) for name in stored},
        path,
        mapping={r"\d+": mfload.rule(r"\g<0>", transpose=(1, 0))},
        mesh=shards.mesh(),
        shardings=P("x"),
        progress=lambda done, _: calls.append(done),
        report=report,
        options=mfload.Options(max_host_overhead=2 << 20),
    )
    assert all((np.asarray(made[name]) == int(name)).all() for name in stored)
    assert report.peak_bytes <= 2 << 20
    assert report.read_bytes == calls[-1] == sum(array.nbytes for array in stored.values())
    assert calls == sorted(calls)
    assert report.result_bytes == report.read_bytes // 2


KINDS = ["device", "pinned_host", "unpinned_host"]
MADE = {
    "plain": ("a", W, 1 << 20),
    "transposed": (mfload.rule("a", transpose=(1, 0)), W.T, 1 << 20),
    "cast": (mfload.rule("a", cast="bfloat16"), W.astype(ml_dtypes.bfloat16), 1 << 20),
    "scaled": (mfload.rule("a", scale=0.5), W * np.float32(0.5), 700 << 10),
}


@pytest.mark.parametrize("cap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("y"), P(None, "x"), P()])
@pytest.mark.parametrize("made", MADE)
def test_any_memory_of_a_device(path: Path, kind: str, spec: P, made: str, cap: bool) -> None:
    if kind not in {each.kind for each in jax.devices()[0].addressable_memories()}:
        pytest.skip("these devices have no such memory")
    rule, whole, limit = MADE[made]
    sharding = NamedSharding(shards.mesh((2, 4)), spec, memory_kind=kind)
    target = {"a": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)}
    mapping = {"w": rule, "v": None}
    options: Any = {"max_host_overhead": limit, "threads": 1} if cap else {}
    report = mfload.Report()
    loaded = mfload.load_into(target, path, mapping=mapping, report=report, **as_options(options))
    shards.assert_sharded(loaded["a"], np.ascontiguousarray(whole), sharding)
    assert {shard.data.sharding.memory_kind for shard in loaded["a"].addressable_shards} == {kind}
    assert report.peak_bytes - (made == "plain") * 8 * W.nbytes <= limit


def test_a_shard_that_is_moved_fits_the_overhead(tmp_path: Path) -> None:
    """It lies in two memories for a while."""
    whole = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)
    path = samples.save(tmp_path / "m.safetensors", {"a": whole})
    mapping: Any = {"a": ("a", ((1, 0), None))}

    def load(spec: P, limit: int) -> Any:
        sharding = NamedSharding(shards.mesh((2, 4)), spec, memory_kind="pinned_host")
        target = {"a": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)}
        return mfload.load_into(
            target,
            path,
            mapping=mapping,
            options=mfload.Options(max_host_overhead=limit, threads=1),
        )["a"]

    with pytest.raises(errors.MemoryLimitError, match="a shard that is moved exceeds") as caught:
        load(P(), (4 << 20) - 1)
    assert caught.value.tensor == "a"
    made = load(P(), asked(caught.value))
    assert (np.asarray(made) == whole.T).all()
    load(P("x", "y"), 1 << 20)


def asked(error: errors.MfloadError) -> int:
    """The overhead that would do, as an error says."""
    return int(str(error.expected).split()[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("limit", [0, 38912, 155648, 300000])
def test_the_overhead_that_is_asked_for_does(
    path: Path, target: Any, limit: int, threads: int
) -> None:
    def load(overhead: int) -> Any:
        return mfload.load_into(
            target,
            path,
            mapping=MAP,
            options=mfload.Options(max_host_overhead=overhead, threads=threads),
        )

    with pytest.raises(errors.MemoryLimitError, match="max_host_overhead is too small") as caught:
        load(min(limit, 76 * 1024 * threads * 4 - 1))
    assert caught.value.found == f"{min(limit, 76 * 1024 * threads * 4 - 1)} bytes"
    made = load(asked(caught.value))
    assert (np.asarray(made["turned"]) == W.T).all()


def test_the_overhead_asked_for_a_row_that_is_large(tmp_path: Path) -> None:
    whole = np.arange(2 << 20, dtype=np.uint8).reshape(2, -1)
    path = samples.save(tmp_path / "m.safetensors", {"a": whole})
    mapping = {"a": mfload.rule("a", reshape=(-1,), cast="float16")}
    target = {"a": jax.ShapeDtypeStruct((2 << 20,), np.float16)}
    with pytest.raises(errors.MemoryLimitError) as caught:
        mfload.load_into(
            target, path, mapping=mapping, options=mfload.Options(max_host_overhead=1, threads=1)
        )
    found = mfload.load_into(
        target,
        path,
        mapping=mapping,
        options=mfload.Options(max_host_overhead=asked(caught.value), threads=1),
    )
    assert (np.asarray(found["a"]) == whole.ravel().astype(np.float16)).all()


def test_what_can_not_be_cut_finely_enough(path: Path, target: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_leaves, "MOST", 0)
    monkeypatch.setattr(batches, "most", lambda parts: 1 << 30)
    with pytest.raises(errors.MemoryLimitError, match="is made of exceeds") as caught:
        mfload.load_into(
            target, path, mapping=MAP, options=mfload.Options(max_host_overhead=1 << 20)
        )
    assert caught.value.tensor == "turned"


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("P('x', 'y')", "transpose=(1, 0)"),
        ("P(None, 'y')", "transpose=(1, 0), cast='bfloat16'"),
        ("P(('x', 'y'))", "reshape=(4096, 64, 256)"),
    ],
)
def test_the_process_holds_no_more(tmp_path: Path, spec: str, rule: str) -> None:
    path = tmp_path / "large.safetensors"
    rows = b"0123456789abcdef" * (1 << 16)
    samples.save_raw(path, [("w", "F32", (4096, 16384), b"".join([rows] * 256))])
    code = """
        import os, resource, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        import jax, numpy as np, mfload
        from jax.sharding import Mesh, PartitionSpec as P

        def now():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        path, spec, rule = sys.argv[1:]
        shape = {"t": (16384, 4096), "r": (4096, 64, 256)}[rule[0]]
        dtype = "bfloat16" if "bfloat16" in rule else "float32"
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        target = {"w": jax.ShapeDtypeStruct(shape, dtype)}
        rules = {"w": eval(f"mfload.rule('w', {rule})")}

        def load():
            return mfload.load_into(
                target, path, mapping=rules, mesh=mesh, shardings=eval(spec),
                options=mfload.Options(max_host_overhead=64 << 20, engine="pread"),
            )

        load()  # What XLA compiles stays, and is another matter.
        open("/proc/self/clear_refs", "w").write("5")  # Sets the high-water mark back.
        before = now()
        made = load()
        lines = open("/proc/self/status").read().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        result = sum(shard.data.nbytes for shard in made["w"].addressable_shards)
        print(peak - before - result, flush=True)
        os._exit(0)  # XLA's threads crash some teardowns.
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), spec, rule],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    print("beside the result:", int(ran.stdout) >> 20, "MiB")
    # The cap, and a little for Python's objects and huge pages' ends.
    assert int(ran.stdout) <= (64 << 20) + (16 << 20)
