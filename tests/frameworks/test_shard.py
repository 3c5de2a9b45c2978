"""`shard=(rank, size)`: plain shards against torch.chunk and slices of NumPy, and refusals."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import samples
import serving
import torch
from hypothesis import given, settings, strategies as st

import mfload
from mfload import errors

DTYPES = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int16, np.bool_, np.complex64)


def chunk(whole: Any, dim: int | None, rank: int, size: int) -> Any:
    """The part of a rank, by torch.chunk; empty where it makes fewer."""
    if dim is None:
        return whole
    rows = torch.arange(whole.shape[dim]).chunk(size)
    mine = rows[rank].numpy() if rank < len(rows) else np.arange(0)
    return np.take(whole, mine, dim)


@st.composite
def cut(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int | None], int]:
    """Arrays, a dim for each, and the number of ranks."""
    arrays: dict[str, Any] = {}
    dims: dict[str, int | None] = {}
    for number in range(draw(st.integers(1, 3))):
        name = f"t{number}"
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        arrays[name] = samples.numbers(shape, draw(st.sampled_from(DTYPES)), number)
        some = st.integers(-len(shape), len(shape) - 1) if shape else st.none()
        dims[name] = draw(st.one_of(st.none(), some))
    return arrays, dims, draw(st.integers(1, 9))


def to_numpy(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        flat = array.contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return tuple(array.shape), raw
    return tuple(array.shape), np.asarray(array).tobytes()


@settings(deadline=None, max_examples=60)
@given(cut(), st.sampled_from(["numpy", "torch", "jax"]))
def test_chunks_are_those_of_torch(made: Any, framework: str) -> None:
    arrays, dims, size = made
    with tempfile.TemporaryDirectory() as folder:
        path = samples.save(Path(folder) / "m.safetensors", arrays)
        for rank in range(size):
            parts = mfload.load(path, framework, shardings=dims, shard=(rank, size))
            for name, whole in arrays.items():
                like = chunk(whole, dims[name], rank, size)
                assert to_numpy(parts[name]) == (like.shape, like.tobytes())


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_many_tensors_in_columns(tmp_path: Path, framework: str) -> None:
    """Chunks that lie in the file as they are wanted, of as many tensors as are kept in columns."""
    shapes = [(4, 16), (4, 16), (1, 5, 3), (9,), (2, 0, 3), (), (4, 16), (3, 2)]
    arrays: dict[str, Any] = {}
    for n in range(600):
        # Long stretches of one shape, and neighbours that differ.
        shape = (4, 16) if n // 100 % 2 else shapes[n % len(shapes)]
        arrays[f"t{n:03}"] = samples.numbers(shape, (np.float32, np.int16)[n % 3 == 0], n)
    path = samples.save(tmp_path / "many.safetensors", arrays)
    dims = {name: None for name, each in arrays.items() if not each.ndim}
    dims |= {n: 1 if each.shape == (1, 5, 3) else 0 for n, each in arrays.items() if each.ndim}
    columns = {name: -1 for name, each in arrays.items() if each.ndim}  # Not all lie so.
    for cuts in (dims, columns, {name: dims[name] for name in [*arrays][::2]}):
        parts = [mfload.load(path, framework, shardings=cuts, shard=(rank, 3)) for rank in range(3)]
        for rank, part in enumerate(parts):
            assert part.keys() == arrays.keys()
            for name, whole in arrays.items():
                like = chunk(whole, cuts.get(name), rank, 3)
                assert to_numpy(part[name]) == (like.shape, like.tobytes())


def test_some_of_many_small_tensors(tmp_path: Path) -> None:
    """Runs at equal distances, in the file and in memory."""
    for sizes in ([3], [3, 1], [64, 64, 64, 7], [5000], [1, 40_000]):
        arrays = {
            f"t{n:04}": samples.numbers((sizes[n % len(sizes)],), np.uint8, n) for n in range(1500)
        }
        path = samples.save(tmp_path / f"{len(sizes)}-{sizes[0]}.safetensors", arrays)
        for step in (2, 3, 7):
            names = [*arrays][1::step]
            samples.assert_same(
                mfload.load(path, "numpy", names=names), {n: arrays[n] for n in names}
            )
            found = mfload.load(path, "jax", names=names)
            assert all(np.array_equal(found[name], arrays[name]) for name in names)


FIVE = np.arange(15, dtype=np.float32).reshape(5, 3)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "five.safetensors", {"w": FIVE})


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_5_rows_over_4_ranks(five: Path, framework: str) -> None:
    parts = [
        mfload.load(five, framework, shardings=[("w", 0)], shard=(rank, 4))["w"]
        for rank in range(4)
    ]
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert np.array_equal(np.concatenate([np.asarray(part) for part in parts]), FIVE)


def test_a_dim_that_the_world_does_not_divide(five: Path) -> None:
    """Where fastsafetensors 0.5 crashes."""
    parts = [
        mfload.load(five, "torch", shardings=[("w", 1)], shard=(rank, 2))["w"] for rank in range(2)
    ]
    assert torch.equal(torch.cat(parts, 1), torch.from_numpy(FIVE))
    assert [part.shape[1] for part in parts] == [2, 1]


def test_a_negative_dim_is_a_part(five: Path) -> None:
    """Where fastsafetensors 0.5 returns the whole tensor."""
    for rank in range(3):
        part = mfload.load(five, "torch", shardings=[("w", -1)], shard=(rank, 3))["w"]
        assert torch.equal(part, torch.from_numpy(FIVE[:, rank : rank + 1]))


def test_only_its_own_rows_are_read(tmp_path: Path) -> None:
    whole = samples.numbers((400, 300))
    path = samples.save(tmp_path / "m.safetensors", {"w": whole, "b": samples.numbers((7,))})
    options = mfload.Options(engine="pread")
    for rank, nbytes in enumerate((120_000, 120_000, 120_000, 120_000)):
        report, seen = mfload.Report(), list[tuple[int, int]]()
        plan = mfload.plan(path, shardings=[("w", 0)], shard=(rank, 4), options=options)
        part = mfload.load(
            path,
            "numpy",
            names="w",
            shardings=[("w", 0)],
            shard=(rank, 4),
            report=report,
            options=options,
            progress=lambda done, every, seen=seen: seen.append((done, every)),
        )["w"]
        assert np.array_equal(part, whole[rank * 100 : rank * 100 + 100], equal_nan=True)
        assert (report.read_bytes, plan.read_bytes) == (nbytes, nbytes + 28)
        assert (report.processes, seen[-1]) == (1, (nbytes, nbytes))


def test_other_arguments(tmp_path: Path) -> None:
    whole = np.linspace(-2, 2, 35, dtype=np.float32).reshape(7, 5)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole, "v": whole})
    given: Any = {"shardings": [("w", 0)], "shard": (1, 2)}
    made = mfload.load(path, "numpy", names=["w"], dtype="float16", **given)
    assert list(made) == ["w"]
    assert np.array_equal(made["w"], whole[4:].astype(np.float16))
    assert np.array_equal(mfload.load(path, "numpy", **given)["v"], whole)
    with pytest.raises(errors.ShardingError, match="no sharding for 1 of 2 tensors"):
        mfload.load(path, "numpy", unmatched="error", **given)
    mfload.verify(path, mode="write")
    manifest = next(tmp_path.glob("*.json"))
    with pytest.raises(errors.UsageError, match="compares whole tensors"):
        mfload.load(path, "numpy", verify=manifest, **given)
    one = mfload.load(path, "numpy", verify=manifest, shardings=[("w", 0)], shard=(0, 1))
    assert np.array_equal(one["w"], whole)


def test_archives_and_urls(tmp_path: Path) -> None:
    whole = samples.numbers((9, 4), np.int32)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "m.npz", w=whole, f=np.asfortranarray(whole))
        given: Any = {"shardings": [("f", 1), ("w", 0)], "shard": (1, 2)}
        made = mfload.load(tmp_path / "m.npz", "numpy", **given)
        assert np.array_equal(made["w"], whole[5:])
        assert np.array_equal(made["f"], whole[:, 2:])
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    with serving.serving({"/model.safetensors": path.read_bytes()}) as server:
        made = mfload.load(server.url(), "numpy", shardings=[("w", 0)], shard=(1, 2))
    assert np.array_equal(made["w"], whole[5:])


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(("dtype", "block"), [("F4", 2), ("F6_E2M3", 4), ("F6_E3M2", 4)])
def test_packed_elements_stay_together(
    tmp_path: Path, framework: str, dtype: str, block: int
) -> None:
    stored = bytes(range(4 * 16 * 3 // block * block // 4 if block == 4 else 32))
    path = samples.save_raw(tmp_path / "m.safetensors", [("w", dtype, (4, 16), stored)])
    rows = np.frombuffer(stored, np.uint8).reshape(4, -1)
    for dim in (0, 1):
        for rank in range(4):
            part = mfload.load(path, framework, shardings=[("w", dim)], shard=(rank, 4))["w"]
            if framework == "jax" and dtype == "F4":
                assert part.shape == ((1, 16) if dim == 0 else (4, 4))
            else:
                expected = chunk(rows, dim, rank, 4)
                assert to_numpy(part) == (expected.shape, expected.tobytes())
    for size in (6, 9, 11, 16):  # Chunks of 3, 2, 2 and 1.
        if -(-16 // size) % block:
            for rank in range(size):  # Also those whose own chunk would do.
                with pytest.raises(errors.ShardingError, match="share a byte") as caught:
                    mfload.load(path, framework, shardings=[("w", -1)], shard=(rank, size))
                assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    "shard",
    [
        *(0, 1, (), (1,), (0, 1, 2), (2, 2), (-1, 2), (0, 0), (0, -2), (True, 2), (0, True)),
        *((0.0, 2), (0, 2.0), ("0", 2), "01", (None, 2), {}, object(), (np.array([0, 1]), 2)),
    ],
)
def test_a_shard_that_is_none(five: Path, shard: Any) -> None:
    for call in (mfload.load, mfload.plan):
        with pytest.raises(errors.UsageError, match="shard is invalid") as caught:
            call(five, "numpy", shardings=[("w", 0)], shard=shard)
        assert caught.value.expected == "(rank, size), with rank from 0 to size - 1"
        assert caught.value.found == repr(shard)


def test_numbers_of_any_kind(five: Path) -> None:
    for number in (np.int64(1), torch.tensor(1), jnp.int32(1)):
        part = mfload.load(five, "numpy", shardings=[("w", number)], shard=(number, 3))["w"]
        assert np.array_equal(part, FIVE[:, 1:2])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"shardings": [("w", 2)]}, errors.ShardingError, "no dim 2"),
        ({"shardings": [("w", -3)]}, errors.ShardingError, "no dim -3"),
        ({"shardings": 2}, errors.ShardingError, "no dim 2"),
        ({"shardings": [("w", True)]}, errors.UsageError, "not a dim"),
        ({"shardings": [("w", 0.0)]}, errors.UsageError, "not a dim"),
        ({"shardings": [("w", "rows")]}, errors.UsageError, "not a dim"),
        ({"shardings": [("w", (0, 1))]}, errors.UsageError, "not a dim"),
        ({"shardings": 1.5}, errors.UsageError, "invalid shardings"),
        ({}, errors.UsageError, "is for dims"),
        ({"shardings": 0, "mesh": object()}, errors.UsageError, "is for dims"),
        ({"shardings": 0, "device": ["cpu"]}, errors.UsageError, "one device"),
        ({"shardings": 0, "device": {"w": "cpu"}}, errors.UsageError, "one device"),
        ({"shardings": 0, "unmatched": "no"}, errors.UsageError, "unmatched"),
    ],
)
def test_refusals(five: Path, given: Any, error: Any, words: str) -> None:
    for call in (mfload.load, mfload.plan):
        with pytest.raises(error, match=words) as caught:
            call(five, "numpy", shard=(0, 2), **given)
        assert caught.value.expected
        if error is errors.ShardingError:
            assert (caught.value.tensor, caught.value.found) == ("w", "shape [5, 3]")


def test_a_number_alone_has_no_dims(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"s": np.float32(3)})
    with pytest.raises(errors.ShardingError, match="no dim 0") as caught:
        mfload.load(path, "numpy", shardings=0, shard=(0, 2))
    assert (caught.value.tensor, caught.value.expected) == ("s", "None")
    assert mfload.load(path, "numpy", shardings={"s": None}, shard=(1, 2))["s"] == 3


def test_an_exchange_needs_a_process_group(five: Path) -> None:
    options = mfload.Options(exchange="once")
    for call in (mfload.load, mfload.plan):
        for framework, words in (("numpy", "numpy has none"), ("torch", "same rank and size")):
            with pytest.raises(errors.UsageError, match=words):
                call(five, framework, shardings=0, shard=(1, 4), options=options)
