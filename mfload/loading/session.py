"""A load from needs to arrays: the stations after the index, wired once for all callers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from mfload import errors
from mfload.cuda import memory
from mfload.dlpack import View
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.io import buffers
from mfload.loading import allocate, batches, execute, preparing, rooms, spreading
from mfload.loading.preparing import Preparation
from mfload.options import LoadOptions
from mfload.planning.blocks import Observer
from mfload.planning.planner import Plan
from mfload.planning.preview import Preview
from mfload.planning.requests import Request
from mfload.report import Report
from mfload.runtime import gc_paused
from mfload.sources.local import LocalFile


class Filled(NamedTuple):
    """What filled a load's buffers in place of a plain transfer.

    Attributes:
        plans: The plans that were run.
        notes: What was decided meanwhile.
        exchanged: Bytes that came from elsewhere than the files.
    """

    plans: Sequence[Plan]
    notes: tuple[str, ...]
    exchanged: int


Fill = Callable[[Plan, list[Any], Preparation, Sequence[LocalFile]], Filled]
"""Fills the buffers of a plan: how the load goes, and the files, come with them."""


class Loader:
    """Loads needs of one checkpoint into one framework.

    Args:
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        options: How.
    """

    def __init__(
        self, index: Index, sources: Sequence[LocalFile], adapter: Adapter, options: LoadOptions
    ) -> None:
        self._index = index
        self._sources = sources
        self._adapter = adapter
        self._settings = options

    @property
    def options(self) -> LoadOptions:
        """How it loads."""
        return self._settings

    def copies(self, request: Request) -> bool:
        """Whether the framework copies this one out of mfload's memory."""
        return bool(batches.copied([request], self._adapter, self._settings))

    def preview(self, requests: Sequence[Request], *, by_host: bool = False) -> Preview:
        """Plans without reading data.

        Args:
            requests: What is wanted.
            by_host: Whether somebody else fills the buffers (see `load`), who needs host memory.
        """
        options = replace(self._settings, by_host=by_host)
        requests = self._adapter.assign(requests)
        units, _ = spreading.spread(requests, self._adapter, options)
        return self._prepare(units, options).preview()

    def _prepare(
        self, requests: Sequence[Request], options: LoadOptions, *, observed: bool = False
    ) -> Preparation:
        preparing.check(requests, self._index)
        return Preparation(
            requests, self._index, self._sources, self._adapter, options, observed=observed
        )

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
            An array for each need, in order; what it is of several devices, the adapter says.
        """
        clock = _Clock()
        buffers.peak_bytes(reset=True)
        memory.peak_bytes(reset=True)
        arrays: dict[int, Any] = {}
        plans: list[Plan] = []
        exchanged = 0
        # Who fills buffers in our place fills host memory.
        options = self._settings if fill is None else replace(self._settings, by_host=True)
        try:
            with clock.stage("plan"), gc_paused():
                requests = self._adapter.assign(requests)
                units, owners = spreading.spread(requests, self._adapter, options)
                way = self._prepare(units, options, observed=observer is not None)
            if len(way.batches) > 1:
                # Each wave is checked when its turn comes: what can't end must not begin.
                rooms.check(units, self._adapter, options)
            notes = list(way.notes)
            for batch in way.batches if fill is None else [range(len(units))]:
                wanted = [units[n] for n in batch]
                made, filled = self._wave(wanted, way, clock, advance, observer, fill)
                plans += filled.plans
                notes += filled.notes
                exchanged += filled.exchanged
                arrays.update(zip(batch, made, strict=True))
                del made
            joined = list(self._adapter.results(spreading.join(requests, units, owners, arrays)))
        except BaseException as error:
            arrays.clear()
            let_go(error)
            if isinstance(error, MemoryError) and not isinstance(error, errors.MfloadError):
                raise errors.MemoryLimitError(
                    "the system refused memory", found=str(error) or None
                ) from error
            raise
        if report is not None:
            self._fill(report, units, way, plans, clock)
            report.exchanged_bytes = exchanged
            report.notes = tuple(dict.fromkeys(notes))
        return joined

    def _wave(
        self,
        requests: Sequence[Request],
        way: Preparation,
        clock: _Clock,
        advance: Callable[[int], None] | None,
        observer: Observer | None,
        fill: Fill | None,
    ) -> tuple[list[Any], Filled]:
        """Arrays of some of the needs, and what filled them."""
        with clock.stage("plan"), gc_paused():
            made = way.plan(requests)
        with clock.stage("allocate"):
            rooms.check_plan(made, way)
            providers = self._providers(made, way)
            held = self._allocate(made, providers)
        with clock.stage("transfer"):
            if fill is not None:
                filled = fill(made, held, way, self._sources)
            else:
                said = self._transfer(made, held, way, advance, observer)
                filled = Filled([made], said, 0)
        with clock.stage("arrays"), gc_paused():
            arrays = self._arrays(made, held, providers)
        return arrays, filled

    def _transfer(
        self,
        made: Plan,
        held: list[Any],
        way: Preparation,
        advance: Callable[[int], None] | None,
        observer: Observer | None,
    ) -> tuple[str, ...]:
        return execute.run(
            made,
            held,
            self._sources,
            [way.route.get(number) for number in range(len(self._sources))],
            threads=way.threads,
            deadline=self._settings.deadline,
            advance=advance,
            observer=observer,
            ways=way.overheads.ways(made),
            staging=way.overheads.staging(made),
        )

    def _providers(self, made: Plan, way: Preparation) -> tuple[allocate.SlotProvider, ...]:
        alone = way.lendable([place.request for place in made.places])
        return (
            allocate.FrameworkMemory(made, self._adapter, alone),
            allocate.FileMaps(made, self._sources, readonly=self._adapter.readonly_maps),
            allocate.OwnMemory(made, self._adapter.devices),
        )

    def _allocate(self, made: Plan, providers: Sequence[allocate.SlotProvider]) -> list[Any]:
        if all(spec.source is None and spec.device is None for spec in made.buffers):
            return allocate.allocate(made, providers)
        # A map reads from the disk, and a device may be busy: both may hang.
        return self._settings.deadline.bound(
            lambda: allocate.allocate(made, providers), "mapping the files, or taking device memory"
        )

    def _arrays(
        self, made: Plan, held: list[Any], providers: Sequence[allocate.SlotProvider]
    ) -> list[Any]:
        adapter = self._adapter
        complete: dict[int, Any] = {}
        for number in range(len(held)):
            for provider in providers:
                array = provider.array(number)
                if array is not None:
                    complete[number] = array
        views: list[View] = []
        as_bytes = {name for name, form in adapter.forms.items() if form.how == "bytes"}
        for request, buffer, at in made.places:
            if buffer in complete:
                continue
            name, where = request.info.name, held[buffer]
            view = View(name, request.dtype, request.shape, where, at, request.devices)
            views.append(view.as_bytes() if request.dtype.name in as_bytes else view)
        arrays = adapter.wrap(views)
        if not complete:
            return arrays
        rest = iter(arrays)
        return [
            complete[place.buffer] if place.buffer in complete else next(rest)
            for place in made.places
        ]

    def _fill(
        self,
        report: Report,
        requests: Sequence[Request],
        way: Preparation,
        plans: list[Plan],
        clock: _Clock,
    ) -> None:
        result = sum(request.nbytes for request in requests)
        copied = batches.copied(requests, self._adapter, self._settings)
        report.framework = self._adapter.name
        report.tensors = len({request.info.name for request in requests})
        report.result_bytes = result
        report.read_bytes = sum(plan.read_bytes for plan in plans)
        report.over_read_bytes = sum(plan.read_bytes - plan.wanted_bytes for plan in plans)
        report.mapped_bytes = sum(plan.mapped_bytes for plan in plans)
        report.aliased_bytes = result - sum(request.nbytes for request in copied)
        report.peak_bytes = buffers.peak_bytes()
        report.device_peak_bytes = memory.peak_bytes()
        report.threads = way.threads
        report.route = tuple((leg.file, leg.engine, leg.why) for leg in way.route.values())
        report.stages = {**report.stages, **clock.stages}


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


class _Clock:
    """Seconds a stage, added up over the waves of a load."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.stages[name] = self.stages.get(name, 0.0) + took
