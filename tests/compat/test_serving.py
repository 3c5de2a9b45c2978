"""What the loaders for serving systems share, without any of these systems."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import samples
import torch

import mfload
from mfload import errors
from mfload.compat.serving import Weights

FILES = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def stale(tmp_path: Path) -> list[str]:
    """Two shards that both hold `a`, which the index has in the first one."""
    held = [{"a": 1.0, "b": 2.0}, {"a": 9.0, "c": 3.0}]
    for file, values in zip(FILES, held, strict=True):
        arrays = {name: np.full((2, 2), value, np.float32) for name, value in values.items()}
        samples.save(tmp_path / file, arrays)
    placed = {"a": FILES[0], "b": FILES[0], "c": FILES[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    return [str(tmp_path / file) for file in FILES]


def numbers(path: str | list[str]) -> dict[str, float]:
    rows = Weights({}).rows(path)
    return {name: float(torch.empty(2, 2).copy_(tensor)[0, 0]) for name, tensor in rows}


def test_of_copies_the_index_chooses(stale: list[str]) -> None:
    """As of a directory: serving systems give the files that the index names, in a list."""
    folder = Path(stale[0]).parent
    assert numbers(str(folder)) == numbers(stale) == {"a": 1, "b": 2, "c": 3}
    (folder / INDEX).unlink()
    with pytest.raises(errors.CheckpointError, match="disagree"):
        numbers(stale)


def test_files_without_an_index_of_their_own(stale: list[str]) -> None:
    folder = Path(stale[0]).parent
    samples.save(folder / "mtp.safetensors", {"a": np.zeros((2, 2), np.float32)})
    with pytest.raises(errors.CheckpointError, match="disagree"):
        numbers([*stale, str(folder / "mtp.safetensors")])
    assert numbers(stale[1:]) == {"a": 9, "c": 3}


def test_options_of_peers(tmp_path: Path) -> None:
    """As JSON has them, since serving systems take no others."""
    given = {"transports": ["http"], "stalled": 5}
    array = np.arange(6, dtype=np.float32)
    with mfload.publish({"x": array}, model="org/name") as seed:
        weights = Weights({"path": seed.url, "peer": given})
        ((name, tensor),) = weights.rows(seed.url)
        assert torch.equal(torch.empty(6).copy_(tensor), torch.from_numpy(array))
    assert name == "x"
    assert {engine for _, engine, _ in weights.report.route} == {"peer-http"}
    with pytest.raises(errors.UsageError, match=r"key that mfload does not know.*'transport'"):
        Weights({"peer": {"transport": "http"}})
    for name in ("copy", "checksums", "publish"):
        with pytest.raises(errors.UsageError, match=f"{name} is invalid"):
            Weights({"peer": {name: "false"}})
