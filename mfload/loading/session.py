"""One load, from requests to arrays: the stations after the index, wired once for all callers.

A `Session` holds what is decided once: where each request lands, the engine of each file, threads,
limits and batches. A `Loader` runs sessions.
"""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload import errors
from mfload.cuda import memory as device_memory
from mfload.dlpack import View
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.io import buffers, probes, route as routing
from mfload.loading import allocate, execute
from mfload.loading.preview import Preview
from mfload.options import LoadOptions
from mfload.planning import memory, planner
from mfload.planning.blocks import Observer
from mfload.planning.memory import Allocation, Limits, Readers
from mfload.planning.planner import Plan
from mfload.planning.requests import Request
from mfload.report import Report, human
from mfload.runtime import gc_paused, process_usage
from mfload.sources.local import LocalFile

if TYPE_CHECKING:
    from mfload.cuda.staging import Staging

_PLAIN = (None, "C", "raw")  # A piece's box, order and encoding.
_MAX_RANK = 64  # NumPy's, and every view is a NumPy array first.
_MAX_SPAN = 2**63 - 1
_MOST_THREADS = 8
_A_DEVICE = 4  # Readers for each of several devices, where there are cores for them.
# Reads past the page cache wait for the disk, not for a core: as many as keep it busy.
_DIRECT_THREADS = 4
_WORTH_ASKING = 64 << 20
_STAGES = ("plan", "allocate", "transfer", "arrays")
_DEVICE, _OWNER, _COPIED = map(attrgetter, ("device", "owner", "copied"))  # Of an Allocation.
_ENGINE, _DIRECT = attrgetter("engine"), attrgetter("direct")  # Of a Leg.
_ARRAY = attrgetter("array")


class Filled(NamedTuple):
    """What filled a load's buffers in place of a plain transfer.

    Attributes:
        exchanged: Bytes that came from elsewhere than the files.
    """

    plans: Sequence[Plan]
    notes: tuple[str, ...]
    exchanged: int


class Batch(NamedTuple):
    """The plan of requests that are loaded together, and what it holds beside their results.

    Attributes:
        staging: The slots of what lands on devices; None if all lands on the host.
        slots: The most bytes of slots in host memory.
        overhead: The most bytes of host memory beside the result.
        device_overhead: The most bytes beside the result on each device, by number.
    """

    plan: Plan
    staging: Staging | None
    slots: int
    overhead: int
    device_overhead: dict[int, int]


