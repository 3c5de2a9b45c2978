"""Redistribution: every wanted byte is read by one process and sent to those that want it.

What each process reads, and what travels when, is in a schedule that all of them follow.
"""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.cuda.staging import DEPTH
from mfload.io import buffers, pread
from mfload.load_options import OVERHEAD
from mfload.loading import execute
from mfload.loading.session import Filled, Loader, Session
from mfload.mesh import agree
from mfload.mesh.agree import ProcessGroup
from mfload.mesh.base import Requests
from mfload.mesh.link import Link, Pieces
from mfload.mesh.schedule import HEADER, ROW, Parcel, Schedule, batches, make_schedule
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import Place, Plan, make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.report import Report

if TYPE_CHECKING:
    from mfload.timeline import Track


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
        made = make_schedule(wanted, width, group.rank)

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
            return plans, tuple(notes), made.received[group.rank]

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
    place_of = {each: n for n, each in enumerate(ranks)}
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
            row = place_of[parcel.target.rank] * width + parcel.wire
            there = [(len(memory) + (parcel.alone), row)] if parcel.wire else spots(parcel)
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
        return link.part(wide[number % 2], place_of[to] * width + at, nbytes)

    def pieces_of(parcels: Sequence[Parcel], round_number: int) -> Pieces:
        sizes = [ROW] * len(ranks)
        common = schedule.most[round_number], schedule.front[round_number]
        pieces = Pieces([], [], sizes, [*sizes], *common)
        for parcel in (each for each in parcels if each.wire):
            given, to = parcel.reader == rank, parcel.target.rank
            number, end = place_of[to if given else parcel.reader], parcel.wire + parcel.nbytes
            if not parcel.alone:
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
            if not parcel.alone:
                row = came[place_of[parcel.reader]][parcel.wire :]
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
            theirs, length = HEADER.unpack(row[: HEADER.size].tobytes())
            if theirs != number:
                raise errors.ProcessError(f"process {other} is at round {theirs}, not {number}")
            if length:
                text = json.loads(row[HEADER.size : HEADER.size + length].tobytes())
                raise failed or agree.failed(other, text)
        return came, interrupted

    rounds = itertools.chain(schedule.rounds, ((),) if rows else ())
    failed: BaseException | None = group.enter("schedule", schedule.digest) if rows else None
    before: Sequence[Parcel] = ()
    begun = 0.0
    with _ctrl_c_waits() if rows else nullcontext([]) as pressed:
        for number, parcels in enumerate(rounds):
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
                header = HEADER.pack(number, len(text)) + text
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
