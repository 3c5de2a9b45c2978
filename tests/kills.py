"""Kills savers, in a process of its own that imports no framework: forks are cheap and safe there.

    python tests/kills.py steps SCENARIO MODE DIRECTORY      before every system call, one by one
    python tests/kills.py random SCENARIO COUNT DIRECTORY    at any moment

Prints one line of JSON: what was found how often.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import faults
import scenarios

MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain": contextlib.nullcontext,
    "no-tmpfile": faults.no_tmpfile,
    "no-links": faults.no_links,
}


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


def by_steps(name: str, mode: str, where: Path) -> dict[str, int]:
    """Kills before every call; after each kill saves once more, over what was left."""
    scenario = scenarios.SCENARIOS[name]
    old, new, third = (scenarios.arrays(seed) for seed in (1, 2, 3))
    folder = where / "dry"
    scenario.begin(folder, old)
    with MODES[mode](), faults.steps(lambda number, call: None) as made:
        saved = scenario.save(folder, new)
    assert scenarios.check(folder, scenario, old, new) == "new"
    scenarios.final(folder, scenario, saved)
    count: collections.Counter[str] = collections.Counter(steps=len(made))
    names = {"link", "replace", "unlink"}
    for at in range(1, len(made) + 1):
        # What shards over nothing leave is the hardest to tell.
        ways = scenarios.AGAIN if scenario.old == 0 else scenarios.AGAIN[at % 3 :][:1]
        for way in ways:
            folder = where / f"{at} {way}"
            scenario.begin(folder, old)
            before = sorted(os.listdir(folder))

            def act(folder: Path = folder, at: int = at) -> None:
                with MODES[mode](), faults.steps(faults.killing(at)):
                    scenario.save(folder, new)

            assert ended(forked(act)), f"step {at} was never reached"
            whole, hidden = (
                scenarios.check(folder, scenario, old, new),
                [each for each in scenarios.hidden(folder) if not each.endswith("-lock")],
            )
            if mode == "plain" and names.isdisjoint(made[: at - 1]) and not scenario.convert:
                # The one file that has a name before all are written is the draft of the index.
                index = [name for name in hidden if name.endswith("-index")][:1]
                left = [each for each in sorted(os.listdir(folder)) if not each.endswith("-lock")]
                assert left == index + before, f"step {at} left something"
            # Whoever comes next gets through, and cleans up.
            scenario.again(folder, way, new, third)
        count[whole] += 1
        count["strays"] += bool(hidden)
    return dict(count)


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
    way, scenario_name, how, directory = sys.argv[1:]
    run = (
        by_steps(scenario_name, how, Path(directory))
        if way == "steps"
        else at_random(scenario_name, int(how), Path(directory))
    )
    print(json.dumps(run))
