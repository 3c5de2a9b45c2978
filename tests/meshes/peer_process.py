"""A process of JAX that publishes what it holds of a mesh, or reads it onto another.

    python peer_process.py publish|read RANK COUNT PORT DEVICES [URL]

One that publishes prints its address and waits for the end of its input.
"""

from __future__ import annotations

import os
import sys

ROLE, RANK, COUNT, PORT, DEVICES = sys.argv[1], *map(int, sys.argv[2:6])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import mfload  # noqa: E402

SHAPES = {"rows": (48, 16), "columns": (16, 48), "whole": (5, 3), "grid": (24, 8)}


def value(name: str) -> np.ndarray:
    """The array of a name, the same in each process."""
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)


def main() -> None:
    """Publishes or reads."""
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, RANK)
    mesh = Mesh(np.array(jax.devices()).reshape(COUNT, DEVICES), ("a", "b"))
    if ROLE == "publish":
        specs = {"rows": P(("a", "b")), "columns": P(None, ("b", "a")), "grid": P("a", "b")}
        arrays = {}
        for name, shape in SHAPES.items():
            sharding = NamedSharding(mesh, specs.get(name, P()))
            full = value(name)
            arrays[name] = jax.make_array_from_callback(shape, sharding, lambda at, f=full: f[at])
        with mfload.publish(arrays, model="org/mesh", part=(RANK, COUNT)) as seed:
            assert seed.copied_bytes == 0
            print(seed.address, flush=True)
            sys.stdin.read()
        return
    shardings = [("rows", P(None, "b")), ("columns", P("a", "b")), ("grid", P(("b", "a")))]
    report = mfload.Report()
    found = mfload.load(sys.argv[6], "jax", mesh=mesh, shardings=shardings, report=report)
    for name, array in found.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value(name)[shard.index])
    assert {how for _, how, _ in report.route} == {"peer-memory"}
    print(sorted(found), flush=True)


main()
