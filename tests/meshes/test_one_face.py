"""Arguments that all calls share, of those that need JAX; calls that name no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mfload


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mfload.save({"w": np.ones((2, 2), "f4"), "b": np.ones(2, "f4")}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_names_of_load_into_leave_the_rest_as_it_is(path: Path) -> None:
    target = {"w": np.zeros((2, 2), "f4"), "b": np.zeros(2, "f4")}
    found = mfload.load_into(target, path, names=iter(["w"]))
    assert (found["w"].sum(), found["b"].sum()) == (4, 0)
    with pytest.raises(mfload.errors.TensorNotFoundError):
        mfload.load_into(target, path, names="nothing")


@pytest.mark.parametrize("target", [None, {"w": np.zeros((2, 2), "f4"), "b": np.zeros(2, "f4")}])
def test_restore_falls_back(path: Path, target: Any) -> None:
    report = mfload.Report()
    given: Any = {"framework": "numpy", "fallback": path, "report": report}
    found = mfload.restore(path.with_name("missing"), target, **given)
    assert found["w"].sum() == 4
    assert "missing failed" in report.notes[0]


def test_a_restore_that_names_no_framework(path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"write mfload.restore\(path, framework='jax'\)"):
        assert isinstance(mfload.restore(path)["w"], jax.Array)


def test_a_plan_on_a_mesh_that_names_no_framework(path: Path) -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    with pytest.warns(DeprecationWarning, match=r"write mfload.plan\(path, 'jax', mesh=…\)"):
        assert mfload.plan(path, mesh=mesh).framework == "jax"
