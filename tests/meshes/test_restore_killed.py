"""A training loop that is killed while it saves goes on from the newest complete step."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import orbax_training
import pytest
from restore_cases import assert_same, linen_state, linen_step

import mfload

_SCRIPT = Path(orbax_training.__file__)


def _killed(directory: Path, how: str, rng: random.Random) -> int:
    """Runs the loop and kills it soon after it began to save; the last step that it saved."""
    log = directory / "log"
    before = log.read_text().count("begun") if log.exists() else 0
    paths = (_SCRIPT.parents[2], _SCRIPT.parents[1], _SCRIPT.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(directory), how],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            wanted, end = before + rng.randint(1, 6), time.monotonic() + 60
            while not log.exists() or log.read_text().count("begun") < wanted:
                assert process.poll() is None, (directory / "output").read_text()[-3000:]
                assert time.monotonic() < end
                time.sleep(0.001)
            time.sleep(rng.random() * 0.08)
        finally:
            process.kill()
            process.wait()
    saved = [int(line.split()[1]) for line in log.read_text().splitlines() if line[:5] == "saved"]
    return max(saved, default=0)


def _rounds(directory: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    wanted, number = linen_state(), 0
    for run in range(count):
        saved = _killed(directory, ("sync", "async")[run % 2], rng)
        if not saved and not any(name.isdigit() for name in os.listdir(directory / "run")):
            continue
        found = mfload.restore(directory / "run", linen_state(seed=7))
        assert found.step >= saved  # What was killed after its end is complete too.
        while number < found.step:
            wanted, number = linen_step(wanted, number), number + 1
        assert number == found.step
        assert_same(found, wanted)
        # The next step is that of a run without an interruption.
        assert_same(linen_step(found, number), linen_step(wanted, number))
    assert number


def test_a_killed_loop_goes_on(tmp_path: Path) -> None:
    _rounds(tmp_path, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_loops_that_are_killed_often(tmp_path: Path, seed: int) -> None:
    _rounds(tmp_path, 15, seed)
