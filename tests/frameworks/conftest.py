"""What has to be said before a framework is imported, and once for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import material
from conformance.material import Stored

# Several CPU devices, so that placement is tested without an accelerator.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

Made = tuple[Path, list[Stored]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of a module lie."""
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def zoo(folder: Path) -> Callable[[int], Made]:
    """Every dtype in every shape, nothing aligned, by where the data begins."""
    rows = material.zoo()

    def make(start: int) -> Made:
        path = folder / f"zoo-{start}.safetensors"
        return (path if path.exists() else material.save(path, rows, start)), rows

    return make


@pytest.fixture(scope="module")
def aligned(folder: Path) -> Made:
    """Every dtype once, everything aligned."""
    rows = material.aligned()
    return material.save(folder / "aligned.safetensors", rows), rows


@pytest.fixture(scope="module")
def sliced(folder: Path) -> tuple[Path, dict[str, Stored]]:
    """Tensors of every width to be cut up, none aligned."""
    shapes = [(), (1,), (9,), (0, 3), (4, 1, 5), (3, 4, 5), (2, 3, 2, 3), (60, 90)]
    kinds = ["U8", "BF16", "F32", "I64", "F8_E4M3", "BOOL", "C64"]
    rows = [material.stored(f"{kind}{list(x)}", kind, x) for kind in kinds for x in shapes]
    # Rows farther apart than what is cheaper read over than skipped.
    rows.append(material.stored("long rows", "U16", (7, 3, 4099)))
    path = material.save(folder / "sliced.safetensors", rows, 13)
    return path, {row.name: row for row in rows}
