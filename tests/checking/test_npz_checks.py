"""Checking NumPy's archives: CRCs, manifests, comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import errors

_RNG = np.random.default_rng(0)
_ARRAYS: dict[str, Any] = {
    "c": _RNG.normal(size=(300, 700)).astype("f4"),
    "f": np.asfortranarray(_RNG.normal(size=(900, 130))),
    "b": _RNG.integers(0, 99, 4000).astype(">i4"),
    "zero": np.zeros((0, 3), "f4"),
    "flat": np.zeros(2_000_000, "f4"),
}


@pytest.fixture(params=["savez", "savez_compressed"])
def path(request: Any, tmp_path: Path) -> Path:
    getattr(np, request.param)(tmp_path / "x.npz", **_ARRAYS)
    return tmp_path / "x.npz"


def test_verify_compares_crcs(path: Path) -> None:
    found = mfload.verify(path)
    assert found.ok, found.problems
    assert found.data_checked
    assert "crc32" in found.checked
    assert mfload.verify(path, checksums=False).checked == ("headers",)


@pytest.mark.parametrize("name", ["c", "f"])
def test_verify_finds_damage_that_a_load_does_not(name: str, path: Path) -> None:
    with mfload.open(path, framework="numpy") as opened:
        piece = opened.info(name).pieces[0]
    raw = bytearray(path.read_bytes())
    raw[piece.offset + piece.nbytes // 2] ^= 1
    path.write_bytes(raw)
    found = mfload.verify(path)
    (problem,) = found.problems
    assert problem.tensor == name
    assert problem.what == "the CRC-32 differs from the archive's"


def test_manifests_hold_what_is_stored(path: Path) -> None:
    assert mfload.verify(path, mode="write").ok
    assert "checksums" in mfload.verify(path).checked
    manifest = path.with_name("x.npz.checksums.json")
    loaded = mfload.load(path, "numpy", verify=manifest, options=mfload.Options(threads=3))
    assert np.array_equal(loaded["f"], _ARRAYS["f"])
    with mfload.open(path, framework="numpy") as opened:
        piece = opened.info("b").pieces[0]
    raw = bytearray(path.read_bytes())
    raw[piece.offset + piece.nbytes // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(errors.FormatError) as caught:
        mfload.load(path, "numpy", verify=manifest)
    assert caught.value.tensor == "b"


def test_other_formats_compare_equal(path: Path, tmp_path: Path) -> None:
    plain = {
        name: np.ascontiguousarray(a).astype(a.dtype.newbyteorder("="))
        for name, a in _ARRAYS.items()
    }
    mfload.save(plain, tmp_path / "y.safetensors")
    assert mfload.diff(path, tmp_path / "y.safetensors").equal
    assert mfload.verify(path, against=tmp_path / "y.safetensors").ok
    plain["f"] = plain["f"].copy()
    plain["f"][800, 100] += 1
    mfload.save(plain, tmp_path / "y.safetensors", overwrite=True)
    found = mfload.diff(path, tmp_path / "y.safetensors")
    (changed,) = found.changed
    assert (changed.name, changed.at, changed.differing) == ("f", (800, 100), 1)
    assert not mfload.verify(tmp_path / "y.safetensors", against=path).ok


def test_unknown_dtypes_are_not_called_equal(tmp_path: Path) -> None:
    for name in ("x.npz", "y.npz"):
        np.savez_compressed(tmp_path / name, o=np.array(["a"]))
    assert not mfload.verify(tmp_path / "x.npz", against=tmp_path / "y.npz").ok
    assert not mfload.diff(tmp_path / "x.npz", tmp_path / "y.npz").equal


def test_align_is_for_safetensors(path: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="safetensors"):
        mfload.align(path, tmp_path / "y.safetensors")
