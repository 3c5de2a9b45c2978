"""The time a run may take, and a step of it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds that are left.

    Args:
        seconds: Of all, the writing of results included.
        clock: Seconds since some moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._end = self._begun + seconds
        self._costs: dict[str, float] = {}

    def part(self, seconds: float) -> Budget:
        """A step's share, which ends with the whole at the latest; what things cost is shared."""
        made = Budget(min(seconds, self.left), self._clock)
        made._costs = self._costs
        return made

    @property
    def left(self) -> float:
        """Seconds until the end; less than 0 past it."""
        return self._end - self._clock()

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begun

    def cost(self, name: str, guess: float) -> float:
        """What a thing took when it was done last, in seconds; the guess before that."""
        return self._costs.get(name, guess)

    def note(self, name: str, seconds: float) -> None:
        """Notes what a thing took."""
        self._costs[name] = seconds
