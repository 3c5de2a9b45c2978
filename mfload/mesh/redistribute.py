"""Redistribution: every wanted byte is read by one process and sent to those that want it.

What each process reads, and what travels when, is in a schedule that all of them follow.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload import errors
from mfload.cuda.staging import DEPTH
from mfload.io import buffers, pread
from mfload.loading import execute
from mfload.loading.session import Filled, Loader, Session
from mfload.mesh import agree
from mfload.mesh.agree import ProcessGroup
from mfload.mesh.base import Requests
from mfload.mesh.link import Link, Pieces
from mfload.mesh.schedule import HEADER, ROW, Parcel, Schedule, batches, make_schedule
from mfload.planning.layout import BufferSpec
from mfload.planning.memory import Ledger
from mfload.planning.plan import Plan, Position, make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.report import Report

if TYPE_CHECKING:
    from mfload.io.decode import Unfinished
    from mfload.timeline import Track


Read = Callable[[Sequence[Request], Sequence[tuple[int, int]], list[Any]], None]
"""Reads requests to places of some memory: buffer and first byte of each."""


class Results(NamedTuple):
    """Where what this process requests lands.

    Attributes:
        places: Those of each request, one for each device that it is for.
    """

    memory: list[Any]
    places: Sequence[Sequence[Position]]
    advance: execute.Advance | None = None


class Exchange(NamedTuple):
    """Loads what all processes request, in rows of `width` bytes from each process to each.

    At most `limit` bytes of the results of this process wait in host memory at once.
    """

    loader: Loader
    group: ProcessGroup
    link: Link
    width: int
    limit: float
    advance: execute.Advance | None

    def load(self, requests: Requests, report: Report | None) -> list[tuple[Any, ...]]:
        """The arrays of this process."""
        loader, rank, arrays = self.loader, self.group.rank, dict[int, tuple[Any, ...]]()
        by_host = loader.options.replace(by_host=self.link.device is None)
        loader = Loader(loader.index, loader.sources, loader.adapter, by_host)
        every = itertools.chain.from_iterable(requests.values())
        growth = max((-(-r.dtype.nbytes // r.info.dtype.nbytes) for r in every), default=1)
        for batch in batches(requests, self.limit):
            wanted = {each: [requests[each][n] for n in batch[each]] for each in self.group.ranks}
            fill = partial(self._fill, make_schedule(wanted, self.width, rank), growth)
            one = Report()
            try:
                found = loader.load(wanted[rank], report=one, fill=fill)
            finally:
                if report is not None:
                    report.add(one)
            arrays.update(zip(batch[rank], found, strict=True))
        return [arrays[n] for n in range(len(arrays))]

    def _fill(
        self,
        schedule: Schedule,
        growth: int,
        plan: Plan,
        memory: list[Any],
        session: Session,
        sources: Any,
    ) -> Filled:
        """Fills memory by an exchange; values grow `growth` times at most when converted."""
        options, threads = self.loader.options, session.threads
        block, unfinished = self._room(session, growth)
        # What lies between parts is mostly for another process to read.
        costs = session.limits.costs._replace(block=block, merge_gap=buffers.PAGE, row_gap=None)
        if self.link.device is not None:
            costs = costs._replace(span=0)
        plans, notes = list[Plan](), list[str]()
        cold = {number: sources[number] for number, leg in session.route.items() if leg.cold}
        fixed = {"threads": threads, "deadline": options.deadline, "recorder": session.recorder}

        def read(some: Sequence[Request], given: Any, there: list[Any]) -> None:
            specs = [BufferSpec(array.nbytes) for array in there]
            plan = make_plan(some, costs=costs, given=given, specs=specs)
            if unfinished is not None:
                plan = plan._replace(blocks=unfinished.resume(plan.blocks))
            plans.append(plan)
            slots = None if self.link.device is None else _slots(plan, there, block)
            # Of a copy, as a failure empties the list: this process takes part further.
            given = plan, [*there], sources, session.route
            more, _ = execute.Transfer(*given, staging=slots, unfinished=unfinished, **fixed).run()
            notes.extend(more)

        def ahead(some: Sequence[Request]) -> None:
            blocks = make_plan(some, costs=costs).blocks
            options.deadline.bound(partial(pread.prefetch, cold, blocks), "reading ahead")

        kept = pread.read_ahead(list(cold.values()))
        try:
            results = Results(memory, session.by_request(plan.places), self.advance)
            given = schedule, self.group, self.link, read, results
            track = session.recorder and session.recorder.exchanges()
            run(*given, ahead if cold else None, track)
        finally:
            for source in kept:
                source.keep(False)
        return plans, tuple(notes), schedule.received[self.group.rank]

    def _room(self, session: Session, growth: int) -> tuple[int, Unfinished | None]:
        """Bytes of a block at most, and what keeps encoded pieces between rounds, if any.

        Half of the overhead is for what travels.
        """
        threads, unfinished = session.threads, None
        pages = Ledger(self.loader.options).slot(2 * threads) // buffers.PAGE - 2
        if self.link.device is not None:
            # Of each slot a part is for what the host converts, and there are several a thread.
            pages = pages // (DEPTH * (1 + growth)) - 3
        if self.loader.index.columns.others:
            from mfload.io.decode import Unfinished

            pages //= 4  # What is fetched, what is put together, and what is left of both.
            unfinished = Unfinished(threads * pages * buffers.PAGE)
        return max(buffers.PAGE, min(session.limits.costs.block, pages * buffers.PAGE)), unfinished


def _slots(plan: Plan, memory: Sequence[Any], spare: int) -> Any:
    """What reads onto a device go through (see `staging`)."""
    from mfload.cuda import copies, memory as device_memory, staging

    own = device_memory.DeviceBuffer
    methods = copies.Methods([each.device if isinstance(each, own) else None for each in memory])
    return staging.staging(plan.blocks, methods, spare)


class _Filler:
    """Fills the results of this process, round by round.

    Rows are made, sent and taken as bytes; on a device, what travels by itself is read and sent
    from there, and the rest goes by the rows. While one round travels, the next is read.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: ProcessGroup,
        link: Link,
        read: Read,
        results: Results,
        ahead: Callable[[Sequence[Request]], None] | None,
    ) -> None:
        self._schedule, self._group, self._link = schedule, group, link
        self._read, self._ahead = read, ahead
        self._memory, self._places, self._advance = results
        self._place_of = {rank: n for n, rank in enumerate(schedule.ranks)}
        self.rows = [link.buffer(), link.buffer()] if schedule.travels else []
        self._rooms = [link.room(each) for each in self.rows]
        self._wide = [link.view(each) for each in self._rooms]
        self._seen = [link.view(each) for each in self._memory]
        self._begun = 0.0

    def read(self, number: int, parcels: Sequence[Parcel]) -> None:
        """Reads what this process sends or keeps in a round."""
        if self._ahead is not None:
            for later in self._schedule.rounds[number + 2 if number else 1 : number + 3]:
                self._ahead(self._wanted(later)[0])
        requests, given = self._wanted(parcels)
        if requests:
            sent = [self.rows[number % 2].reshape(-1), self._rooms[number % 2]] if self.rows else []
            self._read(requests, given, [*self._memory, *sent])

    def start(self, number: int, parcels: Sequence[Parcel], failed: BaseException | None) -> None:
        """Starts a round; with an error, which its header says, as many bytes travel."""
        row, ranks = self.rows[number % 2], self._schedule.ranks
        text = b"" if failed is None else json.dumps(agree.described(failed)).encode()
        header = HEADER.pack(number, len(text)) + text
        row[:, : len(header)] = memoryview(header)
        pieces = self._pieces(number, parcels)
        if failed is not None:  # None of them comes over the text.
            for n, (to, at, part) in enumerate(pieces.sent):
                pieces.sent[n] = to, at, self._in_row(number, ranks[to], at, part.nbytes)
        self._begun = time.perf_counter()
        self._link.start(row, pieces)

    def finish(
        self, number: int, failed: BaseException | None
    ) -> tuple[Any, KeyboardInterrupt | None]:
        """What came in a round; raises the error of a process that failed."""
        try:
            came, interrupted = self._link.finish(self._group.watch("exchange", number))
        except errors.ProcessError as error:  # Others may have failed with this one already.
            raise failed or error  # noqa: B904 - either as it is
        for other, row in zip(self._schedule.ranks, came, strict=True):
            theirs, length = HEADER.unpack(row[: HEADER.size].tobytes())
            if theirs != number:
                raise errors.ProcessError(f"process {other} is at round {theirs}, not {number}")
            if length:
                text = json.loads(row[HEADER.size : HEADER.size + length].tobytes())
                raise failed or agree.failed(other, text)
        return came, interrupted

    def take(self, parcels: Sequence[Parcel], came: Any) -> None:
        """Puts what this process got or kept in a round in its places."""
        nbytes, copies = 0, list[tuple[Any, Any]]()
        for parcel in (each for each in parcels if each.target.rank == self._group.rank):
            info, dtype, *_ = parcel.target.request
            nbytes += parcel.nbytes // dtype.nbytes * info.dtype.nbytes
            if not parcel.wire:
                continue
            part, rest = self._place(parcel), self._spots(parcel)[1:]
            if not parcel.alone:
                row = came[self._place_of[parcel.reader]][parcel.wire :]
                copies.append((part, row[: parcel.nbytes]))
            seen = self._seen
            copies += [(self._link.part(seen[b], at, parcel.nbytes), part) for b, at in rest]
        self._link.copy(copies)
        if self._advance is not None:
            self._advance(nbytes)

    def record(self, track: Track, parcels: Sequence[Parcel]) -> None:
        """Records the round that was started last."""
        rank = self._group.rank
        come = (p.nbytes for p in parcels if p.target.rank == rank != p.reader)
        track.add("exchange", self._begun, sum(come))

    def _spots(self, parcel: Parcel) -> list[tuple[int, int]]:
        every = (place for n in parcel.target.numbers for place in self._places[n])
        return [(place.buffer, place.at + parcel.at) for place in every]

    def _wanted(self, parcels: Sequence[Parcel]) -> tuple[list[Request], list[tuple[int, int]]]:
        requests, given = list[Request](), list[tuple[int, int]]()
        rank, width = self._group.rank, self._schedule.width
        for parcel in (each for each in parcels if each.reader == rank and not each.same):
            # Numbers of another process mean nothing here.
            row = self._place_of[parcel.target.rank] * width + parcel.wire
            in_row = [(len(self._memory) + parcel.alone, row)]
            there = in_row if parcel.wire else self._spots(parcel)
            whole = parcel.target.request
            assert whole.selection is None or whole.selection.steps is None
            selection = boxed(whole.info, parcel.box)
            requests += [whole._replace(selection=selection, devices=())] * len(there)
            given += there
        return requests, given

    def _place(self, parcel: Parcel) -> Any:
        buffer, at = self._spots(parcel)[0]
        return self._link.part(self._seen[buffer], at, parcel.nbytes)

    def _in_row(self, number: int, to: int, at: int, nbytes: int) -> Any:
        start = self._place_of[to] * self._schedule.width + at
        return self._link.part(self._wide[number % 2], start, nbytes)

    def _pieces(self, number: int, parcels: Sequence[Parcel]) -> Pieces:
        sizes = [ROW] * len(self._place_of)
        common = self._schedule.most[number], self._schedule.front[number]
        pieces = Pieces([], [], sizes, [*sizes], *common)
        for parcel in (each for each in parcels if each.wire):
            given, to = parcel.reader == self._group.rank, parcel.target.rank
            other, end = self._place_of[to if given else parcel.reader], parcel.wire + parcel.nbytes
            if not parcel.alone:
                sizes = pieces.sizes if given else pieces.come
                sizes[other] = max(sizes[other], end)
            elif given:
                source = parcel.same or parcel
                where = number, source.target.rank, source.wire, source.nbytes
                part = self._in_row(*where) if source.wire else self._place(source)
                pieces.sent.append((other, parcel.wire, part))
            else:
                pieces.taken.append((other, parcel.wire, self._place(parcel)))
        return pieces


