"""Exchange: who reads what, and what travels when. Pure.

Every byte that anybody wants is read by one process, as a rule by one that wants it. From the needs
of all processes each makes the same schedule, so nobody has to be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mfload import errors, placement
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.placement import Need
from mfload.sharding import cutting

HEADER = 64
"""Bytes before the parcels of a row that travels (see `rounds`)."""

_ALIGNMENT = 64
# Large enough that a round's fixed costs don't count, small enough for the processor's cache.
_WIDEST, _ROUND = 2 << 20, 4 << 20
_NARROWEST = 4096
# Rows to send (this round's and the next), their copies in the framework, and those that came.
_HELD = 6
# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages.
_EVEN, _LEAST = 32, 8192


class Goal(NamedTuple):
    """A part of a tensor that a process needs, for one or more of its needs.

    Attributes:
        info: The tensor.
        dtype: The dtype it is delivered in.
        checked: Whether values are checked on conversion.
        box: The part.
        needs: Numbers of the process's needs.
    """

    info: TensorInfo
    dtype: DType
    checked: bool
    box: Box
    needs: tuple[int, ...]


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

    def needs(self, parcels: Sequence[Parcel], rank: int) -> list[Need]:
        """What a process reads of some parcels: a need for each that is its own to read."""
        made: list[Need] = []
        for parcel in parcels:
            if parcel.reader == rank:
                goal = self.goals[parcel.taker][parcel.goal]
                selection = placement.boxed(goal.info, parcel.box)
                made.append(Need(goal.info, goal.dtype, selection, goal.checked))
        return made

    def digest(self) -> str:
        """The same where schedules are the same."""
        names = {
            rank: [(g.info.name, g.dtype.name, g.checked, g.box, g.needs) for g in goals]
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


def goals(needs: Mapping[int, Sequence[Need]]) -> dict[int, tuple[Goal, ...]]:
    """What each process wants; needs of the same part are one goal.

    Raises:
        UsageError: A need is no box.
    """
    made: dict[int, tuple[Goal, ...]] = {}
    for rank in sorted(needs):
        held: dict[tuple[str, str, bool, Box], tuple[Need, list[int]]] = {}
        for number, need in enumerate(needs[rank]):
            box = cutting.box_of(need)
            if box is None:
                raise errors.UsageError(
                    "a part with steps can't be exchanged", tensor=need.info.name
                )
            key = need.info.name, need.dtype.name, need.checked, box
            held.setdefault(key, (need, []))[1].append(number)
        made[rank] = tuple(
            Goal(need.info, need.dtype, need.checked, key[3], tuple(numbers))
            for key, (need, numbers) in held.items()
            if need.nbytes
        )
    return made


def stored_bytes(wanted: Mapping[int, Sequence[Goal]]) -> int:
    """Bytes of the files that all processes want together, as far as whole slabs go."""
    return sum(_size(each[0][2].info, _hull(each)) for each in _by_tensor(wanted))


def make(needs: Mapping[int, Sequence[Need]], width: int) -> Schedule:
    """Makes the schedule.

    Args:
        needs: What each process needs, by its number.
        width: Bytes from each process to each in a round.

    Returns:
        The same on every process.
    """
    wanted = goals(needs)
    total = stored_bytes(wanted)
    grain = max(_LEAST, total // (_EVEN * len(wanted)))
    packer = _Packer(tuple(wanted), width)
    shares = _Shares(tuple(wanted), grain)
    for each in _by_tensor(wanted):
        info = each[0][2].info
        shares.due += _size(info, _hull(each))
        grown = max(-(-goal.dtype.nbytes // info.dtype.nbytes) for _, _, goal in each)
        limit = min(grain, (width - HEADER - _ALIGNMENT) // grown)
        for slab in _slabs(each, limit):
            parts = [
                (taker, number, goal, box)
                for taker, number, goal in each
                if (box := cutting.within(slab, goal.box)) is not None
            ]
            if parts:
                taking = {taker: 0 for taker, *_ in parts}
                for taker, _, _, box in parts:
                    taking[taker] += _size(info, box)
                reader = shares.reader(_size(info, slab), taking)
                packer.add([_parcel(reader, *part) for part in parts])
    local, rounds = packer.end()
    return Schedule(tuple(wanted), width, wanted, local, rounds)


def parts(needs: Mapping[int, Sequence[Need]], limit: int) -> list[dict[int, list[int]]]:
    """Numbers of the needs that are loaded together, so that no process gets more than a limit.

    Args:
        needs: What each process needs, by its number.
        limit: Bytes; one tensor alone may exceed it.

    Returns:
        For each part the numbers of each process's needs, tensors in file order.
    """
    held: dict[str, dict[int, list[int]]] = {}
    at: dict[str, tuple[int, int]] = {}
    for rank in sorted(needs):
        for number, need in enumerate(needs[rank]):
            at[need.info.name] = need.info.pieces[0][:2]
            held.setdefault(need.info.name, {}).setdefault(rank, []).append(number)
    made: list[dict[int, list[int]]] = [{rank: [] for rank in sorted(needs)}]
    used = dict.fromkeys(needs, 0)
    for name in sorted(held, key=lambda name: at[name]):
        each = {r: sum(needs[r][n].nbytes for n in numbers) for r, numbers in held[name].items()}
        if any(used[r] and used[r] + nbytes > limit for r, nbytes in each.items()):
            made.append({rank: [] for rank in sorted(needs)})
            used = dict.fromkeys(needs, 0)
        for rank, numbers in held[name].items():
            made[-1][rank] += numbers
            used[rank] += each[rank]
    return made


_Each = tuple[int, int, Goal]  # Process, number of the goal there, goal.


def _by_tensor(wanted: Mapping[int, Sequence[Goal]]) -> list[list[_Each]]:
    """The goals of each tensor, in file order."""
    held: dict[str, list[_Each]] = {}
    for rank, each in wanted.items():
        for number, goal in enumerate(each):
            held.setdefault(goal.info.name, []).append((rank, number, goal))
    return sorted(held.values(), key=lambda each: each[0][2].info.pieces[0][:2])


def _slabs(each: Sequence[_Each], limit: int) -> Iterator[Box]:
    """Slabs of a tensor, cut where one process wants no more and the next begins."""
    info = each[0][2].info
    by_rank: dict[int, list[Box]] = {}
    for rank, _, goal in each:
        by_rank.setdefault(rank, []).append(goal.box)
    least = _APART * info.dtype.elements // info.dtype.nbytes
    for piece in cutting.apart(_hull(each), list(map(cutting.hull, by_rank.values())), least):
        yield from cutting.slabs(info, piece, limit)


def _hull(each: Sequence[_Each]) -> Box:
    return cutting.hull([goal.box for _, _, goal in each])


def _size(info: TensorInfo, box: Box) -> int:
    return info.dtype.size_of(cutting.shape_of(box)) or 0


def _parcel(reader: int, taker: int, number: int, goal: Goal, box: Box) -> Parcel:
    at = cutting.offset_in(goal.box, box) // goal.dtype.elements * goal.dtype.nbytes
    return Parcel(reader, taker, number, box, at, goal.dtype.size_of(cutting.shape_of(box)) or 0)


class _Shares:
    """Gives each slab a reader: one that wants it, while all read about as much.

    Args:
        ranks: The processes.
        grain: Bytes that one may be ahead of its share.
    """

    def __init__(self, ranks: tuple[int, ...], grain: int) -> None:
        self.due = 0  # Bytes of all tensors so far, this one counted in.
        self._read = dict.fromkeys(ranks, 0)
        self._grain = grain
        self._last = ranks[0]

    def reader(self, nbytes: int, taking: Mapping[int, int]) -> int:
        """The reader of the next slab.

        Args:
            nbytes: Its size.
            taking: Bytes that each process wants of it.
        """
        most = self.due / len(self._read) + self._grain - nbytes
        # Who wants most of it; then who read what lies before; then who has read least.
        chosen = max(
            (rank for rank, read in self._read.items() if read <= most),
            key=lambda r: (taking.get(r, 0), r == self._last, -self._read[r], -r),
            default=min(self._read, key=lambda r: (self._read[r], r)),
        )
        self._read[chosen] += nbytes
        self._last = chosen
        return chosen


class _Packer:
    """Packs parcels into rounds, each reader's in the order in which it reads them."""

    def __init__(self, ranks: tuple[int, ...], width: int) -> None:
        self._width = width
        self._local: list[Parcel] = []
        self._rounds: list[list[Parcel]] = []
        self._round = dict.fromkeys(ranks, 0)
        self._full: dict[tuple[int, int], int] = {}
        self._latest: dict[tuple[int, int, int], tuple[list[Parcel], int]] = {}

    def add(self, parcels: list[Parcel]) -> None:
        """Takes the parcels of a slab, which have one reader."""
        reader = parcels[0].reader
        if all(parcel.taker == reader for parcel in parcels):
            for parcel in parcels:
                self._append(self._local, parcel)
            return
        sent: dict[int, int] = {}
        for parcel in parcels:
            if parcel.taker != reader:
                sent[parcel.taker] = sent.get(parcel.taker, 0) + _padded(parcel.nbytes)
        full = any(self._fill(reader, to) + nbytes > self._width for to, nbytes in sent.items())
        if full and any(self._fill(reader, to) > HEADER for to in self._round):
            self._round[reader] += 1
            for to in self._round:
                self._full.pop((reader, to), None)
        if any(HEADER + nbytes > self._width for nbytes in sent.values()):
            self._one_by_one(parcels)
        else:
            self._pack(parcels)

    def _one_by_one(self, parcels: list[Parcel]) -> None:
        """Parcels that one row does not hold together: boxes of one process that overlap."""
        for parcel in parcels:
            reader, to = parcel.reader, parcel.taker
            if to != reader and self._fill(reader, to) + _padded(parcel.nbytes) > self._width:
                self._round[reader] += 1
                for other in self._round:
                    self._full.pop((reader, other), None)
            self._pack([parcel])

    def _pack(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            reader, to = parcel.reader, parcel.taker
            while len(self._rounds) <= self._round[reader]:
                self._rounds.append([])
            here = self._rounds[self._round[reader]]
            if to == reader:
                self._append(here, parcel)
                continue
            wire = self._fill(reader, to)
            used = self._append(here, parcel._replace(wire=wire))
            self._full[reader, to] = wire + used

    def _fill(self, reader: int, to: int) -> int:
        return self._full.get((reader, to), HEADER)

    def _append(self, where: list[Parcel], parcel: Parcel) -> int:
        """Adds a parcel, as a part of the one before where it goes on there; bytes of the row."""
        key = parcel.reader, parcel.taker, parcel.goal
        before, place = self._latest.get(key, (None, 0))
        if before is where:
            old = where[place]
            box = cutting.joined(old.box, parcel.box)
            end = old.at + old.nbytes == parcel.at
            row = parcel.wire < 0 or old.wire + old.nbytes == parcel.wire
            if box is not None and end and row:
                where[place] = old._replace(box=box, nbytes=old.nbytes + parcel.nbytes)
                return _padded(parcel.nbytes)
        self._latest[key] = where, len(where)
        where.append(parcel)
        return _padded(parcel.nbytes)

    def end(self) -> tuple[tuple[Parcel, ...], tuple[tuple[Parcel, ...], ...]]:
        """What stays where it is read, and the rounds."""
        return tuple(self._local), tuple(map(tuple, self._rounds))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
