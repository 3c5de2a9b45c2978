"""Many small tensors into a tree of JAX: names as stored, transposed on a mesh, by exact rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row

ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
_SHAPE = (64, 32)  # Of float32, 8 KiB.


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """`load_into` of leaves of 8 KiB: on one device, on a 2 x 4 mesh, and by exact rules."""
    few, some, many = (max(10, int(count * scale)) for count in (500, 5_000, 50_000))
    for count in (few, some):
        path = folder / f"{count}.safetensors"
        names = [f"layers.{n}.kernel" for n in range(count)]
        _save(path, names)
        yield _alike(path, names)
        yield _transposed(path, names)
    yield _mapped(some, many)


def _save(path: Path, names: list[str]) -> None:
    import safetensors.numpy

    data = np.random.default_rng(0).random((len(names), *_SHAPE), np.float32)
    safetensors.numpy.save_file(dict(zip(names, data, strict=True)), path)


def _equal(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name in list(ours)[:: max(1, len(ours) // 500)]:
        assert ours[name].sharding == theirs[name].sharding
        assert np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes()


def _alike(path: Path, names: list[str]) -> Row:
    import jax

    import mfload

    target = {name: jax.ShapeDtypeStruct(_SHAPE, np.float32) for name in names}

    def ours() -> Any:
        return mfload.load_into(target, path)

    def theirs() -> Any:
        return mfload.load(path, "jax")

    _equal(ours(), theirs())
    name = f"load_into of {len(names)} leaves of 8 KiB, same names"
    return Row(name, ours, "mfload.load", theirs, 1.5)


def _transposed(path: Path, names: list[str]) -> Row:
    import jax
    import safetensors.numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mfload

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    shape = _SHAPE[::-1]
    target = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name in names}
    mapping = {"(.*)": mfload.rule(r"\1", transpose=(1, 0))}

    def ours() -> Any:
        return mfload.load_into(target, path, mapping=mapping)

    def theirs() -> Any:
        made = {}
        for name, stored in safetensors.numpy.load_file(path).items():
            whole = stored.T
            made[name] = jax.make_array_from_callback(shape, sharding, whole.__getitem__)
        return made

    _equal(ours(), theirs())
    name = f"load_into of {len(names)} leaves of 8 KiB, transposed, 2 x 4 mesh"
    return Row(name, ours, "by hand", theirs, 2)


def _mapped(few: int, many: int) -> Row:
    """Matching alone: ten times the rules are to take ten times the time, or half as much more."""
    from mfload.dtypes import TABLE
    from mfload.index import Index, Piece, TensorInfo
    from mfload.runtime import gc_paused
    from mfload.trees import matching
    from mfload.trees.recipe import Leaf

    def match(count: int) -> Any:
        names = [f"layers.{n}.kernel" for n in range(count)]
        infos = {
            name: TensorInfo(name, TABLE["F32"], (1,), (Piece(0, 4 * n, 4),))
            for n, name in enumerate(names)
        }
        leaves = [Leaf((f"new.{name}",), (1,), TABLE["F32"]) for name in names]
        mapping = {re.escape(name): f"new.{name}" for name in names}
        index = Index(("file",), infos)

        def call() -> Any:
            with gc_paused():
                return matching.match(index, leaves, mapping)

        return call

    name = f"{many} exact rules"
    return Row(name, match(many), f"{few} of them", match(few), 1.5 * many / few)
