"""Orbax's checkpoints against Orbax's own restore, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax_writer
import pytest

import mfload
from mfload.formats import orbax, structure

pytestmark = pytest.mark.filterwarnings("ignore")  # Of Orbax's own.


def same(found: dict[str, Any], wanted: Any) -> None:
    expected = dict(orbax_writer.leaves(wanted))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        array, mine = np.asarray(value), np.asarray(found[name])
        array = array.astype(array.dtype.newbyteorder("="))
        assert (mine.dtype, mine.shape) == (array.dtype, array.shape), name
        assert mine.tobytes() == array.tobytes(), name


def own(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(orbax.locate(path))


@pytest.mark.parametrize("kind", orbax_writer.KINDS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_what_orbax_restores(tmp_path: Path, kind: str, devices: int) -> None:
    saved = orbax_writer.tree(devices)
    orbax_writer.save(tmp_path / "x", kind, saved)
    found = mfload.load(tmp_path / "x", "numpy")
    same(found, own(tmp_path / "x"))
    same(found, saved)
    text = mfload.open(tmp_path / "x", "numpy").metadata()[structure.KEY]
    rebuilt = structure.loads(text, "x", found.__getitem__)
    assert rebuilt["empty"] == {"dict": {}, "list": [], "tuple": ()}
    assert rebuilt["nothing"] is None
    assert rebuilt["params"]["layers"][1]["k"] is found["params.layers.1.k"]
    assert rebuilt["numbered"]["3"] is found["numbered.3"]
    assert len(jax.devices()) == 8
