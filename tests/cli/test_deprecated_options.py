"""Old spellings of options: they work for one version, with a warning that names the new one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Run

import mfload

# What is typed, what the warning says of it, what it says to write, and what was done.
SPELLINGS: dict[str, tuple[str, str, str, bool]] = {
    "write": ("--checksums write", "--checksums write", "--mode write", True),
    "check": ("--checksums check", "--checksums check", "--mode check", True),
    "auto": ("--checksums auto", "--checksums auto", "--mode auto", True),
    "never": ("--checksums never", "--checksums never", "--no-checksums", False),
    "algorithm": ("--algorithm xxh3", "--algorithm xxh3", "--checksums xxh3", True),
    "algorithm that is written": (
        "--algorithm xxh3 --checksums write", "--checksums write, --algorithm xxh3",
        "--mode write, --checksums xxh3", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_old_option_works_and_warns(name: str, run: Run, tmp_path: Path) -> None:
    typed, old, new, compares = SPELLINGS[name]
    path = tmp_path / "x.safetensors"
    mfload.save({"x": np.arange(6, dtype=np.float32)}, path)
    if "write" not in typed:
        mfload.verify(path, mode="write")
    ran = run("verify", path, *typed.split())
    assert ran.code == 0
    said = " ".join(ran.err.split()).replace(",", "")
    assert f"mfload verify {old} is deprecated; write mfload verify {new}".replace(",", "") in said
    assert ("checksums" in ran.out) == compares
    assert path.with_name("x.safetensors.checksums.json").exists()
    again = run(
        "verify", path, *(["--overwrite"] if "write" in new else []), *new.replace(",", "").split()
    )
    assert again.code == 0
    assert "deprecated" not in again.err
