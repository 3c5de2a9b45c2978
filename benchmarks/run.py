"""A run in progress: takes cases one by one, notes their samples and prints them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks import described
from benchmarks.results import Results
from benchmarks.runner import Take, rounds


class Run:
    """A run in progress.

    Args:
        results: Where samples are noted.
        rng: What the orders follow from.
        label: What a name is called for people.
    """

    def __init__(self, results: Results, rng: random.Random, label: Callable[[str], str]) -> None:
        self.results, self._rng, self._label = results, rng, label

    def take(self, case: str, names: Sequence[str], take: Take, count: int) -> None:
        """Measure all names in a case and print each sample."""
        busy = described.busy_share()
        self.results.run["busy_share"][case] = round(busy, 3)
        print(f"{case}: {len(names)} × {count}, machine {busy:.0%} busy with other things")
        for taken in rounds(names, take, count, self._rng):
            if isinstance(taken, tuple):
                print(f"  FAILED {taken[0]}: {taken[1]}")
                self.results.skipped.append((case, *taken))
                continue
            self.results.samples.append(taken)
            line = (
                f"  {taken['round'] + 1} {self._label(taken['name']):48} "
                f"{taken['seconds']:8.4f} s {taken['cpu_s']:8.4f} CPU s"
            )
            peak = taken.get("peak_over")
            print(line if peak is None else f"{line} {peak / 2**20:+8.0f} MiB", flush=True)
