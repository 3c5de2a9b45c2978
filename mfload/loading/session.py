"""One load, from requests to arrays: what follows once the index is read, for all callers."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import dtypes, errors
from mfload.dlpack import View, Views
from mfload.frameworks.base import Adapter, Lent
from mfload.index import Index
from mfload.io import buffers, route as routing
from mfload.io.engine import Observer
from mfload.loading import allocate, execute
from mfload.loading.execute import Advance
from mfload.options import LoadOptions
from mfload.planning import memory as limits
from mfload.planning.layout import DEVICE_ALIGNMENT
from mfload.planning.memory import Ledger, Limits, Readers
from mfload.planning.plan import Places, Plan, make_plan
from mfload.planning.request import HOST, Allocation, Request, WholeTensors, names, sizes
from mfload.runtime import Crew, gc_paused, usage
from mfload.sources.base import CACHED, Costs, Source

# What only some loads need is imported where it is used.
if TYPE_CHECKING:
    from mfload.cuda.staging import Staging
    from mfload.io.trial import Trial
    from mfload.loading.preview import Preview
    from mfload.planning.layout import BufferSpec
    from mfload.planning.plan import Position
    from mfload.report import Report
    from mfload.timeline import Recorder

MAX_RANK = 64  # NumPy's, and every view is a NumPy array first.
_MAX_SPAN = 2**63 - 1
_MOMENT = 0.1  # Seconds for which a stream goes by the memory that was free,
_PART = 8  # and takes at most this part of it.
_MUCH = 64 << 30  # Bytes that are checked before reads are planned: that takes a while, too.
_SMALLER = 8  # The part of a slot of full size that small reads have.
# A trial comes to at least so many readers, since one alone depends on every delay; and past the
# page cache to no more than `_MOST_TRIED`, for which `max_host_overhead` must leave room, in bytes.
_FEWEST_TRIED, _MOST_TRIED, _ROOM = 2, 16, 128 << 20
_LONG = 4 << 30  # Bytes from a server for which numbers of connections are tried.
_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.
_STAGES = ("plan", "allocate", "transfer", "arrays")
_DIRECT, _COLD, _EITHER = map(attrgetter, ("direct", "cold", "either"))  # Of a leg.
_COPIED, _OWNER, _DEVICE = map(attrgetter, ("copied", "owner", "device"))  # Of an allocation.
_FIRST = itemgetter(0)


Filled = tuple[Sequence[Plan], tuple[str, ...], int]
"""What filled the buffers of a load: plans that were read, notes, and bytes of other processes."""


class Batch:
    """The plan of requests that are loaded together, and the most it holds beside their results.

    Attributes:
        staging: The slots of what lands on devices; None if all lands on the host.
        slots: Bytes of slots in host memory.
        overhead: Bytes of host memory.
        device_overhead: Bytes on each device, by its number.
    """

    plan: Plan
    staging: Staging | None = None
    slots = overhead = 0
    device_overhead: Mapping[int, int] = MappingProxyType({})


class Shared:
    """What the loads of a stream, or of an open checkpoint onto devices, share.

    Attributes:
        wanted: Bytes that all of them take of each file, by its number; None if that is not known.
        legs: The route of files, by their numbers. If it is known what all take, the first load
            chooses for all; else the first one of some MiB for those that land in the same place.
        crew: The threads.
        trial: Goes on from one load to the next, if it is known what all take.
    """

    trial: Trial | None = None

    def __init__(self, wanted: Mapping[int, int] | None) -> None:
        self.wanted = wanted
        self._legs: dict[bool, dict[int, routing.Leg]] = {False: {}, True: {}}
        self.crew = Crew()
        self._room, self._until = 0, 0.0

    def legs(self, on_devices: bool, nbytes: int) -> dict[int, routing.Leg]:
        """Those for a load of so many bytes, which adds others."""
        if self.wanted is not None:
            return self._legs[False]
        return self._legs[on_devices] if nbytes >= routing.SMALL else {}

    def close(self) -> None:
        """Ends the threads; waits for none."""
        self.crew.close()

    def check_host(self, needed: int, specs: Sequence[BufferSpec]) -> None:
        """See `allocate.check_host`; a part of what was free a moment ago is taken to be free."""
        nbytes = needed + sum(spec.nbytes for spec in specs)
        if nbytes > self._room or time.monotonic() > self._until:
            self._room = allocate.check_host(needed, specs) // _PART
            self._until = time.monotonic() + _MOMENT
        else:
            self._room -= nbytes


class Loader:
    """Loads requests of one checkpoint into one framework.

    Attributes:
        shared: What this load shares with others of the checkpoint.
    """

    shared: Shared | None = None

    def __init__(
        self, index: Index, sources: Sequence[Source], adapter: Adapter, options: LoadOptions
    ) -> None:
        self.index, self.sources = index, sources
        self.adapter, self.options = adapter, options

    def preview(self, requests: Sequence[Request], *, by_host: bool = False) -> Preview:
        """Plans without reading data; `by_host`: as if all landed in host memory."""
        return Session(self, requests, by_host=by_host).preview()

    def load(
        self,
        requests: Sequence[Request],
        *,
        report: Report | None = None,
        advance: Advance | None = None,
        fill: Fill | None = None,
    ) -> list[Any]:
        """An array for each request, in order; what it is of several devices, the adapter says.

        `advance` is told of progress in bytes since the last call. `fill` fills the buffers of all
        requests at once instead of this process. What the options check is compared before the
        arrays are returned.
        """
        start = time.perf_counter()
        stages: list[tuple[str, float, float]] = []
        before, held = (0.0, 0.0, 0), 0
        recorder: Recorder | None = None
        if report is not None:
            from mfload.cuda import memory as device_memory
            from mfload.timeline import Recorder

            recorder, before = Recorder([source.name for source in self.sources]), usage()
            buffers.peak_bytes(reset=True)
            device_memory.peak_bytes(reset=True)
            held = buffers.live_bytes()
        arrays: Any = {}
        filled: list[Filled] = []
        try:
            with gc_paused():
                session = Session(self, requests, alone=fill is None)
                session.recorder = recorder
            batches, check = session.limits.batches, self.options.check
            if check is not None:
                session.observer = check.watch(session.requests, batches, self.options)
            # Each batch is checked when its turn comes: what can't end must not begin. And what a
            # file or a peer claims must not cost more than a look.
            if len(batches) > 1 or session.total > _MUCH:
                session.check_result()
            stages.append(("plan", start, time.perf_counter()))
            for batch in batches if fill is None else [range(len(session.requests))]:
                made, one = session.load(batch, stages, advance, fill)
                filled.append(one)
                if len(made) == len(session.requests):
                    arrays = made
                else:
                    arrays.update(zip(batch, made, strict=True))
                del made
            if check is not None:
                check.settle(session.observer, report)
            results = list(session.results(arrays))
        except BaseException as error:
            arrays.clear()
            errors.let_go(error)
            if report is not None and recorder is not None:
                _describe_failed(report, recorder, before)
            if isinstance(error, MemoryError) and not isinstance(error, errors.MfloadError):
                found = str(error) or None
                raise errors.MemoryLimitError("the system refused memory", found=found) from error
            raise
        if report is not None:
            _describe(report, session, filled, stages)
            report.peak_bytes = max(0, buffers.peak_bytes() - held)
            _add_usage(report, before)
        return results


class Session:
    """What is decided once a load, before data is read; opens the files, reads nothing.

    Attributes:
        requests: What is loaded, one request for each place that a result lands in.
        allocations: Where each request lands.
        route: The leg of each source that is used, by its number.
        limits: Batches, and how large a read may be.
        notes: What was decided without being asked for.
        recorder: Records what threads do, for a report.
        trial: Finds out how cold files are best read; None if there is too little to read.
        total: Bytes to take of the sources.
        observer: Is shown the bytes as they are stored.
    """

    observer: Observer | None = None
    recorder: Recorder | None = None
    trial: Trial | None = None
    total = 0
    _gds = False

    def __init__(
        self,
        loader: Loader,
        requests: Sequence[Request],
        *,
        by_host: bool = False,
        alone: bool = True,
    ) -> None:
        index, sources, options = loader.index, loader.sources, loader.options
        check(requests, index, counts_items=loader.adapter.counts_items)
        self.adapter, self._sources = loader.adapter, sources
        self._options = options = options.replace(by_host=True) if by_host else options
        self._shared, adapter = loader.shared, self.adapter
        self._known: dict[tuple[str, tuple[int, ...], bool], Allocation] = {}
        self._whole = adapter.assign(requests)
        self._near: Any = None
        # What others read too, or see, passes through the host.
        on_devices = bool(adapter.devices) and alone and options.check is None
        if on_devices and any(hasattr(each, "lying") for each in sources):
            from mfload.loading import near  # Only some sources lie on devices.

            self._near, self._whole = near, list(map(near.narrowed, self._whole))
        self.requests, self._owners = self._whole, range(len(self._whole))
        # None, for short, if all land in mfload's memory on the host.
        self.allocations: Sequence[Allocation] = ()
        if isinstance(self._whole, WholeTensors):
            where = set(map(self._allocation, self._whole.of_each_kind()))
            alike = where.pop() if len(where) == 1 else None
            if alike is None or alike.owner != "mfload" or alike.copied:
                # Rows that are made when asked for are made once.
                self.requests = self._whole = list(self._whole)
            elif alike != HOST:
                self.allocations = [alike] * len(self._whole)
        if not isinstance(self.requests, WholeTensors):
            if adapter.devices:
                self.requests, self._owners = self._split()
            self.allocations = list(map(self._allocation, self.requests))
        if self._near is not None:
            given = sources, adapter, options
            pairs = zip(self.requests, self.allocations, strict=True)
            self.allocations = [self._near.allocation(*pair, *given) for pair in pairs]
        kinds = set(self.allocations)
        self._copies, self._lends = True in map(_COPIED, kinds), "framework" in map(_OWNER, kinds)
        numbers = set(map(_DEVICE, kinds)) - {None}
        self._devices = list(map(adapter.devices.__getitem__, sorted(numbers)))
        wanted, apart = wanted_bytes(self.requests)
        self.route = self._choose_route(wanted)
        self._choose_readers(wanted, bool(apart), alone and not apart)
        self.notes = (*loader.index.notes, *adapter.notes)
        narrow = sorted(dtypes.NARROW.keys() & map(_FIRST, self._known))
        several = len(self.limits.batches) > 1 or options.allocator != "auto"
        if narrow or several or (apart and adapter.devices):
            self.notes += tuple(self._decided(narrow, len(apart)))

    def _choose_route(self, wanted: Mapping[int, int]) -> dict[int, routing.Leg]:
        """The leg of each source, by its number, of which so many bytes are wanted."""
        sources, shared, options = self._sources, self._shared, self._options
        used, known = sorted(wanted), dict[int, routing.Leg]()
        if shared is not None:
            known = shared.legs(bool(self._devices), sum(wanted.values()))
        files: dict[int, tuple[Source, int]] = {}
        for number in used:
            nbytes = min(wanted[number], sources[number].size)
            self.total += nbytes
            if number not in known:
                if shared is not None and shared.wanted is not None:
                    nbytes = min(shared.wanted.get(number, nbytes), sources[number].size)
                files[number] = sources[number], nbytes
        if files:
            how = options.engine, options.page_cache
            # Where the arrays lie in the memory of the page cache, it would hold all twice.
            keeps = not self.adapter.unified
            choose = functools.partial(routing.choose, [*files.values()], *how, keeps=keeps)
            if self._devices:
                choose = functools.partial(self._onto_devices, [*files.values()])
            chosen = options.deadline.bound(choose, "opening the files")
            known.update(zip(files, chosen, strict=True))
        route = dict(zip(used, map(known.__getitem__, used), strict=True))
        if self._near is not None:
            route = self._near.legs(route, self.requests, self.allocations, sources)
        return route

    def _choose_readers(self, wanted: Mapping[int, int], decodes: bool, tries: bool) -> None:
        """How many read, in what blocks; and whether the load `tries` how cold files are read."""
        shared, options, legs = self._shared, self._options, self.route.values()
        # Of a stream, all of it counts.
        of_all = wanted if shared is None or shared.wanted is None else shared.wanted
        tries = tries and sum(of_all.values()) >= routing.TRIED and self._worth_a_trial(of_all)
        self._direct = any(map(_DIRECT, legs)) or (tries and any(map(_EITHER, legs)))
        cold = self._direct or any(map(_COLD, legs))
        self._mapped: dict[int, int] = {}
        for number, leg in self.route.items():
            if leg.engine == "mmap":
                self._mapped[number] = self._sources[number].size
        costs = self._sources[min(wanted)].costs if wanted else Costs()
        if costs.concurrency and not cold and all(leg.cached is not None for leg in legs):
            costs = CACHED  # Files of a network disk.
        if cold or self._options.check is not None:
            costs = costs._replace(row_gap=None)  # A disk reads on in less time than it turns.
        if self._options.check is not None:
            costs = costs._replace(span=0)  # It is shown the bytes of slots.
        count, concurrency = len(self._devices), costs.concurrency
        chosen = execute.reader_threads(self._direct, count, cold=cold, concurrency=concurrency)
        if tries and self._direct:
            chosen = max(chosen, _MOST_TRIED)
        # A server likes some number of connections; it is found while a long load reads.
        most, long = costs.most or 0, sum(of_all.values()) >= _LONG
        waits = long and most > 0 and options.threads is None and not count
        if waits := waits and Ledger(options).most >= most * costs.block:
            chosen = most
        self.threads, self.used = options.threads or chosen, 0
        readers = Readers()
        readers.threads, readers.costs, readers.decodes = self.threads, costs, decodes
        readers.nbytes, readers.direct, readers.cold = self.total, self._direct, cold
        readers.mapped = len(self._mapped) == len(legs)
        if self._devices:
            self._stage(readers)
        self.limits = Limits(self.requests, self.allocations, options, readers)
        if waits or (tries and (options.threads is None or any(map(_EITHER, legs)))):
            self._begin_trial(sum(of_all.values()))

    def _stage(self, readers: Readers) -> None:
        """What is to be known of readers that land on devices."""
        from mfload.cuda import cufile, staging

        self._gds = any(leg.past_host for leg in self.route.values())
        gds = cufile.slot_bytes(0) if self._gds else None
        readers.depth, readers.slot, readers.gds = staging.DEPTH, staging.SLOT, gds
        readers.kept = self._shared is not None

    def _worth_a_trial(self, nbytes: Mapping[int, int]) -> bool:
        room = Ledger(self._options).most
        legs = [(leg, nbytes[number]) for number, leg in self.route.items()]
        later = sum(nbytes[number] for number in nbytes.keys() - self.route.keys())
        return routing.worth_a_trial(legs, later) and room >= _ROOM

    def _begin_trial(self, nbytes: int) -> None:
        """Begins to try how the files, which are cold, are best read, or goes on with that."""
        from mfload.io.trial import Trial

        shared, asked, count = self._shared, self._options.threads, len(self._devices)
        if shared is not None and shared.trial is not None:
            self.trial = shared.trial
            return
        concurrency, most = self.limits.costs.concurrency, self.limits.costs.most
        cold = any(map(_COLD, self.route.values()))
        if most is None:
            through = asked or execute.reader_threads(False, count, concurrency=concurrency)
            fewest = max(_FEWEST_TRIED, count, (concurrency or 0) // 2)
            how = self.limits.costs.block, asked or fewest, self.threads
            self.trial = Trial(nbytes, *how, through if cold else None, past=self._direct)
        else:
            how = self.limits.costs.block, asked or max(_FEWEST_TRIED, count), self.threads
            begin = concurrency or most
            self.trial = Trial(nbytes, *how, most, past=False, begin=begin, files=False)
        if shared is not None and shared.wanted is not None:
            shared.trial = self.trial

    def _allocation(self, request: Request) -> Allocation:
        by_host = bool(self.adapter.devices) and request.by_host
        key = request.dtype.name, request.devices, by_host
        found = self._known.get(key)
        if found is None:
            options = self._options.replace(by_host=True) if by_host else self._options
            found = self._known[key] = self.adapter.allocation(request, options)
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
                if host := tuple(number for number in request.devices if number not in landed):
                    parts.append(request._replace(devices=host))
            made += parts
            owners += [position] * len(parts)
        return made, owners

    def by_request(self, places: Sequence[Position]) -> list[list[Position]]:
        """The places of a plan of all, for each request as it was before it was split."""
        made: list[list[Position]] = [[] for _ in self._whole]
        for place, owner in zip(places, self._owners, strict=True):
            made[owner].append(place)
        return made

    def results(self, arrays: Mapping[int, Any] | Sequence[Any]) -> Sequence[Any]:
        """What a user gets for each request, from the arrays by their position in `requests`."""
        if self.requests is self._whole:
            if isinstance(arrays, list):
                return self.adapter.results(arrays)
            return self.adapter.results(list(map(arrays.__getitem__, self._owners)))
        made: list[Any] = [None] * len(self._whole)
        for n, (request, owner) in enumerate(zip(self.requests, self._owners, strict=True)):
            whole = self._whole[owner]
            if request is whole:
                made[owner] = arrays[n]
                continue
            # An array for each device, in the order of the request that was split.
            found = made[owner] or [None] * len(whole.devices)
            for number, array in zip(request.devices, arrays[n], strict=True):
                found[whole.devices.index(number)] = array
            made[owner] = found
        return self.adapter.results([tuple(a) if isinstance(a, list) else a for a in made])

    def _onto_devices(self, files: Sequence[tuple[Source, int]]) -> Sequence[routing.Leg]:
        from mfload.cuda import cufile, gds, staging

        options, against = self._options, None
        limit = Ledger(options, device=True).given
        threads = options.threads or execute.reader_threads(direct=True)
        least = limits.least_past_host(threads * staging.DEPTH, cufile.slot_bytes(0))
        if self._options.check is not None:
            against = "verify= sees the bytes on the host"
        elif limit is not None and limit < least:
            against = "max_device_overhead= leaves no room for its slots"
        past = functools.partial(gds.check, self._devices, options.deadline, against)
        keeps = not any(device.unified for device in self._devices)
        how = options.engine, options.page_cache, past
        legs = routing.choose(files, *how, keeps=keeps)
        made: list[routing.Leg] = []
        for (one, _), leg in zip(files, legs, strict=True):
            source: Any = one
            find = getattr(source, "past_host", None)  # Of peers.
            why = None if find is None else find(self._devices)
            if why is not None and (why := against or why):
                leg = leg._replace(why=f"{leg.why}; through the host: {why}")
            elif why is not None:
                why = f"{source.why}; from device to device"
                leg = leg._replace(engine=source.engine, why=why, past_host=True)
            made.append(leg)
        return made

    def _decided(self, narrow: Sequence[str], apart: int) -> Iterator[str]:
        for dtype in narrow:
            if (kind := self.adapter.forms[dtype].type) != dtype:
                what = f"{dtype} arrives as {kind}, with its numbers"
                yield f"{what}: {self.adapter.name} has no such arrays"
        if apart and self.adapter.devices:
            yield (
                "put together in host memory, since encoded or not in C order: "
                + errors.counted(apart, "tensor")
            )
        name, batches, asked = self.adapter.name, self.limits.batches, self._options.allocator
        if len(batches) > 1:
            yield (
                f"loaded in {len(batches)} batches, since {name} copies tensors; the buffers of a "
                "batch are freed before the next"
            )
            if split := limits.split_tensors(self.requests, batches):
                yield (
                    f"read once a batch, since parts together exceed the overhead: "
                    f"{errors.counted(split, 'tensor')}; a larger max_host_overhead= reads once"
                )
        where = self.allocations or itertools.repeat(HOST)
        pairs = list(zip(self.requests, where, strict=False))
        rest = {
            request.info.name
            for request, each in pairs
            if each.owner == "mfload" and not (self.adapter.allocates and each.device is not None)
        }
        if asked == "framework" and rest and (self.adapter.on_host or self._devices):
            count = errors.counted(len(rest), "tensor")
            yield f"in mfload's memory, since {name} can't allocate such dtypes: {count}"
        if asked == "mfload" and any(
            each.owner == "framework" and each.device is not None for _, each in pairs
        ):
            yield f"tensors land in memory of {name}, which takes none of mfload's there"

    def plan(self, batch: Sequence[int] | None = None, *, cut: bool = True) -> Batch:
        """The plan of some requests. Default: of all. Without `cut` it has no reads."""
        requests, allocations = self.requests, self.allocations
        if batch is not None and len(batch) < len(requests):
            requests = [requests[n] for n in batch]
            allocations = [allocations[n] for n in batch]
        made = Batch()
        made.plan = plan = make_plan(
            requests,
            alignment=DEVICE_ALIGNMENT if self.adapter.unified else self.adapter.alignment,
            costs=self.limits.costs,
            allocations=allocations,
            mapped=self._mapped,
            alone=None if self._options.allocator == "mfload" else self.adapter.alone,
            cut=cut,
        )
        if not cut:
            return made
        copied = plan.copied_bytes if self._copies else {}
        # Slots are gone before the framework copies, so the two don't add up.
        if not self._devices or not plan.device_bytes:
            made.slots = self.limits.slots(plan.read_bytes, plan.staged, plan.decoding)
            made.overhead = max(made.slots, copied.get(None, 0))
            return made
        from mfload.cuda import copies, cufile, staging as slots

        there = self.adapter.devices
        methods = copies.Methods(
            [None if s.device is None else there[s.device] for s in plan.buffers]
        )
        # What is prepared on the host beyond that waits for its turn.
        most = self.limits.growth * self.limits.costs.slot
        raw = [block for block in plan.blocks if block.decode is None]
        made.staging = staging = slots.staging(raw, methods, most)
        if self._shared is not None:  # Of two sizes alone, so that the next load can use them.
            block = self.limits.slot or self.limits.costs.block
            small = staging.block <= block // _SMALLER
            block = max(staging.block, block // _SMALLER if small else block)
            made.staging = staging = staging._replace(block=block)
        past = staging.depth * cufile.slot_bytes(staging.block) if self._gds else 0
        held = self.threads * past
        made.device_overhead = {n: max(held, copied.get(n, 0)) for n in plan.device_bytes}
        made.slots = min(self.threads, len(raw)) * staging.pinned + self.threads * plan.decoding
        made.overhead = max(made.slots, copied.get(None, 0))
        return made

    def preview(self) -> Preview:
        """All of it, for people."""
        from mfload.loading.preview import Preview
        from mfload.sources import ahead

        whole = self.plan()
        batches, notes, options = [whole], self.notes, self._options
        if len(self.limits.batches) > 1:
            batches = [self.plan(batch) for batch in self.limits.batches]
            notes += ("this plan shows its batches as one",)
        try:
            for batch in batches:
                allocate.check_host(batch.overhead, batch.plan.buffers)
        except errors.MemoryLimitError as error:
            notes += (f"a load would be refused now: {error}",)
        peak = kept = copied = beside = 0
        how, bounded = (self.route, self.threads, self.limits.costs.concurrency), options.timeout
        readers, asked, trips = [1], 0, 0
        if any(getattr(each, "of_cache", False) for each in self._sources):
            notes += ("requests for what the cache holds are not sent",)
        for batch in batches:
            plan, staged = batch.plan, batch.staging is not None
            readers.append(execute.count_readers(plan, *how, bounded=bool(bounded), staged=staged))
            sent = ahead.requests_for(self._sources, plan.blocks)
            asked, trips = asked + sent, trips + math.ceil(sent / max(1, readers[-1]))
            own, waiting = plan.buffer_bytes - plan.lent_bytes[None], plan.copied_bytes
            peak = max(peak, kept + own + batch.slots)
            kept += own - waiting.get(None, 0)
            beside = max(beside, *batch.device_overhead.values(), 0)
            copied += sum(waiting.values())
            if self._devices:
                copied += sum(each.wanted for block in plan.blocks for each in block.segments)
            else:
                # Of a block that is read past the page cache, any may have to go through a slot.
                copied += sum(b.wanted for b in plan.blocks if b.staged or self._direct)
        return Preview(
            whole.plan,
            tuple(self.route.values()),
            self.adapter.name,
            max(batch.overhead for batch in batches),
            max(readers),
            notes,
            read_bytes=sum(batch.plan.read_bytes for batch in batches),
            wanted_bytes=sum(batch.plan.wanted_bytes for batch in batches),
            copied_bytes=copied,
            peak_bytes=peak,
            device_overhead_bytes=beside,
            remote_requests=asked,
            round_trips=trips,
        )

    def check_result(self) -> None:
        """Refuses a load whose result alone does not fit, before any of its reads is planned."""
        # What is copied to a device leaves the host after each batch.
        self.check_batch(self.plan(cut=False), host=self.adapter.on_host)

    def check_batch(self, batch: Batch, *, host: bool = True) -> None:
        """Refuses a batch that does not fit, with what it holds beside its result.

        What earlier loads left to others goes first.
        """
        try:
            if host:
                specs = batch.plan.buffers
                if self.adapter.lends_held:
                    specs = allocate.not_lent(batch.plan)
                look = allocate.check_host if self._shared is None else self._shared.check_host
                look(batch.overhead, specs)
            if self._devices:
                self._check_devices(batch)
        except errors.MemoryLimitError:
            kept = sys.modules.get("mfload.cuda.staging")
            if kept is None or not kept.KITS.give_back():
                raise
            self.check_batch(batch, host=host)

    def _check_devices(self, batch: Batch) -> None:
        held = self.adapter.lends_held
        for device, nbytes in batch.plan.device_bytes.items():
            beside, lent = batch.device_overhead.get(device, 0), batch.plan.lent_bytes[device]
            own, lent = nbytes - lent, 0 if held else lent
            if self.adapter.allocates and self._options.allocator != "mfload":
                own, lent = 0, own + lent
            allocate.check_device(self.adapter, device, own + beside, lent)

    def _keep_within(self) -> None:
        """Has slots that earlier loads left count for the limits of this one."""
        both, count = [Ledger(self._options, device=there) for there in (False, True)], self.threads
        if any(each.given is not None for each in both):
            from mfload.cuda.staging import KITS

            host, device = (math.inf if e.given is None else e.share(count) for e in both)
            KITS.keep_within(self._devices, count, (host, device))

    def _take(
        self, plan: Plan, memory: list[Any], lent: dict[int, Lent], there: allocate.Allocators
    ) -> None:
        """Puts the buffers of a plan into `memory`, and what is lent of them into `lent`."""
        if self._lends:
            with gc_paused():
                lent.update(allocate.lend(plan, self.adapter))
        deadline, get = self._options.deadline, allocate.allocate
        get = functools.partial(get, plan, self._sources, self.adapter, lent, there)
        if self._devices and deadline.seconds is not None:
            get = functools.partial(_within, self.adapter.follow(), get)
        # A map reads from the disk, and a device may be busy: to get their memory may hang.
        memory.extend(deadline.bound(get, "mapping files or allocating on a device"))

    def load(
        self,
        batch: Sequence[int],
        stages: list[tuple[str, float, float]],
        advance: Advance | None,
        fill: Fill | None,
    ) -> tuple[list[Any], Filled]:
        """Arrays of some of the requests, and what filled them; adds (name, start, stop) stages."""
        deadline, times = self._options.deadline, [time.perf_counter()]
        with gc_paused():
            planned = self.plan(batch)
        plan = planned.plan
        times.append(time.perf_counter())
        there: allocate.Allocators = {}
        if self._devices and self._options.allocator != "mfload":
            specs = allocate.not_lent(plan) if self._lends else plan.buffers
            there = allocate.allocators(specs, self.adapter)
        self.check_batch(planned)
        memory, lent = list[Any](), dict[int, Lent]()
        take = functools.partial(self._take, plan, memory, lent, there)
        # On its way to a device, what is read lands in slots first: readers begin at once.
        later = take if planned.staging is not None and fill is None else None
        if later is None:
            take()
        else:
            self._keep_within()
        times.append(time.perf_counter())
        if fill is not None:
            filled = fill(plan, memory, self, self._sources)
            self.used = self.threads
        else:
            notes, readers = execute.Transfer(
                plan,
                memory,
                self._sources,
                self.route,
                self.threads,
                deadline,
                advance,
                self.observer,
                planned.staging,
                self.recorder,
                start=None if self._shared is None else self._shared.crew.start,
                allocate=later,
                trial=self.trial,
            ).run()
            filled = [plan], notes, 0
            self.used = max(self.used, readers)
            if self._near is not None:
                copy = functools.partial(self._near.copy, plan, memory, self._sources)
                copied = deadline.bound(copy, "copying from device to device")
                if advance is not None:
                    advance(copied)
        if self.adapter.unified:
            filled = filled[0], (*filled[1], *allocate.share(plan, memory, self.adapter)), filled[2]
        times.append(time.perf_counter())
        with gc_paused():
            arrays = _arrays(plan, memory, lent, self.adapter)
        times.append(time.perf_counter())
        stages += zip(_STAGES, times, times[1:], strict=False)
        return arrays, filled


def _within(context: AbstractContextManager[object], call: Callable[[], list[Any]]) -> list[Any]:
    with context:
        return call()


Fill = Callable[[Plan, list[Any], Session, Sequence[Source]], Filled]
"""Fills the buffers of a plan: how the load goes, and the files, come with them."""


def _arrays(plan: Plan, held: list[Any], lent: Mapping[int, Lent], adapter: Adapter) -> list[Any]:
    """The array of each place: of the framework's own memory, or of a view of mfload's."""
    forms = adapter.forms
    if isinstance(plan.places, Places):
        return adapter.wrap(_views(plan.places, held, adapter))
    views: list[View] = []
    for (info, dtype, selection, _, devices), buffer, at in plan.places:
        if buffer in lent:
            continue
        shape = info.shape if selection is None else selection.shape
        view = _new(View, (info.name, dtype, shape, held[buffer], at, devices))
        views.append(view.as_bytes() if forms[dtype.name].how == "bytes" else view)
    arrays = adapter.wrap(views)
    if not lent:
        return arrays
    rest = iter(arrays)
    return [lent[p.buffer].array if p.buffer in lent else next(rest) for p in plan.places]


def _views(places: Places, held: list[Any], adapter: Adapter) -> Views:
    columns = places.requests.columns
    kinds = list(columns.kinds)
    for number, (dtype, shape) in enumerate(kinds):
        # Tensors that were not asked for may be of dtypes that no adapter knows.
        if dtype.known and adapter.forms[dtype.name].how == "bytes":
            view = View("", dtype, shape, None, 0).as_bytes()
            kinds[number] = view.dtype, view.shape
    return Views(columns.names, kinds, columns.kind, held, places.buffers, places.at)


def _describe(
    report: Report,
    session: Session,
    filled: Sequence[Filled],
    stages: Sequence[tuple[str, float, float]],
) -> None:
    """Fills a report."""
    from mfload.cuda import memory as device_memory

    requests, plans = session.requests, [plan for each in filled for plan in each[0]]
    nbytes = sizes(requests)
    report.framework = session.adapter.name
    report.tensors = len(set(names(requests)))
    report.result_bytes = report.aliased_bytes = sum(nbytes)
    for size, allocation in zip(nbytes, session.allocations, strict=False):
        report.aliased_bytes -= size * allocation.copied
    report.read_bytes = sum(plan.read_bytes for plan in plans)
    report.over_read_bytes = report.read_bytes - sum(plan.wanted_bytes for plan in plans)
    report.mapped_bytes = sum(plan.mapped_bytes for plan in plans)
    report.exchanged_bytes = sum(exchanged for _, _, exchanged in filled)
    report.device_peak_bytes = device_memory.peak_bytes()
    report.threads = session.used
    legs = session.route.values()
    if session.trial is not None:
        found = session.trial.gain, session.trial.way.direct
        legs = [routing.after_trial(leg, *found) for leg in legs]
    report.route = tuple((leg.file, leg.engine, leg.why) for leg in legs)
    notes = (*session.notes, *(note for _, notes, _ in filled for note in notes))
    report.notes = tuple(dict.fromkeys(notes))
    for name, start, stop in stages:
        report.add_stage(name, start, stop)
    if session.recorder is not None:
        report.timeline += tuple(session.recorder.spans())


def _describe_failed(report: Report, recorder: Recorder, before: tuple[float, float, int]) -> None:
    """Adds what a load that fails has read, and what that cost."""
    report.timeline += tuple(recorder.spans())
    reads = (span.nbytes for span in report.timeline if span.kind in ("read", "map"))
    report.read_bytes = report.over_read_bytes = sum(reads)
    _add_usage(report, before)


def _add_usage(report: Report, before: tuple[float, float, int]) -> None:
    after = usage()
    report.user_seconds += after[0] - before[0]
    report.system_seconds += after[1] - before[1]
    report.page_faults += after[2] - before[2]


def wanted_bytes(requests: Sequence[Request]) -> tuple[dict[int, int], set[str]]:
    """Bytes to take of each source, by its number; and the tensors that are not one raw range."""
    wanted: dict[int, int] = {}
    apart: set[str] = set()
    if isinstance(requests, WholeTensors):
        columns = requests.columns
        sums = np.bincount(columns.sources, columns.nbytes)  # Floats, exact up to 2**53 bytes.
        return {number: int(sums[number]) for number in set(columns.sources)}, apart
    spans: dict[Any, int] = {}  # Of parts that tensors which are cut alike share.
    for request in requests:
        info, _, selection, _, _ = request
        source, _, nbytes, stored = info.pieces[0]
        if stored is not None or len(info.pieces) > 1:
            apart.add(info.name)
            for source, _, nbytes, _ in info.pieces:
                wanted[source] = wanted.get(source, 0) + nbytes
            continue
        if selection is not None:
            key = id(selection), info.shape, info.dtype.name
            if key not in spans:
                from mfload.planning import extents  # Whole tensors do without it.

                spans[key] = extents.span(request)  # What lies between may be read over.
            nbytes = spans[key]
        wanted[source] = wanted.get(source, 0) + nbytes
    return wanted, apart


def check(requests: Sequence[Request], index: Index, *, counts_items: bool = False) -> None:
    """Refuses tensors that are legal in an index and can't become arrays.

    `counts_items`: as of an `Adapter`.

    Raises UnsupportedDtypeError or UnsupportedShapeError.
    """
    # What counts is the same for tensors of one kind.
    each = requests.of_each_kind() if isinstance(requests, WholeTensors) else requests
    last, kind = None, None
    for request in each:
        info, dtype, *_ = request
        if info is last and dtype is kind:
            continue  # Another part of the same tensor.
        last, kind, shape = info, dtype, info.shape
        large = False
        # A tensor that is one raw range is no larger than its file.
        first = info.pieces[0]
        if 0 in shape or first.stored is not None or len(info.pieces) != 1:
            count = math.prod(filter(None, shape[:MAX_RANK]))
            width = max(info.dtype.nbytes, request.dtype.nbytes)
            large = count * (1 if counts_items and 0 in shape else width) > _MAX_SPAN
        if request.dtype.nbytes and len(shape) <= MAX_RANK and not large:
            continue
        file = index.files[first.source]
        if not request.dtype.known:
            found = request.dtype.name
            raise errors.UnsupportedDtypeError(
                "the dtype is not known to mfload",
                file=file,
                tensor=info.name,
                expected=dtypes.INSTEAD.get(found),
                found=found,
            )
        raise errors.UnsupportedShapeError(
            "no array can have this shape",
            file=file,
            tensor=info.name,
            expected=f"at most {MAX_RANK} dims, and strides that fit 63 bits",
            found=str(shape),
        )


def verifying(
    verify: Any,
    options: LoadOptions,
    index: Index,
    sources: Sequence[Source],
    requests: Callable[[], Iterable[Request]] = tuple,
) -> LoadOptions:
    """The options with a check against a manifest, or its path, unless `verify` is None.

    What is wrong with the headers of the requests is raised at once.
    """
    if verify is None:
        return options
    module = importlib.import_module("mfload.checking.checksums")  # It is above.
    check = module.ManifestCheck(verify, index, sources, options.deadline)
    check.expect([request.info for request in requests()])
    return options.replace(check=check)


def least_overhead(options: LoadOptions) -> int:
    """The least `max_host_overhead` for readers onto the host, whatever files there are."""
    return limits.least(options.threads or execute.reader_threads(direct=True))
