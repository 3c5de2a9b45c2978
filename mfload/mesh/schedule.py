"""Which process reads which bytes of an exchange, and what travels in which round.

Tensors are cut into slabs, runs of rows that one process reads: as a rule one that wants them. The
parts of a slab travel as bytes, in rounds of rows of one size, one row from each process to each; a
slab with more than that travels in steps, in rounds of its own. All of it follows from the requests
of all processes: each chooses the same readers and rounds, and they compare a digest of these.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box
from mfload.mesh import base
from mfload.mesh.base import Requests, TargetBox
from mfload.planning import slicing
from mfload.planning.memory import grouped
from mfload.planning.slicing import first_element, intersection, shape_of
from mfload.runtime import gc_paused

# Of parcels in a row, which begins with a header: the round, and the bytes of the sender's error.
ALIGNMENT, HEADER = 64, struct.Struct("<QQ")
# Parcels from here on travel by themselves, from and to where they lie. Smaller ones share a row.
ALONE = 64 << 10
# Bytes of a row that travel in any case: a header with the longest error.
ROW = 4096
# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages; of very many processes by
# more, as no more slabs than that are cut for it.
_EVEN, _LEAST, _SLABS = 32, 8192, 16384


class Parcel(NamedTuple):
    """A box of a target that one process reads: one stretch of the target's bytes."""

    reader: int
    target: TargetBox
    box: Box
    at: int  # First byte in the result.
    nbytes: int  # Bytes as delivered.
    wire: int  # First byte in the row that travels, 0 if it stays with its reader.
    same: Parcel | None = None  # Has the same bytes, and is read: this one is sent from there.

    @property
    def alone(self) -> bool:
        """Whether it travels by itself, from and to where it lies."""
        return self.nbytes >= ALONE


class Schedule(NamedTuple):
    """What each process reads, and what travels when."""

    ranks: tuple[int, ...]
    width: int  # Bytes from each process to each in a round.
    # What this process reads or gets. What stays with its reader is in the first, except of what
    # is encoded: that is in the order of its pieces.
    rounds: Sequence[list[Parcel]]
    read: Mapping[int, int]  # Bytes that each process reads,
    received: Mapping[int, int]  # and gets from others, of those whose parcels are in the rounds.
    travels: bool  # Whether a process gets anything from another.
    # Of each round: at least as many as the parcels that travel by themselves from one process to
    # another, and as the bytes of a row before them.
    most: list[int]
    front: list[int]
    digest: str  # Of what the schedules of all processes have in common.


class _Want(NamedTuple):
    """Which processes want how much of a slab; those of tensors that are alike share it."""

    nbytes: int
    bytes_of: Mapping[int, int]  # By process, as its place among all.
    most: int  # The most of one,
    best: Any  # and those that want as many.
    ranks: Any  # Those that want some, and how much that is in a row, as arrays,
    amounts: Any
    row: int  # and the most of these.
    parts: Mapping[int, list[int]]  # Numbers of the targets of each.
    alone: int  # The most parcels of one process that travel by themselves,
    small: int  # and the most bytes of others.


# A box of a tensor that one process reads, with what is wanted of it.
_Slab = tuple[Box, _Want]
_Piece = tuple[Box, int]  # Of a tensor that is encoded, with its bytes in the file or its number.
# The part of a tensor that some targets want, by their numbers.
_Group = tuple[Box, list[int]]


class _Cut(NamedTuple):
    """The slabs of tensors that are alike: those that one process wants, and what others share.

    Where it is `fixed`, each process reads what it wants itself.
    """

    slabs: list[_Slab]
    single: Any  # Bytes of slabs that one process alone wants, for each process,
    own: list[_Slab]  # those of the process whose schedule it is,
    shared: list[_Slab]  # and all other slabs;
    inside: list[list[int]]  # of what is encoded, the numbers of the pieces that each reads.
    fixed: bool = False


