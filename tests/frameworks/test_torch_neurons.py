"""Neurons read on demand as tensors of PyTorch: views of the slots, which they pin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch

import mfload
from mfload import errors
from mfload.ondemand import NeuronCache, bundle

NEURONS, WIDTH = 256, 64


@pytest.fixture
def dense(tmp_path: Path) -> dict[str, Any]:
    arrays = {
        "layers.0.up": torch.randn(NEURONS, WIDTH),
        "layers.0.down": torch.randn(WIDTH, NEURONS),
        "embed": torch.randn(3, WIDTH).to(torch.bfloat16),
    }
    mfload.save(arrays, tmp_path / "dense.safetensors")
    rules: dict[str, Any] = {name: rf"layers\.(\d+)\.{name}" for name in ("up", "down")}
    bundle(tmp_path / "dense.safetensors", tmp_path / "a.safetensors", **rules)
    return arrays


def test_the_product(tmp_path: Path, dense: dict[str, Any]) -> None:
    up, down = dense["layers.0.up"], dense["layers.0.down"].T.contiguous()
    with NeuronCache(tmp_path / "a.safetensors", "1MiB", 2, "torch") as cache:
        assert torch.equal(cache.resident["embed"], dense["embed"])
        for _ in range(8):
            x = torch.randn(WIDTH)
            fires = torch.nonzero(up @ x > 6).reshape(-1)
            with cache.use(0, fires) as part:
                rows = torch.from_numpy(part.rows)
                assert torch.equal(part.up, up[rows])
                assert torch.equal(part.down, down[rows])
                assert part.up.data_ptr() == part.whole.up.data_ptr()
                found = torch.relu(x @ part.up.T - 6) @ part.down
                assert torch.equal(found, torch.relu(x @ up[rows].T - 6) @ down[rows])
            wanted = torch.relu(up @ x - 6) @ down
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_views_pin(tmp_path: Path, dense: dict[str, Any]) -> None:
    with NeuronCache(tmp_path / "a.safetensors", 70 << 10, 1, "torch", wait=0.05) as cache:
        room = cache.capacity[0]
        assert room < NEURONS // 2
        with cache.use(0, range(room)) as part:
            view = part.down[3].reshape(8, 8)[2:]
        del part
        with pytest.raises(errors.MemoryLimitError, match="pinned"):
            cache.use(0, range(room, 2 * room))
        assert torch.equal(view, dense["layers.0.down"].T[3].reshape(8, 8)[2:])
        del view
        with cache.use(0, range(room, 2 * room)) as part:
            assert sorted(part.rows.tolist()) == [*range(room, 2 * room)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_dtypes(tmp_path: Path, kind: torch.dtype) -> None:
    raw = torch.from_numpy(samples.numbers((2, 8, 128), np.uint8).copy()).view(kind)
    arrays = {"0.up": raw[0], "0.down": raw[1].T.contiguous()}
    mfload.save(arrays, tmp_path / "d.safetensors")
    rules: dict[str, Any] = {name: rf"(\d+)\.{name}" for name in ("up", "down")}
    bundle(tmp_path / "d.safetensors", tmp_path / "b.safetensors", **rules)
    with (
        NeuronCache(tmp_path / "b.safetensors", "1MiB", framework="torch") as cache,
        cache.use(0, [5, 2]) as part,
    ):
        assert part.up.dtype == part.down.dtype == kind
        for found, wanted in zip((part.up, part.down), raw, strict=True):
            rows = wanted[torch.from_numpy(part.rows)]
            assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
