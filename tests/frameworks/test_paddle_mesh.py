"""Paddle's meshes in one process: the suite, boxes against slicing, and what is refused."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from conformance import mesh_backend
from hypothesis import given, settings, strategies as st

import mfload
from mfload import dtypes, errors
from mfload.frameworks import private_api
from mfload.index import Box
from mfload.mesh import specs
from mfload.mesh.base import MeshBackend

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle.distributed as dist
    from paddle.distributed import Partial, ProcessMesh, Replicate, Shard

    from mfload.mesh import paddle_backend


class TestPaddle(mesh_backend.Conformance):
    grid = (1, 1)

    def make(self) -> MeshBackend:
        return paddle_backend.PaddleBackend()

    def mesh(self, grid: tuple[int, int]) -> Any:
        return ProcessMesh(np.arange(np.prod(grid)).reshape(grid))

    def spec(self, cuts: tuple[str | None, ...]) -> Any:
        axes = (mesh_backend.ROWS, mesh_backend.COLUMNS)
        return [Shard(cuts.index(axis)) if axis in cuts else Replicate() for axis in axes]

    def shards(self, array: Any) -> list[tuple[Box, Any]]:
        assert array.is_dist()
        box = tuple((0, length) for length in array.shape)
        return [(box, array._local_value().numpy())]


def shares(shape: tuple[int, ...], mesh: Any, spec: Any, dtype: str = "F32") -> list[Box]:
    row = specs.Row("w", shape, (), None, dtypes.TABLE[dtype])
    sharding = paddle_backend._sharding(mesh, row, spec)
    return [share.box for share in paddle_backend.PaddleBackend().shares(sharding, shape)]


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int | None]]:
    """A shape, the sizes of a mesh, and the dim that each of its dims cuts."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.none() | st.integers(-len(shape), len(shape) - 1)
    return shape, sizes, draw(st.lists(dims, min_size=0, max_size=len(sizes)))


@settings(deadline=None, max_examples=200)
@given(placed())
def test_boxes_are_chunks_or_refused_for_all(given: Any) -> None:
    shape, sizes, dims = given
    whole = np.arange(np.prod(shape)).reshape(shape)
    beyond, parts = False, list[Any]()
    for at in np.ndindex(sizes):
        part = whole
        for dim, size, n in zip(dims, sizes, at, strict=False):
            if dim is not None:
                step = -(-part.shape[dim] // size)
                beyond = beyond or n * step > part.shape[dim]
                rows = [slice(None)] * part.ndim
                rows[dim] = slice(n * step, (n + 1) * step)
                part = part[tuple(rows)]
        parts.append(part)
    mesh = ProcessMesh(np.arange(np.prod(sizes)).reshape(sizes))
    spec = [Replicate() if dim is None else Shard(dim) for dim in dims]
    if beyond:
        with pytest.raises(errors.ShardingError, match="too few elements"):
            shares(shape, mesh, spec)
        return
    for box, part in zip(shares(shape, mesh, spec), parts, strict=True):
        assert np.array_equal(whole[tuple(slice(*pair) for pair in box)], part)


def test_five_rows_over_four_ranks_are_refused_as_paddle_does() -> None:
    with pytest.raises(errors.ShardingError, match="dim 0 has too few elements") as caught:
        shares((5, 3), ProcessMesh([0, 1, 2, 3]), [Shard(0)])
    assert caught.value.tensor == "w"
    assert [box[0] for box in shares((6, 3), ProcessMesh([0, 1, 2, 3]), [Shard(0)])] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 6),
    ]


def test_orders_of_one_dim() -> None:
    mesh = ProcessMesh([[0, 1], [2, 3]])
    turned = [Shard(0, shard_order=1), Shard(0, shard_order=0)]
    assert [box[0] for box in shares((5,), mesh, turned)] == [(0, 2), (3, 4), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([Partial()], "does not say where values lie"),
        ([Shard(2)], "no dim 2"),
        ([Shard(-3)], "no dim -3"),
        ([Shard(0), Shard(1), Replicate()], "3 placements for 2 dims"),
        ([Shard(0, split_factor=2)], "rows that lie apart"),
        ([Shard(0, shard_order=1), Shard(0, shard_order=1)], "has gaps"),
    ],
)
def test_placements_that_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(errors.ShardingError, match=message) as caught:
        shares((8, 8), ProcessMesh([[0, 1], [2, 3]]), spec)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("spec", [7, [0], "rows", [Shard(0), 1], {"a": 1}])