class _Steps(NamedTuple):
    """A slab in parts that each fit a row; of its rows that no one wants there are none."""

    slab: Box  # The first that was cut so: others lie elsewhere.
    slabs: list[_Slab]
    alone: Any  # Of the wants of each, as arrays.
    small: Any


class _Sent(NamedTuple):
    """A slab, its reader as a place among all, and the rounds in which it travels."""

    tensor: base.WantedTensor
    reader: int
    first: int
    box: Box
    cut: Box  # The first slab that was cut like this one,
    steps: Sequence[_Slab]  # and its parts, one a round.


class _Rounds(Sequence[list[Parcel]]):
    """The parcels of each round, made when they are asked for: of many rows they are very many."""

    def __init__(self, ranks: Sequence[int], width: int, rank: int | None) -> None:
        self.total = 1
        self._ranks, self._width, self._rank = ranks, width, rank
        self._place = -1 if rank is None else ranks.index(rank)
        self._kept: dict[int, list[_Sent]] = {}  # By round.
        self._sent: dict[int, tuple[list[int], list[_Sent]]] = {}  # By reader, in order of rounds.
        self._made: dict[int, list[Parcel]] = {}  # The last few.

    def add(self, sent: _Sent, travels: bool) -> None:
        if not travels:
            self._kept.setdefault(sent.first, []).append(sent)
            return
        firsts, every = self._sent.setdefault(sent.reader, ([], []))
        firsts.append(sent.first)
        every.append(sent)

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, at: int) -> list[Parcel]: ...
    @overload
    def __getitem__(self, at: slice) -> list[list[Parcel]]: ...
    def __getitem__(self, at: int | slice) -> list[Parcel] | list[list[Parcel]]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(self.total))]
        number = range(self.total)[at]
        if number not in self._made:
            if len(self._made) > 3:
                del self._made[min(self._made)]
            self._made[number] = self._round(number)
        return self._made[number]

    def _round(self, number: int) -> list[Parcel]:
        made, row = list[Parcel](), (Counter[int](), Counter[int]())
        for sent in self._kept.get(number, ()):
            made += self._parcels(sent, 0, *row)
        for _, (firsts, every) in sorted(self._sent.items()):
            row = Counter[int](), Counter[int]()
            start = bisect_left(firsts, number)
            if start and number - firsts[start - 1] < len(every[start - 1].steps):
                start -= 1
            for sent in every[start : bisect_right(firsts, number)]:
                made += self._parcels(sent, number - sent.first, *row)
        return made

    def _parcels(
        self, sent: _Sent, step: int, used: Counter[int], fore: Counter[int]
    ) -> Iterator[Parcel]:
        """The parcels of a slab that this process reads or gets in a round.

        `used` are the bytes of the reader's rows, by process, and `fore` those of small parcels.
        """
        box, want = sent.steps[step]
        slab = _moved(box, sent.cut, sent.box)
        mine, reader = self._rank, self._ranks[sent.reader]
        parts: Iterable[int] = want.parts.get(self._place, ())
        if mine is None or mine == reader:
            # What the reader keeps comes first: others get it from there.
            others = (some for place, some in want.parts.items() if place != sent.reader)
            parts = itertools.chain(want.parts.get(sent.reader, ()), *others)
        held: dict[object, Parcel] = {}
        for n in parts:
            box = intersection(slab, sent.tensor.parts[n].box)
            if box is None:
                continue
            target = sent.tensor.target(n)
            wire, nbytes, to, dtype = 0, _nbytes(target, box), target.rank, target.request.dtype
            key = (box, dtype.name, target.request.checked) if nbytes >= ALONE else None
            if to != reader:
                used[to] += _padded(nbytes)
                if key is None:  # Small ones from the front on, others from the back.
                    wire = ALIGNMENT + fore[to]
                    fore[to] += _padded(nbytes)
                else:
                    wire = self._width - (used[to] - fore[to])
            at = first_element(target.box, box) // dtype.elements * dtype.nbytes
            same = held.get(key) if wire else None
            parcel = Parcel(reader, target, box, at, nbytes, wire, same)
            if key is not None:
                held.setdefault(key, parcel)
            yield parcel


