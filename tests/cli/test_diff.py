"""`mfload diff`: the table, the largest change first, and the exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import samples
from conftest import Run


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    a = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([2**60, 1]),
         "same": np.ones(4, np.float16), "gone": np.zeros(1)}  # fmt: skip
    b = {"w": a["w"].copy(), "n": a["n"].copy(), "same": a["same"], "new": np.zeros(1)}
    b["w"][1, 2] = 4.5
    b["n"][0] += 1
    return samples.save(tmp_path / "a.safetensors", a), samples.save(tmp_path / "b.safetensors", b)


def test_the_table(run: Run, sides: tuple[Path, Path]) -> None:
    ran = run("diff", *sides)
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert lines[0] == "compared   they differ"
    assert lines[1] == "tensors    3 in both, 2 of them changed"
    assert lines[2:4] == ["only in a  1: gone", "only in b  1: new"]
    assert lines[-3:] == [
        "max abs    max rel  differing  nan  dtype  shape   name",
        "      1  8.674e-19          1    0  I64    [2]     n",
        "    0.5        0.1          1    0  F32    [2, 3]  w",
    ]


def test_what_is_shown(run: Run, sides: tuple[Path, Path]) -> None:
    assert "same" not in run("diff", *sides).out
    assert run("diff", *sides, "--all").out.splitlines()[-1].endswith("same")
    found = run("diff", *sides, "--json")
    assert found.code == 1
    assert [each["name"] for each in found.json["tensors"]] == ["n", "w"]
    assert found.json["only_a"] == ["gone"]
    assert found.json["tensors"][0]["max_abs"] == 1
    assert len(run("diff", *sides, "--all", "--json").json["tensors"]) == 3


def test_tolerances(run: Run, sides: tuple[Path, Path]) -> None:
    wanted = ("--names", "^(w|n|same)$")
    for given, code in (((), 1), (("--rtol", "0.01"), 1), (("--atol", "0.4"), 1),
                        (("--atol", "0.6"), 1), (("--atol", "0.6", "--rtol", "1e-3"), 0),
                        (("--rtol", "0.2"), 0), (("--rtol", "-1"), 2)):  # fmt: skip
        assert run("diff", *sides, *wanted, *given).code == code, given
    found = run("diff", *sides, *wanted, "--rtol", "0.2", "--json").json
    assert (found["equal"], found["rtol"], found["atol"], found["tensors"]) == (True, 0.2, 0, [])


def test_no_difference(run: Run, sides: tuple[Path, Path]) -> None:
    ran = run("diff", sides[0], sides[0])
    assert ran.code == 0
    assert ran.out.startswith("compared  no difference\n")
    assert run("diff", *sides, "--names", "^same$").code == 0
    assert run("diff", *sides, "--names", "^(w|same)$").code == 1


def test_what_can_t_be_compared(run: Run, sides: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("diff", *sides, "--names", "zzz").code == 2
    assert run("diff", *sides, "--names", "(").code == 2
    assert run("diff", sides[0]).code == 2
    assert run("diff", sides[0], tmp_path / "none.safetensors").code == 3
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    assert run("diff", sides[0], tmp_path / "bad.safetensors").code == 4


def test_infinity_is_json(run: Run, tmp_path: Path) -> None:
    a = samples.save(tmp_path / "a.safetensors", {"w": np.array([np.inf, 1])})
    b = samples.save(tmp_path / "b.safetensors", {"w": np.array([1, np.nan])})
    (change,) = run("diff", a, b, "--json").json["tensors"]
    assert (change["max_abs"], change["nans"], change["differing"]) == ("inf", 1, 2)
