"""PyTorch's device meshes in one process: boxes against PyTorch's own, and what is refused.

The process groups are fake ones of many ranks, which never exchange anything.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import samples
import torch
import torch.distributed as dist
from conformance import mesh_backend
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfload
from mfload import errors
from mfload.mesh import load as mesh_load, torch_backend
from mfload.runtime import Deadline

WORLD = 24


def joined(rank: int) -> None:
    """A fake process group, of which this process is one rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())


@pytest.fixture(autouse=True)
def group() -> Generator[None]:
    joined(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(int(np.prod(sizes))).reshape(sizes)
    return DeviceMesh("cpu", ranks, _init_backend=False)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """A shape, the sizes of a mesh, and placements."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    some = st.one_of(
        st.builds(Shard, dims),
        st.just(Replicate()),
        st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 4)),
    )
    placements = draw(st.lists(some, min_size=len(sizes), max_size=len(sizes)))
    return shape, sizes, placements


@settings(deadline=None, max_examples=100)
@given(placed())
def test_boxes_are_those_of_pytorch(given: Any) -> None:
    shape, sizes, placements = given
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    for number in range(int(np.prod(sizes))):
        at = tuple(int(n) for n in np.unravel_index(number, sizes))
        part = whole
        for size, n, each in zip(sizes, at, placements, strict=True):
            if not isinstance(each, Replicate):
                pieces, _ = each._split_tensor(part, size, with_padding=False)
                part = pieces[n]
        box = torch_backend._box(shape, sizes, at, placements)
        if box is not None:
            assert torch.equal(whole[tuple(slice(*pair) for pair in box)], part)
        elif part.numel():
            assert any(isinstance(each, _StridedShard) for each in placements)
            starts = {int(x) for x in part.flatten()}
            hull = whole[
                tuple(slice(int(a.min()), int(a.max()) + 1) for a in _indices(part, shape))
            ]
            assert starts != {int(x) for x in hull.flatten()}


def _indices(part: Any, shape: tuple[int, ...]) -> Any:
    return np.unravel_index(part.flatten().numpy(), shape)


@pytest.mark.parametrize("rank", [0, 1, 5, 11, 23])
def test_arrays_are_those_of_pytorch(tmp_path: Path, rank: int) -> None:
    joined(rank)
    stored = {
        "five": samples.numbers((5, 3), np.float32, 1),
        "bf16": samples.numbers((24, 8), ml_dtypes.bfloat16, 2),
        "one": samples.numbers((1, 7), np.int64, 3),
        "none": np.zeros((0, 4), np.float16),
        "number": np.array(7, np.int32),
        "complex": samples.numbers((6, 5, 4), np.complex64, 4),
    }
    path = samples.save(tmp_path / "m.safetensors", stored)
    held = safetensors.torch.load_file(path)
    for sizes, placements in (
        ((WORLD,), [Shard(0)]),
        ((WORLD,), [Shard(-1)]),
        ((4, 6), [Shard(0), Shard(1)]),
        ((4, 6), [Shard(0), Shard(0)]),
        ((4, 6), [Replicate(), Shard(1)]),
        ((2, 3, 4), [Shard(1), Replicate(), Shard(0)]),
        ((4, 6), [_StridedShard(0, split_factor=6), Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", sizes)
        rules: Any = {name: placements for name, array in stored.items() if array.ndim > 1}
        made = mfload.load(path, "torch", mesh=mesh, shardings=rules, options=OWN)
        for name, array in made.items():
            whole = held[name]
            expected = [Replicate()] * mesh.ndim if name not in rules else placements
            expected = [
                Shard(p.dim + whole.ndim) if isinstance(p, Shard) and p.dim < 0 else p
                for p in expected
            ]
            assert isinstance(array, DTensor)
            assert (array.shape, array.dtype) == (whole.shape, whole.dtype)
            assert array.stride() == whole.stride()
            assert list(array.placements) == expected
            part = whole
            at: Any = mesh.get_coordinate()
            for size, n, each in zip(sizes, at, expected, strict=True):
                if not isinstance(each, Replicate):
                    part = each._split_tensor(part, size, with_padding=False)[0][n]
            local = array.to_local()
            assert local.shape == part.shape
            assert torch.equal(bits(local), bits(part))


def bits(tensor: Any) -> Any:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


OWN = mfload.Options(exchange="never")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torch_backend.TorchBackend
    # Fake groups agree on nothing.
    monkeypatch.setattr(backend, "processes", lambda self, asked: (self.rank,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    arrays = {"w": np.zeros((4, 6), np.float32), "s": np.array(1, np.float32)}
    return samples.save(tmp_path / "m.safetensors", arrays)


@pytest.mark.parametrize(
    ("shardings", "error", "words"),
    [
        ([("w", Shard(2))], errors.ShardingError, "has no dim 2"),
        ([("w", Shard(-3))], errors.ShardingError, "has no dim -3"),
        ([("s", Shard(0))], errors.ShardingError, "has no dim 0"),
        ([("w", Partial())], errors.ShardingError, "does not say where values lie"),
        ([("w", [Shard(0), Shard(1), Shard(0)])], errors.ShardingError, "3 placements for 2 dims"),
        ([("w", [_StridedShard(0, split_factor=2)])], errors.ShardingError, "rows that lie apart"),
        ([("w", 0)], errors.UsageError, "not placements"),
        ([("w", "rows")], errors.UsageError, "not placements"),
        (3, errors.UsageError, "invalid shardings"),
    ],
)
def test_what_does_not_fit_names_the_tensor(
    path: Path, shardings: Any, error: Any, words: str
) -> None:
    mesh = init_device_mesh("cpu", (4, 6))
    for call in (mfload.load, mfload.plan):
        with pytest.raises(error, match=words) as caught:
            call(path, "torch", mesh=mesh, shardings=shardings)
        if error is errors.ShardingError:
            assert caught.value.tensor == shardings[0][0]


def test_packed_elements_stay_together(tmp_path: Path) -> None:
    row = ("w", "F4", (3, 8), bytes(range(12)))
    path = samples.save_raw(tmp_path / "m.safetensors", [row])
    mesh = mesh_of((2,))
    (array,) = mfload.load(path, "torch", mesh=mesh, shardings=Shard(1), options=OWN).values()
    assert array.shape == (3, 4)
    assert array.to_local().view(torch.uint8).tolist() == [[0, 1], [4, 5], [8, 9]]
    with pytest.raises(errors.ShardingError, match="share a byte"):
        mfload.load(path, "torch", mesh=mesh_of((3,)), shardings=Shard(1), options=OWN)


def test_like_distribute_tensor(tmp_path: Path) -> None:
    whole = torch.arange(30.0).reshape(5, 6)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole.numpy()})
    mesh = init_device_mesh("cpu", (4,))
    array = mfload.load(path, "torch", mesh=mesh, shardings=[Shard(0)], options=OWN)["w"]
    like = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    assert array._spec == like._spec
    assert torch.equal(array.to_local(), like.to_local())


def test_nothing_holds_a_process_group_that_was_destroyed(path: Path) -> None:
    """Its port would stay taken."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    backend = torch_backend.TorchBackend()
    assert backend.store() is not None
    link = backend.link([0], 4096, Deadline(None))
    for value in (7, 200):
        rows = link.buffer()
        rows[:] = value
        link.start(rows)
        came, _ = link.finish(lambda: None)
        assert (np.asarray(came) == value).all()
    mesh_backend.check_store(backend.store())
    held = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert held() is None
    joined(0)
    assert backend.store() is None  # That of the group that is there now, which has none.


def test_a_mesh_of_a_process_group_that_was_destroyed(path: Path) -> None:
    mesh = mesh_of((2,))
    dist.destroy_process_group()
    backend = torch_backend.TorchBackend()
    whole = mfload.load(path, "torch", mesh=mesh)["w"]  # Alone, as all are here, it needs no group.
    assert whole.shape == (4, 6)
    with (
        pytest.raises(errors.UsageError, match="are not joined"),
        mesh_load.together(backend, (0, 1), Deadline(5)),
    ):
        pass


@pytest.mark.parametrize("exchange", ["never", "once"])
def test_a_mesh_of_an_older_and_larger_group(
    path: Path, exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other processes are not there to be waited for."""
    monkeypatch.undo()
    mesh = mesh_of((2,))
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    options, start = mfload.Options(exchange=exchange), time.monotonic()
    with pytest.raises(errors.UsageError, match=r"are not joined.* group has, 1\b.*processes 0, 1"):
        mfload.load(path, "torch", mesh=mesh, shardings=[Shard(0)], options=options)
    assert time.monotonic() - start < 2


def test_a_default_device_without_memory_does_not_matter(path: Path) -> None:
    """Models are built on "meta" inside of such a context."""
    mesh = init_device_mesh("cpu", (4, 6))
    with torch.device("meta"):
        made = mfload.load(
            path, "torch", mesh=mesh, shardings=[("w", [Shard(0), Shard(-1)])], options=OWN
        )
    assert made["w"].to_local().device.type == "cpu"
    assert made["w"].to_local().tolist() == [[0.0]]


def test_a_placement_of_ones_own_is_refused(path: Path) -> None:
    class Own(Shard):
        pass

    with pytest.raises(errors.ShardingError, match="does not say where values lie"):
        mfload.load(path, "torch", mesh=mesh_of((2,)), shardings=[("w", Own(0))])


def test_negative_dims_of_strided_shards(path: Path) -> None:
    placements = [_StridedShard(-1, split_factor=2), Shard(-1)]
    mesh = init_device_mesh("cpu", (12, 2))
    array = mfload.load(path, "torch", mesh=mesh, shardings=[("w", placements)], options=OWN)["w"]
    assert list(array.placements) == [_StridedShard(1, split_factor=2), Shard(1)]
    assert array.to_local().shape == (4, 1)
