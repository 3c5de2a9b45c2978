"""Random tensors, meshes and specs, against slicing the whole array shard by shard."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import samples
import shards
from calls import as_options
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import mfload
from mfload.io import buffers
from mfload.sources.base import Costs
from mfload.sources.local import LocalFile

DTYPES = [np.uint8, np.bool_, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex64]
MESHES = [(8,), (4,), (3,), (1,), (2, 4), (4, 2), (2, 3), (1, 5), (2, 2, 2), (2, 1, 3)]


@st.composite
def specs(draw: st.DrawFn, mesh: Any) -> P:
    """Some axes of the mesh on some dims, several on one too."""
    axes = draw(st.permutations(mesh.axis_names))
    axes = axes[: draw(st.integers(0, len(axes)))]
    parts: list[Any] = [()] * draw(st.integers(0, 4))
    for axis in axes if parts else ():
        dim = draw(st.integers(0, len(parts) - 1))
        parts[dim] = (*parts[dim], axis)
    return P(*(None if not part else part[0] if len(part) == 1 else part for part in parts))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, NamedSharding]]:
    """Tensors and their shardings, which fit."""
    shape = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(range(len(jax.devices()))))
    mesh = shards.mesh(shape, order=order)
    arrays: dict[str, Any] = {}
    shardings: dict[str, NamedSharding] = {}
    for n in range(draw(st.integers(1, 4))):
        spec = draw(specs(mesh))
        rank = draw(st.integers(len(tuple(spec)), 4))
        dims: list[int] = []
        for dim in range(rank):
            part = tuple(spec)[dim] if dim < len(tuple(spec)) else None
            axes = () if part is None else part if isinstance(part, tuple) else (part,)
            unit = math.prod(mesh.shape[axis] for axis in axes)
            dims.append(unit * draw(st.integers(0, 5) if rank > 2 else st.integers(0, 40)))
        arrays[f"t{n}"] = samples.numbers(tuple(dims), draw(st.sampled_from(DTYPES)), n)
        shardings[f"t{n}"] = NamedSharding(mesh, spec)
    return arrays, shardings


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that come through `os.preadv`, beside headers, which don't."""
    counts: list[int] = []
    real = os.preadv

    def preadv(*arguments: Any) -> int:
        counts.append(real(*arguments))
        return counts[-1]

    os.preadv = preadv
    try:
        yield counts
    finally:
        os.preadv = real


@contextmanager
def small_blocks(nbytes: int, gap: int) -> Iterator[None]:
    """Reads so short that small tensors take many."""
    kept = LocalFile.costs
    LocalFile.costs = Costs(min(Costs().block, nbytes), gap, nbytes // 2)
    try:
        yield
    finally:
        LocalFile.costs = kept


@given(
    made=jobs(),
    allocator=st.sampled_from(["auto", "framework"]),
    block=st.sampled_from([256, 4096, 1 << 20]),
    gap=st.sampled_from([0, 16, 4096, 64 << 10]),
    threads=st.sampled_from([1, 3]),
    convert=st.booleans(),
)
def test_every_shard_is_its_slice(
    made: Any, allocator: Any, block: int, gap: int, threads: int, convert: bool
) -> None:
    arrays, shardings = made
    options: dict[str, Any] = {
        "shardings": shardings,
        "allocator": allocator,
        "threads": threads,
        "engine": "pread",
        "dtype": None,
    }
    expected = dict(arrays)
    if convert:
        rules = {"t0": "complex64", "t1": "float64", "t2": "complex64"}
        options["dtype"] = {name: rules[name] for name in arrays if name in rules}
        for name in arrays:
            wanted = {"t1": np.float64, "t3": None}.get(name, np.complex64)
            if wanted is np.float64 and arrays[name].dtype == np.complex64:
                options["dtype"].pop("t1")
            elif wanted is not None:
                with np.errstate(all="ignore"):
                    expected[name] = arrays[name].astype(wanted)
    with tempfile.TemporaryDirectory() as folder, small_blocks(block, gap):
        path = samples.save(Path(folder) / "a.safetensors", arrays)
        preview = mfload.plan(path, "jax", **as_options(options))
        report = mfload.Report()
        with counted() as counts:
            buffers.peak_bytes(reset=True)
            loaded = mfload.load(path, framework="jax", report=report, **as_options(options))
            peak = buffers.peak_bytes()
    shards.assert_loaded(loaded, expected, shardings)
    figures = preview.as_dict()
    assert sum(counts) == figures["read_bytes"] == report.read_bytes
    assert figures["over_read_bytes"] == report.over_read_bytes
    # Whatever the gap, a whole tensor leaves nothing to read over, and nothing is read twice.
    everywhere = sum(array.nbytes for array in arrays.values())
    assert figures["read_bytes"] - figures["over_read_bytes"] <= everywhere
    assert peak <= figures["peak_bytes"]
    assert report.result_bytes == figures["result_bytes"]
