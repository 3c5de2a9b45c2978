"""Small tensors onto a mesh of 2 x 4 CPU devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row

ENV = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """`load` of many tensors of 8 KiB, cut along both dims."""
    import jax
    import safetensors.numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mfload

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    spec = PartitionSpec("data", "model")
    sharding = NamedSharding(mesh, spec)

    for count in (500, 5_000):  # With --scale 10 up to 50,000.
        count = max(8, int(count * scale))
        path = folder / f"{count}.safetensors"
        data = np.frombuffer(np.random.default_rng(0).bytes(count * 8192), np.int32)
        tensors = {f"t.{n}": each for n, each in enumerate(data.reshape(count, 32, 64))}
        safetensors.numpy.save_file(tensors, path)

        def ours(path: Path = path) -> Any:
            arrays = mfload.load(path, framework="jax", mesh=mesh, shardings=spec)
            return jax.block_until_ready(arrays)

        def by_hand(path: Path = path) -> Any:
            arrays = {
                name: jax.make_array_from_callback(each.shape, sharding, each.__getitem__)
                for name, each in safetensors.numpy.load_file(path).items()
            }
            return jax.block_until_ready(arrays)

        made = ours()
        assert made.keys() == tensors.keys()
        for name, array in made.items():
            assert array.sharding == sharding
            assert np.array_equal(np.asarray(array), tensors[name])
        del made
        yield Row(f"{count} tensors of 8 KiB onto 2 x 4", ours, "by hand", by_hand, 2)
