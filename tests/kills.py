"""Kills savers, in a process of its own that imports no framework: forks are cheap and safe there.

    python tests/kills.py random SCENARIO COUNT DIRECTORY    at any moment
    python tests/kills.py readers COUNT DIRECTORY            at any moment, beside readers

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
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import scenarios

import mfload


def forked(act: Callable[[], object]) -> int:
    """Starts a process that acts and ends; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
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
    """Kills after a random time in each part of a save's, from too early to too late."""
    scenario = scenarios.SCENARIOS[name]
    big = {"count": 8, "size": 3 << 20}
    if scenario.old:
        scenario = scenario._replace(old=scenario.old << 10)
    if scenario.new:
        scenario = scenario._replace(new=scenario.new << 10)
    old, new = scenarios.arrays(1, **big), scenarios.arrays(2, **big)
    count: collections.Counter[str] = collections.Counter()
    # What a save imports is no part of the time that the next ones take.
    scenario.begin(where / "first", old)
    scenario.save(where / "first", new)
    took = 0.1
    for number in range(times):
        folder = where / str(number)
        scenario.begin(folder, old)
        start = time.perf_counter()
        child = forked(lambda folder=folder: scenario.save(folder, new))
        if number:
            time.sleep(took * 1.1 * (number - random.random()) / (times - 1))
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


def marked(seed: int) -> dict[str, Any]:
    """Tensors of one model whose every element is the seed: two have the same headers."""
    return {f"w{n}": np.full(50_000 + n, seed, np.int32) for n in range(6)}


def seed_of(found: Mapping[str, Any]) -> str:
    """Says that it is of one checkpoint, or what else it is."""
    seen = {int(value) for array in found.values() for value in np.unique(array)}
    shapes = {name: array.shape for name, array in found.items()}
    whole = shapes == {name: array.shape for name, array in marked(0).items()}
    return "one" if whole and len(seen) == 1 else f"BAD a mixture: {sorted(seen)}, {shapes}"


def _load(folder: Path) -> str:
    return seed_of(mfload.load(folder, "numpy"))


def _load_verified(folder: Path) -> str:
    manifest = next(folder.glob("*.checksums.json"), None)
    try:
        return seed_of(mfload.load(folder, "numpy", verify=manifest))
    except mfload.errors.SourceNotFoundError:
        if manifest is None or manifest.exists():
            raise
        return "no manifest"


def _open(folder: Path) -> str:
    with mfload.open(folder, "numpy") as opened:
        return seed_of({name: opened.get_tensor(name) for name in marked(0)})


def _verify(folder: Path) -> str:
    found = mfload.verify(folder)
    if wrong := {each.what for each in found.problems} - CHANGED:
        return f"BAD not well: {sorted(wrong)}"
    if not found.ok:
        return "changed"
    return "compared" if found.data_checked else "one"


CHANGED = {f"the file {how} since its header was read" for how in ("changed", "is gone")}
READERS = [_load, _load_verified, _open, _verify]


def read_on(read: Callable[[Path], str], folder: Path, stop: Path) -> None:
    """Reads until there is a file at `stop`; adds one with what came of it beside that."""
    count: collections.Counter[str] = collections.Counter()
    while not stop.exists():
        try:
            count[read(folder)] += 1
        except mfload.errors.SourceChangedError:
            count["changed"] += 1
        except Exception as error:
            text = getattr(error, "message", None) or traceback.format_exc()
            count[f"BAD {type(error).__name__}: {text}"] += 1
    stop.with_name(read.__name__).write_text(json.dumps(count))


def write_on(folder: Path) -> None:
    """Saves one checkpoint over the other, in one file and in several, until it is killed."""
    random.seed()  # A fork has the state of its parent.
    while True:
        size, sums = random.choice([None, 500_000]), random.choice([False, True])
        arrays = marked(random.randrange(1 << 30))
        mfload.save(arrays, folder, max_shard_size=size, checksums=sums, overwrite=True)


def beside_readers(times: int, where: Path) -> dict[str, Any]:
    """Kills writers of one target while other processes read it; nothing BAD may come of it."""
    folder, stop = where / "model", where / "stop"
    folder.mkdir()
    mfload.save(marked(0), folder, checksums=True)
    start = time.perf_counter()
    mfload.save(marked(0), folder, max_shard_size=500_000, checksums=True, overwrite=True)
    took = max(0.05, time.perf_counter() - start)
    readers = [forked(partial(read_on, read, folder, stop)) for read in READERS]
    try:
        for _ in range(times):
            child = forked(partial(write_on, folder))
            time.sleep(random.uniform(0, 3 * took))
            os.kill(child, signal.SIGKILL)
            assert ended(child)
        mfload.save(marked(1), folder, overwrite=True)
        time.sleep(0.1)
    finally:
        stop.touch()
        for reader in readers:
            ended(reader)
    assert _load(folder) == "one"
    assert not scenarios.hidden(folder)
    return {read.__name__: json.loads((where / read.__name__).read_text()) for read in READERS}


if __name__ == "__main__":
    way, *rest, directory = sys.argv[1:]
    at = Path(directory)
    if way == "random":
        run: Any = at_random(rest[0], int(rest[1]), at)
    else:
        run = beside_readers(int(rest[0]), at)
    print(json.dumps(run))
