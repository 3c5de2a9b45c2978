"""PyTorch whose allocator gives memory away that kernels still work on, on simulated devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from devices import arrays
from devices.fake import FakeDevice
from devices.pool import Pool
from devices.torch_pool import Place, Torch

import mfload
from mfload.cuda import discovery, staging
from mfload.frameworks import torch_adapter, torch_memory

MODEL = {f"w{n}": samples.numbers((n, 70_000), "f4", n) for n in range(1, 6)}


@pytest.fixture
def devices() -> list[FakeDevice]:
    return [FakeDevice(), FakeDevice((1, 1), "fake:1")]


@pytest.fixture
def stub(devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    """Stands in for torch: two devices, of which the first is current."""
    made = Torch(Pool(), Pool())
    for module in (torch_memory, torch_adapter):
        monkeypatch.setattr(module, "torch", made)
    monkeypatch.setattr(discovery, "find", devices.__getitem__)
    torch_memory.device_of.cache_clear()
    yield made
    torch_memory.device_of.cache_clear()
    gc.collect()
    for device in devices:
        device.assert_clean()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("side", [False, True])
def test_memory_that_is_there_already(stub: Torch, number: int, side: bool) -> None:
    """Kernels that the current stream of its device was given before have ended."""
    pool, array = stub.cuda.pools[number], np.zeros(1000, np.uint8)
    with pool.on(pool.queues.new() if side else pool.default):
        pool.kernel(array, lambda: array.fill(7))
        memory = torch_memory.memory_of(stub.Tensor(array, Place(number)))
    assert (memory.address, memory.nbytes) == (array.ctypes.data, 1000)
    assert memory.device.name == f"fake:{number}"
    assert set(array) == {7}


def test_a_stream_that_captures_a_graph(stub: Torch) -> None:
    """What is captured there is not written past the graph; other devices are no matter."""
    stub.cuda.capturing = {1}
    tensors = [stub.Tensor(np.zeros(10, np.uint8), Place(n)) for n in (0, 1)]
    first, second = map(torch_memory.memory_of, tensors)
    assert first is not None
    assert second is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_kernels_that_were_started_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stub: Torch,
    devices: list[FakeDevice],
    allocator: Any,
    side: bool,
    number: int,
) -> None:
    """They end before a load writes to memory that torch had back before they did."""
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    pool, adapter = stub.cuda.pools[number], torch_adapter.TorchAdapter(Place(number))
    adapter.devices = (devices[number],)
    adapter.on_host = True  # Where its tensors are in truth.
    arrays.take(monkeypatch, adapter)
    path = samples.save(tmp_path / "m.safetensors", MODEL)
    with pool.on(pool.queues.new() if side else pool.default):
        found = mfload.load(path, "torch", options=mfload.Options(allocator=allocator))
    assert pool.taken or allocator == "auto"
    pool.finish()
    samples.assert_same({name: tensor.numpy() for name, tensor in found.items()}, MODEL)
    assert isinstance(found["w1"], torch.Tensor)
    del found
