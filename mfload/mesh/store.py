"""The board: where the processes of a program leave each other short texts, and take turns."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from mfload.mesh import heartbeat
from mfload.mesh.heartbeat import Place
from mfload.runtime import Deadline

log = logging.getLogger("mfload")

PLACES = "mfload/at/"
"""Where each process says where it is."""
_LOST = "mfload/lost/"
# Seconds after which a thread that waits for another looks whether Ctrl-C was pressed.
_TICK = 1.0

moved = threading.Condition()
"""Held while the place of this process changes, and told of it: its threads share one place."""


class Board(Protocol):
    """A place where all processes can put short texts, and read those of the others.

    Attributes:
        place: Where this process is, None before it said so.
        kept: The oldest turn of each group whose texts may still be there.
    """

    place: Place | None
    kept: dict[str, int]

    def post(self, key: str, text: str) -> None:
        """Puts a text there, in place of an older one."""
        ...

    def look(self, prefix: str) -> dict[str, str]:
        """All texts whose keys lie under a prefix that ends with a slash."""
        ...

    def decide(self, key: str, text: str) -> str:
        """Puts a text where there is none; the one that was first, on every process."""
        ...

    def forget(self, prefix: str) -> None:
        """Takes away all texts under a prefix that ends with a slash."""
        ...


def move(board: Board, rank: int, change: Callable[[Place], Place] = lambda place: place) -> Place:
    """Says where this process is from now on.

    Args:
        board: Where.
        rank: This process.
        change: Makes the new place from the one before.
    """
    with moved:
        place = stay(board, change)
        board.post(f"{PLACES}{rank}", place.text())
        return place


def stay(board: Board, change: Callable[[Place], Place]) -> Place:
    """Changes the place of this process, and leaves it to the next move to say so."""
    with moved:
        place = change(board.place or Place(who=heartbeat.identity()))
        board.place = place
        moved.notify_all()
        return place


def lost(rank: int, number: int) -> str:
    """Where it is written for which group a lost load counts."""
    return f"{_LOST}{rank}/{number}"


def settle(board: Board, rank: int, place: Place, group: str, turn: int | None = None) -> Place:
    """Counts the loads that a process lost as turns of a group.

    Nothing tells for which group one was meant. It counts for the first in which somebody waits
    in vain for that process, and is told; until then for all, as all processes may have lost it.

    Args:
        board: Where it is written.
        rank: The process.
        place: Where it is.
        group: The group that asks.
        turn: The turn for which somebody waits; None where that process itself is about to ask.
    """
    left = range(place.seen.get(group, 0), place.lost)
    told = board.look(f"{_LOST}{rank}/") if turn is None and left else {}
    for number in left:
        if turn is None:
            owner = told.get(lost(rank, number), group)
        elif place.turn(group) < turn:
            owner = board.decide(lost(rank, number), group)
        else:
            break
        place = place.charged(group, int(owner == group))
    return place


@contextlib.contextmanager
def telling() -> Generator[None]:
    """For what the others are told while an error is raised here: that one counts."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        log.warning("the other processes could not be told of an error here: %s", error)


class Turn:
    """The turn of one load, from when a thread asks for it.

    It is numbered at once, so that a load that fails while it waits for another thread fails under
    its own number, and the others need not wait for it.

    Args:
        board: Where the processes meet.
        rank: This one.
        ranks: Those that take part, in order.
    """

    def __init__(self, board: Board, rank: int, ranks: Sequence[int]) -> None:
        self._board = board
        self._rank = rank
        name = ",".join(map(str, ranks))
        if len(name) > 40:
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
        self.group = f"mfload/{name}/"

        def asked(place: Place) -> Place:
            return settle(board, rank, place, self.group).asked(self.group, tuple(ranks))

        self.load = stay(board, asked).loads[-1]
        self.number = self.load.number
        self._texts = f"mfload/text/{name}/"
        self.texts = f"{self._texts}{self.number}/"
        try:
            move(board, rank)
        except BaseException:
            self.end({}, failed=True)
            raise

    def begin(self, deadline: Deadline) -> None:
        """Waits for the loads that other threads of this process asked for before.

        Raises:
            LoadTimeoutError: The deadline passed first.
        """
        if self._first():
            return
        with moved:
            while not self._first():
                if deadline.left() <= 0:
                    raise deadline.error("waiting for a load of another thread")
                moved.wait(min(_TICK, max(0.0, deadline.left())))
        move(self._board, self._rank)

    def _first(self) -> bool:
        place = self._board.place
        return place is not None and place.loads[:1] == (self.load,)

    def end(self, over: Mapping[str, int], *, failed: bool) -> None:
        """Lets the next thread begin.

        Args:
            over: Turns of groups that are settled, too.
            failed: Whether the others may wait for this process in that load.
        """
        stay(self._board, lambda place: place.left(self.load, over))
        if failed:
            with telling():
                move(self._board, self._rank)

    def forget_earlier(self) -> None:
        """Takes away what was posted in earlier turns: all are here, so nobody looks at it."""
        for old in range(self._board.kept.get(self.group, 1), self.number):
            self._board.forget(f"{self.group}{old}/")
            self._board.forget(f"{self._texts}{old}/")
        self._board.kept[self.group] = self.number
