"""Several processes: the same values as one, every byte read once, the figures of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launching
import ml_dtypes
import numpy as np
import pytest
import samples

SPECS = ("rows", "columns", "grid", "across", "partly", "replicated")
BLOCK = 256 << 10


def model(directory: Path) -> int:
    """Two files; their bytes of tensors."""
    directory.mkdir()
    files = [
        {
            "t.a": samples.numbers((1024, 1024), ml_dtypes.bfloat16, 1),
            "t.b": samples.numbers((512, 2048), np.float32, 2),
            "t.c": samples.numbers((64, 16), np.int64, 3),
            "norm": samples.numbers((333,), np.float32, 4),
        },
        {
            "t.d": samples.numbers((2048, 512), np.float16, 5),
            "t.e": samples.numbers((16, 32), np.uint8, 6),
            "scalar": np.array(3.5, np.float32),
            "empty": np.zeros((0, 8), np.float32),
            "odd": samples.numbers((8, 7, 5), np.int8, 8),
        },
    ]
    names = [f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)]
    for name, arrays in zip(names, files, strict=True):
        samples.save(directory / name, arrays)
    weights = {key: name for name, arrays in zip(names, files, strict=True) for key in arrays}
    index = {"metadata": {}, "weight_map": weights}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(array.nbytes for arrays in files for array in arrays.values())


def cases(ended: list[launching.Ended], names: list[str]) -> list[dict[str, Any]]:
    """What each process said, all of whose cases went well."""
    for each in ended:
        assert each.code == 0, each.log
        assert list(each.said) == names, each.log
        for line in each.said.values():
            assert line["error"] is None, line
            assert line["live"] == 0, line
    return [each.said for each in ended]


@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 2)])
def test_values_and_bytes(tmp_path: Path, count: int, devices: int) -> None:
    """Each process compares its shards with the files, and counts what it reads at the source."""
    total = model(tmp_path / "model")
    names = [f"values:{spec}:{how}" for spec in SPECS for how in ("never", "once", "auto")]
    names += ["values:columns:once:4194304", "values:replicated:once:4194304"]
    ended = launching.launch(tmp_path, names, count=count, devices=devices, seconds=90)
    said = cases(ended, names)
    for name in names:
        lines = [each[name] for each in said]
        for line in lines:
            assert line["counted"] == line["read_bytes"], name
        if ":once" in name:
            assert sum(line["read_bytes"] for line in lines) == total
            for line in lines:
                assert line["over_read_bytes"] == 0
                assert line["read_bytes"] <= total / count + max(8192, total / 32 / count)
                if count == 2:
                    assert line["read_bytes"] <= 0.55 * total
        else:
            assert all(line["exchanged_bytes"] == 0 for line in lines), name
    rows = [each["values:rows:once"] for each in said]
    # Rows are read by those who want them: next to nothing travels.
    assert sum(line["exchanged_bytes"] for line in rows) < total / 20
    for line in [each["values:columns:auto"] for each in said]:
        assert any("each process reads its own" in note for note in line["notes"])
        assert any("measured" in note for note in line["notes"])
    for line in [each["values:replicated:once:4194304"] for each in said]:
        assert line["peak_bytes"] <= total + (1 << 16) + (4 << 20)
