"""Steps as `flax.training.checkpoints` writes them are found as its own restore finds them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import orbax_savers
import pytest
from flax.training import checkpoints
from hypothesis import example, given, settings, strategies as st

import mfload
from mfload import errors

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated"),
]

PREFIXES = ["checkpoint_", "model_", "ckpt-", "a.b_", "run", "v1_", "step=", ""]
STEPS = st.one_of(
    st.integers(0, 10**12), st.integers(0, 20), st.floats(-1e3, 1e6), st.floats(0, 1e-3)
)


@pytest.fixture(params=["files", "directories"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    flax.config.update("flax_use_orbax_checkpointing", request.param == "directories")
    yield request.param
    flax.config.update("flax_use_orbax_checkpointing", True)


def save(path: Any, step: float, prefix: str = "checkpoint_") -> None:
    state = {"w": jnp.full(2, float(step))}
    checkpoints.save_checkpoint(path, state, step, prefix=prefix, keep=99, overwrite=False)


def found(path: Any, **how: Any) -> Any:
    return mfload.restore(path, framework="numpy", **how)["w"].tolist()


@settings(max_examples=8)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=3, unique_by=float),
    prefix=st.sampled_from(PREFIXES),
    legacy=st.booleans(),
)
@example(steps=[0.5, 1.5], prefix="checkpoint_", legacy=True)
@example(steps=[0.5, 1.5], prefix="checkpoint_", legacy=False)
@example(steps=[1e-05, 0.001, 2e20], prefix="model_", legacy=True)
@example(steps=[5, 10], prefix="run-", legacy=True)  # Flax takes the dash for a sign.
@example(steps=[-5.0, 3.0], prefix="run", legacy=True)
@example(steps=[3, 20, 100], prefix="test", legacy=False)
def test_found_as_flax_finds_them(steps: list[float], prefix: str, legacy: bool) -> None:
    flax.config.update("flax_use_orbax_checkpointing", not legacy)
    try:
        with tempfile.TemporaryDirectory() as path:
            root = Path(path, "each")
            root.mkdir()
            for step in steps:  # Apart, since Flax refuses a step before the newest.
                save(Path(path, str(step)), step, prefix)
                Path(path, str(step), f"{prefix}{step}").rename(root / f"{prefix}{step}")
            compare(root, steps, prefix)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", True)


def compare(root: Path, steps: list[float], prefix: str) -> None:
    if prefix:
        (root / f"{prefix}tmp").write_bytes(b"half")
        (root / "logs").mkdir()
    # In `run-5` the dash may be a sign or the end of the prefix.
    how = [{"prefix": prefix}, *([] if prefix == "run" and min(steps) < 0 else [{}])]
    for step in (None, *steps):
        wanted = checkpoints.restore_checkpoint(root, None, step, prefix)["w"].tolist()
        for each in how:
            assert found(root, step=step, **each) == wanted
    for each in how:
        with pytest.raises(errors.SourceNotFoundError, match=r"no step 7777777\.5"):
            found(root, step=7777777.5, **each)


def test_prefixes_side_by_side(tmp_path: Path, kind: str) -> None:
    for step, prefix in ((1, "best_"), (2.5, "last_"), (3, "last_")):
        save(tmp_path, step, prefix)
    with pytest.raises(errors.CheckpointError, match="give the prefix") as caught:
        found(tmp_path)
    assert caught.value.problems == ("best_1", "last_3")
    assert found(tmp_path, prefix="best_") == [1, 1]
    assert found(tmp_path, prefix="last_") == [3, 3]
    assert found(tmp_path, step=2.5) == [2.5, 2.5]  # Of one prefix only.
    with pytest.raises(errors.SourceNotFoundError, match=r"no step 1 .*expected: 2\.5, 3"):
        found(tmp_path, step=1, prefix="last_")
    with pytest.raises(errors.SourceNotFoundError, match="no step with the prefix 'other_'"):
        found(tmp_path, prefix="other_")
    save(tmp_path, 2)
    assert found(tmp_path) == [2, 2]  # Flax looks for this one.
    assert found(tmp_path, prefix="last_") == [3, 3]


def test_one_number_in_two_spellings(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1.0)
    for step in (1, 1.0, np.float32(1)):
        assert found(tmp_path, step=step) == found(tmp_path / f"checkpoint_{step}")
    with pytest.raises(errors.CheckpointError, match="several checkpoints of step 1") as caught:
        found(tmp_path)
    assert caught.value.problems == ("checkpoint_1", "checkpoint_1.0")


def test_steps_of_arrays(tmp_path: Path, kind: str) -> None:
    for step in (0.1, 7):
        save(tmp_path, step)
    assert found(tmp_path, step=np.float32(0.1)) == found(tmp_path, step=jnp.float32(0.1))
    assert found(tmp_path, step=jnp.int32(7)) == found(tmp_path, step=7.0) == [7, 7]
    for bad in ("7", [7], np.arange(2), 1j, True, False):
        with pytest.raises(errors.UsageError, match="step is invalid"):
            found(tmp_path, step=bad)


def test_what_is_no_step(tmp_path: Path) -> None:
    """Files whose names end with a number lie beside the steps of Orbax."""
    with orbax_savers.manager(tmp_path / "run") as manager:
        manager.save(3, args=orbax_savers.ocp.args.StandardSave({"w": jnp.full(2, 3.0)}))
    (tmp_path / "run" / "log.4").write_text("text")
    (tmp_path / "run" / "plot_5").write_bytes(b"\x89PNG")
    (tmp_path / "run" / "core.6").write_bytes(b"")
    (tmp_path / "run" / ("data" + "7" * 30)).write_bytes(b"\x81\xa1a\x01")
    assert found(tmp_path / "run") == [3, 3]
    for how in ({"prefix": "checkpoint_"}, {"step": 4}):
        with pytest.raises(errors.SourceNotFoundError):
            found(tmp_path / "run", **how)
    for how in ({"prefix": ""}, {"step": 3}):
        with pytest.raises(errors.UsageError, match="has no steps"):
            found(tmp_path / "run" / "3", **how)
    with pytest.raises(errors.UsageError, match="prefix is invalid"):
        found(tmp_path / "run", prefix=3)
    with pytest.raises(errors.UsageError, match="prefix= is for a directory"):
        mfload.restore(tmp_path / "x.safetensors", framework="jax", prefix="a")