class Session:
    """What is decided once a load, before data is read. Opens the files, reads nothing.

    Args:
        observed: Whether something on the host sees all bytes.

    Attributes:
        requests: What is loaded, one request for each place that a result lands in.
        route: The leg of each source that is used, by its number.
        limits: Batches, and how large a read may be.
        notes: What was decided without being asked for.

    Raises:
        MemoryLimitError: A tensor that must be copied is larger than the overhead allowed.
        SourceError: A file can't be opened or has changed.
        UnsupportedDtypeError: A tensor can't become an array.
        UnsupportedShapeError: The same.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        index: Index,
        sources: Sequence[LocalFile],
        adapter: Adapter,
        options: LoadOptions,
        *,
        observed: bool = False,
    ) -> None:
        check(requests, index)
        self.adapter = adapter
        self._options = options
        self._sources = sources
        self._whole = adapter.assign(requests)
        self._known: dict[tuple[str, tuple[int, ...]], Allocation] = {}
        self.requests, self._owners = self._whole, range(len(self._whole))
        if adapter.devices:
            self.requests, self._owners = self._split()
        self.allocations = list(map(self._allocation, self.requests))
        kinds = set(self.allocations)
        numbers = set(map(_DEVICE, kinds)) - {None}
        self._devices = [adapter.devices[n] for n in sorted(numbers)] if numbers else []
        self._copies = True in map(_COPIED, kinds)
        self.lends = "framework" in map(_OWNER, kinds)
        wanted: dict[int, int] = {}
        for request in self.requests:
            source = request.info.pieces[0].source
            stored = request.info.nbytes if request.selection is None else request.nbytes
            wanted[source] = wanted.get(source, 0) + stored
        used = sorted(wanted)
        files: list[tuple[LocalFile, int]] = []
        for number in used:
            files.append((sources[number], wanted[number]))
        choose = functools.partial(routing.choose, files, options.engine)
        if self._devices:
            choose = functools.partial(self._legs, files, observed)
        legs = options.deadline.bound(choose, "opening the files")
        self.route = dict(zip(used, legs, strict=True))
        engines = set(map(_ENGINE, legs))
        direct = any(map(_DIRECT, legs))
        if options.threads:
            self.threads = options.threads
        else:
            most = max(_MOST_THREADS, _A_DEVICE * len(self._devices))
            self.threads = max(min(probes.cores(), most), _DIRECT_THREADS if direct else 1)
        self._gds = "gds" in engines
        self._mapped: dict[int, int] = {}
        if "mmap" in engines:
            self._mapped = {
                n: sources[n].size for n, leg in self.route.items() if leg.engine == "mmap"
            }
        # Memory of maps reads from the disk, and that of devices may be busy.
        self.waits = bool(self._mapped or self._devices)
        readers = Readers(self.threads, direct=direct, mapped=engines <= {"mmap"})
        if self._devices:
            from mfload.cuda import cufile, staging  # Late: a load onto the host does without them.

            gds = cufile.slot_bytes(0) if self._gds else None
            readers = readers._replace(depth=staging.DEPTH, slot=staging.SLOT, gds=gds)
        self.limits = Limits(self.requests, self.allocations, options, readers)
        self.notes = (*index.notes, *adapter.notes)
        if len(self.limits.batches) > 1 or options.allocator != "auto":
            self.notes += tuple(self._decided())

    def _allocation(self, request: Request) -> Allocation:
        key = request.dtype.name, request.devices
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.adapter.allocation(request, self._options)
        return found

    def _split(self) -> tuple[Sequence[Request], Sequence[int]]:
        """A request for each place that results lie in, and the position of its origin.

        On the host one buffer serves all devices of a request; each device that results land on
        has its own, and the plan reads the bytes once.
        """
        made: list[Request] = []
        owners: list[int] = []
        for position, request in enumerate(self._whole):
            parts = [request]
            if len(request.devices) > 1:
                alone = [request._replace(devices=(number,)) for number in request.devices]
                parts = [each for each in alone if self._allocation(each).device is not None]
                landed = {each.devices[0] for each in parts}
                host = tuple(number for number in request.devices if number not in landed)
                if host:
                    parts.append(request._replace(devices=host))
            made += parts
            owners += [position] * len(parts)
        return made, owners

    def results(self, arrays: Mapping[int, Any]) -> Sequence[Any]:
        """What a user gets for each request.

        Args:
            arrays: By the position in `requests`; of a request with devices a tuple of one each.
        """
        if self.requests is self._whole:
            return self.adapter.results(list(map(arrays.__getitem__, self._owners)))
        by_device: list[dict[int, Any]] = [{} for _ in self._whole]
        made: list[Any] = [None] * len(self._whole)
        for n, (request, owner) in enumerate(zip(self.requests, self._owners, strict=True)):
            if request is self._whole[owner]:
                made[owner] = arrays[n]
            else:
                by_device[owner].update(zip(request.devices, arrays[n], strict=True))
        for owner, found in enumerate(by_device):
            if found:
                made[owner] = tuple(found[number] for number in self._whole[owner].devices)
        return self.adapter.results(made)

    def _legs(
        self, wanted: Sequence[tuple[LocalFile, int]], observed: bool
    ) -> Sequence[routing.Leg]:
        options = self._options
        from mfload.cuda import cufile, gds, staging

        against = None
        limit = options.max_device_overhead
        least = memory.least_past_host(
            threads_at_most(options), staging.DEPTH, cufile.slot_bytes(0)
        )
        if observed:
            against = "verify= sees the bytes on the host"
        elif limit is not None and limit < least:
            against = "max_device_overhead= leaves no room for its slots"
        past = functools.partial(gds.check, self._devices, options.deadline, against)
        return routing.choose_onto_device(wanted, options.engine, past)

    def _decided(self) -> Iterator[str]:
        name, batches, asked = self.adapter.name, self.limits.batches, self._options.allocator
        if len(batches) > 1:
            yield (
                f"loaded in {len(batches)} batches, since {name} copies tensors; the buffers of a "
                "batch are freed before the next"
            )
            if split := memory.split_tensors(self.requests, batches):
                yield (
                    f"{split} tensors are read once a batch, since their parts together exceed the "
                    "overhead; a larger max_host_overhead= reads them once"
                )
        if asked == "framework" and (self.adapter.on_host or self._devices):
            pairs = zip(self.requests, self.allocations, strict=True)
            if rest := {r.info.name for r, a in pairs if a.owner == "mfload"}:
                yield (
                    f"{len(rest)} tensors land in mfload's memory: {name} can't allocate their "
                    "dtypes"
                )
        if asked == "mfload" and any(
            allocation.device is not None and allocation.owner == "framework"
            for allocation in self.allocations
        ):
            yield f"tensors land in memory of {name}, which takes none of mfload's there"

    def plan(self, batch: Sequence[int] | None = None) -> Batch:
        """The plan of some requests. Default: of all."""
        requests, allocations = self.requests, self.allocations
        if batch is not None and len(batch) < len(requests):
            requests = [requests[n] for n in batch]
            allocations = [allocations[n] for n in batch]
        made = planner.make(
            requests,
            alignment=self.adapter.alignment,
            costs=self.limits.costs,
            allocations=allocations,
            mapped=self._mapped,
        )
        read_bytes = made.read_bytes
        if self._options.max_host_overhead is not None:
            self.limits.check_slots(read_bytes)
        copied = made.copied_bytes if self._copies else {}
        # Slots are gone before the framework copies, so the two don't add up.
        if not self._devices or not made.device_bytes:
            held = self.limits.slots(read_bytes, made.staged)
            return Batch(made, None, held, max(held, copied.get(None, 0)), {})
        from mfload.cuda import copies, cufile, staging as slots

        there = self.adapter.devices
        methods = copies.Methods(
            [None if s.device is None else there[s.device] for s in made.buffers]
        )
        # What is prepared on the host beyond that waits for its turn.
        most = self.limits.growth * self.limits.costs.slot
        staging = slots.staging(made.blocks, methods, most)
        past = staging.depth * cufile.slot_bytes(staging.block) if self._gds else 0
        held = self.threads * (staging.scratch + past)
        beside = {number: max(held, copied.get(number, 0)) for number in made.device_bytes}
        pinned = self.threads * staging.pinned
        return Batch(made, staging, pinned, max(pinned, copied.get(None, 0)), beside)

    def preview(self) -> Preview:
        """All of it, for people."""
        whole = self.plan()
        plans, notes = [whole], self.notes
        if len(self.limits.batches) > 1:
            plans = [self.plan(batch) for batch in self.limits.batches]
            notes += ("this plan shows its batches as one",)
        try:
            for made in plans:
                _check_host(made)
        except errors.MemoryLimitError as error:
            notes += (f"a load would be refused now: {error}",)
        overhead = max(made.overhead for made in plans)
        return Preview(
            whole.plan,
            tuple(self.route.values()),
            self.adapter.name,
            overhead,
            self.threads,
            notes,
            read_bytes=sum(made.plan.read_bytes for made in plans),
            wanted_bytes=sum(made.plan.wanted_bytes for made in plans),
            copied_bytes=sum(self._copied(made.plan) for made in plans),
            peak_bytes=_peak(plans),
            device_overhead_bytes=max(
                max(made.device_overhead.values(), default=0) for made in plans
            ),
        )

    def _copied(self, made: Plan) -> int:
        """Bytes of a plan that are copied in memory once they were read, at most."""
        waiting = sum(made.copied_bytes.values())
        if self._devices:
            return waiting + sum(s.wanted for block in made.blocks for s in block.segments)
        # Of a block that is read past the page cache, any may have to go through a slot.
        direct = any(leg.direct for leg in self.route.values())
        return waiting + sum(block.wanted for block in made.blocks if block.staged or direct)

    def check_result(self) -> None:
        """Refuses a load whose result alone does not fit, before the first of several batches.

        Raises:
            MemoryLimitError: It does not fit.
        """
        held: Counter[tuple[int | None, bool]] = Counter()
        for request, (device, owner, _) in zip(self.requests, self.allocations, strict=True):
            held[device, owner == "framework"] += request.nbytes
        if self.adapter.on_host:
            check_host(held[None, False] + held[None, True])
        for device in {device for device, _ in held if device is not None}:
            self._check_device(device, held[device, False], held[device, True])

    def check_batch(self, batch: Batch) -> None:
        """Refuses a batch that does not fit, with what it holds beside its result.

        Raises:
            MemoryLimitError: It does not fit.
        """
        made = batch.plan
        _check_host(batch)
        if not self._devices:
            return
        lent: Counter[int | None] = Counter()
        for place, (device, owner, _) in zip(made.places, made.allocations, strict=True):
            if device is not None and owner == "framework":
                lent[device] += place.request.nbytes
        for device, nbytes in made.device_bytes.items():
            own = nbytes - lent[device] + batch.device_overhead[device]
            self._check_device(device, own, lent[device])

    def _check_device(self, number: int, own: int, lent: int) -> None:
        """Refuses what does not fit in a device's memory, or in a framework's part of it."""
        name = self.adapter.name
        device, pool = self.adapter.devices[number], self.adapter.pool(number)
        room = device.memory_info()
        advice = "" if pool is None else f"; {pool.advice}"
        if own > room.free:
            raise errors.MemoryLimitError(
                f"the load does not fit on {device.name}{advice}",
                expected=f"{own} bytes ({human(own)}) beside what {name} holds",
                found=f"{room.free} bytes free of {room.total}",
            )
        if lent and pool is not None and pool.free is not None and lent > pool.free:
            raise errors.MemoryLimitError(
                f"the load does not fit in the memory that {name} has on {device.name}{advice}",
                expected=f"{lent} bytes ({human(lent)})",
                found=f"{pool.free} bytes free",
            )


Fill = Callable[[Plan, list[Any], Session, Sequence[LocalFile]], Filled]
"""Fills the buffers of a plan: how the load goes, and the files, come with them."""


class Loader:
    """Loads requests of one checkpoint into one framework."""

    def __init__(
        self, index: Index, sources: Sequence[LocalFile], adapter: Adapter, options: LoadOptions
    ) -> None:
        self._index = index
        self._sources = sources
        self._adapter = adapter
        self.options = options

    @property
    def on_host(self) -> bool:
        """Whether the framework's arrays lie in host memory."""
        return self._adapter.on_host

    def session(
        self, requests: Sequence[Request], *, by_host: bool = False, observed: bool = False
    ) -> Session:
        """What is decided of a load, before data is read.

        Args:
            by_host: Whether something else fills the buffers, which needs host memory.
            observed: Whether something on the host sees all bytes.
        """
        options = replace(self.options, by_host=True) if by_host else self.options
        index, sources = self._index, self._sources
        return Session(requests, index, sources, self._adapter, options, observed=observed)

    def preview(self, requests: Sequence[Request], *, by_host: bool = False) -> Preview:
        """Plans without reading data (see `session`)."""
        return self.session(requests, by_host=by_host).preview()

    def load(
        self,
        requests: Sequence[Request],
        *,
        report: Report | None = None,
        advance: Callable[[int], None] | None = None,
        observer: Observer | None = None,
        fill: Fill | None = None,
    ) -> list[Any]:
        """Loads.

        Args:
            requests: What is wanted.
            report: Filled, whatever it held before.
            advance: Told of progress, in bytes since the last call.
            observer: Shown the bytes as they are stored, while they come.
            fill: Fills the buffers instead of a transfer of this process alone, all at once.

        Returns:
            An array for each request, in order; what it is of several devices, the adapter says.
        """
        start = time.perf_counter()
        stages: dict[str, float] = {}
        before, held = (0.0, 0.0, 0), 0
        if report is not None:
            before = process_usage()
            buffers.peak_bytes(reset=True)
            device_memory.peak_bytes(reset=True)
            held = buffers.live_bytes()
        arrays: dict[int, Any] = {}
        filled: list[Filled] = []
        try:
            with gc_paused():
                session = self.session(
                    requests, by_host=fill is not None, observed=observer is not None
                )
            batches = session.limits.batches
            if len(batches) > 1:
                # Each batch is checked when its turn comes: what can't end must not begin.
                session.check_result()
            stages["plan"] = time.perf_counter() - start
            for batch in batches if fill is None else [range(len(session.requests))]:
                made, said = self._batch(session, batch, stages, advance, observer, fill)
                filled.append(said)
                arrays.update(zip(batch, made, strict=True))
                del made
            results = list(session.results(arrays))
        except BaseException as error:
            arrays.clear()
            let_go(error)
            if isinstance(error, MemoryError) and not isinstance(error, errors.MfloadError):
                raise errors.MemoryLimitError(
                    "the system refused memory", found=str(error) or None
                ) from error
            raise
        if report is not None:
            _fill(report, session, filled, stages)
            report.peak_bytes = max(0, buffers.peak_bytes() - held)
            after = process_usage()
            report.user_seconds += after[0] - before[0]
            report.system_seconds += after[1] - before[1]
            report.page_faults += after[2] - before[2]
        return results

    def _batch(
        self,
        session: Session,
        batch: Sequence[int],
        stages: dict[str, float],
        advance: Callable[[int], None] | None,
        observer: Observer | None,
        fill: Fill | None,
    ) -> tuple[list[Any], Filled]:
        """Arrays of some of the requests, and what filled them."""
        deadline = self.options.deadline
        times = [time.perf_counter()]
        with gc_paused():
            planned = session.plan(batch)
        plan = planned.plan
        times.append(time.perf_counter())
        session.check_batch(planned)
        lent = allocate.lend(plan, self._adapter) if session.lends else {}
        take = functools.partial(allocate.allocate, plan, self._sources, self._adapter, lent)
        if not session.waits:
            held = take()
        else:
            # A map reads from the disk, and a device may be busy: both may hang.
            held = deadline.bound(take, "mapping the files, or taking device memory")
        times.append(time.perf_counter())
        if fill is not None:
            filled = fill(plan, held, session, self._sources)
        else:
            said = execute.run(
                plan,
                held,
                self._sources,
                list(map(session.route.get, range(len(self._sources)))),
                threads=session.threads,
                deadline=deadline,
                advance=advance,
                observer=observer,
                staging=planned.staging,
            )
            filled = Filled([plan], said, 0)
        times.append(time.perf_counter())
        with gc_paused():
            complete = dict(zip(lent, map(_ARRAY, lent.values()), strict=True))
            arrays = _arrays(plan, held, complete, self._adapter)
        times.append(time.perf_counter())
        for name, start, end in zip(_STAGES, times, times[1:], strict=False):
            stages[name] = stages.get(name, 0.0) + end - start
        return arrays, filled


