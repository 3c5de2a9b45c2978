"""Kills savers, in a process of its own that imports no framework: forks are cheap and safe there.

    python tests/kills.py random SCENARIO COUNT DIRECTORY    at any moment

Prints one line of JSON: what was found how often. What a kill between any two calls leaves, if
nothing else happens, is among the states of tests/crashes.py.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import scenarios


def forked(act: Callable[[], object]) -> int:
    """Starts a process that acts and ends; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int) -> bool:
    """Waits for a process; whether it was killed.

    Raises:
        RuntimeError: It failed on its own.
    """
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        raise RuntimeError("the saver failed")
    return False


def at_random(name: str, times: int, where: Path) -> dict[str, int]:
    """Kills after a random time, from too early to too late."""
    scenario = scenarios.SCENARIOS[name]
    big = {"count": 8, "size": 3 << 20}
    if scenario.old:
        scenario = scenario._replace(old=scenario.old << 10)
    if scenario.new:
        scenario = scenario._replace(new=scenario.new << 10)
    old, new = scenarios.arrays(1, **big), scenarios.arrays(2, **big)
    count: collections.Counter[str] = collections.Counter()
    took = 0.1
    for number in range(times):
        folder = where / str(number)
        scenario.begin(folder, old)
        start = time.perf_counter()
        child = forked(lambda folder=folder: scenario.save(folder, new))
        if number:
            time.sleep(random.uniform(0, took * 1.1))
            os.kill(child, signal.SIGKILL)
        killed = ended(child)
        took = took if number else time.perf_counter() - start
        found = scenarios.check(folder, scenario, old, new)
        assert killed or found == "new"
        count[found if killed else "finished"] += 1
        saved = scenario.save(folder, old)
        assert scenarios.found(folder, {"old": old}) == "old"
        scenarios.final(folder, scenario, saved)
        for path in folder.iterdir():
            path.unlink()
    return dict(count)


if __name__ == "__main__":
    way, *rest, directory = sys.argv[1:]
    assert way == "random", __doc__
    print(json.dumps(at_random(rest[0], int(rest[1]), Path(directory))))
