"""The command, run in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import samples

from mfload import cli

SECONDS = 60


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON value and nothing else."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = cli.run([str(each) for each in arguments])
        return Ran(code, *capsys.readouterr())

    return run


def command(*arguments: object, code: str | None = None) -> list[str]:
    """The command line of a process of its own; `code` runs before the command does."""
    if code is None:
        return [sys.executable, "-m", "mfload", *map(str, arguments)]
    program = f"{code}\nimport sys\nfrom mfload.cli import main\nsys.exit(main())"
    return [sys.executable, "-c", program, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, its colours and sizes left out."""
    left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "MFLOAD_TRACEBACK")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return kept | {"TERM": "xterm"} | changes


def process(*arguments: object, code: str | None = None, **changes: str) -> Ran:
    """Runs the command in a process of its own, its output into pipes."""
    done = subprocess.run(
        command(*arguments, code=code),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(**changes),
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    arrays = {
        "embed.weight": samples.numbers((64, 16), np.float16, 1),
        "layers.0.q.weight": samples.numbers((16, 16), np.float32, 2),
        "layers.0.q.bias": samples.numbers((16,), np.float32, 3),
        "layers.10.q.weight": samples.numbers((16, 16), np.float32, 4),
        "layers.2.q.weight": samples.numbers((16, 16), np.float32, 5),
        "steps": samples.numbers((1,), np.int64, 6),
    }
    return samples.save(tmp_path / "model.safetensors", arrays, {"format": "pt"})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint in two files, with its index."""
    directory = tmp_path / "shards"
    directory.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    samples.save(directory / names[0], {"a": np.zeros((8, 4), np.float32)})
    samples.save(directory / names[1], {"b": np.zeros(6, np.int16), "c": np.zeros(1, np.float32)})
    placed = {"a": names[0], "b": names[1], "c": names[1]}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory
