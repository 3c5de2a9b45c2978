"""A load on a mesh: from shardings to sharded arrays, on one process or on several at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.index import Index, TensorInfo
from mfload.io import buffers
from mfload.loading import execute, session
from mfload.loading.preview import Preview
from mfload.loading.session import Filled, Loader, Session
from mfload.mesh import base
from mfload.mesh.base import TensorShares
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning import planner
from mfload.planning.blocks import Costs, Observer
from mfload.planning.layout import BufferSpec
from mfload.planning.planner import Plan
from mfload.planning.requests import Request
from mfload.progress import Progress, shown
from mfload.report import Report, human
from mfload.runtime import Deadline, gc_paused
from mfload.sources.local import LocalFile

if TYPE_CHECKING:  # Only loads of several processes import them.
    from mfload.mesh.agree import ProcessGroup
    from mfload.mesh.jax_backend import JaxBackend
    from mfload.mesh.redistribute import Read, Schedule

_FEW = 50  # A share of so much is not worth a note.
# Pages of each file that processes compare, and of all files together; two of each at least.
_SAMPLED, _IN_ALL = 16, 512
_PAGE = 4096  # The same on every host.
_OUT_OF_STEP = "an exchange broke off before, so that the collectives are out of step"

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What there is to load: the whole of each tensor that is requested of a checkpoint."""

    index: Index
    sources: Sequence[LocalFile]
    requests: Sequence[Request]
    options: LoadOptions


class MeshLoad:
    """What this process loads of a checkpoint, and how it becomes sharded arrays.

    `requests` are those of each process, by its number, `mine` those of this one.
    """

    def __init__(
        self, backend: JaxBackend, chosen: Chosen, mesh: Any, shardings: Any, unmatched: str
    ) -> None:
        self.notes: list[str] = []
        self._backend = backend
        self._whole = chosen.requests
        self._shardings = backend.resolve(
            chosen.requests, mesh, shardings, unmatched, self.notes, chosen.index.tensors
        )
        # Whole rows are read over rather than skipped, where a few are not wanted.
        options = replace(chosen.options, merge_gap=planner.MESH_GAP)
        wanted: list[TensorShares] = []
        for each, sharding in zip(chosen.requests, self._shardings, strict=True):
            shares = backend.shares(sharding, each.info.shape)
            separate = backend.separate(sharding, each.dtype, options)
            wanted.append(TensorShares(each.info, each.dtype, each.checked, shares, separate))
        self.requests = base.requests(wanted)
        self.mine = self.requests.setdefault(backend.rank, [])
        self.loader = Loader(chosen.index, chosen.sources, backend.adapter(), options)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        seen = {(request.info.name, request.selection): request for request in self.mine}
        return sum(request._replace(dtype=request.info.dtype).nbytes for request in seen.values())

    @property
    def whole(self) -> bool:
        """Whether this process wants all of every tensor, if it loads alone."""
        return self.stored_bytes == sum(request.info.nbytes for request in self._whole)

    def arguments(self) -> list[str]:
        """What is wanted and how: lines that must be the same on all processes."""
        how = self.loader.options
        lines = [f"exchange={how.exchange!r}, allocator={how.allocator!r}"]
        lines.append(f"max_host_overhead={how.max_host_overhead}")
        for request, sharding in zip(self._whole, self._shardings, strict=True):
            shares = repr(self._backend.shares(sharding, request.info.shape))
            digest = hashlib.sha256(shares.encode()).hexdigest()[:16]
            dtype = f"{request.dtype}{' checked' if request.checked else ''}"
            lines.append(f"{request.info.name}: {dtype} {sharding} {digest}")
        return lines

    def assemble(self, fetched: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The sharded arrays by name, of an array for each device of each request."""
        held: dict[str, dict[Any, Any]] = {request.info.name: {} for request in self._whole}
        for request, arrays in zip(self.mine, fetched, strict=True):
            devices = map(self._backend.device, request.devices)
            held[request.info.name].update(zip(devices, arrays, strict=True))
        fetched.clear()
        made: dict[str, Any] = {}
        for (info, dtype, *_), sharding in zip(self._whole, self._shardings, strict=True):
            parts = held.pop(info.name)
            made[info.name] = self._backend.assemble(info.shape, sharding, parts, dtype)
        return made


def load(
    choose: Callable[[], Chosen],
    framework: str,
    mesh: Any,
    shardings: Any,
    unmatched: str,
    deadline: Deadline,
    *,
    report: Report | None = None,
    progress: Progress = False,
    check: Callable[[Index, Sequence[TensorInfo]], Any] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint onto the devices of this process, together with the other processes.

    `choose` checks all other arguments and reads headers: what it raises reaches the other
    processes too. `check` makes what compares bytes while they come (see `checking.checksums`).
    """
    backend = base.backend(framework)
    ranks = backend.processes(mesh, shardings)
    made: dict[str, Any] = {}
    try:
        with together(backend, ranks, deadline) as group:
            start = time.perf_counter()
            with gc_paused():
                chosen = choose()
                headers = time.perf_counter() - start
                job = MeshLoad(backend, chosen, mesh, shardings, unmatched)
            if report is not None:
                resolved = time.perf_counter() - start - headers
                report.stages = {"headers": headers, "shardings": resolved}
            if group is not None:
                agree_on_inputs(group, chosen.index, chosen.sources, job.arguments())
            if check is not None and (group is not None or not job.whole):
                raise errors.UsageError(
                    "verify= compares whole tensors, and this process reads parts of them",
                    expected="one process, whose shards make up each tensor; or mfload.verify",
                    found=f"{len(ranks)} processes; this one wants {job.stored_bytes} bytes",
                )
            checking = None
            if check is not None:
                checking = check(chosen.index, [each.info for each in chosen.requests])
            with shown(progress, job.stored_bytes) as advance:
                fetched = fetch(
                    job.requests,
                    job.loader,
                    backend,
                    group=group,
                    report=report,
                    advance=advance,
                    observer=None if checking is None else checking.observer,
                )
            if checking is not None:
                checking.settle(fetched, report)
            with gc_paused():
                made.update(job.assemble(fetched))
            if report is not None:
                report.tensors = len(made)
                report.processes = len(ranks)
                over = _over(report.read_bytes, report.over_read_bytes)
                report.notes = (*report.notes, *job.notes, *over)
    except BaseException:
        made.clear()  # A kept error keeps this frame.
        raise
    return made


def together(
    backend: JaxBackend, ranks: tuple[int, ...], deadline: Deadline
) -> contextlib.AbstractContextManager[ProcessGroup | None]:
    """A load of several processes (see `agree.joined`); None if it is this process alone."""
    if ranks == (backend.rank,):
        return contextlib.nullcontext()
    from mfload.mesh import agree

    return agree.joined(backend, ranks, deadline)


def agree_on_inputs(
    group: ProcessGroup, index: Index, sources: Sequence[LocalFile], arguments: Sequence[str]
) -> None:
    """Raises if the processes do not see the same files, or were not given the same arguments.

    Files are compared by size and a sample: a few pages, evenly spread from the first tensor to the
    end. That tells one step of a training from another, and misses a single number that differs.
    """
    begin = [source.size for source in sources]
    header = hashlib.sha256()
    for info in index.tensors.values():
        header.update(repr((info.name, info.dtype.name, info.shape)).encode())
        for piece in info.pieces:
            begin[piece.source] = min(begin[piece.source], piece.offset)
            header.update(repr((piece.source, piece.offset)).encode())
    count = max(2, min(_SAMPLED, _IN_ALL // max(1, len(sources))))
    samples = group.deadline.bound(
        lambda: [_sample(*each, count) for each in zip(sources, begin, strict=True)],
        "comparing files",
    )
    lines = [
        f"{os.path.basename(source.path)}: {source.size} bytes, sampled {sample}"
        for source, sample in zip(sources, samples, strict=True)
    ]
    group.agree("files", [*lines, f"headers: {header.hexdigest()[:16]}"])
    group.agree("arguments", arguments)


def _sample(source: LocalFile, begin: int, count: int) -> str:
    last = max(begin, source.size - _PAGE)
    places = {begin + (last - begin) * n // (count - 1) for n in range(count)}
    digest = hashlib.sha256()
    for at in sorted(places):
        digest.update(source.read(at, min(_PAGE, source.size - at)))
    return digest.hexdigest()[:16]


def fetch(
    requests: Mapping[int, Sequence[Request]],
    loader: Loader,
    backend: JaxBackend,
    *,
    group: ProcessGroup | None = None,
    report: Report | None = None,
    advance: Advance | None = None,
    observer: Observer | None = None,
) -> list[tuple[Any, ...]]:
    """Loads what this process requests: by itself, or by an exchange with the others.

    `requests` are those of each process, the same everywhere. Returns for each request of this
    process an array for each of its devices.
    """
    mine = requests.get(backend.rank, [])
    if group is None:
        return loader.load(mine, report=report, advance=advance, observer=observer)
    requests = {rank: requests.get(rank, []) for rank in group.ranks}
    schedule, note = _choose(requests, loader.options, backend)
    arrays = None
    if schedule is not None:
        arrays = _exchange(requests, loader, backend, schedule, group, report, advance)
        if arrays is None:
            if loader.options.exchange == "once":
                raise errors.ProcessError(
                    f"{_OUT_OF_STEP}: start the processes anew, or load with exchange='never'"
                )
            note = f"each process reads its own: {_OUT_OF_STEP}"
    if arrays is None:
        arrays = loader.load(mine, report=report, advance=advance)
    if report is not None and note:
        report.notes = (*report.notes, note)
    return arrays


def _choose(
    requests: Mapping[int, Sequence[Request]], options: LoadOptions, backend: JaxBackend
) -> tuple[Schedule | None, str]:
    from mfload.mesh import redistribute

    exchange = options.exchange
    if options.engine == "mmap":
        if exchange == "once":
            raise errors.UsageError(
                "engine='mmap' reads nothing that could be exchanged",
                expected="another engine, or exchange='never'",
                found="exchange='once'",
            )
        exchange = "never"
    least = session.least_overhead(options)
    overhead = options.max_host_overhead
    return redistribute.choose(requests, exchange, backend.platform(), overhead, least)


def _exchange(
    requests: Mapping[int, Sequence[Request]],
    loader: Loader,
    backend: JaxBackend,
    schedule: Schedule,
    group: ProcessGroup,
    report: Report | None,
    advance: Advance | None,
) -> list[tuple[Any, ...]] | None:
    """Loads in one exchange, or in one for each part whose results fit; None if links broke."""
    from mfload.mesh import redistribute

    parts = [{rank: list(range(len(each))) for rank, each in requests.items()}]
    schedules = [schedule]
    if backend.platform() != "cpu":
        # Elsewhere results wait in host memory until they are copied to their device.
        parts = redistribute.parts(requests, loader.options.max_host_overhead or OVERHEAD)
        held = [{r: [requests[r][n] for n in part[r]] for r in part} for part in parts]
        schedules = [redistribute.schedule(each, schedule.width) for each in held]
    link = backend.link(group.ranks, schedule.width, loader.options.deadline)
    rounds = [f"{len(each.rounds)} rounds of {each.width} bytes" for each in schedules]
    if any(group.agree("exchange", rounds, "broken" if link.broken else "").values()):
        return None
    arrays: dict[int, tuple[Any, ...]] = {}
    total = Report(stages={} if report is None else report.stages)
    try:
        for part, each in zip(parts, schedules, strict=True):

            def fill(
                made: Plan, memory: list[Any], way: Session, sources: Sequence[LocalFile]
            ) -> Filled:
                plans: list[Plan] = []
                notes: list[str] = []
                read = _reader(way, sources, loader.options, plans, notes)
                swap = link if each.rounds else None  # noqa: B023
                run = redistribute.Exchange(each, group, swap, read, advance)  # noqa: B023
                run.run(made.places, memory)
                return Filled(plans, tuple(notes), each.received(group.rank))  # noqa: B023

            one = Report()
            wanted = [requests[group.rank][n] for n in part[group.rank]]
            made = loader.load(wanted, report=one, fill=fill)
            arrays.update(zip(part[group.rank], made, strict=True))
            total.add(one)
    finally:
        link.close()
    if report is not None:
        vars(report).update(vars(total))
    return [arrays[n] for n in range(len(arrays))]


def _reader(
    way: Session,
    sources: Sequence[LocalFile],
    options: LoadOptions,
    plans: list[Plan],
    notes: list[str],
) -> Read:
    """Reads requests to given places, and keeps the plans and notes."""
    # Half of the overhead is for what travels.
    overhead = options.max_host_overhead or OVERHEAD
    slot = overhead // 2 // way.threads // buffers.PAGE * buffers.PAGE - 2 * buffers.PAGE
    block = max(buffers.PAGE, min(way.limits.costs.block, slot))
    # What lies between parts is mostly for another process to read.
    costs = way.limits.costs._replace(block=block, merge_gap=Costs().merge_gap)
    routes = [way.route.get(number) for number in range(len(sources))]

    def read(
        requests: Sequence[Request], given: Sequence[tuple[int, int]], memory: list[Any]
    ) -> None:
        specs = [BufferSpec(array.nbytes) for array in memory]
        made = planner.make(requests, costs=costs, given=given, specs=specs)
        plans.append(made)
        threads, deadline = way.threads, options.deadline
        notes.extend(execute.run(made, memory, sources, routes, threads=threads, deadline=deadline))

    return read


def preview(chosen: Chosen, framework: str, mesh: Any, shardings: Any, unmatched: str) -> Preview:
    """Says what `load` would do on this process; reads nothing."""
    backend = base.backend(framework)
    ranks = backend.processes(mesh, shardings)
    job = MeshLoad(backend, chosen, mesh, shardings, unmatched)
    here = job.loader.preview(job.mine)
    notes, schedule = [*here.notes, *job.notes], None
    if len(ranks) > 1:
        requests = {rank: job.requests.get(rank, []) for rank in ranks}
        schedule, note = _choose(requests, job.loader.options, backend)
        notes += [note] if note else []
    if schedule is None:
        notes += _over(here.read_bytes, here.over_read_bytes)
        return replace(here, notes=tuple(notes), processes=len(ranks))
    if here.plan.device_bytes:
        # What is exchanged is put together on the host.
        here = job.loader.preview(job.mine, by_host=True)
    read, received = schedule.read[backend.rank], schedule.received(backend.rank)
    return replace(
        here,
        notes=(*notes, "the blocks of this plan are what the process would read on its own"),
        processes=len(ranks),
        read_bytes=read,
        wanted_bytes=read,
        copied_bytes=here.copied_bytes + received,
        overhead_bytes=here.overhead_bytes + schedule.overhead,
        peak_bytes=here.peak_bytes + schedule.overhead,
        exchanged_bytes=received,
    )


def abstract(
    chosen: Chosen, framework: str, mesh: Any, shardings: Any, unmatched: str
) -> dict[str, Any]:
    """What the arrays will be, without any data; without shardings if none are given."""
    session.check(chosen.requests, chosen.index)
    backend = base.backend(framework)
    resolved: list[Any] = [None] * len(chosen.requests)
    if mesh is not None or shardings is not None:
        known = chosen.index.tensors
        resolved = backend.resolve(chosen.requests, mesh, shardings, unmatched, [], known)
    return backend.abstract(chosen.requests, resolved)


def _over(read: int, over: int) -> tuple[str, ...]:
    """Why bytes are read that are not wanted, if they are more than a few."""
    if over <= read // _FEW:
        return ()
    return (
        f"{over / read:.0%} of what is read is not wanted here, or not yet: gaps shorter than "
        f"{human(planner.MESH_GAP)} between the parts of a shard are read over",
    )
