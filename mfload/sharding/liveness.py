"""Liveness: where the other processes are, and whether they still run.

A process that is killed leaves no word, and the heartbeat of a framework takes minutes to miss it.
On one host the kernel knows at once. Elsewhere nobody does, and the answer is None.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where a process is, in its own words.

    Attributes:
        who: Its `identity`.
        turns: The loads that it has begun with each group.
        lost: Loads that failed before it was known with whom: each counts as a turn of all groups.
        error: Of the last of those.
        group: With whom it loads, or did last; empty where that load failed.
        number: Which turn of that group it is.
        ranks: The processes of the group.
        ended: Whether it is about to end.
    """

    who: str = ""
    turns: Mapping[str, int] = {}
    lost: int = 0
    error: str = ""
    group: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()
    ended: bool = False

    def text(self) -> str:
        """As it is posted."""
        return json.dumps(self)

    def turn(self, group: str) -> int:
        """The last turn of a group that it took, or lost."""
        return self.turns.get(group, 0) + self.lost

    def entered(self, group: str, ranks: tuple[int, ...]) -> Place:
        """The place after it began a load with a group."""
        turns = {**self.turns, group: self.turns.get(group, 0) + 1}
        number = turns[group] + self.lost
        return self._replace(turns=turns, group=group, number=number, ranks=ranks)

    def met(self, group: str, lost: int) -> Place:
        """The place after it met a group: who lost less than this one has heard of the rest here.

        Args:
            group: Whom.
            lost: The fewest loads that one of them has lost.
        """
        turns = {**self.turns, group: self.turns.get(group, 0) + self.lost - lost}
        return self._replace(turns=turns, lost=lost)

    def reached(self, turns: Mapping[str, int]) -> Place:
        """The place after turns were settled that it need not take any more."""
        least = {group: number - self.lost for group, number in turns.items()}
        made = {group: max(self.turns.get(group, 0), number) for group, number in least.items()}
        return self._replace(turns={**self.turns, **made})


def read(text: str) -> Place:
    """A place from its text."""
    place = Place(*json.loads(text))
    return place._replace(ranks=tuple(place.ranks))


def circle(places: Mapping[int, Place], start: int) -> tuple[int, ...]:
    """Processes that can't go on, since each waits for the next to begin a load.

    Args:
        places: Where all of them are.
        start: The first, for which the last waits.

    Returns:
        None of them where there is hope: one that is in no load may come yet, and so may one in a
        load that all of its group have begun.
    """
    ways: list[tuple[int, ...]] = [(start,)]
    seen: set[int] = set()
    for way in ways:
        place = places.get(way[-1], Place())
        for rank in place.ranks if place.group else ():
            if rank == way[-1] or places.get(rank, Place()).turn(place.group) >= place.number:
                continue
            if rank == start:
                return way
            if rank not in seen:
                seen.add(rank)
                ways.append((*way, rank))
    return ()


def identity() -> str:
    """Words by which others on the same host can look this process up; empty where none can.

    Returns:
        Boot, pid namespace, pid and time of start: a pid alone may be somebody else's by now.
    """
    pid = os.getpid()
    started = _started(pid)
    return "" if started is None else f"{_host()} {pid} {started}"


def alive(who: str) -> bool | None:
    """Whether the process of an `identity` runs; None where this host can't tell."""
    parts = who.split(" ")
    if len(parts) != 3 or parts[0] != _host() or not parts[1].isdigit():
        return None
    return _started(int(parts[1])) == parts[2]


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything (proc_pid_stat(5)); the state follows it.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]
