"""Several processes: the same values as one, every byte read once, the figures of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import launching
import numpy as np
import orbax_writer
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from world import model

from mfload.formats import checkpoint
from mfload.mesh import base as mesh_base

MANY_ROUNDS = 4 << 20
SPECS = ("rows", "columns", "grid", "across", "partly", "replicated")
BLOCK = 256 << 10


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


@pytest.mark.parametrize(
    ("cut", "store"),
    [((), "ocdbt"), (("a",), "files"), ((None, "a"), "ocdbt"), (("a", "b"), "files")],
)
def test_an_encoded_piece_is_read_by_one_process(
    tmp_path: Path, cut: tuple[str | None, ...], store: str
) -> None:
    """Chunks of all forms, for processes that want rows, columns or all, in few rounds or many."""
    rng, mesh = np.random.default_rng(3), Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    held = {f"t{n}": (rng.integers(0, 99, (384, 1024)) / 8).astype(np.float32) for n in range(3)}
    tree = {name: jax.device_put(t, NamedSharding(mesh, P(*cut))) for name, t in held.items()}
    orbax_writer.save(tmp_path / "compressed", f"v0-{store}-zarr2-zstd", tree)
    safetensors.numpy.save_file(held, tmp_path / "held")
    index, _ = checkpoint.read(tmp_path / "compressed")
    infos = [index[name] for name in held]
    total = sum(nbytes for info in infos for _, nbytes in mesh_base.encoded(info))
    assert 0 < total < sum(info.nbytes for info in infos) / 2
    names = [f"compressed:{spec}:once" for spec in ("rows", "columns", "replicated")]
    names += [f"{name}:{MANY_ROUNDS}" for name in names]
    names += ["compressed:columns:never"]
    ended = launching.launch(tmp_path, names, count=4, devices=1, seconds=90)
    for name in names[:-1]:
        lines = [each[name] for each in cases(ended, names)]
        assert sum(line["read_bytes"] for line in lines) == total, name
        assert sum(line["counted"] for line in lines) == total, name
        assert all("every byte is read by one process" in str(line["notes"]) for line in lines)
