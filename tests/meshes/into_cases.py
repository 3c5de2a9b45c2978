"""What each process of a load into a target does in a test (see `launching`).

    python into_cases.py RANK COUNT PORT DIRECTORY CASE…

A case is `spec:exchange` or the name of a failure. Writes a line of JSON for each to
`DIRECTORY/said.RANK`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
import world
from calls import as_options
from jax.sharding import Mesh, PartitionSpec as P
from world import World

import mfload
from mfload.trees import host_leaves

SPECS: dict[str, Any] = {
    "rows": P(("a", "b")),
    "columns": P(None, ("a", "b")),
    "grid": P("b", "a"),
    "replicated": P(),
}
MAP = {
    r"layers\.(\d+)\.w": mfload.rule("layers.w", transpose=(1, 0), stack=1, cast="bfloat16"),
    r"layers\.(\d+)\.b": mfload.rule("layers.b", stack=1),
    r"(q|k)": mfload.rule("qk", concat=(0, 1, ("q", "k"))),
    "table": "table",
    "turned": ("turned", ((1, 0), None)),
}
LAYERS = 3


def stored() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"table": (512, 256), "turned": (256, 1024), "q": (64, 256), "k": (32, 256)}
    for n in range(LAYERS):
        shapes |= {f"layers.{n}.w": (64, 128), f"layers.{n}.b": (64,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def expected() -> dict[str, Any]:
    whole = stored()
    import ml_dtypes

    w = np.stack([whole[f"layers.{n}.w"].T for n in range(LAYERS)]).astype(ml_dtypes.bfloat16)
    return {
        "layers": {"w": w, "b": np.stack([whole[f"layers.{n}.b"] for n in range(LAYERS)])},
        "qk": np.concatenate([whole["q"], whole["k"]]),
        "table": whole["table"],
        "turned": whole["turned"].T,
    }


def sharding_of(spec: Any) -> Any:
    def choose(name: str, info: Any) -> Any:
        if name == "layers.w":
            return P(None, *spec)
        return P() if name == "layers.b" else spec

    return choose


def load(directory: Path, mesh: Mesh, spec: str, exchange: str, **options: Any) -> dict[str, Any]:
    whole = expected()
    target = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), whole)
    report = mfload.Report()
    made = mfload.load_into(
        target,
        directory / "model.safetensors",
        mapping=MAP,
        mesh=mesh,
        shardings=sharding_of(SPECS[spec]),
        report=report,
        **as_options({"exchange": exchange, **options}),
    )
    for array, numbers in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
        assert array.shape == numbers.shape
        assert array.dtype == numbers.dtype
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == numbers[shard.index].tobytes()
    return {
        "read": report.read_bytes,
        "exchanged": report.exchanged_bytes,
        "processes": report.processes,
        "peak": report.peak_bytes,
    }


def run(rank: int, directory: Path, mesh: Mesh, case: str) -> dict[str, Any]:
    if case == "own":
        # The devices of the leaves say who takes part: each process loads by itself.
        mine = Mesh(np.array(jax.local_devices()), ("a",))
        leaf = jax.ShapeDtypeStruct(
            (512, 256), np.float32, sharding=jax.sharding.NamedSharding(mine, P("a"))
        )
        if rank == 0:
            return {}
        made = mfload.load_into(
            {"table": leaf},
            directory / "model.safetensors",
            strict=False,
            options=mfload.Options(timeout=20),
        )
        assert made["table"].is_fully_addressable
        return {}
    if case == "map":
        rules = MAP if rank == 0 else {**MAP, "table": ("turned", ((1, 0), None))}
        target = {"table": jax.ShapeDtypeStruct((512, 256), np.float32)}
        mfload.load_into(
            target,
            directory / "model.safetensors",
            mapping=rules,
            mesh=mesh,
            strict=rank == 1,
            options=mfload.Options(timeout=20),
        )
        return {}
    if case == "target":
        target = {"a.b": 1, "a": {"b": 2}} if rank else {"table": jax.ShapeDtypeStruct((8,), "f4")}
        mfload.load_into(
            target, directory / "model.safetensors", mesh=mesh, options=mfload.Options(timeout=20)
        )
        return {}
    if case == "numpy":
        # Each process has its own of these, beside what they share.
        whole = stored()
        target = {"w": jax.ShapeDtypeStruct((512, 256), "f4"), "v": np.zeros((1024, 256), "f4")}
        made = mfload.load_into(
            target,
            directory / "model.safetensors",
            mapping={"table": "w", "turned": ("v", ((1, 0), None)), ".*": None},
            mesh=mesh,
            shardings=[("w", P(("a", "b")))],
            options=mfload.Options(exchange="once", timeout=20),
        )
        assert not made["w"].is_fully_addressable
        assert type(made["v"]) is np.ndarray
        assert made["v"].tobytes() == whole["turned"].T.tobytes()
        return {}
    if case.startswith("apart"):
        # One leaf lies on devices of the last process alone, the other on all.
        whole, here = stored(), Mesh(mesh.devices[-1:], mesh.axis_names)
        place = jax.sharding.NamedSharding(here, P())
        target = {
            "w": jax.ShapeDtypeStruct((LAYERS, 128, 64), "f4", sharding=place),
            "table": jax.ShapeDtypeStruct(
                (512, 256), "f4", sharding=jax.sharding.NamedSharding(mesh, P("a"))
            ),
        }
        rule = mfload.rule("w", transpose=(1, 0), stack=1)
        host_leaves._JOINED = 0
        made = mfload.load_into(
            target,
            directory / "model.safetensors",
            mapping={r"layers\.(\d+)\.w": rule, "table": "table", ".*": None},
            options=mfload.Options(exchange=case.partition(":")[2], timeout=20),
        )
        stacked = np.stack([whole[f"layers.{n}.w"].T for n in range(LAYERS)])
        for shard in made["w"].addressable_shards:
            assert np.asarray(shard.data).tobytes() == stacked.tobytes()
        for shard in made["table"].addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole["table"][shard.index].tobytes()
        return {}
    spec, exchange, *cap = case.split(":")
    options = {"max_host_overhead": int(cap[0])} if cap else {}
    return load(directory, mesh, spec, exchange, **options)


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    directory = Path(sys.argv[4])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("a", "b"))
    if rank == 0:
        safetensors.numpy.save_file(stored(), directory / "model.tmp")
        (directory / "model.tmp").rename(directory / "model.safetensors")
    while not (directory / "model.safetensors").exists():
        time.sleep(0.02)
    here = World(rank, count, directory)
    if world.said(here, sys.argv[5:], lambda case: run(rank, directory, mesh, case)):
        world.leave(here)  # JAX waits at its exit for processes that are gone.


if __name__ == "__main__":
    main()