def run(
    schedule: Schedule,
    group: ProcessGroup,
    link: Link,
    read: Read,
    results: Results,
    ahead: Callable[[Sequence[Request]], None] | None = None,
    track: Track | None = None,
) -> None:
    """Fills the results of this process.

    `ahead` is told of requests some rounds before they are read. `track` records what travels.

    A process that fails keeps taking part until it has said so in the header of its rows. Then all
    of them stop after the same round, and their collectives stay in step.
    """
    here = _Filler(schedule, group, link, read, results, ahead)
    travels, count = schedule.travels, len(schedule.rounds)
    failed: BaseException | None = None
    before: Sequence[Parcel] = ()
    with agree.ctrl_c_waits() if travels else nullcontext([]) as pressed:
        if travels:
            failed = group.enter("schedule", schedule.digest, pressed)
        for number, parcels in enumerate(itertools.chain(schedule.rounds, ((),) * travels)):
            came = None
            failed = failed or _attempt(here.read, number, parcels)
            if number and travels:
                came, interrupted = here.finish(number - 1, failed)
                failed = failed or interrupted
                if track is not None:
                    here.record(track, before)
            if travels and number < count:
                stopped = _attempt(group.begin, "exchange", number)
                if isinstance(stopped, errors.ProcessError):
                    raise failed or stopped
                failed = failed or stopped or next(iter(pressed), None)
                here.start(number, parcels, failed)
            taken = before if travels else parcels
            failed = failed or _attempt(here.take, taken, came)
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
