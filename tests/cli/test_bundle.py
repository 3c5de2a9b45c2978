"""`mfload bundle` and `mfload unbundle`: what they write and say, and the exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import samples
from conftest import Run

import mfload


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    rules = ("--up", r"(\d+)\.up", "--down", r"(\d+)\.down")
    arrays = {name: samples.numbers((64, 32)) for name in ("0.up", "0.gate")}
    arrays |= {"0.down": samples.numbers((32, 64)), "norm": samples.numbers((32,))}
    mfload.save(arrays, tmp_path / "a.safetensors")
    names = [tmp_path / f"{name}.safetensors" for name in "abc"]
    ran = run("bundle", names[0], names[1], *rules)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("bundled  3 tensors, ")
    assert run("bundle", names[0], names[1], *rules).code == 3
    more = ("--gate", r"(\d+)\.gate", "--max-host-overhead", "16MiB", "--overwrite", "--json")
    again = run("bundle", names[0], names[1], *rules, *more)
    assert (again.json["files"], again.json["tensors"]) == ([os.fspath(names[1])], 2)
    assert mfload.load(names[1], "numpy")["0.bundle"].shape == (64, 3, 32)
    ran = run("unbundle", names[1], names[2])
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("unbundled  4 tensors, ")
    assert run("diff", names[0], names[2]).code == 0


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    mfload.save({"0.up": samples.numbers((8, 4))}, tmp_path / "a.safetensors")
    given = ("bundle", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert run(*given).code == 2
    ran = run(*given, "--up", r"(\d+)\.up", "--down", r"(\d+)\.down")
    assert (ran.code, ran.out) == (2, "")
    assert "layer 0 has no tensor that down matches" in ran.err
    assert run("unbundle", *given[1:]).code == 4
    assert os.listdir(tmp_path) == ["a.safetensors"]
