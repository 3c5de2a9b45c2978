"""Small tensors, and memory whose pages are new, each against what people write without mfload."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row

ENV = {"JAX_PLATFORMS": "cpu"}
_LIMIT = 1.5


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """Ten calls, in one process."""
    count = max(10, int(10_000 * scale))
    yield from _small(folder / "small.safetensors", count)
    yield _msgpack(folder / "small.msgpack", count)
    yield _shards(folder / "shards", max(10, int(1000 * scale)))
    yield _pages(folder / "large.safetensors", scale)
    yield _to_torch(folder / "f32.safetensors", scale)
    yield _each(folder / "each.safetensors", max(10, int(2000 * scale)))
    yield _to_jax(folder / "f16.safetensors", scale)
    yield _npy(folder / "array.npy", scale)


def _save(path: Path, count: int, size: int, dtype: str = "float32") -> None:
    import safetensors.numpy

    numbers = np.random.default_rng(0).random((count, size), np.float32).astype(dtype)
    named = {f"t.{n}": each for n, each in enumerate(numbers)}
    safetensors.numpy.save_file(named, path)


def _equal(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        assert ours[name].dtype == each.dtype
        assert bool((ours[name] == each).all())


def _small(path: Path, count: int) -> Iterator[Row]:
    """A module, shards of leaves, and a stream of lazy tensors."""
    import safetensors
    import safetensors.numpy
    import safetensors.torch
    import torch

    import mfload

    _save(path, count, 16)

    # All in one module: `load_state_dict` of as many takes minutes.
    modules = [torch.nn.Module(), torch.nn.Module()]
    for module in modules:
        held = {f"{n}": torch.nn.Parameter(torch.empty(16)) for n in range(count)}
        module.add_module("t", torch.nn.ParameterDict(held))

    def into() -> Any:
        return mfload.load_into(modules[0], path)

    def state_dict() -> Any:
        return modules[1].load_state_dict(safetensors.torch.load_file(path))

    into()
    state_dict()
    _equal(modules[0].state_dict(), modules[1].state_dict())
    each = f"{count} of 64 bytes"
    yield Row(f"load_into a torch module, {each}", into, "load_state_dict", state_dict, _LIMIT)

    whole = partial(safetensors.numpy.load_file, path)
    half = partial(mfload.load, path, "numpy", shard=(0, 2), shardings=[(".", 0)])
    _equal(half(), {name: array[:8] for name, array in whole().items()})
    yield Row(f"load(shard=(0, 2)), {each}", half, "load_file", whole, _LIMIT)

    places = {name: torch.empty(16) for name in whole()}

    def streamed() -> Any:
        with mfload.stream(path, "torch", lazy=True) as tensors:
            for name, tensor in tensors:
                places[name].copy_(tensor)

    def copied() -> Any:
        with safetensors.safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                places[name].copy_(opened.get_tensor(name))

    streamed()
    _equal(places, safetensors.torch.load_file(path))
    yield Row(f"stream(lazy=True), copy_, {each}", streamed, "safe_open, copy_", copied, _LIMIT)


def _msgpack(path: Path, count: int) -> Row:
    from flax import serialization

    import mfload

    numbers = np.random.default_rng(0).random((count, 16), np.float32)
    tree = {f"layer.{n}": each for n, each in enumerate(numbers)}
    path.write_bytes(serialization.msgpack_serialize(tree))
    ours = partial(mfload.load, path, "numpy")

    def theirs() -> Any:
        return serialization.msgpack_restore(path.read_bytes())

    _equal(ours(), theirs())
    name = f"Flax msgpack into NumPy, {count} of 64 bytes"
    return Row(name, ours, "msgpack_restore", theirs, _LIMIT)


def _shards(folder: Path, count: int) -> Row:
    import safetensors.numpy

    import mfload

    folder.mkdir()
    random = np.random.default_rng(0)
    paths = [folder / f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for number, path in enumerate(paths):
        safetensors.numpy.save_file({f"t.{number}": random.random(20_000, np.float32)}, path)
    ours = partial(mfload.load, folder, "numpy")

    def theirs() -> Any:
        made: dict[str, Any] = {}
        for path in paths:
            made |= safetensors.numpy.load_file(path)
        return made

    _equal(ours(), theirs())
    return Row(f"{count} shards of 80 kB", ours, "load_file of each", theirs, _LIMIT)


def _pages(path: Path, scale: float) -> Row:
    import safetensors

    import mfload

    _save(path, 16, int((4 << 20) * scale))

    def ours() -> Any:
        with mfload.open(path, "torch") as opened:
            return [opened.get_tensor(name) for name in opened]

    def theirs() -> Any:
        with safetensors.safe_open(path, "pt") as opened:
            return [opened.get_tensor(name).clone() for name in opened.keys()]  # noqa: SIM118

    name = f"get_tensor of 16 of {round(16 * scale)} MiB"
    return Row(name, ours, "safe_open, clone", theirs, _LIMIT)


def _to_torch(path: Path, scale: float) -> Row:
    import safetensors.torch
    import torch

    import mfload

    _save(path, 30, int((4 << 20) * scale))
    ours = partial(mfload.load, path, "torch", dtype="bfloat16")

    def theirs() -> Any:
        loaded = safetensors.torch.load_file(path)
        return {name: tensor.to(torch.bfloat16) for name, tensor in loaded.items()}

    _equal(ours(), theirs())
    name = f"float32 to bfloat16 into torch, {round(480 * scale)} MiB"
    return Row(name, ours, "load_file, .to", theirs, _LIMIT)


def _each(path: Path, count: int) -> Row:
    import safetensors

    import mfload

    _save(path, count, 256)

    def ours() -> Any:
        with mfload.open(path, "numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened}

    def theirs() -> Any:
        with safetensors.safe_open(path, "numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    _equal(ours(), theirs())
    return Row(f"get_tensor of {count} of 1 KiB", ours, "safe_open", theirs, _LIMIT)


def _to_jax(path: Path, scale: float) -> Row:
    import jax
    import safetensors.flax

    import mfload

    _save(path, 16, int((4 << 20) * scale), "float16")
    ours = partial(mfload.load, path, "jax", dtype="float32")

    def theirs() -> Any:
        loaded = safetensors.flax.load_file(path)
        return jax.block_until_ready({n: a.astype("float32") for n, a in loaded.items()})

    _equal(ours(), theirs())
    name = f"float16 to float32 into JAX, {round(256 * scale)} MiB"
    return Row(name, ours, "load_file, .astype", theirs, _LIMIT)


def _npy(path: Path, scale: float) -> Row:
    import mfload

    np.save(path, np.random.default_rng(0).random(int((4 << 20) * scale), np.float32))
    ours, theirs = partial(mfload.load, path, "numpy"), partial(np.load, path)
    assert all(array.tobytes() == theirs().tobytes() for array in ours().values())
    return Row(f"one .npy of {round(16 * scale)} MiB", ours, "np.load", theirs, _LIMIT)
