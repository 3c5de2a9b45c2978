"""Saves of global arrays by two processes of four devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import launching
import ml_dtypes
import numpy as np
import pytest
import save_process

import mfload


def _launch(directory: Path, *cases: str) -> Any:
    script = Path(save_process.__file__)
    return launching.launch(directory, cases, count=2, devices=4, seconds=60, script=script)


def _hidden(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".mfload")]


def _assert_same(found: Any) -> None:
    for name, array in save_process.ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_each_writes_what_it_holds(tmp_path: Path) -> None:
    cases = ("flat", "tree", "shards", "alone", "boxes", "exists", "differ", "other-sums", "fails")
    one, two = _launch(tmp_path, *cases)
    for each in (one, two):
        for case in cases[:5]:
            assert each.said[case]["error"] is None, (case, each.said[case], each.log)
        done, whole = each.said["flat"]["seen"]
        assert done == whole == (tmp_path / "flat.safetensors").stat().st_size
    found = mfload.load(tmp_path / "flat.safetensors", "numpy")
    _assert_same(found)
    assert (found["host"] == np.arange(5)).all()
    assert (found["turned"].T.ravel() == np.arange(9 << 20)).all()
    tree = mfload.restore(tmp_path / "tree.safetensors", framework="numpy")
    assert tree["step"] == 3
    _assert_same(tree["params"])
    assert (mfload.load(tmp_path / "alone.safetensors", "numpy")["x"] == np.arange(7)).all()
    index = tmp_path / "shards.safetensors.index.json"
    _assert_same(mfload.load(index, "numpy"))
    _assert_same(mfload.load(tmp_path / "boxes.safetensors", "numpy"))
    assert one.said["shards"]["done"] == two.said["shards"]["done"]
    assert any("checksums written" in note for note in two.said["shards"]["done"]["notes"])
    assert one.said["shards"]["files"] == two.said["shards"]["files"] > 2
    assert mfload.verify(index, mode="check").ok
    assert {each.said["exists"]["error"] for each in (one, two)} == {
        "TargetExistsError",
        "ProcessError",
    }
    for case in ("differ", "other-sums"):
        assert {each.said[case]["error"] for each in (one, two)} == {"ProcessError"}
    assert one.said["fails"]["error"] == "ProcessError"
    assert two.said["fails"]["error"] == "WriteError"
    assert not (tmp_path / "fails.safetensors").exists()
    assert not _hidden(tmp_path)


def test_in_the_background(tmp_path: Path) -> None:
    cases = ("flat", "background", "background-exists", "background-fails", "tree")
    one, two = _launch(tmp_path, *cases)
    for each in (one, two):
        for case in ("flat", "background", "tree"):
            assert each.said[case]["error"] is None, (case, each.said[case], each.log)
    found = mfload.load(tmp_path / "background.safetensors", "numpy")
    _assert_same(found)
    assert (found["host"] == np.arange(5)).all()
    _assert_same(mfload.load(tmp_path / "several/", "numpy"))
    assert one.said["background"]["copied"] == np.arange(5).nbytes
    assert two.said["background"]["copied"] == 0  # The first process writes what all have.
    raised = {each.said["background-exists"]["error"] for each in (one, two)}
    assert raised == {"TargetExistsError", "ProcessError"}
    assert one.said["background-fails"]["error"] == "ProcessError"
    assert two.said["background-fails"]["error"] == "WriteError"
    assert not (tmp_path / "background-fails.safetensors").exists()
    assert not _hidden(tmp_path)


@pytest.mark.parametrize("case", ["dies", "late"])
def test_one_is_gone(case: str, tmp_path: Path) -> None:
    one, _ = _launch(tmp_path, case)
    assert one.said[case]["error"] in ("ProcessError", "LoadTimeoutError"), one
    assert not (tmp_path / f"{case}.safetensors").exists()
    assert not _hidden(tmp_path)


def test_arrays_that_all_hold_whole(tmp_path: Path) -> None:
    """Data parallel training: every process makes the call, and there is one checkpoint."""
    ended = _launch(tmp_path, "replicated", "packed", "packed-parts", "deleted", "flat")
    for each in ended:
        assert each.said["replicated"]["error"] is None, (each.said, each.log)
        assert each.said["packed"]["error"] is None, (each.said, each.log)
        assert each.said["flat"]["error"] is None, (each.said, each.log)
        for case, text in (("packed-parts", "share a byte"), ("deleted", "was deleted")):
            assert each.said[case]["error"] in ("UnsupportedArrayError", "ProcessError")
            assert text in each.said[case]["text"]
    assert ended[0].said["replicated"]["done"] == ended[1].said["replicated"]["done"]
    found = mfload.restore(tmp_path / "replicated.safetensors", framework="numpy")
    assert found["step"] == 3
    _assert_same(found["params"])
    packed = mfload.load(tmp_path / "packed.safetensors", "numpy")["four"]
    four = mfload.unpack(packed, "F4", (2, 4)).astype(np.float32)
    wanted = np.arange(8).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert (four.reshape(-1) == wanted).all(), four
    assert not _hidden(tmp_path)


def test_a_process_that_does_not_call(tmp_path: Path) -> None:
    one, _ = _launch(tmp_path, "absent")
    assert one.said["absent"]["error"] == "ProcessError"
    assert "jax.device_get" in one.said["absent"]["text"]
    assert not (tmp_path / "absent.safetensors").exists()
    assert not _hidden(tmp_path)


def test_what_is_wrong_in_one_is_raised_in_both(tmp_path: Path) -> None:
    one, two = _launch(tmp_path, "tree-of-one", "sums", "host", "flat")
    assert one.said["flat"]["error"] is two.said["flat"]["error"] is None, one.log
    for case, own in (("tree-of-one", "UnsupportedArrayError"), ("sums", "UsageError")):
        assert (one.said[case]["error"], two.said[case]["error"]) == ("ProcessError", own)
    for each in (one, two):
        assert each.said["host"]["error"] == "ProcessError"
        assert "process 1: own: values" in each.said["host"]["text"]
    assert sorted(each.name for each in tmp_path.glob("*safetensors*")) == ["flat.safetensors"]
    assert not _hidden(tmp_path)


def test_the_next_save_removes_what_the_first_process_left(tmp_path: Path) -> None:
    _, two = _launch(tmp_path, "first-dies")
    assert two.said.get("first-dies", {"error": "none"})["error"] is not None
    path = tmp_path / "first-dies.safetensors"
    assert not path.exists()
    assert _hidden(tmp_path)
    mfload.save({"a": np.ones(2)}, path)
    assert not _hidden(tmp_path)
