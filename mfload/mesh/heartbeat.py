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


class Load(NamedTuple):
    """A load with others.

    Attributes:
        group: With whom.
        number: Which of their loads it is, from 1: its turn.
        ranks: The processes of the group.
    """

    group: str
    number: int
    ranks: tuple[int, ...]


class Place(NamedTuple):
    """Where a process is, in its own words.

    Attributes:
        who: Its `identity`.
        turns: The last turn of each group that it asked for, or lost.
        lost: Loads that failed before it was known with whom.
        seen: How many of those each group has accounted for; they are in `turns` if they count.
        error: Of the last that was lost.
        loads: Those of its threads, in the order in which they asked: the first is under way, and
            the rest wait for it. The last may have ended well since.
        ended: Whether it is about to end.
    """

    who: str = ""
    turns: Mapping[str, int] = {}
    lost: int = 0
    seen: Mapping[str, int] = {}
    error: str = ""
    loads: tuple[Load, ...] = ()
    ended: bool = False

    def text(self) -> str:
        """As it is posted."""
        return json.dumps(self)

    def turn(self, group: str) -> int:
        """The last turn of a group that it asked for, or is known to have lost."""
        return self.turns.get(group, 0)

    def asked(self, group: str, ranks: tuple[int, ...]) -> Place:
        """The place after a thread asked for a load with a group: it is the last."""
        number = self.turn(group) + 1
        loads = (*self.loads, Load(group, number, ranks))
        return self._replace(turns={**self.turns, group: number}, loads=loads)

    def left(self, load: Load, turns: Mapping[str, int]) -> Place:
        """The place after a load ended, and turns were settled that it need not take any more."""
        made = {group: max(self.turn(group), number) for group, number in turns.items()}
        loads = tuple(each for each in self.loads if each != load)
        return self._replace(turns={**self.turns, **made}, loads=loads)

    def losing(self, error: str) -> Place:
        """The place after a load failed before it was known with whom."""
        return self._replace(lost=self.lost + 1, error=error)

    def charged(self, group: str, count: int) -> Place:
        """The place after a group has accounted for one more lost load: as so many turns."""
        turns = {**self.turns, group: self.turn(group) + count}
        return self._replace(turns=turns, seen={**self.seen, group: self.seen.get(group, 0) + 1})

    def begun(self, load: Load) -> bool:
        """Whether it has begun a load of others, or has no more to do with it."""
        return self.turn(load.group) >= load.number and load not in self.loads[1:]


def read(text: str) -> Place:
    """A place from its text."""
    place = Place(*json.loads(text))
    loads = tuple(Load(group, number, tuple(ranks)) for group, number, ranks in place.loads)
    return place._replace(loads=loads)


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
        for load, rank in _awaited(places.get(way[-1], Place())):
            if rank == way[-1] or places.get(rank, Place()).begun(load):
                continue
            if rank == start:
                return way
            if rank not in seen:
                seen.add(rank)
                ways.append((*way, rank))
    return ()


def _awaited(place: Place) -> list[tuple[Load, int]]:
    return [(load, rank) for load in place.loads[:1] for rank in load.ranks]


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
