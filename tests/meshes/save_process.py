"""What each process of a save does in a test (see `launching`).

python save_process.py RANK COUNT PORT DIRECTORY CASE…
"""

# pyright: reportUnknownParameterType=false

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import world
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from world import World

import mfload
from mfload.saving import together

ARRAYS = {
    "rows": np.arange(64 * 30, dtype=np.float32).reshape(64, 30),
    "columns": np.arange(33 * 64, dtype=np.int32).reshape(33, 64),
    "both": np.arange(16 * 4 * 8, dtype=np.float16).reshape(16, 4, 8),
    "deep": np.arange(3 * 16 * 5, dtype=np.uint8).reshape(3, 16, 5),
    "replicated": np.arange(7, dtype=np.int16),
    "scalar": np.float32(2.5),
    "empty": np.empty((0, 8), np.float32),
}
SPECS = {
    "rows": P(("a", "b")),
    "columns": P(None, ("b", "a")),
    "both": P("b", None, "a"),
    "deep": P(None, "a"),
    "empty": P(None, "b"),
}


def state(mesh: Mesh) -> dict[str, Any]:
    made = {}
    for name, array in ARRAYS.items():
        sharding = NamedSharding(mesh, SPECS.get(name, P()))
        made[name] = jax.make_array_from_callback(
            array.shape, sharding, lambda index, array=array: np.asarray(array)[index]
        )
    return made


def run(rank: int, directory: Path, mesh: Mesh, case: str) -> dict[str, Any]:
    arrays, path = state(mesh), directory / f"{case}.safetensors"
    match case:
        case "flat":
            seen: list[tuple[int, int]] = []
            turned = np.arange(9 << 20, dtype=np.float32).reshape(3, -1).T  # Fetched in parts.
            given = {**arrays, "host": np.arange(5), "turned": turned}
            done = mfload.save(given, path, progress=lambda *each: seen.append(each))
            return {"files": len(done.files), "seen": seen[-1]}
        case "background":
            host, shards = np.arange(5), directory / "several/"
            pending = mfload.save({**arrays, "host": host}, path, background=True)
            host[:] = 0
            arrays["rows"].delete()
            # Their turns come in the order of the calls.
            again = mfload.save(state(mesh), f"{shards}/", max_shard_size=2000, background=True)
            loaded = mfload.load(directory / "flat.safetensors", "jax", mesh=mesh, shardings=P())
            saved = pending.result(60)
            again.result(60)
            return {"loaded": len(loaded), "copied": saved.copied, "notes": saved.notes}
        case "background-exists":
            mfload.save(arrays, directory / "flat.safetensors", background=True)
            raise AssertionError
        case "background-fails":
            real = together.write_all

            def full(*given: Any) -> None:
                if rank == 1:
                    raise OSError(28, "full")
                real(*given)

            together.write_all = full
            try:
                mfload.save(arrays, path, background=True).result(60)
            finally:
                together.write_all = real
        case "tree":
            mfload.save({"params": arrays, "step": 3}, path)
        case "shards":
            done = mfload.save(arrays, path, max_shard_size=2000, checksums=True)
            return {"files": len(done.files), "done": done.as_dict()}
        case "replicated":
            everywhere = NamedSharding(mesh, P())
            params = {
                name: jax.make_array_from_callback(
                    array.shape, everywhere, lambda index, array=array: np.asarray(array)[index]
                )
                for name, array in ARRAYS.items()
            }
            done = mfload.save({"params": params, "step": 3}, path)
            return {"done": done.as_dict()}
        case "packed":
            four = np.arange(8).astype(ml_dtypes.float4_e2m1fn).reshape(2, 4)
            whole = jax.device_put(four, NamedSharding(mesh, P()))
            mfload.save({"four": whole, "rows": arrays["rows"]}, path)
        case "packed-parts":
            four = np.zeros((64, 4), ml_dtypes.float4_e2m1fn)
            mfload.save({"four": jax.device_put(four, NamedSharding(mesh, P("a")))}, path)
        case "deleted":
            arrays["rows"].delete()
            mfload.save(arrays, path)
        case "alone":
            if rank == 0:
                mfload.save(jax.device_get({"x": arrays["replicated"]}), path)
        case "absent":
            together._ARRIVAL = 1.0  # pyright: ignore[reportPrivateUsage]
            if rank == 0:
                mfload.save({"x": arrays["replicated"]}, path)
            time.sleep(4)
        case "exists":
            mfload.save(arrays, directory / "flat.safetensors")
        case "differ":
            if rank:
                arrays.pop("rows")
            mfload.save(arrays, path)
        case "host":
            mfload.save({**arrays, "own": np.full(3, rank)}, path)
        case "tree-of-one":
            mfload.save({"params": arrays, "f": [object()] if rank else None}, path)
        case "boxes":
            boxes = {name: nn.Partitioned(array, ()) for name, array in arrays.items()}
            mfload.save(boxes, path)
        case "sums":
            checksums: Any = "nothing" if rank else True
            mfload.save(arrays, path, checksums=checksums)
        case "other-sums":
            mfload.save(arrays, path, checksums="sha256" if rank else True)
        case "fails" | "dies" | "first-dies":
            real = together.write_all

            def write(*given: Any) -> None:
                if rank == (case == "dies") and case.endswith("dies"):
                    os._exit(9)
                if rank == 1 and case == "fails":
                    raise OSError(28, "full")
                real(*given)

            together.write_all = write
            try:
                mfload.save(arrays, path)
            finally:
                together.write_all = real
        case "late":
            if rank == 0:
                mfload.save(arrays, path, timeout=2)
            time.sleep(0)
        case _:
            raise AssertionError(case)
    return {}


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    directory = Path(sys.argv[4])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("a", "b"))
    here = World(rank, count, directory)
    if world.said(here, sys.argv[5:], lambda case: run(rank, directory, mesh, case)):
        world.leave(here)  # JAX waits at its exit for processes that are gone.


if __name__ == "__main__":
    main()
