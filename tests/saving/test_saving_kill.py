"""A kill at any moment leaves the old checkpoint or the new one; tests/kills.py does it.

Kills between any two calls are among the crashes of test_saving_crashes.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

KILLS = Path(__file__).parent.with_name("kills.py")
# Forks, O_TMPFILE and locks: what is promised is promised on Linux.
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
RANDOM = 60 if os.environ.get("MFLOAD_SLOW") else 8


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: each step of these tests syncs."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="mfload-test-", dir=shm) as folder:
        yield Path(folder)


def run(*arguments: object) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(KILLS), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "name", ["nothing-sharded", "single-single", "sharded-same-names", "sharded-single"]
)
def test_a_kill_at_a_random_moment(name: str, tmp_path: Path) -> None:
    found = run("random", name, RANDOM, tmp_path)
    assert sum(found.values()) == RANDOM
    assert found["finished"] >= 1
    assert RANDOM - found["finished"] >= 1, "none was killed"
