"""Restores by several processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import launching
import numpy as np
import orbax_savers
import pytest
import restore_process
from flax import nnx, serialization, traverse_util
from restore_cases import assert_same, keyless, linen_state, nnx_state

import mfload

_FILES = ("state.msgpack", "state.safetensors", "orbax", "raw")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    state = serialization.to_state_dict(linen_state(steps=2))
    state["step"] = np.int32(state["step"])
    (directory / "wanted.msgpack").write_bytes(serialization.msgpack_serialize(state))
    (directory / "state.msgpack").write_bytes(serialization.msgpack_serialize(state))
    flat = traverse_util.flatten_dict(state, sep=".")
    mfload.save({k: np.asarray(v) for k, v in flat.items()}, directory / "state.safetensors")
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    kernels = jax.NamedSharding(mesh, jax.P("y", "x"))
    sharded = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, kernels) if "kernel" in str(path) else x, state
    )
    orbax_savers.save("standard", directory / "orbax", sharded)
    orbax_savers.save("raw-zarr3", directory / "raw", sharded)
    model = keyless(nnx.to_pure_dict(nnx_state(steps=1)))
    (directory / "net.msgpack").write_bytes(serialization.to_bytes(model))
    return directory


def launch(saved: Path, cases: list[str], **how: Any) -> Any:
    script = Path(restore_process.__file__)
    return launching.launch(saved, cases, seconds=120, script=script, **how)


@pytest.mark.parametrize(("count", "devices"), [(2, 4), (2, 1)])
def test_each_process_gets_its_shards(saved: Path, count: int, devices: int) -> None:
    cases = [f"{name}:{how}" for name in _FILES for how in ("rows", "own", "free")]
    cases.append("net.msgpack:keys")
    for each in launch(saved, cases, count=count, devices=devices):
        assert each.code == 0, each.log
        for case in cases:
            line = each.said[case]
            assert line["error"] is None, (case, line["error"], line["text"])
            assert (line["live"], line["processes"]) == (0, count)


def test_what_two_processes_saved(saved: Path) -> None:
    for count, cases in ((2, ["both:save", "both:rows", "both:own"]), (1, ["both:rows"])):
        for each in launch(saved, cases, count=count, devices=8 // count):
            assert each.code == 0, each.log
            lines = {case: each.said[case].get("text") for case in cases}
            assert not any(lines.values()), lines
    assert len([*(saved / "both").glob("ocdbt.process_*")]) == 2
    wanted = linen_state(steps=2)
    assert_same(mfload.restore(saved / "both", linen_state(seed=1)), wanted)


@pytest.mark.parametrize("how", ["wrong", "gone", "gone-free"])
def test_what_fails_in_one_fails_in_both(saved: Path, how: str) -> None:
    case = f"state.msgpack:{how}"
    lines = [each.said[case] for each in launch(saved, [case], count=2, devices=1)]
    own = "MappingError" if how == "wrong" else "SourceNotFoundError"
    assert [line["error"] for line in lines] == ["ProcessError", own], lines
    assert all(line["typed"] for line in lines)
