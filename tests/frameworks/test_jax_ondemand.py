"""JAX on weights that are read on demand: no copies, and computations pin what they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import samples
from conformance.ondemand import Ondemand

from mfload.ondemand import ExpertCache


class TestJax(Ondemand):
    framework = "jax"
    same_as_loaded = False  # F4 takes a byte an element in JAX; here it stays packed.

    def raw(self, array: Any) -> bytes:
        return np.asarray(array).tobytes()

    def address(self, array: Any) -> int:
        return array.unsafe_buffer_pointer()

    def view(self, array: Any) -> Any:
        return array.addressable_data(0)

    def test_a_computation_pins_what_it_uses(self, tmp_path: Path) -> None:
        """There is one slot: what comes next waits for what still computes."""
        path = samples.save(
            tmp_path / "a.safetensors", weights := {f"e.0.{n}.w": _square(n) for n in range(3)}
        )

        @jax.jit
        def slow(w: Any) -> Any:
            # The weights are read until the end.
            return jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ w), jnp.ones_like(w))

        slow(jnp.ones((256, 256))).block_until_ready()
        with ExpertCache(path, r"e\.(\d)\.(\d)\.(\w)", 256 * 1024 + 8192, "jax") as cache:
            made = []
            for expert in (0, 1, 2):
                with cache.use(0, [expert]) as experts:
                    made.append(slow(experts[expert]["w"]))
                del experts
            assert cache.report().evictions == 2
            assert cache.report().wait_seconds > 0.02
            for n, result in enumerate(made):
                assert np.array_equal(result, slow(jnp.asarray(weights[f"e.0.{n}.w"])))

    def expert(self, x: Any, arrays: Any) -> Any:
        return _expert(x, arrays)


@jax.jit
def _expert(x: Any, arrays: Any) -> Any:
    return Ondemand().expert(x, arrays)


def _square(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((256, 256), np.float32) / 16