def make_schedule(requests: Requests, width: int, rank: int | None = None) -> Schedule:
    """The schedule of a process for the requests of each; of all processes without `rank`.

    All processes choose the same readers and rounds; only a process's own parcels are made, so that
    the work grows with what it sends and receives.
    """
    with gc_paused():
        return _Scheduler(requests, width, rank).made()


class _Scheduler:
    def __init__(self, requests: Requests, width: int, rank: int | None) -> None:
        self._ranks, self._width = tuple(sorted(requests)), width
        self._rank, count = rank, len(self._ranks)
        self._places = {each: n for n, each in enumerate(self._ranks)}
        self._place = -1 if rank is None else self._places[rank]
        self._tensors = base.targets(requests)
        self._pieces = [base.encoded(each.info) for each in self._tensors]
        sizes = [sum(nbytes for _, nbytes in pieces) for pieces in self._pieces]
        self._sizes = [n or each.info.nbytes for n, each in zip(sizes, self._tensors, strict=True)]
        total = sum(self._sizes)
        self._grain = max(_LEAST, total // min(_EVEN * count, max(_SLABS, count)))
        self._room, self._due, self._last = width - ALIGNMENT, 0, 0
        self._rounds = _Rounds(self._ranks, width, rank)
        # Of each round, as in a schedule.
        self._most, self._front = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._read, self._received = np.zeros(count, np.int64), Counter[int]()
        # The round that each reader fills, how full its row to each process is, and what parcels of
        # their own kind take of the fullest.
        self._current = [0] * count
        self._full = np.zeros((count, count), np.int64)
        self._alone, self._small = [0] * count, [0] * count
        self._steps_of: dict[int, _Steps] = {}  # By the id of what is wanted of a slab.
        self._trace: list[int] = []
        self._travels = False

    def made(self) -> Schedule:
        cuts: dict[int, _Cut] = {}
        constants = ALIGNMENT, ALONE, ROW, HEADER.format, self._ranks, self._width
        digest = hashlib.sha256(repr(constants).encode())
        for tensor, pieces, nbytes in zip(self._tensors, self._pieces, self._sizes, strict=True):
            cut = cuts.get(id(tensor.parts))
            if cut is None:
                cut = cuts[id(tensor.parts)] = self._cut(tensor, pieces)
                digest.update(repr([box for box, _ in cut.slabs]).encode())
            self._due += int(cut.single.sum()) if cut.fixed else nbytes
            read, most = self._read + cut.single, self._due / len(self._ranks) + self._grain
            if cut.fixed or (read <= most)[cut.single > 0].all():
                self._read = read
                for box, want in cut.own:
                    (reader,) = want.bytes_of
                    self._rounds.add(
                        _Sent(tensor, reader, 0, box, box, [(box, want)]), travels=False
                    )
                slabs = cut.shared
            else:
                slabs = cut.slabs
            for (box, want), inside in itertools.zip_longest(slabs, cut.inside):
                nbytes = want.nbytes if inside is None else sum(pieces[n][1] for n in inside)
                self._last = self._reader(want, nbytes)
                self._read[self._last] += nbytes
                self._send(tensor, box, want, stays=self._current[self._last] if pieces else 0)
        digest.update(np.array(self._trace, np.int64).tobytes())
        count = len(self._rounds)
        front = np.clip(ALIGNMENT + self._front[:count], ROW, self._width)
        return Schedule(
            self._ranks,
            self._width,
            self._rounds,
            dict(zip(self._ranks, self._read.tolist(), strict=True)),
            {each: self._received[place] for each, place in self._places.items()},
            self._travels,
            self._most[:count].tolist(),
            front.tolist(),
            digest.hexdigest()[:32],
        )

    def _cut(self, tensor: base.WantedTensor, pieces: Sequence[_Piece]) -> _Cut:
        groups = _groups(tensor, range(len(tensor.parts)))
        whole = tuple((0, n) for n in tensor.info.shape)
        single = np.zeros(len(self._ranks), np.int64)
        own, shared = list[_Slab](), list[_Slab]()
        if pieces and base.backwards(tensor.info):
            for place, rank in enumerate(self._ranks):
                numbers = [n for n, part in enumerate(tensor.parts) if part.rank == rank]
                if groups := _groups(tensor, numbers):
                    single[place] = sum(n for inside, n in pieces if _within(inside, groups))
                    if self._place in (place, -1):
                        own.append((whole, self._want(tensor, whole, groups)))
            return _Cut([], single, own, [], [], fixed=True)
        if pieces:
            inside, known = list[list[int]](), dict[object, _Want]()
            numbers = [(box, n) for n, (box, _) in enumerate(pieces)]
            for box, some, mine in _cells(whole, numbers, groups):
                inside.append([n for piece, n in some if _within(piece, mine)])
                mine, first = _within(box, mine), tuple((0, 0) for _ in box)
                # Chunks of a grid that are wanted alike share what is known of that.
                key = shape_of(box), tuple((_moved(part, box, first), id(n)) for part, n in mine)
                if (want := known.get(key)) is None:
                    want = known[key] = self._want(tensor, box, mine)
                shared.append((box, want))
            return _Cut(shared, single, own, shared, inside)
        slabs = self._slabs(tensor, whole, groups, grain=self._grain)
        for slab in slabs:
            if len(slab[1].bytes_of) > 1:
                shared.append(slab)
                continue
            (place,) = slab[1].bytes_of
            single[place] += slab[1].nbytes
            if self._place in (place, -1):
                own.append(slab)
        return _Cut(slabs, single, own, shared, [])

    def _reader(self, want: _Want, nbytes: int) -> int:
        """One that wants most of a slab, while all read about as much.

        Then the one that read what lies before; then the one that has read least.
        """
        read, limit = self._read, self._due / len(self._ranks) + self._grain - nbytes
        if want.bytes_of.get(self._last) == want.most and read[self._last] <= limit:
            return self._last
        reader = int(want.best[read.take(want.best).argmin()])
        if read[reader] <= limit:
            return reader
        ready = np.flatnonzero(read <= limit)
        if not ready.size:
            ready = np.flatnonzero(read == read.min())
        wanted = np.zeros(len(read), np.int64)
        wanted[want.ranks] = want.amounts
        wanted = wanted[ready]
        best = ready[wanted == wanted.max()]
        return self._last if self._last in best else int(best[read[best].argmin()])

    def _send(self, tensor: base.WantedTensor, box: Box, want: _Want, stays: int) -> None:
        """Takes the reader's next rounds for a slab, or the round `stays` if none of it travels."""
        reader, first, cut, steps = self._last, stays, box, [(box, want)]
        travels = [*want.bytes_of] != [reader]
        if travels:
            self._travels = True
            cut, steps, alone, small = self._steps(tensor, box, want)
            first = self._next(reader, steps[-1][1], alone, small)
        self._trace += (reader, first)
        if self._place not in want.bytes_of and self._place not in (reader, -1):
            return
        self._rounds.add(_Sent(tensor, reader, first, box, cut, steps), travels)
        for place in want.bytes_of if self._place < 0 else (self._place,):
            if place != reader:
                self._received[place] += want.bytes_of[place]

    def _steps(self, tensor: base.WantedTensor, box: Box, want: _Want) -> _Steps:
        """The parts of a slab that each fit a row; slabs with the same `want` are cut alike."""
        if (steps := self._steps_of.get(id(want))) is None:
            slabs = [(box, want)]
            if want.row > self._room:
                groups = _groups(tensor, itertools.chain(*want.parts.values()))
                slabs = self._slabs(tensor, box, groups, room=self._room)
            alone, small = np.array([(each.alone, each.small) for _, each in slabs]).T
            steps = self._steps_of[id(want)] = _Steps(box, slabs, alone, small)
        return steps

    def _next(self, reader: int, last: _Want, alone: Any, small: Any) -> int:
        """Fills the next rounds of a reader; the last one has room left for others."""
        row, more = self._full[reader], len(alone) - 1
        filled = row.take(last.ranks) + last.amounts
        if more or filled.max() > self._room:
            self._current[reader] += bool(row.any())
            row[:], filled = 0, last.amounts
            self._alone[reader] = self._small[reader] = 0
        first = self._current[reader]
        end = self._current[reader] = first + more
        row.put(last.ranks, filled)
        row[reader] = 0
        self._alone[reader] += int(alone[-1])
        self._small[reader] += int(small[-1])
        self._rounds.total = max(len(self._rounds), end + 1)
        if end >= len(self._most):
            self._most, self._front = (np.pad(a, (0, end + 1)) for a in (self._most, self._front))
        for most, each, full in (
            (self._most, alone, self._alone[reader]),
            (self._front, small, self._small[reader]),
        ):
            if more:
                np.maximum(most[first:end], each[:-1], out=most[first:end])
            if full > most[end]:
                most[end] = full
        return first

    def _want(self, tensor: base.WantedTensor, slab: Box, groups: Sequence[_Group]) -> _Want:
        wanted, rows = Counter[int](), Counter[int]()
        alone, small = Counter[int](), Counter[int]()
        parts: dict[int, list[int]] = {}
        for box, some in groups:
            sizes: dict[DType, int] = {}
            for n in some:
                rank, request, *_ = tensor.parts[n]
                if request.dtype not in sizes:
                    sizes[request.dtype] = request.dtype.size_of(shape_of(box)) or 0
                nbytes, place = sizes[request.dtype], self._places[rank]
                parts.setdefault(place, []).append(n)
                wanted[place] += nbytes
                rows[place] += _padded(nbytes)
                if nbytes >= ALONE:
                    alone[place] += 1
                else:
                    small[place] += _padded(nbytes)
        most, ranks, amounts = max(wanted.values()), np.array([*rows]), np.array([*rows.values()])
        best = np.array(sorted(place for place, nbytes in wanted.items() if nbytes == most))
        return _Want(
            tensor.info.dtype.size_of(shape_of(slab)) or 0,
            wanted,
            most,
            best,
            ranks,
            amounts,
            max(rows.values()),
            parts,
            max(alone.values(), default=0),
            max(small.values(), default=0),
        )

    def _slabs(
        self,
        tensor: base.WantedTensor,
        slab: Box,
        groups: Sequence[_Group],
        *,
        grain: int = sys.maxsize,
        room: int = sys.maxsize,
    ) -> list[_Slab]:
        """Cuts a box of a tensor in file order into slabs; `groups` want it.

        A slab has at most `grain` bytes, of which a process wants at most `room`: a run of rows of
        one dim at one place in all dims before it. So the part of it that a box holds is one
        stretch of it.
        """
        groups = _within(slab, groups)
        if not groups:
            return []
        info, want = tensor.info, self._want(tensor, slab, groups)
        count, ends = max(-(-want.nbytes // grain), -(-want.row // room)), list[int]()
        dim, cuts = slicing.cuts(slab, slicing.units_of(info), count)
        if cuts:
            ends = sorted({*slab[dim], *(end for box, _ in groups for end in box[dim])})
            if len(want.bytes_of) > 1 and 2 < len(ends) <= want.nbytes // _APART + 1:
                cuts = ends
        elif want.row > room:
            expected = "more, or exchange='never'"
            raise errors.MemoryLimitError(base.SMALL, tensor=info.name, expected=expected)
        if len(cuts) < 3:
            return [(slab, want)]
        within = [list[_Group]() for _ in cuts[1:]]
        for group in groups:
            first, last = group[0][dim]
            for n in range(bisect_right(cuts, first) - 1, bisect_left(cuts, last)):
                within[n].append(group)
        made: list[_Slab] = []
        known: dict[int, tuple[Box, list[_Slab]]] = {}
        for (start, stop), some in zip(itertools.pairwise(cuts), within, strict=True):
            cut = (*slab[:dim], (start, stop), *slab[dim + 1 :])
            # Where no part ends in between, runs of as many rows are cut alike.
            first, below = known.get(stop - start, (cut, None)) if len(ends) < 3 else (cut, None)
            if below is None:
                below = self._slabs(tensor, cut, some, grain=grain, room=room)
                known[stop - start] = cut, below
            made += [(_moved(box, first, cut), inner) for box, inner in below]
        return made


def _groups(tensor: base.WantedTensor, numbers: Iterable[int]) -> list[_Group]:
    by_box: dict[Box, list[int]] = {}
    for number in numbers:
        by_box.setdefault(tensor.parts[number].box, []).append(number)
    return [*by_box.items()]


def _moved(box: Box, first: Box, second: Box) -> Box:
    """A box moved as far as from a first one that it begins in to a second."""
    pairs = zip(box, first, second, strict=True)
    return tuple((a - b + c, end - b + c) for (a, end), (b, _), (c, _) in pairs)


def _within(slab: Box, groups: Sequence[_Group]) -> list[_Group]:
    common = ((intersection(slab, box), some) for box, some in groups)
    return [(box, some) for box, some in common if box is not None]


def _cells(
    cell: Box, pieces: Sequence[_Piece], groups: Sequence[_Group], dim: int = 0
) -> Iterator[tuple[Box, Sequence[_Piece], Sequence[_Group]]]:
    """Cuts a box into boxes that no encoded piece reaches out of, each with its pieces and groups.

    Nor does a part that is wanted, in dims where what is cut off would be several stretches of it.
    """
    if not groups:
        return
    if dim == len(cell):
        yield cell, pieces, groups
        return
    whole = [box[dim] for box, _ in pieces]
    if any(stop - start > 1 for start, stop in cell[:dim]):
        whole += [box[dim] for box, _ in groups]
    cuts, reach = [cell[dim][0]], cell[dim][0]
    for start, stop in sorted(whole):
        if start >= reach and start > cuts[-1]:
            cuts.append(start)
        reach = max(reach, stop)
    cuts.append(cell[dim][1])
    inside: list[tuple[list[_Piece], list[_Group]]] = [([], []) for _ in cuts[1:]]
    for piece in pieces:
        inside[bisect_right(cuts, piece[0][dim][0]) - 1][0].append(piece)
    for group in groups:
        first, last = group[0][dim]
        for n in range(bisect_right(cuts, first) - 1, bisect_left(cuts, last)):
            inside[n][1].append(group)
    for pair, (some, mine) in zip(itertools.pairwise(cuts), inside, strict=True):
        yield from _cells((*cell[:dim], pair, *cell[dim + 1 :]), some, mine, dim + 1)


def batches(requests: Requests, limit: float) -> list[dict[int, list[int]]]:
    """Numbers of the requests that are loaded together, so that no process gets more than a limit.

    One tensor alone may exceed it.
    """
    if limit == math.inf:
        return [{rank: [*range(len(every))] for rank, every in requests.items()}]

    def held(tensor: base.WantedTensor) -> Counter[int]:
        nbytes = Counter[int]()
        for part in tensor.parts:
            nbytes[part.rank] += part.request.nbytes * len(part.numbers)
        return nbytes

    made: list[dict[int, list[int]]] = []
    for group in [*grouped(base.targets(requests), dict.fromkeys(requests, limit), held)] or [[]]:
        made.append({rank: [] for rank in requests})
        for tensor in group:
            for part in tensor.parts:
                made[-1][part.rank] += [tensor.numbers[n] for n in part.numbers]
    for rank, every in requests.items():
        made[-1][rank] += [n for n, request in enumerate(every) if not request.nbytes]
    return made


def _nbytes(target: TargetBox, box: Box) -> int:
    return target.request.dtype.size_of(shape_of(box)) or 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