def _arrays(plan: Plan, held: list[Any], complete: dict[int, Any], adapter: Adapter) -> list[Any]:
    """The array of each place: of the framework's own memory, or of a view of mfload's."""
    forms = adapter.forms
    views: list[View] = []
    for request, buffer, at in plan.places:
        if buffer in complete:
            continue
        dtype = request.dtype
        view = View(request.info.name, dtype, request.shape, held[buffer], at, request.devices)
        views.append(view.as_bytes() if forms[dtype.name].how == "bytes" else view)
    arrays = adapter.wrap(views)
    if not complete:
        return arrays
    rest = iter(arrays)
    return [
        complete[place.buffer] if place.buffer in complete else next(rest) for place in plan.places
    ]


def _fill(
    report: Report, session: Session, filled: Sequence[Filled], stages: dict[str, float]
) -> None:
    requests, plans = session.requests, [plan for each in filled for plan in each.plans]
    copied = sum(
        request.nbytes
        for request, allocation in zip(requests, session.allocations, strict=True)
        if allocation.copied
    )
    report.framework = session.adapter.name
    report.tensors = len({request.info.name for request in requests})
    report.result_bytes = sum(request.nbytes for request in requests)
    report.read_bytes = sum(plan.read_bytes for plan in plans)
    report.over_read_bytes = sum(plan.read_bytes - plan.wanted_bytes for plan in plans)
    report.mapped_bytes = sum(plan.mapped_bytes for plan in plans)
    report.exchanged_bytes = sum(each.exchanged for each in filled)
    report.aliased_bytes = report.result_bytes - copied
    report.device_peak_bytes = device_memory.peak_bytes()
    report.threads = session.threads
    report.route = tuple((leg.file, leg.engine, leg.why) for leg in session.route.values())
    notes = (*session.notes, *(note for each in filled for note in each.notes))
    report.notes = tuple(dict.fromkeys(notes))
    report.stages = {**report.stages, **stages}


