"""Checkpoints as the real Orbax writes them. For tests that import JAX, or in a process apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = [
    f"{api}-{store}-zarr{zarr}-{packed}"
    for api in ("v0", "v1")
    for store in ("ocdbt", "files")
    for zarr in (2, 3)
    for packed in ("raw", "zstd")
]


def tree(devices: int = 1) -> dict[str, Any]:
    """A tree with all that Orbax takes; arrays lie on so many devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    rows = max(1, devices // 2)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(rows, devices // rows), ("a", "b"))
    rng = np.random.default_rng(devices)

    def on(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    normal = rng.standard_normal
    return {
        "params": {
            "w": on(normal((64, 48)).astype(np.float32), "a", "b"),
            "bf16": on(jnp.asarray(normal((32, 16)), jnp.bfloat16), ("a", "b")),
            "fp8": jnp.asarray(normal(40), jnp.float8_e4m3fn),
            "layers": [{"k": jnp.arange(12)}, {"k": jnp.arange(12) + 5}],
            "mlp/~/w": on(normal((8, 24)).astype(np.float16), None, "b"),
            "zeros": jnp.zeros((100, 30)),
        },
        "opt": (jnp.ones(3, jnp.int8), {"nu": jnp.asarray(normal(7) + 1j, jnp.complex64)}),
        "flags": jnp.array([True, False, True]),
        "step": 7,
        "rate": 0.5,
        "scalar": jnp.float32(3.5),
        "double": np.arange(5.0),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(4, dtype=">f4"),
        "numbered": {3: jnp.ones(2, jnp.uint32)},
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }


def save(path: Path, kind: str, value: Any) -> None:
    """Writes a tree as one of `KINDS`."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    api, store, zarr, packed = kind.split("-")
    how = {
        "use_ocdbt": store == "ocdbt",
        "use_zarr3": zarr == "zarr3",
        "use_compression": packed == "zstd",
    }
    if api == "v0":
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
            checkpointer.save(path, value)
        return
    saving = v1.options.ArrayOptions.Saving(**how)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save_pytree(path, value, custom_metadata={"run": "seven"})


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The arrays and numbers of a tree, by their keys joined by dots."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from leaves(each, (*path, str(number)))
    elif value is not None and not isinstance(value, str):
        yield ".".join(path), value


if __name__ == "__main__":  # python orbax_writer.py DEVICES PATH KIND …
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
    for each in sys.argv[3:]:
        save(Path(sys.argv[2], each), each, tree(int(sys.argv[1])))
