"""Memory of XLA's is waited for before a load writes to it: XLA gives it away by its own order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import samples
from devices import arrays
from devices.fake import FakeDevice, FakeStream

import mfload
from mfload.frameworks import jax_adapter

MODEL = {f"w{n}": samples.numbers((n, 7000), "f4", n) for n in range(1, 6)}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where arrays lie that were waited for, each the first byte and the end."""
    found: list[tuple[int, int]] = []
    real = jax.block_until_ready

    def wait(made: Any) -> Any:
        made = real(made)
        for leaf in jax.tree.leaves(made):
            for shard in getattr(leaf, "addressable_shards", ()):
                start = shard.data.unsafe_buffer_pointer()
                found.append((start, start + shard.data.nbytes))
        return made

    monkeypatch.setattr(jax, "block_until_ready", wait)
    return found


@pytest.mark.parametrize("allocator", ["auto", "framework", "mfload"])
def test_nothing_is_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: list[tuple[int, int]], allocator: Any
) -> None:
    device, written = FakeDevice(), 0
    real = FakeStream.copy_in

    def copy_in(self: Any, target: Any, at: int, source: Any, rows: Any) -> None:
        nonlocal written
        start = target.address + at
        own = any(begin <= start < begin + size for begin, size in device.memory.items())
        ready = any(begin <= start < end for begin, end in waited)
        assert own or ready
        written += ready and not own
        real(self, target, at, source, rows)

    monkeypatch.setattr(FakeStream, "copy_in", copy_in)
    arrays.take(monkeypatch, jax_adapter.JaxAdapter(jax.devices("cpu")[0], device))
    path = samples.save(tmp_path / "m.safetensors", MODEL)
    found = mfload.load(path, "jax", options=mfload.Options(allocator=allocator))
    samples.assert_same({name: np.asarray(array) for name, array in found.items()}, MODEL)
    assert bool(written) == (allocator != "mfload")
    del found
    device.assert_clean()
