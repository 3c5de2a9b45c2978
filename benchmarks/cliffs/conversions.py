"""Numbers converted while they land, and transposed arrays put in order while they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row
from mfload.bench import machine

# Stored and wanted dtypes; the wider of them takes 256 MiB.
PAIRS = (
    ("float32", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
)


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """`dtype=` into NumPy, then into torch, each against torch; and `save` of `.T`."""
    import safetensors.torch
    import torch

    import mfload
    from mfload import frameworks
    from mfload.io import pread

    numbers = torch.randn(1 << 12, int((1 << 14) * scale), generator=torch.manual_seed(0))
    numbers = (20 * numbers).clamp_(-127, 127)
    for stored in {stored for stored, _ in PAIRS}:
        tensors = {"w": numbers.to(getattr(torch, stored))}
        safetensors.torch.save_file(tensors, folder / f"{stored}.safetensors")
        del tensors

    frameworks.get("torch", None)
    lent = pread.CONVERTER

    def ours(framework: str, stored: str, wanted: str) -> Any:
        # NumPy's are measured as in a process that never loads into torch.
        pread.CONVERTER = lent if framework == "torch" else None
        path = folder / f"{stored}.safetensors"
        return mfload.load(path, frameworks.resolve(framework), dtype={"w": wanted})["w"]

    def theirs(stored: str, wanted: str) -> Any:
        path = folder / f"{stored}.safetensors"
        return safetensors.torch.load_file(path)["w"].to(getattr(torch, wanted))

    size = f"{round(256 * scale)} MiB"
    for framework, limit in ("numpy", 1.5), ("torch", 1.2):
        for stored, wanted in PAIRS:
            mine, other = partial(ours, framework, stored, wanted), partial(theirs, stored, wanted)
            made = mine()
            raw = made.view(torch.uint8).numpy() if framework == "torch" else made.view(np.uint8)
            assert raw.tobytes() == other().view(torch.uint8).numpy().tobytes()
            name = f"{framework}: {stored} to {wanted}, {size}"
            ready = partial(machine.prime, round((600 << 20) * scale))
            yield Row(name, mine, "load_file, .to", other, limit, before=ready)

    turned, target = numbers.numpy().T, folder / "out.safetensors"
    ordered = torch.from_numpy(turned)

    def save(array: Any) -> Any:
        return mfload.save({"w": array}, target, overwrite=True)

    save(turned)
    assert safetensors.torch.load_file(target)["w"].equal(ordered)
    name = f"save NumPy .T, {size}"
    yield Row(name, partial(save, turned), "save torch .T", partial(save, ordered), 1.1)
