"""Errors end as text on stderr or JSON on stdout, and as a code that scripts can use."""

from __future__ import annotations

import errno
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import samples
from conftest import Run

from mfload import errors
from mfload.cli import failures

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.MfloadError)
}
CODES = {
    "MfloadError": 5,
    "UsageError": 2,
    "ArgumentError": 2,
    "SourceError": 3,
    "SourceNotFoundError": 3,
    "SourcePermissionError": 3,
    "SourceChangedError": 3,
    "ReadError": 3,
    "LoadTimeoutError": 124,
    "TargetError": 3,
    "TargetExistsError": 3,
    "WriteError": 3,
    "FormatError": 4,
    "HeaderError": 4,
    "CheckpointError": 4,
    "ChecksumError": 1,
    "TensorNotFoundError": 2,
    "SliceError": 2,
    "ShardingError": 5,
    "MappingError": 5,
    "ProcessError": 5,
    "ShardNotFoundError": 4,
    "UnsupportedDtypeError": 5,
    "UnsupportedShapeError": 5,
    "UnsupportedArrayError": 5,
    "LossyCastError": 5,
    "MemoryLimitError": 5,
    "FrameworkMissingError": 5,
    "FrameworkVersionError": 5,
    "DeviceError": 5,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_error_has_its_code(name: str) -> None:
    assert failures.code_of(KINDS[name]("x")) == CODES[name]


def test_errors_of_others() -> None:
    assert failures.code_of(OSError(errno.ENOSPC, "full")) == 3
    assert failures.code_of(MemoryError()) == 5
    assert failures.code_of(ZeroDivisionError()) == 70


def test_fields_are_on_lines_of_their_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}more")
    ran = run("ls", path)
    assert ran == (
        4, "", "mfload: error: the file has bytes past its last tensor\n"
        f"  file: {path}\n  expected: 10 bytes\n  found: 14 bytes\n",
    )  # fmt: skip
    assert run("ls", path, "--json") == (
        4,
        '{"error": {"type": "HeaderError", "message": "the file has bytes past its last tensor", '
        f'"file": {json.dumps(str(path))}, "tensor": null, '
        '"expected": "10 bytes", "found": "14 bytes", "problems": []}}\n',
        "",
    )


def test_problems_are_listed(run: Run, shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    ran = run("load", shards)
    assert ran.code == 4
    lines = ran.err.splitlines()
    assert lines[0] == "mfload: error: shards are missing"
    assert any(line.startswith("  - 'model-00002-of-00002.safetensors' is named") for line in lines)
    problems = run("load", shards, "--json").json["error"]["problems"]
    assert [f"  - {line}" for line in problems] == lines[2:]


def test_many_problems_are_cut_for_people_not_for_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = errors.CheckpointError("m", problems=tuple(map(str, range(80))))
    failures.show(error, as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 52
    assert lines[-2:] == ["  - 49", "  … and 30 more"]
    failures.show(error, as_json=True)
    assert '"79"]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: path.chmod(0), 3),
        (lambda path: path.unlink(), 3),
        (lambda path: path.write_bytes(b""), 4),
        (lambda path: (path.unlink(), path.mkdir()), 3),
        (lambda path: (path.unlink(), os.mkfifo(path)), 3),
    ],
)
def test_sources(run: Run, model: Path, make: Any, code: int) -> None:
    make(model)
    if os.geteuid() == 0 and model.exists() and not model.stat().st_mode & 0o777:
        pytest.skip("root may read everything")
    ran = run("ls", model)
    assert (ran.code, ran.out) == (code, "")
    assert f"  file: {model}" in ran.err


def test_what_cannot_be_done_here(run: Run, tmp_path: Path, model: Path) -> None:
    assert run("load", model, "--device", "cuda:99").code == 5
    assert run("load", model, "--dtype", "int8").code == 5
    assert run("load", model, "--names", "steps", "--dtype", "steps=float4_e2m1fn").code == 5
    path = samples.save_raw(tmp_path / "y.safetensors", [("a", "Q4_0", (32,), b"x" * 18)])
    ran = run("load", path)
    assert ran.code == 5
    assert "  tensor: a\n" in ran.err


def test_time_that_runs_out(run: Run, model: Path) -> None:
    ran = run("load", model, "--timeout", "1e-9")
    assert ran.code == 124
    assert ran.err.startswith("mfload: error: ")
    data = run("load", model, "--timeout", "1e-9", "--json").json
    assert data["error"]["type"] == "LoadTimeoutError"


def test_text_is_harmless_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[31m[red]\n\u202e\ud800"
    error = errors.CheckpointError(
        bad + "x" * 10**6, file=bad, tensor=bad, expected=bad, found=[bad], problems=(bad,)
    )
    assert failures.show(error, as_json=False) == 4
    shown = capsys.readouterr().err
    assert shown.count("\n") == 6
    assert shown.replace("\n", "").isprintable()
    assert len(shown) < 4000


def test_a_fault_has_no_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.show(KeyError("x"), as_json=False) == 70
    assert capsys.readouterr().err.count("\n") == 1
    failures.show(KeyError("x"), as_json=True)
    assert '"type": "KeyError"' in capsys.readouterr().out


def test_arguments_are_spelled_as_on_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.UsageError("overwrite=True replaces it", expected="threads=")
    for as_json in (False, True):
        failures.show(error, as_json=as_json)
        said = "".join(capsys.readouterr())
        assert "--overwrite replaces it" in said
        assert "--threads" in said


def test_what_is_there_is_replaced_with_an_option(run: Run, model: Path) -> None:
    assert "; --overwrite replaces it" in run("align", model).err
    assert "overwrite=" not in run("align", model, "--json").out
