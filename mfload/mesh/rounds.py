"""Rounds: runs an exchange. Each process reads, swaps, and puts what came in its place.

While the rows of one round travel, the next are read. A process that fails keeps taking part until
it has said so in the header of its rows; then all of them stop after the same round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mfload import errors
from mfload.io.route import Leg
from mfload.loading import execute
from mfload.mesh.group import Party
from mfload.mesh.schedule import HEADER, Parcel, Schedule
from mfload.planning import planner
from mfload.planning.blocks import Costs
from mfload.planning.layout import BufferSpec
from mfload.planning.planner import Place, Plan
from mfload.planning.requests import Request
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

_WHAT = "exchange"
# Load, round, and whether the sender failed.
_HEAD = struct.Struct("<QQQ")
assert _HEAD.size <= HEADER


class Link(Protocol):
    """Swaps rows of bytes between processes.

    Attributes:
        ranks: The processes, in the order of the rows.
    """

    ranks: tuple[int, ...]

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width)."""
        ...

    def swap(self, send: Any) -> Callable[[Callable[[], None]], Any]:
        """Begins to swap; a function that waits for what came, and calls another meanwhile."""
        ...

    def close(self) -> None:
        """Lets go of the memory for what is sent."""
        ...


class Reading(NamedTuple):
    """How this process reads.

    Attributes:
        sources: The files.
        legs: The leg of each, None for those that are not read.
        threads: Readers at once.
        costs: What a read may be.
        deadline: When to give up.
        advance: Told of bytes that have come, as they are stored.
    """

    sources: Sequence[LocalFile]
    legs: Sequence[Leg | None]
    threads: int
    costs: Costs
    deadline: Deadline
    advance: Callable[[int], None] | None