def _peak(batches: Sequence[Batch]) -> int:
    """The most host memory that mfload's buffers hold at once."""
    peak = kept = 0
    for made in batches:
        plan = made.plan
        own = plan.buffer_bytes - sum(
            place.request.nbytes
            for place, (device, owner, _) in zip(plan.places, plan.allocations, strict=True)
            if device is None and owner == "framework"
        )
        peak = max(peak, kept + own + made.slots)
        kept += own - plan.copied_bytes.get(None, 0)
    return peak


def _check_host(batch: Batch) -> None:
    plan = batch.plan
    needed, mapped = batch.overhead, 0
    for nbytes, source, device in plan.buffers:
        if source is not None:
            mapped += nbytes
        elif device is None:
            needed += nbytes
    # For less the system is not asked.
    if needed + mapped >= _WORTH_ASKING:
        check_host(needed, mapped)


def check_host(needed: int, mapped: int = 0) -> None:
    """Refuses a load that can't have its memory, or would have the kernel kill the process.

    Args:
        needed: Bytes of memory that it will hold.
        mapped: Bytes of files that it will map.

    Raises:
        MemoryLimitError: It does not fit in what the process, a control group or the machine has.
    """
    for limit in probes.process_limits():
        if needed + mapped > limit.limit - limit.used:
            raise errors.MemoryLimitError(
                f"the load does not fit in {limit.name}, the limit of this process",
                expected=f"{human(needed + mapped)} for the result and what it takes to load it",
                found=f"{limit.name} {human(limit.limit)}, in use {human(limit.used)}",
            )
    # For less the system is not asked.
    room = probes.memory_room() if needed >= _WORTH_ASKING else None
    if room is not None and needed > room[0]:
        raise errors.MemoryLimitError(
            f"the load does not fit in the {room[1]}",
            expected=f"{needed} bytes",
            found=f"{room[0]} bytes free",
        )


