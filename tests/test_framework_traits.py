"""Plans for frameworks that are not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import samples

import mfload
from mfload import cli, errors
from mfload.frameworks.traits import TRAITS


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy alone is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in TRAITS else find(name)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows: list[Any] = [
        (name, name, (4, 8), bytes(row.size_of((4, 8)) or 0))
        for name, row in mfload.dtypes.TABLE.items()
    ]
    return samples.save_raw(tmp_path / "model.safetensors", rows)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", TRAITS)
def test_a_plan_needs_no_framework(
    name: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = mfload.plan(path, name)
    assert plan.framework == name
    assert plan.tensors == len(mfload.dtypes.TABLE)
    assert f"{name} is not installed: planned " in plan.notes[-1]
    assert cli.run(["plan", str(path), "-f", name, "--device", "cpu"]) == 0
    assert f"{name} is not installed" in capsys.readouterr().out
    for call in (
        lambda: mfload.plan(path, name, device="cuda:0"),
        lambda: mfload.load(path, name),
    ):
        with pytest.raises(errors.FrameworkMissingError):
            call()
