"""Redistribution: every wanted byte is read by one process and sent to those that want it.

Tensors are cut into slabs, runs of rows that one process reads: as a rule one that wants them. The
parts of a slab travel as bytes, in rounds of rows of one size, one row from each process to each.
All of it follows from the requests of all processes: each chooses the same readers and rounds, and
they compare a digest of these before any bytes travel.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import signal
import struct
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.cuda.staging import DEPTH
from mfload.dtypes import DType
from mfload.index import Box
from mfload.io import buffers, pread
from mfload.load_options import OVERHEAD
from mfload.loading import execute
from mfload.loading.session import Filled, Loader, Session
from mfload.mesh import agree, base
from mfload.mesh.agree import ProcessGroup
from mfload.mesh.base import Requests, Target
from mfload.mesh.link import Link, Pieces
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import Place, Plan, make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed, first_element, intersection, shape_of
from mfload.report import Report
from mfload.runtime import gc_paused

if TYPE_CHECKING:
    from mfload.timeline import Track

# Of parcels in a row, which begins with a header: the round, and the bytes of the sender's error.
ALIGNMENT, _HEADER = 64, struct.Struct("<QQ")
# Parcels from here on travel by themselves, from and to where they lie. Smaller ones share a row.
ALONE = 64 << 10
# Bytes of a row that travel in any case: a header with the longest error.
_ROW = 4096
# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages; of very many processes by
# more, as no more slabs than that are cut for it.
_EVEN, _LEAST, _SLABS = 32, 8192, 16384


class Parcel(NamedTuple):
    """A box of a target that one process reads: one stretch of the target's bytes."""

    reader: int
    target: Target
    box: Box
    at: int  # First byte in the result.
    nbytes: int  # Bytes as delivered.
    wire: int  # First byte in the row that travels, 0 if it stays with its reader.
    same: Parcel | None = None  # Has the same bytes, and is read: this one is sent from there.


class Schedule(NamedTuple):
    """What each process reads, and what travels when."""

    ranks: tuple[int, ...]
    width: int  # Bytes from each process to each in a round.
    # What this process reads or gets. What stays with its reader is in the first, except of what
    # is encoded: that is in the order of its pieces.
    rounds: list[list[Parcel]]
    read: Mapping[int, int]  # Bytes that each process reads.
    travels: bool  # Whether a process gets anything from another.
    # Of each round: at least as many as the parcels that travel by themselves from one process to
    # another, and as the bytes of a row before them.
    most: list[int]
    front: list[int]
    digest: str  # Of what the schedules of all processes have in common.

    def received(self, rank: int) -> int:
        """Bytes that a process gets from others."""
        every = (parcel for parcels in self.rounds for parcel in parcels)
        return sum(p.nbytes for p in every if p.target.rank == rank != p.reader)


class _Want(NamedTuple):
    """Which processes want how much of a slab; those of tensors that are alike share it."""

    nbytes: int
    bytes_of: Mapping[int, int]  # Bytes of rows by process, as its place among all.
    most: int
    ranks: Any  # The keys and values of `bytes_of`, as arrays,
    amounts: Any
    best: Any  # and those that want the most.
    parts: Mapping[int, list[int]]  # Numbers of the targets of each.
    alone: int  # The most parcels of one process that travel by themselves,
    small: int  # and the most bytes of others.


# A box of a tensor that one process reads, with what is wanted of it, and of all that this process
# reads with it: None if the slab before has said that.
_Slab = tuple[Box, _Want, _Want | None]
_Inner = tuple[Box, _Want]
_Piece = tuple[Box, int]  # Of a tensor that is encoded, with its bytes in the file.
# The part of a tensor that some targets want, by their numbers.
_Group = tuple[Box, list[int]]


