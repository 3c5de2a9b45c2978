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
from typing import Any

import pytest

KILLS = Path(__file__).parent.with_name("kills.py")
# Forks, O_TMPFILE and locks: what is promised is promised on Linux.
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
RANDOM, BESIDE = (60, 200) if os.environ.get("MFLOAD_SLOW") else (8, 10)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: each step of these tests syncs."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="mfload-test-", dir=shm) as folder:
        yield Path(folder)


def run(*arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(KILLS), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "name", ["nothing-sharded", "single-single", "sharded-same-names", "sharded-single"]
)
def test_a_kill_at_a_random_moment(name: str, tmp_path: Path) -> None:
    found = run("random", name, RANDOM, tmp_path)
    assert sum(found.values()) == RANDOM
    assert found["finished"] >= 1
    assert RANDOM - found["finished"] >= 1, "none was killed"


def test_readers_beside_writers_that_are_killed(tmp_path: Path) -> None:
    """They get one checkpoint or hear that it changes; nothing is mixed, nothing called damaged."""
    for reader, count in run("readers", BESIDE, tmp_path).items():
        assert not [what for what in count if what.startswith("BAD")], (reader, count)
        assert count.get("one", 0) + count.get("compared", 0) > 0
