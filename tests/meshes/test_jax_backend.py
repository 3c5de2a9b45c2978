"""JAX's mesh backend does what every backend must."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from conformance import mesh_backend
from jax.sharding import Mesh, PartitionSpec

from mfload.index import Box
from mfload.mesh.base import MeshBackend
from mfload.mesh.jax_backend import JaxBackend


class TestJax(mesh_backend.Conformance):
    def make(self) -> MeshBackend:
        return JaxBackend()

    def mesh(self, grid: tuple[int, int]) -> Any:
        return Mesh(
            np.array(jax.devices()).reshape(grid), (mesh_backend.ROWS, mesh_backend.COLUMNS)
        )

    def spec(self, cuts: tuple[str | None, ...]) -> Any:
        return PartitionSpec(*cuts)

    def shards(self, array: Any) -> list[tuple[Box, Any]]:
        found: list[tuple[Box, Any]] = []
        for shard in array.addressable_shards:
            pairs = zip(shard.index, array.shape, strict=True)
            box = tuple(part.indices(length)[:2] for part, length in pairs)
            found.append((box, np.asarray(shard.data)))
        return found
