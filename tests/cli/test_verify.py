"""`mfload verify`: what it prints, and the exit codes that scripts go by."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import samples
from conftest import Run, process


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_a_sound_checkpoint(run: Run, model: Path) -> None:
    ran = run("verify", model)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("verified  headers only")
    assert lines[1].startswith("holds     6 tensors in 1 file, 5.")
    assert lines[2] == "checked   headers"
    found = run("verify", model, "--json").json
    assert (found["ok"], found["problems"], found["tensors"]) == (True, [], 6)


def test_checksums_written_checked_and_broken(run: Run, model: Path) -> None:
    ran = run("verify", model, "--mode", "write")
    assert ran.code == 0
    assert f"manifest  {model.with_name('model.safetensors.checksums.json')}" in ran.out
    assert run("verify", model, "--mode", "check").code == 0
    assert run("load", model).code == 0
    _flip(model)
    ran = run("verify", model, "--mode", "check")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("verified  2 problems\n")
    # Not asked for, the manifest is compared all the same.
    assert run("verify", model).out.startswith("verified  2 problems\n")
    assert run("verify", model, "--no-checksums").code == 0
    assert "problem   the tensor's bytes have changed" in ran.out
    found = run("verify", model, "--mode", "check", "--json")
    assert found.code == 1
    assert found.json["problems"][0]["tensor"] == "embed.weight"
    # What the manifest knows is not written over.
    ran = run("verify", model, "--mode", "write")
    assert (ran.code, ran.out) == (3, "")
    assert "the file exists already; --overwrite replaces it" in ran.err
    assert run("verify", model, "--mode", "write", "--overwrite").code == 0
    assert run("verify", model, "--mode", "check").code == 0


def test_one_algorithm(run: Run, model: Path) -> None:
    at = model.with_name("model.safetensors.checksums.json")
    for algorithm in ("xxh3", "sha256"):
        ran = run("verify", model, "--mode", "write", "--overwrite", "--checksums", algorithm)
        assert ran.code == 0
        assert ("digest" in at.read_text()) == (algorithm == "xxh3")
        assert run("verify", model, "--checksums", algorithm).code == 0
        assert run("verify", model, "--mode", "check").code == 0
    assert run("verify", model, "--checksums", "xxh3").code == 2
    assert "xxh3 | sha256 | both" in run("verify", model, "--checksums", "md5").err


def test_a_manifest_elsewhere(run: Run, shards: Path, tmp_path: Path) -> None:
    where = tmp_path / "sums.json"
    ran = run("verify", shards, "--mode", "write", "--manifest", where)
    assert ran.code == 0
    assert where.exists()
    assert run("verify", shards, "--mode", "check", "--manifest", where).code == 0
    assert run("verify", shards, "--manifest", where).code == 0
    assert run("verify", shards, "--manifest", where, "--no-checksums").code == 2
    ran = run("verify", shards, "--mode", "check")
    assert ran.code == 3
    where.write_text("{}")
    assert run("verify", shards, "--mode", "check", "--manifest", where).code == 4


def test_against_another(run: Run, shards: Path, tmp_path: Path) -> None:
    arrays = {"a": np.zeros((8, 4), np.float32), "b": np.zeros(6, np.int16),
              "c": np.zeros(1, np.float32)}  # fmt: skip
    other = samples.save(tmp_path / "other.safetensors", arrays)
    assert run("verify", shards, "--against", other).code == 0
    arrays["b"][4] = 7
    samples.save(other, arrays)
    ran = run("verify", shards, "--against", other)
    assert ran.code == 1
    assert "the tensors differ from [4] on" in ran.out
    assert "expected: 0 (0x0000); found: 7 (0x0007)" in ran.out
    assert run("verify", shards, "--against", tmp_path / "none.safetensors").code == 3


def test_published_sums(run: Run, model: Path) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert run("verify", model, "--sha256", digest).code == 0
    assert run("verify", model, "--sha256", "0" * 64).code == 1
    sums = model.with_name("SHA256SUMS")
    sums.write_text(f"{digest}  {model.name}\n")
    assert run("verify", model, "--sha256", sums).code == 0
    assert run("verify", model, "--sha256", "auto").code == 1
    assert run("verify", model, "--sha256", model.with_name("none")).code == 3


def test_damage_is_a_finding_and_a_missing_file_is_not(run: Run, shards: Path) -> None:
    os.truncate(shards / "model-00001-of-00002.safetensors", 40)
    ran = run("verify", shards)
    assert (ran.code, ran.err) == (1, "")
    assert "model-00001-of-00002.safetensors" in ran.out
    ran = run("verify", shards / "none.safetensors")
    assert (ran.code, ran.out) == (3, "")
    assert "none.safetensors" in ran.err


@pytest.mark.parametrize("word", ["read", ""])
def test_words_that_mean_nothing(run: Run, model: Path, word: str) -> None:
    ran = run("verify", model, "--mode", word)
    assert (ran.code, ran.out) == (2, "")
    assert "auto | write | check" in ran.err
    assert run("verify", model, "--mode", word, "--json").json["error"]["found"] == word


def test_without_the_package_that_hashes(model: Path) -> None:
    ran = process(
        "verify", model, "--mode", "write", code="import sys; sys.modules['xxhash'] = None"
    )
    assert (ran.code, ran.out) == (5, "")
    assert "pip install 'xxhash>=" in ran.err
    assert process("verify", model).code == 0


def test_names_that_would_colour_the_terminal(run: Run, tmp_path: Path) -> None:
    a = samples.save(tmp_path / "a.safetensors", {"x\x1b[31m": np.zeros(1)})
    b = samples.save(tmp_path / "b.safetensors", {"y\x1b[31m": np.zeros(1)})
    ran = run("verify", a, "--against", b)
    assert ran.code == 1
    assert "\x1b" not in ran.out
    assert "\\x1b" in ran.out


def test_the_manifest_of_other_data(run: Run, model: Path) -> None:
    assert run("verify", model, "--mode", "write").code == 0
    samples.save(model, {"other": np.ones(3)})
    ran = run("verify", model)
    assert ran.code == 1
    assert ran.out.startswith("verified  1 problem\n")
    assert "problem   the manifest is of other data" in ran.out
