"""The others: where they are, as far as they said, and which of them can be waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from mfload.sharding import liveness, verdicts
from mfload.sharding.board import PLACES, Board
from mfload.sharding.liveness import Place
from mfload.sharding.verdicts import Verdict

# Seconds between looks at where the others are.
_ROUND = 0.25


class Others:
    """The other processes, as one that waits for them sees them.

    Args:
        board: Where they say where they are.
        rank: The process that waits.
        group: For whom, and
        number: for which of their loads.
    """

    def __init__(self, board: Board, rank: int, group: str, number: int) -> None:
        self._board = board
        self._rank = rank
        self._group = group
        self._number = number
        self._places: Mapping[int, Place] = {}
        self._judged = self._places
        self._asked = -_ROUND
        self._circle: Mapping[int, Place] = {}

    def look(self) -> None:
        """Looks where all processes are, now and then."""
        if time.monotonic() - self._asked >= _ROUND:
            self._places = {
                int(key.rpartition("/")[2]): liveness.read(text)
                for key, text in self._board.look(PLACES).items()
            }
            self._asked = time.monotonic()

    def ended(self, ranks: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Those that have ended, or are about to."""
        for rank in ranks:
            place = self._places.get(rank, Place())
            if place.ended or liveness.alive(place.who) is False:
                yield rank, Verdict("dead", rank)

    def astray(self, ranks: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Those that have not begun this load, and never will: they lost it."""
        for rank in ranks:
            place = self._places.get(rank, Place())
            here = (place.group, place.number) == (self._group, self._number)
            if not here and place.turn(self._group) >= self._number:
                yield rank, Verdict("failed", rank, place.error)

    def circle(self) -> Verdict | None:
        """The verdict on all loads of a circle, which is seen twice before it is believed."""
        if self._places is self._judged:
            return None
        self._judged = self._places
        found = {rank: self._places[rank] for rank in liveness.circle(self._places, self._rank)}
        before, self._circle = self._circle, found
        if not found or found != before:
            return None
        loads = {place.group: place.number for place in found.values()}
        verdict = verdicts.apart({rank: place.ranks for rank, place in found.items()}, loads)
        for group, number in loads.items():
            self._board.decide(f"{group}{number}/verdict/0", verdict.text())
        return verdict

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Processes, and with whom those of them load that load with others."""
        lines: list[str] = []
        for rank in ranks:
            place = self._places.get(rank, Place())
            others = ", ".join(map(str, place.ranks[:16]))
            elsewhere = place.group and place.group != self._group
            lines.append(f"{rank} (last seen in a load of {others})" if elsewhere else f"{rank}")
        return ", ".join(lines)