class _Cut(NamedTuple):
    """The slabs of tensors that are alike: those that one process wants, and what others share.

    Where it is `fixed`, each process reads what it wants itself.
    """

    slabs: list[_Slab]
    single: Any  # Bytes of slabs that one process alone wants, for each process,
    own: list[_Slab]  # those of the process whose schedule it is,
    shared: list[_Slab]  # and all other slabs.
    fixed: bool = False


def schedule(requests: Requests, width: int, rank: int | None = None) -> Schedule:
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
        self._rounds: list[list[Parcel]] = [[]]
        self._most, self._front = [0], [_ROW]
        self._read = np.zeros(count, np.int64)
        # The round that each reader fills, how full its row to each process is, what parcels of
        # their own kind take of the fullest, and what is known of each row that has own parcels.
        self._current = [0] * count
        self._full = np.zeros((count, count), np.int64)
        self._alone, self._small = [0] * count, [0] * count
        self._used: list[Counter[int]] = [Counter() for _ in self._ranks]
        self._fore: list[Counter[int]] = [Counter() for _ in self._ranks]
        self._trace: list[int] = []
        self._targets: dict[int, Target] = {}  # Of the tensor at hand, by the number of the part.
        self._travels = False

    def made(self) -> Schedule:
        cuts: dict[int, _Cut] = {}
        constants = ALIGNMENT, ALONE, _ROW, _HEADER.format, self._ranks, self._width
        digest = hashlib.sha256(repr(constants).encode())
        for tensor, pieces, nbytes in zip(self._tensors, self._pieces, self._sizes, strict=True):
            cut = cuts.get(id(tensor.parts))
            if cut is None:
                cut = cuts[id(tensor.parts)] = self._cut(tensor, pieces)
                digest.update(repr([box for box, *_ in cut.slabs]).encode())
            self._targets.clear()
            self._due += int(cut.single.sum()) if cut.fixed else nbytes
            read, most = self._read + cut.single, self._due / len(self._ranks) + self._grain
            if cut.fixed or (read <= most)[cut.single > 0].all():
                self._read = read
                for box, want, _ in cut.own:
                    (reader,) = want.bytes_of
                    self._parcels(tensor, box, want, reader, 0)
                slabs = cut.shared
            else:
                slabs = cut.slabs
            for box, want, of in slabs:
                if of is not None:
                    self._last = self._reader(of)
                    self._read[self._last] += of.nbytes
                reader = self._last
                number = self._round(want, reader, self._current[reader] if pieces else 0)
                self._trace += (reader, number)
                self._parcels(tensor, box, want, reader, number)
        digest.update(np.array(self._trace, np.int64).tobytes())
        read = dict(zip(self._ranks, self._read.tolist(), strict=True))
        common = self._travels, self._most, self._front, digest.hexdigest()[:32]
        return Schedule(self._ranks, self._width, self._rounds, read, *common)

    def _cut(self, tensor: base.Wanted, pieces: Sequence[_Piece]) -> _Cut:
        by_box: dict[Box, list[int]] = {}
        for number, part in enumerate(tensor.parts):
            by_box.setdefault(part.box, []).append(number)
        whole, groups = tuple((0, n) for n in tensor.info.shape), list(by_box.items())
        single = np.zeros(len(self._ranks), np.int64)
        own, shared = list[_Slab](), list[_Slab]()
        if pieces and base.backwards(tensor.info):
            for place, rank in enumerate(self._ranks):
                numbers = [n for n, part in enumerate(tensor.parts) if part.rank == rank]
                groups = [(tensor.parts[n].box, [n]) for n in numbers]
                for want in [self._want(tensor, whole, groups)] if groups else ():
                    single[place] = sum(n for inside, n in pieces if _within(inside, groups))
                    own += [(whole, want, want)] if self._place in (place, -1) else []
            return _Cut([], single, own, [], fixed=True)
        if pieces:
            for box, some, mine in _cells(whole, pieces, groups):
                nbytes = sum(n for inside, n in some if _within(inside, mine))
                of = self._want(tensor, box, _within(box, mine))._replace(nbytes=nbytes)
                for slab, want in self._slabs(tensor, box, mine, sys.maxsize):
                    shared.append((slab, want, of))
                    of = None
            return _Cut(shared, single, own, shared)
        inner = self._slabs(tensor, whole, groups, self._grain)
        slabs: list[_Slab] = [(slab, want, want) for slab, want in inner]
        for slab in slabs:
            if len(slab[1].bytes_of) > 1:
                shared.append(slab)
                continue
            (place,) = slab[1].bytes_of
            single[place] += slab[1].nbytes
            if self._rank is None or place == self._place:
                own.append(slab)
        return _Cut(slabs, single, own, shared)

    def _reader(self, want: _Want) -> int:
        """One that wants most of a slab, while all read about as much.

        Then the one that read what lies before; then the one that has read least.
        """
        read, limit = self._read, self._due / len(self._ranks) + self._grain - want.nbytes
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

    def _round(self, want: _Want, reader: int, stays: int) -> int:
        """The round in which a slab travels: the reader's next with room. `stays` if none does."""
        if [*want.bytes_of] == [reader]:
            return stays
        self._travels, row = True, self._full[reader]
        filled = row.take(want.ranks) + want.amounts
        if filled.max() > self._room:
            row[:], filled = 0, want.amounts
            self._alone[reader] = self._small[reader] = 0
            self._used[reader].clear()
            self._fore[reader].clear()
            self._current[reader] += 1
            if self._current[reader] == len(self._rounds):
                self._rounds.append([])
                self._most.append(0)
                self._front.append(_ROW)
        row.put(want.ranks, filled)
        row[reader] = 0
        number = self._current[reader]
        self._alone[reader] += want.alone
        self._small[reader] += want.small
        self._most[number] = max(self._most[number], self._alone[reader])
        front = min(ALIGNMENT + self._small[reader], self._width)
        self._front[number] = max(self._front[number], front)
        return number

    def _parcels(
        self, tensor: base.Wanted, slab: Box, want: _Want, reader: int, number: int
    ) -> None:
        """Adds the parcels of a slab that this process reads or gets."""
        ranks, mine = self._ranks, self._rank
        parts: Iterable[int] = want.parts.get(self._place, ())
        if mine is None or mine == ranks[reader]:
            # What the reader keeps comes first: others get it from there.
            others = (some for place, some in want.parts.items() if place != reader)
            parts = itertools.chain(want.parts.get(reader, ()), *others)
        used, fore = self._used[reader], self._fore[reader]
        held: dict[object, Parcel] = {}
        for n in parts:
            box = intersection(slab, tensor.parts[n].box)
            if box is None:
                continue
            if (target := self._targets.get(n)) is None:
                target = self._targets[n] = tensor.target(n)
            wire, nbytes, to, dtype = 0, _nbytes(target, box), target.rank, target.request.dtype
            key = (box, dtype.name, target.request.checked) if nbytes >= ALONE else None
            if to != ranks[reader]:
                used[to] += _padded(nbytes)
                if key is None:  # Small ones from the front on, others from the back.
                    wire = ALIGNMENT + fore[to]
                    fore[to] += _padded(nbytes)
                else:
                    wire = self._width - (used[to] - fore[to])
            at = first_element(target.box, box) // dtype.elements * dtype.nbytes
            same = held.get(key) if wire else None
            parcel = Parcel(ranks[reader], target, box, at, nbytes, wire, same)
            self._rounds[number].append(parcel)
            if key is not None:
                held.setdefault(key, parcel)

    def _want(self, tensor: base.Wanted, slab: Box, groups: Sequence[_Group]) -> _Want:
        wanted, alone, small = Counter[int](), Counter[int](), Counter[int]()
        parts: dict[int, list[int]] = {}
        for box, some in groups:
            sizes: dict[DType, int] = {}
            for n in some:
                rank, request, *_ = tensor.parts[n]
                if request.dtype not in sizes:
                    sizes[request.dtype] = request.dtype.size_of(shape_of(box)) or 0
                nbytes, place = sizes[request.dtype], self._places[rank]
                parts.setdefault(place, []).append(n)
                wanted[place] += _padded(nbytes)
                if nbytes >= ALONE:
                    alone[place] += 1
                else:
                    small[place] += _padded(nbytes)
        ranks, amounts = np.array([*wanted]), np.array([*wanted.values()])
        most = int(amounts.max())
        best = np.sort(ranks[amounts == most])
        nbytes = tensor.info.dtype.size_of(shape_of(slab)) or 0
        highest = max(alone.values(), default=0), max(small.values(), default=0)
        return _Want(nbytes, wanted, most, ranks, amounts, best, parts, *highest)

    def _slabs(
        self, tensor: base.Wanted, slab: Box, groups: Sequence[_Group], grain: int
    ) -> list[_Inner]:
        """Cuts a box of a tensor in file order into slabs; `groups` want it.

        A slab has at most `grain` bytes, of which a process wants at most `room`: a run of rows of
        one dim at one place in all dims before it. So the part of it that a box holds is one
        stretch of it.
        """
        groups = _within(slab, groups)
        if not groups:
            return []
        info, want = tensor.info, self._want(tensor, slab, groups)
        # Elements that share a byte stay together.
        units = [1] * (len(slab) - 1) + [info.dtype.elements]
        if info.shape and info.shape[-1] % units[-1]:
            units = list(info.shape)  # Rows share bytes as well.
        dim = next((n for n, (a, b) in enumerate(slab) if b - a > units[n]), None)
        cuts, ends = list[int](), list[int]()
        if dim is not None:
            (start, stop), unit = slab[dim], units[dim]
            count = max(-(-want.nbytes // grain), -(-want.most // self._room))
            step = max(1, (stop - start) // (count * unit)) * unit
            cuts = [*range(start, stop, step), stop]
            ends = sorted({start, stop, *(end for box, _ in groups for end in box[dim])})
            if len(want.bytes_of) > 1 and 2 < len(ends) <= want.nbytes // _APART + 1:
                cuts = ends
        elif want.most > self._room:
            expected = "more, or exchange='never'"
            raise errors.MemoryLimitError(base.SMALL, tensor=info.name, expected=expected)
        if dim is None or len(cuts) < 3:
            return [(slab, want)]
        within = [list[_Group]() for _ in cuts[1:]]
        for group in groups:
            first, last = group[0][dim]
            for n in range(bisect_right(cuts, first) - 1, bisect_left(cuts, last)):
                within[n].append(group)
        made: list[_Inner] = []
        known: dict[int, tuple[int, list[_Inner]]] = {}
        for (start, stop), some in zip(itertools.pairwise(cuts), within, strict=True):
            # Where no part ends in between, runs of as many rows are cut alike.
            first, below = (
                known.get(stop - start, (start, None)) if len(ends) < 3 else (start, None)
            )
            if below is None:
                cut = (*slab[:dim], (start, stop), *slab[dim + 1 :])
                below = self._slabs(tensor, cut, some, grain)
                known[stop - start] = start, below
            for box, inner in below:
                a, b = box[dim]
                moved = (*box[:dim], (a - first + start, b - first + start), *box[dim + 1 :])
                made.append((moved, inner))
        return made


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
    made: list[dict[int, list[int]]] = [{rank: [] for rank in requests}]
    used = Counter[int]()
    for tensor in base.targets(requests):
        more = Counter[int]()
        for part in tensor.parts:
            more[part.rank] += part.request.nbytes * len(part.numbers)
        if any(used[rank] and used[rank] + nbytes > limit for rank, nbytes in more.items()):
            made.append({rank: [] for rank in requests})
            used.clear()
        used.update(more)
        for part in tensor.parts:
            made[-1][part.rank] += [tensor.numbers[n] for n in part.numbers]
    for rank, every in requests.items():
        made[-1][rank] += [n for n, request in enumerate(every) if not request.nbytes]
    return made


def _nbytes(target: Target, box: Box) -> int:
    return target.request.dtype.size_of(shape_of(box)) or 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def load(
    requests: Requests,
    loader: Loader,
    group: ProcessGroup,
    link: Link,
    width: int,
    limit: float,
    report: Report | None,
    advance: execute.Advance | None,
) -> list[tuple[Any, ...]]:
    """The arrays of this process, of which at most `limit` bytes wait in host memory at once."""
    options, arrays = loader.options, dict[int, tuple[Any, ...]]()
    by_host = options.replace(by_host=link.device is None)
    loader = Loader(loader.index, loader.sources, loader.adapter, by_host)
    for batch in batches(requests, limit):
        wanted = {rank: [requests[rank][n] for n in batch[rank]] for rank in group.ranks}
        made = schedule(wanted, width, group.rank)

        def fill(
            plan: Plan, memory: list[Any], session: Session, sources: Any, made: Schedule = made
        ) -> Filled:
            costs, threads = session.limits.costs, session.threads
            execute_run = partial(
                execute.run,
                threads=threads,
                deadline=options.deadline,
                recorder=session.recorder,
            )
            # Half of the overhead is for what travels.
            pages = (options.max_host_overhead or OVERHEAD) // 2 // threads // buffers.PAGE - 2
            if link.device is not None:
                # Of each slot a part is for what the host converts, and there are several a thread.
                every = itertools.chain.from_iterable(requests.values())
                growth = 1 + max(-(-r.dtype.nbytes // r.info.dtype.nbytes) for r in every)
                pages, costs = pages // (DEPTH * growth) - 3, costs._replace(span=0)
            unfinished = None
            if loader.index.columns.others:
                from mfload.io.decode import Unfinished

                pages //= 4  # What is fetched, what is put together, and what is left of both.
                unfinished = Unfinished(threads * pages * buffers.PAGE)
            block = max(buffers.PAGE, min(costs.block, pages * buffers.PAGE))
            # What lies between parts is mostly for another process to read.
            costs = costs._replace(block=block, merge_gap=buffers.PAGE, row_gap=None)
            plans, notes = list[Plan](), list[str]()
            cold = {number: sources[number] for number, leg in session.route.items() if leg.cold}

            def read(some: Sequence[Request], given: Any, there: list[Any]) -> None:
                specs = [BufferSpec(array.nbytes) for array in there]
                plan = make_plan(some, costs=costs, given=given, specs=specs)
                if unfinished is not None:
                    plan = plan._replace(blocks=unfinished.resume(plan.blocks))
                plans.append(plan)
                slots = None if link.device is None else _slots(plans[-1], there, block)
                # Of a copy, as a failure empties the list: this process takes part further.
                held = [*there]
                given = plan, held, sources, session.route
                more, _ = execute_run(*given, staging=slots, unfinished=unfinished)
                notes.extend(more)

            def ahead(some: Sequence[Request]) -> None:
                blocks = make_plan(some, costs=costs).blocks
                options.deadline.bound(partial(pread.prefetch, cold, blocks), "reading ahead")

            kept = pread.read_ahead(list(cold.values()))
            try:
                places = session.by_request(plan.places)
                given = made, group, link, read, places, memory, advance
                track = session.recorder and session.recorder.exchanges()
                run(*given, ahead if cold else None, track)
            finally:
                for source in kept:
                    source.keep(False)
            return plans, tuple(notes), made.received(group.rank)

        one = Report()
        try:
            found = loader.load(wanted[group.rank], report=one, fill=fill)
        finally:
            if report is not None:
                report.add(one)
        arrays.update(zip(batch[group.rank], found, strict=True))
    return [arrays[n] for n in range(len(arrays))]


def _slots(plan: Plan, memory: Sequence[Any], spare: int) -> Any:
    """What reads onto a device go through (see `staging`)."""
    from mfload.cuda import copies, memory as device_memory, staging

    own = device_memory.DeviceBuffer
    methods = copies.Methods([each.device if isinstance(each, own) else None for each in memory])
    return staging.staging(plan.blocks, methods, spare)


def run(
    schedule: Schedule,
    group: ProcessGroup,
    link: Link,
    read: Callable[[Sequence[Request], Sequence[tuple[int, int]], list[Any]], None],
    places: Sequence[Sequence[Place]],
    memory: list[Any],
    advance: execute.Advance | None,
    ahead: Callable[[Sequence[Request]], None] | None = None,
    track: Track | None = None,
) -> None:
    """Fills the results of this process; `read` reads requests to places, (buffer, first byte).

    `places` has those of each request, one for each device that it is for.
    `ahead` is told of requests some rounds before they are read. `track` records what travels.

    A process that fails keeps taking part until it has said so in the header of its rows. Then all
    of them stop after the same round, and their collectives stay in step.
    """
    rank, ranks, width = group.rank, schedule.ranks, schedule.width
    # While one travels, the next is filled.
    rows = [link.buffer(), link.buffer()] if schedule.travels else []
    # On a device, what travels by itself is read and sent from there; the rest goes by the rows.
    rooms = [link.room(each) for each in rows]
    wide = [link.view(each) for each in rooms]
    seen = [link.view(each) for each in memory]

    def spots(parcel: Parcel) -> list[tuple[int, int]]:
        every = (place for n in parcel.target.numbers for place in places[n])
        return [(place.buffer, place.at + parcel.at) for place in every]

    def wanted(parcels: Sequence[Parcel]) -> tuple[list[Request], list[tuple[int, int]]]:
        requests, given = list[Request](), list[tuple[int, int]]()
        for parcel in (each for each in parcels if each.reader == rank and not each.same):
            # Numbers of another process mean nothing here.
            row = ranks.index(parcel.target.rank) * width + parcel.wire
            there = (
                [(len(memory) + (parcel.nbytes >= ALONE), row)] if parcel.wire else spots(parcel)
            )
            whole = parcel.target.request
            selection = boxed(whole.info, parcel.box)
            requests += [whole._replace(selection=selection, devices=())] * len(there)
            given += there
        return requests, given

    def read_round(number: int, parcels: Sequence[Parcel]) -> None:
        if ahead is not None:
            for later in schedule.rounds[number + 2 if number else 1 : number + 3]:
                ahead(wanted(later)[0])
        requests, given = wanted(parcels)
        if requests:
            sent = [rows[number % 2].reshape(-1), rooms[number % 2]] if rows else []
            read(requests, given, [*memory, *sent])

    def place(parcel: Parcel) -> Any:
        buffer, at = spots(parcel)[0]
        return link.part(seen[buffer], at, parcel.nbytes)

    def in_row(number: int, to: int, at: int, nbytes: int) -> Any:
        return link.part(wide[number % 2], ranks.index(to) * width + at, nbytes)

    def pieces_of(parcels: Sequence[Parcel], round_number: int) -> Pieces:
        sizes = [_ROW] * len(ranks)
        common = schedule.most[round_number], schedule.front[round_number]
        pieces = Pieces([], [], sizes, [*sizes], *common)
        for parcel in (each for each in parcels if each.wire):
            given, to = parcel.reader == rank, parcel.target.rank
            number, end = ranks.index(to if given else parcel.reader), parcel.wire + parcel.nbytes
            if parcel.nbytes < ALONE:
                sizes = pieces.sizes if given else pieces.come
                sizes[number] = max(sizes[number], end)
            elif given:
                source = parcel.same or parcel
                where = round_number, source.target.rank, source.wire, source.nbytes
                part = in_row(*where) if source.wire else place(source)
                pieces.sent.append((number, parcel.wire, part))
            else:
                pieces.taken.append((number, parcel.wire, place(parcel)))
        return pieces

    def take_round(parcels: Sequence[Parcel], came: Any) -> None:
        nbytes, copies = 0, list[tuple[Any, Any]]()
        for parcel in (each for each in parcels if each.target.rank == rank):
            info, dtype, *_ = parcel.target.request
            nbytes += parcel.nbytes // dtype.nbytes * info.dtype.nbytes
            if not parcel.wire:
                continue
            part, rest = place(parcel), spots(parcel)[1:]
            if parcel.nbytes < ALONE:
                row = came[ranks.index(parcel.reader)][parcel.wire :]
                copies.append((part, row[: parcel.nbytes]))
            copies += [(link.part(seen[b], at, parcel.nbytes), part) for b, at in rest]
        link.copy(copies)
        if advance is not None:
            advance(nbytes)

    def finish(number: int) -> tuple[Any, KeyboardInterrupt | None]:
        try:
            came, interrupted = link.finish(group.watch("exchange", number))
        except errors.ProcessError as error:  # Others may have failed with this one already.
            raise failed or error  # noqa: B904 - either as it is
        for other, row in zip(ranks, came, strict=True):
            theirs, length = _HEADER.unpack(row[: _HEADER.size].tobytes())
            if theirs != number:
                raise errors.ProcessError(f"process {other} is at round {theirs}, not {number}")
            if length:
                text = json.loads(row[_HEADER.size : _HEADER.size + length].tobytes())
                raise failed or agree.failed(other, text)
        return came, interrupted

    failed: BaseException | None = group.enter("schedule", schedule.digest) if rows else None
    before: Sequence[Parcel] = ()
    begun = 0.0
    with _ctrl_c_waits() if rows else nullcontext([]) as pressed:
        for number, parcels in enumerate([*schedule.rounds, ()] if rows else schedule.rounds):
            last, came = number == len(schedule.rounds), None
            wire = rows[number % 2] if rows else None
            failed = failed or _attempt(read_round, number, parcels)
            if number and rows:
                came, interrupted = finish(number - 1)
                failed = failed or interrupted
                if track is not None:
                    come = (p.nbytes for p in before if p.target.rank == rank != p.reader)
                    track.add("exchange", begun, sum(come))
            if wire is not None and not last:
                stopped = _attempt(group.begin, "exchange", number)
                if isinstance(stopped, errors.ProcessError):
                    raise failed or stopped
                failed = failed or stopped or next(iter(pressed), None)
                text = b"" if failed is None else json.dumps(agree.described(failed)).encode()
                header = _HEADER.pack(number, len(text)) + text
                wire[:, : len(header)] = memoryview(header)
                pieces = pieces_of(parcels, number)
                if failed is not None:  # As many bytes, and none that would come over the text.
                    for n, (to, at, part) in enumerate(pieces.sent):
                        pieces.sent[n] = to, at, in_row(number, ranks[to], at, part.nbytes)
                begun = time.perf_counter()
                link.start(wire, pieces)
            taken = before if rows else parcels
            failed = failed or _attempt(take_round, taken, came)
            before = parcels
    failed = failed or next(iter(pressed), None)
    if failed is not None:
        raise failed


@contextmanager
def _ctrl_c_waits() -> Generator[list[KeyboardInterrupt]]:
    """Ctrl-C is put into a list, the second is raised: elsewhere than in a round it breaks that."""
    pressed: list[KeyboardInterrupt] = []

    def press(*_: object) -> None:
        pressed.append(KeyboardInterrupt())
        if len(pressed) > 1:
            raise pressed[-1]

    usual, main = signal.default_int_handler, threading.main_thread()
    if threading.current_thread() is not main or signal.getsignal(signal.SIGINT) is not usual:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)


def _attempt(act: Callable[..., None], *given: Any) -> BaseException | None:
    """The error of a step, to be raised once the other processes know of it."""
    try:
        act(*given)
    except BaseException as error:  # noqa: BLE001
        return error
    return None
