"""The rooms of meshes take a backend that is not JAX's, from `mfload.load` on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grid_backend
import numpy as np
import pytest
import safetensors.numpy
import stores
from conformance import mesh_backend
from grid_backend import GridBackend, GridMesh

import mfload
from mfload import frameworks
from mfload.index import Box
from mfload.mesh.base import MeshBackend


class TestGrid(mesh_backend.Conformance):
    def make(self) -> MeshBackend:
        return GridBackend()

    def mesh(self, grid: tuple[int, int]) -> Any:
        return GridMesh(((mesh_backend.ROWS, grid[0]), (mesh_backend.COLUMNS, grid[1])))

    def spec(self, cuts: tuple[str | None, ...]) -> Any:
        return cuts

    def shards(self, array: Any) -> list[tuple[Box, Any]]:
        return grid_backend.boxes(array)


def test_a_store_in_memory() -> None:
    mesh_backend.check_store(stores.MemoryStore(stores.Memory()))


def test_load_and_plan_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "ON_MESHES", ("numpy",))
    module: Any = SimpleNamespace(make=GridBackend)
    monkeypatch.setitem(sys.modules, "mfload.mesh.numpy_backend", module)
    stored = {"w": np.arange(192, dtype=np.float32).reshape(8, 24)}
    safetensors.numpy.save_file(stored, tmp_path / "m.safetensors")
    mesh = GridMesh((("a", 2), ("b", 4)))
    given: Any = {"mesh": mesh, "shardings": [("w", ("a", "b"))]}
    (array,) = mfload.load(tmp_path, framework="numpy", **given).values()
    for box, part in grid_backend.boxes(array):
        np.testing.assert_array_equal(part, stored["w"][tuple(slice(*pair) for pair in box)])
    assert mfload.plan(tmp_path, framework="numpy", **given).read_bytes == 192 * 4
    assert mfload.abstract(tmp_path, **given)["w"].shape == (8, 24)
