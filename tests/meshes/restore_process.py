"""What each process of a restore does in a test (see `launching`).

    python restore_process.py RANK COUNT PORT DIRECTORY CASE…

A case is `CHECKPOINT:rows`, `CHECKPOINT:own`, `CHECKPOINT:free` or the name of a failure. Writes a
line of JSON for each to `DIRECTORY/said.RANK`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax_savers
import world
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from restore_cases import Net, linen_state
from world import World

import mfload

RULES = [("kernel", P(("a", "b"), None)), ("bias", P("b"))]


def check(found: Any, wanted: Any) -> None:
    """Compares the shards of this process, bit by bit."""
    one, other = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        if not isinstance(left, jax.Array):
            assert left == right
            continue
        if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
            left = jax.random.key_data(left)
        assert left.dtype == np.asarray(right).dtype
        for shard in left.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(right)[shard.index].tobytes()


def run(rank: int, directory: Path, mesh: Mesh, case: str) -> dict[str, Any]:
    wanted = serialization.msgpack_restore((directory / "wanted.msgpack").read_bytes())
    report = mfload.Report()
    target = jax.eval_shape(linen_state)
    name, _, how = case.partition(":")
    path = directory / name
    match how:
        case "save":
            state = jax.tree.map(np.asarray, linen_state(steps=2).replace(step=np.int32(2)))
            where = NamedSharding(mesh, P("b", "a")), NamedSharding(mesh, P())
            state = jax.tree.map(
                lambda x: jax.make_array_from_callback(x.shape, where[x.ndim < 2], x.__getitem__),
                state,
            )
            orbax_savers.save("standard", path, state)
            report.processes = jax.process_count()
        case "rows":
            found = mfload.restore(path, target, mesh=mesh, shardings=RULES, report=report)
            kernel = found.opt_state[1][0].mu["Dense_0"]["kernel"]
            assert kernel.sharding == NamedSharding(mesh, RULES[0][1])
            check(serialization.to_state_dict(found), wanted)
        case "own":
            sharding = NamedSharding(mesh, P())
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), target
            )
            found = mfload.restore(path, target.replace(step=0), report=report)
            assert type(found.step) is int
            check(serialization.to_state_dict(found), wanted)
        case "free":
            found = mfload.restore(
                path, framework="jax", mesh=mesh, shardings=RULES, names=r"^params\."
            )
            assert found["params"]["Dense_0"]["kernel"].sharding.spec == RULES[0][1]
            check(found, {"params": wanted["params"]})
            report.processes = jax.process_count()
        case "keys":
            found = mfload.restore(path, nnx.eval_shape(lambda: Net(nnx.Rngs(9))), mesh=mesh)
            model = serialization.msgpack_restore((directory / "net.msgpack").read_bytes())
            check(nnx.to_pure_dict(nnx.state(found)), model)
            report.processes = jax.process_count()
        case "wrong":
            if rank == 1:
                target = target.replace(params={"w": jax.ShapeDtypeStruct((3,), np.float32)})
            mfload.restore(path, target, mesh=mesh, shardings=RULES)
        case "gone" | "gone-free":
            path = directory / "nothing.msgpack" if rank == 1 else path
            given = {"target": target} if how == "gone" else {"framework": "jax"}
            mfload.restore(path, **given, mesh=mesh, shardings=RULES)
        case _:
            raise AssertionError(case)
    return {"processes": report.processes}


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