def test_what_is_no_placement_is_refused(spec: Any) -> None:
    with pytest.raises(errors.UsageError, match="not placements"):
        shares((8, 8), ProcessMesh([[0, 1], [2, 3]]), spec)


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [("U16", (4, 6), True), ("U16", (4, 7), False), ("F4", (4, 12), True), ("F4", (4, 6), False)],
)
def test_what_arrives_as_bytes_is_cut_between_elements(
    dtype: str, shape: tuple[int, ...], fits: bool
) -> None:
    mesh = ProcessMesh([0, 1])
    shares(shape, mesh, [Shard(0)], dtype)
    if fits:
        shares(shape, mesh, [Shard(1)], dtype)
        return
    with pytest.raises(errors.ShardingError, match="arrives as bytes"):
        shares(shape, ProcessMesh([0, 1, 2, 3]), [Shard(1)], dtype)


def test_what_arrives_is_what_paddle_makes_and_shares_mfloads_memory(tmp_path: Path) -> None:
    stored = {
        "bf16": samples.numbers((24, 8), ml_dtypes.bfloat16, 2),
        "fp8": samples.numbers((4, 6), ml_dtypes.float8_e4m3fn, 3),
        "u16": samples.numbers((4, 6), np.uint16, 3),
        "complex": samples.numbers((6, 5, 4), np.complex64, 4),
        "none": np.zeros((0, 4), np.float16),
        "number": np.array(7, np.int32),
    }
    path = samples.save(tmp_path / "m.safetensors", stored)
    mesh = ProcessMesh([[0]])
    rules = [("bf16|complex", [Shard(-1), Shard(0)]), ("none", Shard(1)), ("fp8|u16", Shard(1))]
    for allocator in ("mfload", "framework"):
        options: Any = mfload.Options(allocator=allocator)
        made = mfload.load(path, "paddle", mesh=mesh, shardings=rules, options=options)
        plain = mfload.load(path, "paddle")
        for name, array in made.items():
            like = dist.shard_tensor(plain[name], mesh, array.placements)
            assert array.is_dist()
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
            assert array.stop_gradient == like.stop_gradient
            mine, theirs = array._local_value(), like._local_value()
            assert mine.shape == theirs.shape
            assert bytes_of(mine) == bytes_of(theirs)


def bytes_of(tensor: Any) -> bytes:
    tensor = tensor.contiguous()
    length = tensor.size * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def test_meshes_and_groups_that_do_not_fit(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros((8, 8), np.float32)})
    with pytest.raises(errors.UsageError, match="are not joined"):
        mfload.load(path, "paddle", mesh=ProcessMesh([0, 1]), shardings=[("w", [Shard(0)])])
    with pytest.raises(errors.UsageError, match="takes no part"):
        mfload.load(path, "paddle", mesh=ProcessMesh([1, 2]), shardings=[("w", [Shard(0)])])
    for mesh, spec in ((None, [("w", [Shard(0)])]), ("mesh", [("w", [Shard(0)])])):
        with pytest.raises(errors.UsageError, match="need a mesh"):
            mfload.load(path, "paddle", mesh=mesh, shardings=spec)
    with pytest.raises(errors.UsageError, match="mesh is one of paddle"):
        mfload.load(path, "jax", mesh=ProcessMesh([0]))


def test_a_version_without_the_constructor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros((8, 8), np.float32)})
    monkeypatch.setattr(private_api, "paddle_sharder", lambda: None)
    with pytest.raises(errors.UsageError, match="no distributed tensors of parts"):
        mfload.load(path, "paddle", mesh=ProcessMesh([0]))


@pytest.mark.parametrize("count", [2, 4, 6, 8, 16])
def test_in_each_step_all_meet_another(count: int) -> None:
    met = {rank: set[int]() for rank in range(count)}
    for step in range(count - 1):
        for rank in met:
            peer = paddle_backend.partner(rank, step, count)
            assert paddle_backend.partner(peer, step, count) == rank != peer
            met[rank].add(peer)
    assert all(len(peers) == count - 1 for peers in met.values())
