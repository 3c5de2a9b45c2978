"""The schedule of an exchange: what each process reads, and what travels when. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.planning.requests import Request, boxed

HEADER = 64
"""Bytes before the parcels of a row that travels (see `rounds`)."""

# Large enough that a round's fixed costs don't count, small enough for the processor's cache.
_WIDEST, _ROUND = 2 << 20, 4 << 20
_NARROWEST = 4096
# Rows to send (this round's and the next), their copies in the framework, and those that came.
_HELD = 6


class Goal(NamedTuple):
    """A part of a tensor that a process needs, for one or more of its needs.

    Attributes:
        info: The tensor.
        dtype: The dtype it is delivered in.
        checked: Whether values are checked on conversion.
        box: The part.
        requests: Numbers of the process's needs.
    """

    info: TensorInfo
    dtype: DType
    checked: bool
    box: Box
    requests: tuple[int, ...]


class Parcel(NamedTuple):
    """A part of a goal that one process reads, for itself or another.

    Attributes:
        reader: The process that reads it.
        taker: The process that wants it.
        goal: What for: a number in the taker's goals.
        box: The part of the tensor.
        at: First byte of it in the result.
        nbytes: Bytes as delivered.
        wire: First byte in the row that travels, -1 where it stays with its reader.
    """

    reader: int
    taker: int
    goal: int
    box: Box
    at: int
    nbytes: int
    wire: int = -1


class Schedule(NamedTuple):
    """The course of an exchange.

    Attributes:
        ranks: The processes that take part.
        width: Bytes from each process to each in a round, the header counted in.
        goals: What each process wants.
        local: Parcels that stay with their readers, read before the first round.
        rounds: Parcels of each round.
    """

    ranks: tuple[int, ...]
    width: int
    goals: Mapping[int, tuple[Goal, ...]]
    local: tuple[Parcel, ...]
    rounds: tuple[tuple[Parcel, ...], ...]

    @property
    def overhead(self) -> int:
        """Bytes that a process holds for the rows of two rounds."""
        return _HELD * len(self.ranks) * self.width if self.rounds else 0

    def parcels(self) -> Iterable[Parcel]:
        """All of them."""
        yield from self.local
        for parcels in self.rounds:
            yield from parcels

    def came(self, rank: int) -> int:
        """Bytes that a process gets from others."""
        return sum(p.nbytes for p in self.parcels() if p.taker == rank and p.reader != rank)

    def went(self, rank: int) -> int:
        """Bytes that a process sends to others."""
        return sum(p.nbytes for p in self.parcels() if p.reader == rank and p.taker != rank)

    def requests(self, parcels: Sequence[Parcel], rank: int) -> list[Request]:
        """What a process reads of some parcels: a need for each that is its own to read."""
        made: list[Request] = []
        for parcel in parcels:
            if parcel.reader == rank:
                goal = self.goals[parcel.taker][parcel.goal]
                selection = boxed(goal.info, parcel.box)
                made.append(Request(goal.info, goal.dtype, selection, goal.checked))
        return made

    def digest(self) -> str:
        """The same where schedules are the same."""
        names = {
            rank: [(g.info.name, g.dtype.name, g.checked, g.box, g.requests) for g in goals]
            for rank, goals in self.goals.items()
        }
        said = (self.ranks, self.width, sorted(names.items()), self.local, self.rounds)
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:32]
        return f"{len(self.rounds)} rounds of {self.width} bytes, {digest}"


def width(count: int, overhead: int, least: int = 0) -> int:
    """Bytes from each process to each in a round.

    Args:
        count: Processes.
        overhead: Bytes beside the result that may be held; half of them are for the readers.
        least: What the readers need in any case, for the error's figure.

    Raises:
        MemoryLimitError: They do for no round at all.
    """
    most = min(_WIDEST, _ROUND // count, overhead // 2 // (_HELD * count))
    made = max(_NARROWEST, 1 << max(0, most.bit_length() - 1))
    if made > max(most, overhead // 2 // (_HELD * count)):
        raise errors.MemoryLimitError(
            "max_host_overhead is too small for an exchange",
            expected=f"{max(least, 2 * _HELD * count * _NARROWEST)} bytes or more, or "
            "exchange='never'",
            found=overhead,
        )
    return made
