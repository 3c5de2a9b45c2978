"""The commands take URLs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import serving
from conftest import Run

SECRET = "s3cr3t"


@pytest.fixture
def url() -> Iterator[str]:
    from safetensors.numpy import save

    raw = save({"w": np.arange(6, dtype=np.float32)})
    with serving.serving({"/model.safetensors": raw}) as served:
        yield served.url()


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
def test_commands(run: Run, url: str, command: str) -> None:
    ran = run(command, f"{url}?token={SECRET}")
    assert ran.code == 0
    assert SECRET not in ran.out + ran.err
    assert "1 tensor" in ran.out or "1 numpy tensor" in ran.out


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
def test_what_is_not_there(run: Run, url: str, command: str) -> None:
    ran = run(command, f"{url}x?token={SECRET}")
    assert ran.code == 3
    assert "no such file on the server" in ran.err
    assert SECRET not in ran.out + ran.err


def test_what_reads_local_files_alone(run: Run, url: str) -> None:
    ran = run("load", url, "--engine", "mmap")
    assert ran.code == 2
    assert "local files" in ran.err
    assert run("bench", url).code == 2
    ran = run("doctor", url)
    assert ran.code in (0, 1)
    assert "please report" not in ran.out
