"""`convert` of what Orbax and Flax write, against their own readers and `restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mfload


def _state() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    make = lambda shape, dtype, *spec: jax.device_put(  # noqa: E731
        jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype),
        NamedSharding(mesh, PartitionSpec(*spec)),
    )
    return {
        "rows": make((64, 300), jnp.float32, "x"),
        "columns": make((33, 64), jnp.bfloat16, None, "x"),
        "layers": [{"w": make((8, 8), jnp.float16)}, {"w": make((5,), jnp.float8_e4m3fn)}],
        "step": jnp.asarray(7),
    }


def _assert_same(tree: Any, other: Any) -> None:
    flat, structure = jax.tree.flatten(tree)
    found, same = jax.tree.flatten(other)
    assert structure == same
    for one, two in zip(flat, found, strict=True):
        assert np.asarray(one).dtype == np.asarray(two).dtype
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_orbax(ocdbt: bool, zarr3: bool, tmp_path: Path) -> None:
    state = _state()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(state))
    mfload.convert(tmp_path / "orbax", tmp_path / "a.safetensors", max_shard_size="20KB")
    found = mfload.restore(tmp_path / "a.safetensors.index.json", framework="jax")
    _assert_same(found, jax.device_get(state))


def test_msgpack(tmp_path: Path) -> None:
    state = _state()
    path = tmp_path / "flax.msgpack"
    path.write_bytes(flax.serialization.to_bytes(jax.device_get(state)))
    mfload.convert(path, tmp_path / "a.safetensors")
    found = mfload.restore(tmp_path / "a.safetensors", framework="jax")
    _assert_same(found, mfload.restore(path, framework="jax"))
    _assert_same(
        flax.serialization.from_state_dict(jax.device_get(state), found), jax.device_get(state)
    )
