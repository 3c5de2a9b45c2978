"""Neurons read on demand as arrays of JAX: aliased, of one shape for jit, pinned by what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.ondemand import NeuronCache, bundle

NEURONS, WIDTH = 256, 64


@pytest.fixture
def dense(tmp_path: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = {
        "layers.0.up": random.standard_normal((NEURONS, WIDTH), np.float32),
        "layers.0.down": random.standard_normal((WIDTH, NEURONS), np.float32),
        "embed": samples.numbers((3, WIDTH)),
    }
    mfload.save(arrays, tmp_path / "dense.safetensors")
    rules: dict[str, Any] = {name: rf"layers\.(\d+)\.{name}" for name in ("up", "down")}
    bundle(tmp_path / "dense.safetensors", tmp_path / "a.safetensors", **rules)
    return arrays


def test_the_product_is_compiled_once(tmp_path: Path, dense: dict[str, Any]) -> None:
    """With a mask over matrices of one shape, over what is left of other neurons in them."""
    random, traced = np.random.default_rng(1), list[int]()

    @jax.jit
    def product(x: Any, up: Any, down: Any, used: Any) -> Any:
        traced.append(1)
        hidden = jnp.maximum(x @ up.T - 6, 0)
        return jnp.where(jnp.arange(len(up)) < used, hidden, 0) @ down

    up, down = dense["layers.0.up"], np.ascontiguousarray(dense["layers.0.down"].T)
    counts = set[int]()
    with NeuronCache(tmp_path / "a.safetensors", 110 << 10, 2, "jax") as cache:
        assert isinstance(cache.resident["embed"], jax.Array)
        assert cache.capacity[0] < NEURONS
        for _ in range(12):
            x = random.standard_normal(WIDTH, np.float32)
            with cache.use(0, np.flatnonzero(up @ x > 6)) as part:
                counts.add(part.used)
                whole = part.whole
                assert whole.up.shape == (cache.capacity[0], WIDTH)
                found = product(x, whole.up, whole.down, part.used)
                assert samples.same(np.asarray(part.up), up[part.rows])
                assert samples.same(np.asarray(part.down), down[part.rows])
                del whole
            wanted = np.maximum(up @ x - 6, 0) @ down
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
        assert cache.report().evictions > 0
    assert len(counts) > 3
    assert len(traced) == 1


def test_slots_are_aliased_and_pinned(tmp_path: Path, dense: dict[str, Any]) -> None:
    with NeuronCache(tmp_path / "a.safetensors", 110 << 10, 1, "jax", wait=0.05) as cache:
        room = cache.capacity[0]
        with cache.use(0, range(room)) as part:
            one, other = part.whole.up, part.up
            assert one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
            del one
        del part
        with pytest.raises(errors.MemoryLimitError, match="pinned"):
            cache.use(0, range(room, room + 9))
        assert samples.same(np.asarray(other), dense["layers.0.up"][:room])
        del other
        with cache.use(0, range(room, room + 9)) as part:
            assert sorted(part.rows.tolist()) == [*range(room, room + 9)]


def test_a_running_computation_keeps_the_rows(tmp_path: Path, dense: dict[str, Any]) -> None:
    """What is dispatched reads the rows that it was given, though the block is long over."""

    @jax.jit
    def slow(up: Any) -> Any:
        return jax.lax.fori_loop(0, 300, lambda _, x: x + jnp.tanh(up @ (up.T @ x)) * 0, up)

    with NeuronCache(tmp_path / "a.safetensors", 110 << 10, 1, "jax") as cache:
        room = cache.capacity[0]
        running: list[Any] = []
        for start in (0, room, 2 * room - 40):
            asked = range(start, min(start + room, NEURONS))
            with cache.use(0, asked) as part:
                running.append((part.rows, slow(part.up)))
            del part
        for rows, found in running:
            assert samples.same(np.asarray(found), dense["layers.0.up"][rows])
