"""Parts of tensors: wide, narrow, strided, backwards and by lists, warm and cold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row

_LISTED = np.random.default_rng(1)


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """Slices of an opened checkpoint, each against the fastest natural way."""
    import ml_dtypes
    import safetensors.numpy

    import mfload

    random = np.random.default_rng(0)
    height, depth = max(32, int(16384 * scale)), max(2, int(64 * scale))
    path = folder / "slices.safetensors"
    tensors: dict[str, Any] = {
        "wide": random.random((height, 4096), np.float32),
        "thin": random.random((height * 256, 16), np.float32),
        "deep": random.random((depth, 1024, 1024), np.float32),
        "tenth": random.random((max(4, height // 10), 4096), np.float32),
        "half": random.random((height, 4096), np.float32).astype(ml_dtypes.bfloat16),
    }
    safetensors.numpy.save_file(tensors, path)
    opened = mfload.open(path, "numpy")
    peer = safetensors.safe_open(path, "numpy")
    listed = _LISTED.integers(0, height * 256, 5000)
    some = _LISTED.integers(0, height, 2000).tolist()
    cases: list[tuple[str, Any, float]] = [
        ("wide", np.s_[:, :2048], 1.3),
        ("wide", np.s_[::2], 1.3),
        ("half", np.s_[:, :2048], 1.3),
        ("wide", np.s_[:, 8:16], 10),
        ("tenth", np.s_[:, 8:16], 10),
        ("half", np.s_[:, 8:16], 10),
        ("thin", np.s_[::300], 10),
        ("thin", np.s_[::-3000], 10),
        ("deep", np.s_[::2, ::2, ::2], 10),
        ("wide", some, 1.3),
        ("thin", listed, 10),
    ]
    for name, index, limit in cases:
        ours, text = _ours(opened, name, index), _named(tensors[name], index)
        dtype = np.uint16 if name == "half" else np.float32
        info = opened.info(name)
        kept = np.memmap(path, dtype, "r", info.pieces[0].offset, info.shape)
        taken = ours()
        assert taken.tobytes() == tensors[name][index].tobytes()
        yield Row(text, ours, "memmap", lambda kept=kept, index=index: np.array(kept[index]), limit)
        if isinstance(index, tuple) and name == "wide":
            yield Row(text, ours, "get_slice", _ours(peer, name, index), limit)
    # What is mapped stays in the page cache, so cold files are files of their own.
    cold = folder / "cold.safetensors"
    shutil.copyfile(path, cold)
    opened = mfload.open(cold, "numpy")
    for name, index, _ in (*cases[:2], cases[3], *cases[6:9]):
        text = f"cold: {_named(tensors[name], index)}"
        info = opened.info(name)

        def mapped(info: Any = info, index: Any = index) -> Any:
            fresh = np.memmap(cold, np.float32, "r", info.pieces[0].offset, info.shape)
            return np.array(fresh[index])

        yield Row(text, _ours(opened, name, index), "memmap", mapped, 1.3, cold=[cold])


def _ours(opened: Any, name: str, index: Any) -> Any:
    part = opened.get_slice(name)
    return lambda: part[index]


def _named(array: Any, index: Any) -> str:
    """A tensor, and an index as people write it."""
    whole = f"{array.dtype} {' x '.join(map(str, array.shape))}"
    if not isinstance(index, (tuple, slice)):
        return f"{whole} [{len(index)} numbers]"
    parts: list[str] = []
    for each in index if isinstance(index, tuple) else (index,):
        ends = ("" if end is None else str(end) for end in (each.start, each.stop))
        parts.append(":".join(ends) + ("" if each.step is None else f":{each.step}"))
    return f"{whole} [{', '.join(parts)}]"