class Exchange:
    """One exchange, as one process runs it.

    Args:
        schedule: Who reads what, and what travels when.
        rank: This process.
        party: The load that it belongs to.
        link: To the other processes; None where nothing travels.
    """

    def __init__(self, schedule: Schedule, rank: int, party: Party, link: Link | None) -> None:
        self._schedule = schedule
        self._rank = rank
        self._party = party
        self._link = link
        self.plans: list[Plan] = []
        self.notes: list[str] = []

    def run(self, places: Sequence[Place], memory: list[Any], reading: Reading) -> None:
        """Fills the results of this process.

        Args:
            places: Where each need's result lies.
            memory: The buffers that they name.
            reading: How to read.

        Raises:
            ProcessError: Another process failed, or is gone.
            MfloadError: This one failed.
        """
        link, failure = self._link, None
        count = len(self._schedule.rounds) if link is not None else 0
        send = [link.buffer() for _ in range(min(2, count))] if link is not None else []
        try:
            self._read(self._schedule.local, places, memory, None, reading)
        except BaseException as error:  # noqa: BLE001 - raised once the others know
            failure = error
        pending: Callable[[Callable[[], None]], Any] | None = None
        for number in range(count + 1):
            rows = send[number % 2] if number < count else None
            if rows is not None and failure is None:
                parcels = self._schedule.rounds[number]
                try:
                    self._read(parcels, places, memory, rows, reading)
                except BaseException as error:  # noqa: BLE001 - raised once the others know
                    failure = error
            came = None
            if pending is not None:
                try:
                    came, interrupted, stopped = self._received(pending, number - 1)
                except BaseException:
                    # Its rows are on their way: the others may wait for them, and for no more.
                    self._party.leave(number - 1)
                    raise
                failure = failure or interrupted
                if stopped:
                    raise failure or self._party.failure(_WHAT)
            if link is not None and rows is not None:
                last = self._party.left()
                if last is not None and last < number:
                    raise failure or self._party.failure(_WHAT)
                self._head(rows, number, failed=failure is not None)
                pending = link.swap(rows)
            if came is not None and failure is None:
                self._unpack(self._schedule.rounds[number - 1], came, places, memory, reading)
        if failure is not None:
            raise failure

    def _read(
        self,
        parcels: Sequence[Parcel],
        places: Sequence[Place],
        memory: list[Any],
        rows: Any,
        reading: Reading,
    ) -> None:
        requests = self._schedule.requests(parcels, self._rank)
        mine = [parcel for parcel in parcels if parcel.reader == self._rank]
        if not mine:
            return
        wanted: list[Request] = []
        given: list[tuple[int, int]] = []
        for request, parcel in zip(requests, mine, strict=True):
            for where in self._where(parcel, places, len(memory), rows):
                wanted.append(request)
                given.append(where)
        specs = [BufferSpec(array.nbytes) for array in memory]
        held = list(memory)
        if rows is not None:
            held.append(rows.reshape(-1))
            specs.append(BufferSpec(rows.nbytes))
        made = planner.make(wanted, costs=reading.costs, given=given, specs=specs)
        self.plans.append(made)
        said = execute.run(
            made,
            held,
            reading.sources,
            reading.legs,
            threads=reading.threads,
            deadline=reading.deadline,
            advance=reading.advance if rows is None else None,
        )
        self.notes += said
        if rows is not None:
            self._advance(reading, [parcel for parcel in mine if parcel.taker == self._rank])

    def _where(
        self, parcel: Parcel, places: Sequence[Place], after: int, rows: Any
    ) -> list[tuple[int, int]]:
        """Buffer and first byte of each place that a parcel read here goes to."""
        if parcel.taker != self._rank:
            row = self._schedule.ranks.index(parcel.taker)
            return [(after, row * rows.shape[1] + parcel.wire)]
        goal = self._schedule.goals[self._rank][parcel.goal]
        return [(places[n].buffer, places[n].at + parcel.at) for n in goal.requests]

    def _unpack(
        self,
        parcels: Sequence[Parcel],
        came: Any,
        places: Sequence[Place],
        memory: list[Any],
        reading: Reading,
    ) -> None:
        """Copies what came to where it belongs: each parcel is one stretch, there and here."""
        mine = [p for p in parcels if p.taker == self._rank and p.reader != self._rank]
        for parcel in mine:
            row = came[self._schedule.ranks.index(parcel.reader)]
            data = row[parcel.wire : parcel.wire + parcel.nbytes]
            for buffer, at in self._where(parcel, places, 0, None):
                memory[buffer][at : at + parcel.nbytes] = data
        self._advance(reading, mine)

    def _advance(self, reading: Reading, parcels: Sequence[Parcel]) -> None:
        if reading.advance is None:
            return
        nbytes = 0
        for parcel in parcels:
            goal = self._schedule.goals[self._rank][parcel.goal]
            nbytes += parcel.nbytes // goal.dtype.nbytes * goal.info.dtype.nbytes
        reading.advance(nbytes)

    def _head(self, rows: Any, number: int, *, failed: bool) -> None:
        head = _HEAD.pack(self._party.number, number, failed)
        for row in rows:
            row[: len(head)] = memoryview(head)

    def _received(
        self, pending: Callable[[Callable[[], None]], Any], number: int
    ) -> tuple[Any, KeyboardInterrupt | None, bool]:
        """The rows of a round, whether Ctrl-C came meanwhile, and whether any process failed."""
        interrupted: KeyboardInterrupt | None = None
        try:
            came = pending(lambda: self._party.watch(_WHAT))
        except KeyboardInterrupt as error:
            # The others are told in the next round; whoever presses twice leaves them alone.
            interrupted = error
            came = pending(lambda: self._party.watch(_WHAT))
        except errors.ProcessError:
            self._party.watch(_WHAT)  # It may know which process is gone.
            raise
        failed = False
        for row in came:
            load, turn, flag = _HEAD.unpack(row[: _HEAD.size].tobytes())
            if (load, turn) != (self._party.number, number):
                raise errors.ProcessError(
                    "the processes are out of step: an exchange was given up half-way before",
                    expected=f"load {self._party.number}, round {number}",
                    found=f"load {load}, round {turn}",
                )
            failed = failed or bool(flag)
        return came, interrupted, failed
