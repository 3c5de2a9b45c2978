"""An exchange: this process reads its share of a schedule, and gets the rest from the others."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.io import buffers
from mfload.loading import execute
from mfload.loading.session import Filled, Loader, Session
from mfload.mesh import agree, redistribute
from mfload.mesh.agree import ProcessGroup
from mfload.mesh.redistribute import Parcel, Requests, Schedule
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.blocks import Costs
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import Place, Plan, make_plan
from mfload.planning.request import Request, boxed
from mfload.report import Report
from mfload.sources.local import LocalFile

if TYPE_CHECKING:  # They import JAX.
    from mfload.mesh.jax_backend import JaxBackend
    from mfload.mesh.jax_processes import JaxLink

_HEADER = struct.Struct("<QQ")  # Round, and bytes of the error that follows if the sender failed.
_OUT_OF_STEP = "an exchange broke off before, so that the collectives are out of step"

Advance = Callable[[int], None] | None
Spots = Sequence[tuple[int, int]]
"""Places to read to: (buffer, first byte) in a list of buffers."""


def load(
    requests: Requests,
    loader: Loader,
    backend: JaxBackend,
    group: ProcessGroup,
    report: Report | None,
    advance: Advance,
) -> tuple[list[tuple[Any, ...]] | None, str]:
    """The arrays of this process by an exchange, or None if each process reads its own; and why."""
    requests = {rank: requests.get(rank, []) for rank in group.ranks}
    options = loader.options
    width, why = redistribute.choose(requests, options, backend.platform())
    if width is None:
        return None, why
    link = backend.link(group.ranks, width, options.deadline)
    if any(group.gather("exchange", "broken" if link.broken else "").values()):
        if options.exchange == "once":
            advice = "start the processes anew, or load with exchange='never'"
            raise errors.ProcessError(f"{_OUT_OF_STEP}: {advice}")
        return None, f"each process reads its own: {_OUT_OF_STEP}"
    batches = [{rank: list(range(len(each))) for rank, each in requests.items()}]
    if backend.platform() != "cpu":
        # Elsewhere results wait in host memory until they are copied to their device.
        batches = redistribute.batches(requests, options.max_host_overhead or OVERHEAD)
    arrays: dict[int, tuple[Any, ...]] = {}
    try:
        for batch in batches:
            wanted = {rank: [requests[rank][n] for n in batch[rank]] for rank in group.ranks}
            schedule = redistribute.schedule(wanted, width)
            fill = functools.partial(_fill, schedule, group, link, options, advance)
            one = Report()
            made = loader.load(wanted[group.rank], report=one, fill=fill)
            arrays.update(zip(batch[group.rank], made, strict=True))
            if report is not None:
                report.add(one)
    finally:
        link.close()
    return [arrays[n] for n in range(len(arrays))], why


def _fill(
    schedule: Schedule,
    group: ProcessGroup,
    link: JaxLink,
    options: LoadOptions,
    advance: Advance,
    plan: Plan,
    memory: list[Any],
    session: Session,
    sources: Sequence[LocalFile],
) -> Filled:
    """Fills the results of one load (see `session.Fill`)."""
    # Half of the overhead is for what travels.
    overhead = options.max_host_overhead or OVERHEAD
    slot = overhead // 2 // session.threads // buffers.PAGE * buffers.PAGE - 2 * buffers.PAGE
    block = max(buffers.PAGE, min(session.limits.costs.block, slot))
    # What lies between parts is mostly for another process to read.
    costs = session.limits.costs._replace(block=block, merge_gap=Costs().merge_gap)
    plans: list[Plan] = []
    notes: list[str] = []

    def read(requests: Sequence[Request], given: Spots, memory: list[Any]) -> None:
        specs = [BufferSpec(array.nbytes) for array in memory]
        made = make_plan(requests, costs=costs, given=given, specs=specs)
        threads, deadline, route = session.threads, options.deadline, session.route
        notes.extend(execute.run(made, memory, sources, route, threads=threads, deadline=deadline))
        plans.append(made)

    run(schedule, group, link, read, plan.places, memory, advance)
    return Filled(plans, tuple(notes), schedule.received(group.rank))


def run(
    schedule: Schedule,
    group: ProcessGroup,
    link: JaxLink,
    read: Callable[[Sequence[Request], Spots, list[Any]], None],
    places: Sequence[Place],
    memory: list[Any],
    advance: Advance,
) -> None:
    """Fills the results of this process.

    A process that fails keeps taking part until it has said so in the header of its rows. Then all
    of them stop after the same round, and their collectives stay in step.
    """
    rank, ranks, width = group.rank, schedule.ranks, schedule.width
    rows = link.buffer() if schedule.travels else None

    def spots(parcel: Parcel) -> list[tuple[int, int]]:
        return [(places[n].buffer, places[n].at + parcel.at) for n in parcel.target.numbers]

    def read_round(parcels: Sequence[Parcel]) -> None:
        requests: list[Request] = []
        given: list[tuple[int, int]] = []
        for parcel in parcels:
            if parcel.reader == rank:
                whole = parcel.target.request
                if parcel.wire:  # The target is another process, whose numbers mean nothing here.
                    there = [(len(memory), ranks.index(parcel.target.rank) * width + parcel.wire)]
                else:
                    there = spots(parcel)
                selection = boxed(whole.info, parcel.box)
                requests += [whole._replace(selection=selection, devices=())] * len(there)
                given += there
        if requests:
            read(requests, given, memory if rows is None else [*memory, rows.reshape(-1)])

    def take_round(parcels: Sequence[Parcel], came: Any) -> None:
        nbytes = 0
        for parcel in parcels:
            target, request = parcel.target, parcel.target.request
            if target.rank == rank:
                nbytes += parcel.nbytes // request.dtype.nbytes * request.info.dtype.nbytes
                for buffer, at in spots(parcel) if parcel.wire else ():
                    row = came[ranks.index(parcel.reader)]
                    data = row[parcel.wire : parcel.wire + parcel.nbytes]
                    memory[buffer][at : at + parcel.nbytes] = data
        if advance is not None:
            advance(nbytes)

    failed: BaseException | None = None
    for number, parcels in enumerate(schedule.rounds):
        came = None
        failed = failed or _attempt(read_round, parcels)
        if rows is not None:
            text = b"" if failed is None else json.dumps(agree.described(failed)).encode()
            header = _HEADER.pack(number, len(text)) + text
            for row in rows:
                row[: len(header)] = memoryview(header)
            came, interrupted = link.swap(rows, lambda: group.check("exchange"))
            for other, row in zip(ranks, came, strict=True):
                theirs, length = _HEADER.unpack(row[: _HEADER.size].tobytes())
                if theirs != number:
                    found = f"round {theirs}, not {number}"
                    raise errors.ProcessError("the processes are out of step", found=found)
                if length:
                    text = json.loads(row[_HEADER.size : _HEADER.size + length].tobytes())
                    raise failed or agree.failed(other, text)
            failed = interrupted
        failed = failed or _attempt(take_round, parcels, came)
    if failed is not None:
        raise failed


def _attempt(act: Callable[..., None], *given: Any) -> BaseException | None:
    """The error of a step, to be raised once the other processes know of it."""
    try:
        act(*given)
    except BaseException as error:  # noqa: BLE001
        return error
    return None
