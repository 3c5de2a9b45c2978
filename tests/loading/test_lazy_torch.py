"""Opened checkpoints in torch's data loaders; alone, because it imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload

torch = pytest.importorskip("torch")

ROWS = samples.numbers((64, 33), np.int32)


class Rows(torch.utils.data.Dataset):  # pyright: ignore
    """Rows of a tensor on disk; the handle is made before the workers are."""

    def __init__(self, path: Path, framework: str) -> None:
        self.opened = mfload.open(path, framework)

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> Any:
        return self.opened.get_slice("rows")[row], os.getpid()


@pytest.mark.parametrize(
    ("method", "framework"), [("fork", "torch"), ("fork", "numpy"), ("spawn", "torch")]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_of_a_data_loader_share_a_handle(
    tmp_path: Path, method: str, framework: str
) -> None:
    path = samples.save(tmp_path / "rows.safetensors", {"rows": ROWS})
    loader = torch.utils.data.DataLoader(
        Rows(path, framework), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    batches, workers = [], set()
    for batch, pids in loader:
        batches.append(batch.numpy())
        workers.update(pids.tolist())
    assert np.array_equal(np.concatenate(batches), ROWS)
    assert len(workers) == 2
    assert os.getpid() not in workers


def test_a_write_reaches_neither_the_file_nor_the_next_request(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "rows.safetensors", {"rows": ROWS})
    before = path.read_bytes()
    for engine in ("mmap", "pread", "direct"):
        with mfload.open(path, "torch", options=mfload.Options(engine=engine)) as opened:
            first = opened.get_tensor("rows")
            first.zero_()
            assert np.array_equal(opened.get_tensor("rows").numpy(), ROWS)
    assert path.read_bytes() == before