def check(requests: Sequence[Request], index: Index) -> None:
    """Refuses by name what is legal in an index and can't become an array.

    Raises:
        UnsupportedShapeError: A shape that no array can have.
        UnsupportedDtypeError: A dtype that mfload does not know, or pieces that the plan can't
            slice: it knows one raw piece a tensor, in C order.
    """
    for request in requests:
        piece = request.info.pieces[0]
        if len(request.info.pieces) != 1 or piece[3:] != _PLAIN:
            raise errors.UnsupportedDtypeError(
                "the tensor is stored in a way that mfload can't read yet",
                file=index.files[piece.source],
                tensor=request.info.name,
                expected="one raw piece in C order",
                found=f"{len(request.info.pieces)} pieces, {piece.encoding}, {piece.order} order",
            )
        shape = request.info.shape
        # Without a zero among its dims, a tensor is no larger than its file.
        large = 0 in shape and _span(request) > _MAX_SPAN
        if request.dtype.nbytes and len(shape) <= _MAX_RANK and not large:
            continue
        file = index.files[request.info.pieces[0].source]
        if not request.dtype.known:
            raise errors.UnsupportedDtypeError(
                "the dtype is not known to mfload",
                file=file,
                tensor=request.info.name,
                found=request.dtype.name,
            )
        raise errors.UnsupportedShapeError(
            "no array can have this shape",
            file=file,
            tensor=request.info.name,
            expected=f"at most {_MAX_RANK} dims, and strides that fit 63 bits",
            found=str(shape),
        )


def _span(request: Request) -> int:
    """Bytes that strides have to reach over, were the dims of no length of length one."""
    count = math.prod(filter(None, request.info.shape[:_MAX_RANK]))
    return count * max(request.info.dtype.nbytes, request.dtype.nbytes)


def threads_at_most(options: LoadOptions) -> int:
    """Readers at once onto the host, at most, whatever files there are."""
    return options.threads or max(min(probes.cores(), _MOST_THREADS), _DIRECT_THREADS)


def least_overhead(options: LoadOptions) -> int:
    """The least `max_host_overhead` for readers onto the host, whatever files there are."""
    return memory.least(threads_at_most(options))


def let_go(error: BaseException) -> None:
    """Takes the buffers out of an error's traceback: who keeps the error keeps no memory."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        for frame, _ in traceback.walk_tb(each.__traceback__):
            # An error that was carried over knows its callers too, by no traceback.
            caller: FrameType | None = frame
            with suppress(RuntimeError):  # It is running, and so are its callers.
                while caller and caller.f_globals.get("__name__", "").startswith("mfload."):
                    caller.clear()
                    caller = caller.f_back
        each = each.__cause__ or each.__context__
