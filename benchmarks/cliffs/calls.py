"""Tensors taken one by one from an opened checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """`get_tensor` of many small tensors; at two sizes, since the time of each stays."""
    for count in (2000, 50_000):
        yield from _of(folder, max(10, int(count * scale)))


def _of(folder: Path, count: int) -> Iterator[Row]:
    import safetensors
    import safetensors.numpy

    import mfload

    path = folder / f"calls.{count}.safetensors"
    data = np.frombuffer(np.random.default_rng(0).bytes(count * 2048), np.float32)
    tensors = {f"t.{n}": each for n, each in enumerate(data.reshape(count, 512))}
    safetensors.numpy.save_file(tensors, path)
    names = list(tensors)

    def ours() -> Any:
        with mfload.open(path, "numpy") as opened:
            return [opened.get_tensor(name) for name in names]

    def theirs() -> Any:
        with safetensors.safe_open(path, "numpy") as opened:
            return [opened.get_tensor(name) for name in names]

    with mfload.open(path) as opened:
        starts = [opened.info(name).pieces[0].offset for name in names]

    def bare() -> Any:
        fd = os.open(path, os.O_RDONLY)
        made = [np.frombuffer(os.pread(fd, 2048, start), np.float32) for start in starts]
        os.close(fd)
        return made

    for mine, other in zip(ours(), bare(), strict=True):
        assert mine.tobytes() == other.tobytes()
    each = count * 20e-6
    yield Row(f"{count} get_tensor of 2 KiB", ours, "pread", bare, 1, allowance=each)
    yield Row(f"{count} get_tensor of 2 KiB, peer", ours, "safe_open", theirs, 1, allowance=each)
