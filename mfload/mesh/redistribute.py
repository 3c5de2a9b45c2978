"""Redistribution: every wanted byte is read by one process and sent to those that want it.

Tensors are cut into slabs, runs of rows that one process reads: as a rule one that wants them. The
parts of a slab travel as bytes, in rounds of rows of one size, one row from each process to each.
All of it follows from the requests of all processes, so each makes the same schedule.
"""

from __future__ import annotations

import itertools
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload import errors
from mfload.cuda.staging import DEPTH
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
# A process may be ahead of its share by that part of it, or by two pages.
_EVEN, _LEAST = 32, 8192


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
    rounds: list[list[Parcel]]  # What stays with its reader is in the first.
    read: Mapping[int, int]  # Bytes that each process reads.

    @property
    def travels(self) -> bool:
        """Whether a process gets anything from another."""
        return any(parcel.wire for parcels in self.rounds for parcel in parcels)

    def received(self, rank: int) -> int:
        """Bytes that a process gets from others."""
        every = (parcel for parcels in self.rounds for parcel in parcels)
        return sum(p.nbytes for p in every if p.target.rank == rank != p.reader)


def schedule(requests: Requests, width: int) -> Schedule:
    """The schedule for the requests of each process; the same on every process."""
    ranks, tensors = tuple(sorted(requests)), base.targets(requests)
    total = sum(targets[0].request.info.nbytes for targets in tensors)
    grain, room = max(_LEAST, total // (_EVEN * len(ranks))), width - ALIGNMENT
    read, due, last = dict.fromkeys(ranks, 0), 0, ranks[0]
    rounds: list[list[Parcel]] = [[]]
    current = dict.fromkeys(ranks, 0)  # The round that each reader fills,
    full = {rank: Counter[int]() for rank in ranks}  # how full its row to each process is,
    front = {rank: Counter[int]() for rank in ranks}  # and what small parcels take of that.
    for targets in tensors:
        info = targets[0].request.info
        due += info.nbytes
        whole = tuple((0, length) for length in info.shape)
        every = [(target, target.box) for target in targets]
        for nbytes, wanted, parts in _slabs(whole, every, grain, room):
            # One that wants most of it, while all read about as much; then the one that read what
            # lies before; then the one that has read least.
            ready = [rank for rank in ranks if read[rank] + nbytes <= due / len(ranks) + grain]
            reader = max(ready or ranks, key=lambda r: (wanted[r], r == last, -read[r]))
            read[reader] += nbytes
            last, row = reader, full[reader]
            if any(row[to] + n > room for to, n in wanted.items() if to != reader):
                row.clear()
                front[reader].clear()
                current[reader] += 1
                if current[reader] == len(rounds):
                    rounds.append([])
            number = 0 if wanted.keys() == {reader} else current[reader]
            held: dict[object, Parcel] = {}
            # What the reader keeps comes first: others get it from there.
            for target, box in sorted(parts, key=lambda part: part[0].rank != reader):
                wire, nbytes, to = 0, _nbytes(target, box), target.rank
                dtype, key = target.request.dtype, None
                if nbytes >= ALONE:
                    key = box, dtype.name, target.request.checked
                if to != reader:
                    row[to] += _padded(nbytes)
                    if key is None:  # Small ones from the front on, others from the back.
                        wire = ALIGNMENT + front[reader][to]
                        front[reader][to] += _padded(nbytes)
                    else:
                        wire = width - (row[to] - front[reader][to])
                at = first_element(target.box, box) // dtype.elements * dtype.nbytes
                same = held.get(key) if wire else None
                parcel = Parcel(reader, target, box, at, nbytes, wire, same)
                rounds[number].append(parcel)
                if key is not None:
                    held.setdefault(key, parcel)
    return Schedule(ranks, width, rounds, read)


def batches(requests: Requests, limit: float) -> list[dict[int, list[int]]]:
    """Numbers of the requests that are loaded together, so that no process gets more than a limit.

    One tensor alone may exceed it.
    """
    made: list[dict[int, list[int]]] = [{rank: [] for rank in requests}]
    used = Counter[int]()
    for targets in base.targets(requests):
        more = Counter[int]()
        for target in targets:
            more[target.rank] += target.request.nbytes * len(target.numbers)
        if any(used[rank] and used[rank] + nbytes > limit for rank, nbytes in more.items()):
            made.append({rank: [] for rank in requests})
            used.clear()
        used.update(more)
        for target in targets:
            made[-1][target.rank] += target.numbers
    for rank, every in requests.items():
        made[-1][rank] += [n for n, request in enumerate(every) if not request.nbytes]
    return made


def _slabs(
    slab: Box, around: Sequence[tuple[Target, Box]], grain: int, room: int
) -> Iterator[tuple[int, Counter[int], list[tuple[Target, Box]]]]:
    """Cuts a box of a tensor in file order into slabs.

    Gives the bytes of each, those of the rows that each process wants, and what each target wants.
    A slab has at most `grain` bytes, of which a process wants at most `room`: a run of rows of one
    dim at one place in all dims before it. So the part of it that a box holds is one stretch of it.
    """
    parts = [(t, common) for t, b in around if (common := intersection(slab, b)) is not None]
    if not parts:
        return
    wanted = Counter[int]()
    for target, box in parts:
        wanted[target.rank] += _padded(_nbytes(target, box))
    info, most = parts[0][0].request.info, max(wanted.values())
    nbytes = info.dtype.size_of(shape_of(slab)) or 0
    # Elements that share a byte stay together.
    units = [1] * (len(slab) - 1) + [info.dtype.elements]
    if info.shape and info.shape[-1] % units[-1]:
        units = list(info.shape)  # Rows share bytes as well.
    dim = next((n for n, (a, b) in enumerate(slab) if b - a > units[n]), None)
    cuts: list[int] = []
    if dim is not None:
        (start, stop), unit = slab[dim], units[dim]
        count = max(-(-nbytes // grain), -(-most // room))
        cuts = [*range(start, stop, max(1, (stop - start) // (count * unit)) * unit), stop]
        ends = sorted({start, stop, *(end for _, box in parts for end in box[dim])})
        if len(wanted) > 1 and 2 < len(ends) <= nbytes // _APART + 1:
            cuts = ends
    elif most > room:
        expected = "more, or exchange='never'"
        raise errors.MemoryLimitError(base.SMALL, tensor=info.name, expected=expected)
    if dim is None or len(cuts) < 3:
        yield nbytes, wanted, parts
    else:
        for cut in itertools.pairwise(cuts):
            yield from _slabs((*slab[:dim], cut, *slab[dim + 1 :]), parts, grain, room)


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
        made = schedule(wanted, width)

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
            block = max(buffers.PAGE, min(costs.block, pages * buffers.PAGE))
            # What lies between parts is mostly for another process to read.
            costs = costs._replace(block=block, merge_gap=buffers.PAGE, row_gap=None)
            plans, notes = list[Plan](), list[str]()
            cold = {number: sources[number] for number, leg in session.route.items() if leg.cold}

            def read(some: Sequence[Request], given: Any, there: list[Any]) -> None:
                specs = [BufferSpec(array.nbytes) for array in there]
                plans.append(make_plan(some, costs=costs, given=given, specs=specs))
                slots = None if link.device is None else _slots(plans[-1], there, block)
                # Of a copy, as a failure empties the list: this process takes part further.
                held = [*there]
                more, _ = execute_run(plans[-1], held, sources, session.route, staging=slots)
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
        wired = [each for each in parcels if each.wire]
        alone = Counter((p.reader, p.target.rank) for p in wired if p.nbytes >= ALONE)
        most = max(alone.values(), default=0)
        front = max((p.wire + p.nbytes for p in wired if p.nbytes < ALONE), default=_ROW)
        sizes = [_ROW] * len(ranks)
        pieces = Pieces([], [], sizes, [*sizes], most, max(front, _ROW))
        for parcel in wired:
            given, to = parcel.reader == rank, parcel.target.rank
            if not given and to != rank:
                continue
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
            came, interrupted = link.finish(lambda: group.check("exchange"))
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

    failed: BaseException | None = group.enter("rows") if rows else None
    before: Sequence[Parcel] = ()
    begun = 0.0
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
    if failed is not None:
        raise failed


def _attempt(act: Callable[..., None], *given: Any) -> BaseException | None:
    """The error of a step, to be raised once the other processes know of it."""
    try:
        act(*given)
    except BaseException as error:  # noqa: BLE001
        return error
    return None
