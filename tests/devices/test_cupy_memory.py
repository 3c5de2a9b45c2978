"""Loads into CuPy whose pool gives memory away that kernels still work on, and their consumers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from devices import arrays
from devices.cupy_pool import package
from devices.fake import FakeDevice
from devices.pool import Pool, bytes_at

import mfload
from mfload import errors
from mfload.cuda import staging
from mfload.frameworks.cupy_adapter import CupyAdapter

MODEL = {f"w{n}": samples.numbers((n, 70_000), "f4", n) for n in range(1, 6)}
ALLOCATORS = ("auto", "framework", "mfload")
STREAMS = ("default", "side")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    return samples.save(tmp_path / "m.safetensors", MODEL)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def pool(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool()
    arrays.take(monkeypatch, CupyAdapter(package(made), 0, device))
    yield made
    gc.collect()
    device.assert_clean()


@pytest.mark.parametrize("engine", ["auto", "mmap"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_kernels_that_were_started_before(
    path: Path, pool: Pool, allocator: Any, stream: str, engine: Any
) -> None:
    """They end before a load writes to memory that they use; so do the load's own copies."""
    options = mfload.Options(allocator=allocator, engine=engine)
    with pool.on(pool.default if stream == "default" else pool.queues.new()):
        found = mfload.load(path, "cupy", options=options)
    samples.assert_same({name: np.array(array) for name, array in found.items()}, MODEL)
    pool.finish()
    samples.assert_same({name: np.array(array) for name, array in found.items()}, MODEL)
    del found


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_graph_that_is_captured(path: Path, pool: Pool, allocator: Any, other: bool) -> None:
    """It is not waited for, and has none of its memory written to by a load."""
    pool.implicit, pool.captures = other, None if other else pool.default
    options = mfload.Options(allocator=allocator)
    if allocator == "framework":
        with pytest.raises(errors.UsageError, match="graph is being captured"):
            mfload.load(path, "cupy", options=options)
        return
    found = mfload.load(path, "cupy", options=options)
    samples.assert_same({name: np.array(array) for name, array in found.items()}, MODEL)
    assert not pool.taken
    del found


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_consumers_of_a_stream(
    path: Path, pool: Pool, allocator: Any, stream: str, timeout: Any
) -> None:
    """Their kernels on a tensor come late, and find it as it was though it was let go."""
    options = mfload.Options(
        allocator=allocator, max_device_overhead=1 << 20, max_host_overhead=1 << 20, threads=1,
        timeout=timeout,
    )  # fmt: skip
    seen: dict[str, Any] = {}
    with pool.on(pool.default if stream == "default" else pool.queues.new()):
        for _ in range(2):
            for name, array in mfload.stream(path, "cupy", options=options):
                where = array.data.ptr, array.nbytes  # No kernel keeps the array.
                pool.kernel(array, lambda n=name, w=where: seen.update({n: bytes_at(*w).copy()}))
                del array
    pool.finish()
    assert {name: memory.tobytes() for name, memory in seen.items()} == {
        name: array.tobytes() for name, array in MODEL.items()
    }


@pytest.mark.parametrize("allocator", ["auto", "framework"])
@pytest.mark.parametrize("room", [0, 1, 1 << 20])
def test_memory_that_is_refused(
    path: Path, pool: Pool, device: FakeDevice, allocator: Any, room: int
) -> None:
    pool.limit, device.total = room, 1 << 20
    with pytest.raises(errors.MemoryLimitError) as caught:
        mfload.load(path, "cupy", options=mfload.Options(allocator=allocator))
    assert "cuda" in str(caught.value).lower() or "CuPy" in str(caught.value)
    del caught
    pool.finish()
