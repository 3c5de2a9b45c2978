"""TensorFlow's meshes in one process of eight CPUs, against TensorFlow's own sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import tensorflow as tf
from conformance import mesh_backend
from hypothesis import given, settings, strategies as st
from tensorflow.experimental import dtensor

import mfload
from mfload import errors
from mfload.dlpack import data_address
from mfload.index import Box
from mfload.io import buffers
from mfload.mesh import tensorflow_backend
from mfload.mesh.base import MeshArguments, MeshBackend
from mfload.runtime import Deadline

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)
WHOLE = dtensor.UNSHARDED


def mesh_of(**sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    return dtensor.create_mesh(list(sizes.items()), devices=[f"CPU:{n}" for n in range(count)])


class TestTensorflow(mesh_backend.Conformance):
    def make(self) -> MeshBackend:
        return tensorflow_backend.make()

    def mesh(self, grid: tuple[int, int]) -> Any:
        return mesh_of(**dict(zip((mesh_backend.ROWS, mesh_backend.COLUMNS), grid, strict=True)))

    def spec(self, cuts: tuple[str | None, ...]) -> Any:
        return [axis or WHOLE for axis in cuts + (None,) * (2 - len(cuts))]

    def shards(self, array: Any) -> list[tuple[Box, Any]]:
        layout, found = dtensor.fetch_layout(array), []
        counts = [layout.num_shards(dim) for dim in range(layout.rank)]
        for at, part in zip(layout.offset_to_shard(), dtensor.unpack(array), strict=True):
            sizes = [n // count for n, count in zip(array.shape, counts, strict=True)]
            box = tuple((n * k, (n + 1) * k) for n, k in zip(at, sizes, strict=True))
            found.append((box, part.numpy()))
        return found


STORED = {
    "bf16": samples.numbers((24, 8), ml_dtypes.bfloat16, 2),
    "complex": samples.numbers((8, 4), np.complex64, 4),
    "bool": np.arange(64).reshape(8, 8) % 3 == 0,
    "u64": samples.numbers((16, 4), np.uint64, 5),
    "fp8": samples.numbers((8, 16), ml_dtypes.float8_e4m3fn, 6),
    "four": samples.numbers((4, 8, 2), np.float64, 7),
    "half": samples.numbers((8, 4, 4), np.float16, 8),
}


@pytest.mark.parametrize("allocator", ["mfload", "framework"])
def test_arrays_are_those_of_tensorflow(tmp_path: Path, allocator: Any) -> None:
    more = {
        "none": np.zeros((0, 4), np.float16),
        "number": np.array(7, np.int32),
        "odd": samples.numbers((5, 3), np.float32, 1),
    }
    path = samples.save(tmp_path / "m.safetensors", STORED | more)
    options = mfload.Options(allocator=allocator)
    for sizes, cuts in (
        ({"x": 8}, ["x", WHOLE]),
        ({"x": 2, "y": 4}, ["x", "y"]),
        ({"x": 4, "y": 2}, ["y", WHOLE]),
        ({"x": 2, "y": 2, "z": 2}, [WHOLE, "y"]),
        ({"x": 1}, ["x", WHOLE]),
    ):
        mesh = mesh_of(**sizes)
        rules: Any = {
            name: dtensor.Layout(cuts + [WHOLE] * (array.ndim - 2), mesh)
            for name, array in STORED.items()
            if all(n % sizes.get(a, 1) == 0 for n, a in zip(array.shape, cuts, strict=False))
        } | {"none": cuts}
        made = mfload.load(path, "tensorflow", mesh=mesh, shardings=rules, options=options)
        assert set(made) == set(STORED | more)
        for name, array in made.items():
            whole = (STORED | more)[name]
            layout = dtensor.Layout.replicated(mesh, whole.ndim)
            if name in rules:
                layout = dtensor.Layout(cuts + [WHOLE] * (whole.ndim - 2), mesh)
            like = tf.constant(whole)
            assert dtensor.is_dtensor(array)
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
            assert dtensor.fetch_layout(array) == layout
            parts = dtensor.unpack(array)
            assert [part.device for part in parts] == list(mesh.local_devices())
            theirs = sliced(whole, layout)
            if name not in ("fp8", "u64", "complex", "none"):  # It can't copy all of them.
                theirs = [x.numpy() for x in dtensor.unpack(dtensor.relayout(like, layout))]
            for mine, its in zip(parts, theirs, strict=True):
                assert mine.shape == its.shape, name
                assert bytes_of(mine) == its.tobytes(), name
    del made, array, parts, mine
    assert buffers.live_bytes() == 0


def sliced(whole: Any, layout: Any) -> list[Any]:
    """The parts of the devices of a layout."""
    made: list[Any] = []
    for at in layout.offset_to_shard():
        sizes = [n // layout.num_shards(dim) for dim, n in enumerate(whole.shape)]
        pairs = zip(at, sizes, strict=True)
        made.append(np.ascontiguousarray(whole[tuple(slice(n * k, (n + 1) * k) for n, k in pairs)]))
    return made


def bytes_of(tensor: Any) -> bytes:
    return np.asarray(tensor.numpy()).tobytes()


@st.composite
def placed(draw: st.DrawFn) -> tuple[dict[str, int], list[str], tuple[int, ...]]:
    """The sizes of a mesh, the axes of a layout, and a shape."""
    counts = draw(st.sampled_from([(1,), (2,), (3,), (8,), (2, 4), (4, 2), (3, 2), (2, 2, 2)]))
    sizes = dict(zip("xyz", counts, strict=False))
    rank = draw(st.integers(0, 4))
    axes = draw(st.permutations([*sizes, *([WHOLE] * rank)]))[:rank]
    shape = tuple(sizes.get(a, 1) * draw(st.integers(0, 3)) for a in axes)
    return sizes, axes, shape


@settings(deadline=None, max_examples=40)
@given(placed())
def test_random_layouts(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    sizes, axes, shape = case
    whole = samples.numbers(shape, np.int16, 1) if shape else np.array(3, np.int16)
    path = samples.save(tmp_path_factory.mktemp("random") / "m.safetensors", {"w": whole})
    layout = dtensor.Layout(axes, mesh_of(**sizes))
    made = mfload.load(path, "tensorflow", mesh=layout.mesh, shardings=layout)["w"]
    assert dtensor.fetch_layout(made) == layout
    for part, like in zip(dtensor.unpack(made), sliced(whole, layout), strict=True):
        np.testing.assert_array_equal(part.numpy(), like)


def test_cpus_share_what_they_hold_alike(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": samples.numbers((64, 64), np.float32, 1)})
    before = buffers.live_bytes()
    made = mfload.load(path, "tensorflow", mesh=mesh_of(x=2, y=4), shardings=["x", WHOLE])
    parts = dtensor.unpack(made["w"])
    found = {data_address(tf.experimental.dlpack.to_dlpack(part)) for part in parts}
    assert (len(parts), len(found)) == (8, 2)
    assert buffers.live_bytes() - before < 2 * 64 * 64 * 4


def test_inside_a_default_mesh(tmp_path: Path) -> None:
    stored = {"w": samples.numbers((8, 4), np.float32, 1)}
    path, mesh = samples.save(tmp_path / "m.safetensors", stored), mesh_of(x=8)
    with dtensor.default_mesh(mesh), tf.device("CPU:3"):
        made = mfload.load(path, "tensorflow", mesh=mesh, shardings=["x", WHOLE])["w"]
    assert [x.numpy().shape for x in dtensor.unpack(made)] == [(1, 4)] * 8


def test_what_becomes_bytes_is_cut_between_blocks(tmp_path: Path) -> None:
    held = np.arange(4 * 16 // 2, dtype=np.uint8)
    path = samples.save_raw(tmp_path / "m.safetensors", [("f4", "F4", (4, 16), held.tobytes())])
    mesh = mesh_of(x=2, y=4)
    made = mfload.load(path, "tensorflow", mesh=mesh, shardings=[WHOLE, "y"])["f4"]
    layout = dtensor.Layout([WHOLE, "y"], mesh)
    assert (made.shape, made.dtype) == ((4, 8), tf.uint8)
    for part, like in zip(dtensor.unpack(made), sliced(held.reshape(4, 8), layout), strict=True):
        np.testing.assert_array_equal(part.numpy(), like)
    path = samples.save_raw(tmp_path / "n.safetensors", [("f4", "F4", (4, 12), bytes(24))])
    with pytest.raises(errors.ShardingError, match="elements of F4 share a byte") as caught:
        mfload.load(path, "tensorflow", mesh=mesh, shardings=[WHOLE, "y"])
    assert caught.value.tensor == "f4"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (["x", WHOLE], "dim 0 of 5 does not divide into 4 shards"),
        ([WHOLE, "no"], "'no' is not a dim of the mesh"),
        ([dtensor.MATCH, WHOLE], "'match' is not a dim of the mesh"),
        (["y", "y"], "'y' cuts two dims"),
        (["x"], "1 spec for a tensor of 2 dims"),
        ([], "0 specs for a tensor of 2 dims"),
    ],
)
def test_misfits_name_the_tensor(tmp_path: Path, spec: Any, words: str) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros((5, 4), np.float32)})
    with pytest.raises(errors.ShardingError, match=words) as caught:
        mfload.load(path, "tensorflow", mesh=mesh_of(x=4, y=2), shardings=[("w", spec)])
    assert caught.value.tensor == "w"
    assert "shape [5, 4] on a mesh of x=4, y=2" in str(caught.value)


def test_a_layout_of_another_mesh_is_refused(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros((8, 4), np.float32)})
    layout = dtensor.Layout(["x", WHOLE], mesh_of(x=2))
    with pytest.raises(errors.ShardingError, match="another mesh"):
        mfload.load(path, "tensorflow", mesh=mesh_of(x=4), shardings=layout)


def test_what_is_not_a_layout_or_mesh_is_refused(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros((8, 4), np.float32)})
    mesh: Any = mesh_of(x=4)
    for shardings in ([("w", 0)], [("w", "x")], [("w", ["x", None])], "x", 7):
        with pytest.raises(errors.UsageError, match=r"not a layout|invalid shardings"):
            mfload.load(path, "tensorflow", mesh=mesh, shardings=shardings)
    for wrong in (None, 7, "mesh"):
        with pytest.raises(errors.UsageError, match="need a mesh"):
            mfload.load(path, "tensorflow", mesh=wrong, shardings=["x", WHOLE])
    with pytest.raises(errors.UsageError, match="the mesh is one of tensorflow"):
        mfload.load(path, "jax", mesh=mesh, shardings=["x", WHOLE])


def test_a_plan_of_a_mesh(tmp_path: Path) -> None:
    stored = {"w": np.zeros((8, 1024), np.float32), "v": np.zeros((8, 1024), np.float32)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    plan = mfload.plan(path, "tensorflow", mesh=mesh_of(x=4), shardings=[("w", ["x", WHOLE])])
    assert (plan.processes, plan.read_bytes) == (1, 2 * 8 * 1024 * 4)


def clients(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    """As if this process were one of several clients."""
    monkeypatch.setattr(tensorflow_backend.TensorflowBackend, "group", lambda *_: (rank, count))


def distributed(ids: list[int], size: int) -> Any:
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(len(ids))]
    return dtensor.Mesh(["x"], np.arange(size), ids, devices)


def test_whose_devices_a_mesh_has(monkeypatch: pytest.MonkeyPatch) -> None:
    clients(monkeypatch, 1, 2)
    backend = tensorflow_backend.make()
    assert backend.processes(MeshArguments(distributed([2, 3], 4))) == (0, 1)
    assert tensorflow_backend._owners(distributed([2, 3], 4)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert backend.processes(MeshArguments(distributed([0, 1], 2))) == (1,)  # This client's alone.
    for ids, size in (([0, 1], 4), ([3, 2], 4), ([2], 3)):
        assert backend.processes(MeshArguments(distributed(ids, size))) == (0, 1)
        with pytest.raises(errors.UsageError, match="spread evenly"):
            backend.resolve([], MeshArguments(distributed(ids, size)))


def test_rows_go_to_their_clients_in_whatever_order_tensorflow_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorFlow puts client 10 before client 2."""
    ranks = (2, 9, 10, 11)
    order = sorted(ranks, key=str)
    clients(monkeypatch, 9, 12)
    sent: dict[int, Any] = {}

    def swap(_ranks: Any, _device: str, rows: Any) -> Any:
        if rows.shape[1] == 64:
            assert (rows.view(np.int32) == 9).all()
            return np.array([[rank] * 16 for rank in order], np.int32).view(np.uint8)
        sent.update(zip(order, rows, strict=True))
        return np.array([[rank] * 4096 for rank in order], np.uint8)

    monkeypatch.setattr(tensorflow_backend, "_swap", swap)
    tensorflow_backend._order.cache_clear()
    link = tensorflow_backend.TensorflowLink.__new__(tensorflow_backend.TensorflowLink)
    link._ranks, link._device, link._width = ranks, "CPU:0", 4096
    came = link.exchange(np.array([[rank + 100] * 4096 for rank in ranks], np.uint8))
    tensorflow_backend._order.cache_clear()
    assert came[:, 0].tolist() == list(ranks)
    assert {rank: int(row[0]) for rank, row in sent.items()} == {r: r + 100 for r in ranks}


def test_clients_that_have_not_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", "127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(errors.UsageError, match="has not joined"):
        tensorflow_backend.make().link((0, 1), 4096, Deadline(1))
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "7")
    with pytest.raises(errors.UsageError, match="clients are not set up"):
        tensorflow_backend.make()
