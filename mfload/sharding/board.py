"""The board: a place where the processes of a program leave each other short texts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import Protocol

from mfload.sharding import liveness
from mfload.sharding.liveness import Place

log = logging.getLogger("mfload")

PLACES = "mfload/at/"
"""Where each process says where it is."""


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


def move(board: Board, rank: int, place: Place) -> None:
    """Says where this process is from now on."""
    place = place if place.who else place._replace(who=liveness.identity())
    board.place = place
    board.post(f"{PLACES}{rank}", place.text())


@contextlib.contextmanager
def telling() -> Generator[None]:
    """For what the others are told while an error is raised here: that one counts."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        log.warning("the other processes could not be told of an error here: %s", error)
