"""Slots in use that come first, without gaps: the rows of a matrix that is never reallocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mfload.ondemand.cache import SlotCache

if TYPE_CHECKING:
    from mfload.ondemand.cache import Numbers


class RowCache(SlotCache):
    """A `SlotCache` whose slots in use come first; a lease is for all of them.

    New keys take the slots of those that left, and the next ones behind. What gaps are left, the
    last rows are moved into. Keys leave, and rows move, only while nothing is pinned or read; until
    then new keys come behind.
    """

    def _leased(self, asked: Numbers) -> Numbers:
        return np.arange(self._used())

    def _used(self) -> int:
        """Slots up to the last one that has a key."""
        used = np.flatnonzero(self.key_of >= 0)
        return int(used[-1]) + 1 if used.size else 0

    def _quiet(self) -> bool:
        return not (self.pins.any() or self._busy.any())

    def _available(self, asked: Numbers) -> int:
        held = np.count_nonzero(self.slot_of[asked] >= 0) if self._quiet() else self._used()
        return self.capacity - int(held)

    def _room(self, missing: Numbers, asked: Numbers) -> Numbers | None:
        if self._quiet():
            there = self.slot_of >= 0
            there[asked] = False
            others = np.flatnonzero(there)
            self._evict(self.policy.expired(others))
            others = others[self.slot_of[others] >= 0]
            held = int(np.count_nonzero(self.key_of >= 0))
            more = held + missing.size - self.capacity
            self._evict(self.policy.victims(others, max(0, more)))
            self._close_gaps(missing.size)
        used = self._used()
        gaps = np.flatnonzero(self.key_of[:used] < 0)
        slots = np.append(gaps, np.arange(used, self.capacity))[: missing.size]
        # A gap that can't be filled or closed now is that of a read that failed.
        blocked = gaps.size > missing.size or self.pins[slots].any()
        return None if blocked or slots.size < missing.size else slots

    def _close_gaps(self, kept: int) -> None:
        """Moves the last rows into gaps, but for the first `kept`, which are about to be filled."""
        live = np.flatnonzero(self.key_of >= 0)
        used = live.size + min(kept, np.count_nonzero(self.key_of[: self._used()] < 0))
        tail = live[live >= used]
        if not tail.size:
            return
        gaps = np.flatnonzero(self.key_of[:used] < 0)[-tail.size :]
        for arena in self._arenas:  # Row by row: no copy of them all lies beside the budget.
            for gap, row in zip(gaps, tail, strict=True):
                arena[gap] = arena[row]
        moved = self.key_of[tail]
        self.key_of[gaps], self.key_of[tail] = moved, -1
        self.slot_of[moved] = gaps
