"""The others: where they are, as far as they said, and which of them can be waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from mfload.mesh import heartbeat, outcome
from mfload.mesh.heartbeat import Load, Place
from mfload.mesh.outcome import Verdict
from mfload.mesh.store import PLACES, Board, lost, settle

# Seconds between looks at where the others are.
_ROUND = 0.25


class Others:
    """The other processes, as one that waits for them sees them.

    Args:
        board: Where they say where they are.
        rank: The process that waits.
        load: For which load.
    """

    def __init__(self, board: Board, rank: int, load: Load) -> None:
        self._board = board
        self._rank = rank
        self._load = load
        self._places: Mapping[int, Place] = {}
        self._judged = self._places
        self._asked = -_ROUND
        self._circle: Mapping[int, Place] = {}

    def look(self) -> None:
        """Looks where all processes are, now and then."""
        if time.monotonic() - self._asked >= _ROUND:
            self._places = {
                int(key.rpartition("/")[2]): heartbeat.read(text)
                for key, text in self._board.look(PLACES).items()
            }
            self._asked = time.monotonic()

    def ended(self, ranks: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Those that have ended, or are about to."""
        for rank in ranks:
            place = self._places.get(rank, Place())
            if place.ended or heartbeat.alive(place.who) is False:
                yield rank, Verdict("dead", rank)

    def astray(self, ranks: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Those that never asked for this load, and never will: they lost it."""
        group, number, _ = self._load
        for rank in ranks:
            place = self._places.get(rank, Place())
            if self._load in place.loads:
                continue
            # Nothing is written down before it is needed: all may have lost the same load.
            if settle(self._board, rank, place, group).turn(group) < number:
                continue
            if settle(self._board, rank, place, group, number).turn(group) >= number:
                if place.lost:
                    self._board.decide(lost(rank, place.lost - 1), group)
                yield rank, Verdict("failed", rank, place.error)

    def circle(self) -> Verdict | None:
        """The verdict on all loads of a circle, which is seen twice before it is believed."""
        if self._places is self._judged:
            return None
        self._judged = self._places
        found = {rank: self._places[rank] for rank in heartbeat.circle(self._places, self._rank)}
        before, self._circle = self._circle, found
        if not found or found != before:
            return None
        now = {rank: place.loads[0] for rank, place in found.items()}
        loads = {load.group: load.number for load in now.values()}
        verdict = outcome.apart({rank: load.ranks for rank, load in now.items()}, loads)
        for group, number in loads.items():
            self._board.decide(f"{group}{number}/verdict/0", verdict.text())
        return verdict

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Processes, and with whom those of them load that load with others."""
        lines: list[str] = []
        for rank in ranks:
            line = f"{rank}"
            for load in self._places.get(rank, Place()).loads[:1]:
                if load.group != self._load.group:
                    others = ", ".join(map(str, load.ranks[:16]))
                    line += f" (last seen in a load of {others})"
            lines.append(line)
        return ", ".join(lines)
