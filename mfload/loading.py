"""A load from needs to arrays: the stations after the index, wired once for all callers."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Literal

from mfload import errors, planning, transfer
from mfload.dlpack import View
from mfload.frameworks.adapter import Adapter
from mfload.index import Index
from mfload.io import buffers, probes, route as routing
from mfload.io.blocks import Costs
from mfload.io.deadline import Deadline
from mfload.io.source import LocalFile
from mfload.pause import collector_paused
from mfload.placement import Need
from mfload.planning import Plan
from mfload.report import Report, html_table, human, table

Landing = Literal["auto", "mfload", "framework"]
LANDINGS = ("auto", "mfload", "framework")

OVERHEAD = 256 << 20
"""Bytes beside the result that a load may hold where nobody says otherwise."""

_MAX_RANK = 64  # NumPy's, and every view is a NumPy array first.
_MAX_SPAN = 2**63 - 1
_LEAST_BLOCK = 64 << 10
_MOST_THREADS = 8
# Reads past the page cache wait for the disk, not for a core.
_DIRECT_THREADS = 3
_PAGE = buffers.PAGE


@dataclass(frozen=True, slots=True)
class Preview:
    """What a load would do: the plan, which is pure, and beside it this machine's route.

    Attributes:
        plan: Buffers, blocks and places.
        route: Engine and reason for each file.
        framework: Whose arrays it would make.
        overhead_bytes: The most it would hold beside the result.
        threads: Readers at once.
        notes: What else was decided without being asked for.
    """

    plan: Plan
    route: tuple[routing.Leg, ...]
    framework: str
    overhead_bytes: int
    threads: int
    notes: tuple[str, ...] = ()

    @property
    def over_read_bytes(self) -> int:
        """Bytes read that no tensor wants."""
        return self.plan.read_bytes - self.plan.wanted_bytes

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "framework": self.framework,
            "tensors": len(self.plan.places),
            "result_bytes": self.plan.result_bytes,
            "read_bytes": self.plan.read_bytes,
            "over_read_bytes": self.over_read_bytes,
            "mapped_bytes": self.plan.mapped_bytes,
            "buffers": len(self.plan.buffers),
            "buffer_bytes": self.plan.buffer_bytes,
            "blocks": len(self.plan.blocks),
            "overhead_bytes": self.overhead_bytes,
            "threads": self.threads,
            "route": [leg._asdict() for leg in self.route],
            "notes": list(self.notes),
        }

    def _rows(self) -> list[tuple[str, str]]:
        made = self.plan
        tensors = f"{len(made.places)} {self.framework} tensors, {human(made.result_bytes)}"
        over = human(self.over_read_bytes)
        rows = [
            ("result", tensors),
            ("read", f"{human(made.read_bytes)} in {len(made.blocks)} blocks, {over} unwanted"),
            ("mapped", human(made.mapped_bytes)),
            ("buffers", f"{len(made.buffers)}, {human(made.buffer_bytes)} of memory"),
            ("overhead", f"at most {human(self.overhead_bytes)} beyond the buffers"),
            ("threads", str(self.threads)),
        ]
        rows += [("route", f"{leg.file}: {leg.engine} ({leg.why})") for leg in self.route[:16]]
        if len(self.route) > 16:
            rows.append(("route", f"… and {len(self.route) - 16} more files"))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        return table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())


@dataclass(frozen=True, slots=True)
class Settings:
    """How to load; the arguments of `mfload.load` that say nothing of what."""

    engine: str = "auto"
    landing: str = "auto"
    max_host_overhead: int | None = None
    threads: int | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    def __post_init__(self) -> None:
        if self.landing not in LANDINGS:
            expected = " | ".join(LANDINGS)
            raise errors.UsageError("unknown landing", expected=expected, found=self.landing)
        _check_count("threads", self.threads, 1)
        _check_count("max_host_overhead", self.max_host_overhead, 0)
        if self.engine not in routing.ENGINES:
            expected = " | ".join(routing.ENGINES)
            raise errors.UsageError("unknown engine", expected=expected, found=self.engine)


def _check_count(name: str, value: object, least: int) -> None:
    if value is None:
        return
    # What indexes counts: NumPy's integers do, booleans only by accident.
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:  # pyright: ignore
        raise errors.UsageError(name, expected=f"{least} or more", found=repr(value))


class Loader:
    """Loads needs of one checkpoint into one framework.

    Args:
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        settings: How.
    """

    def __init__(
        self, index: Index, sources: Sequence[LocalFile], adapter: Adapter, settings: Settings
    ) -> None:
        self._index = index
        self._sources = sources
        self._adapter = adapter
        self._settings = settings

    def _check(self, needs: Sequence[Need]) -> None:
        """Refuses by name what is legal in a file and can't become an array."""
        for need in needs:
            shape = need.info.shape
            # Without a zero among its dims, a tensor is no larger than its file.
            large = 0 in shape and _span(need) > _MAX_SPAN
            if need.dtype.known and len(shape) <= _MAX_RANK and not large:
                continue
            file = self._index.files[need.info.pieces[0].source]
            if not need.dtype.known:
                raise errors.UnsupportedDtypeError(
                    "the dtype is not known to mfload",
                    file=file,
                    tensor=need.info.name,
                    found=need.dtype.name,
                )
            raise errors.UnsupportedShapeError(
                "no array can have this shape",
                file=file,
                tensor=need.info.name,
                expected=f"at most {_MAX_RANK} dims, and strides that fit 63 bits",
                found=str(shape),
            )

    def preview(self, needs: Sequence[Need]) -> Preview:
        """Plans without reading data."""
        self._check(needs)
        adapter, settings = self._adapter, self._settings
        used = sorted({piece.source for need in needs for piece in need.info.pieces})
        legs = settings.deadline.bound(
            lambda: routing.choose([self._sources[n] for n in used], settings.engine),
            "opening the files",
        )
        route = dict(zip(used, legs, strict=True))
        threads = settings.threads or _threads(legs)
        costs = self._costs(threads)
        copied = self._copied(needs)
        notes = list(self._index.notes)
        made = planning.make(
            needs,
            alignment=adapter.alignment,
            costs=costs,
            separate=self._lendable(needs, notes),
            mapped={n: self._sources[n].size for n in used if route[n].engine == "mmap"},
        )
        direct = any(leg.engine == "direct" for leg in legs)
        slots = costs.block + 2 * _PAGE if direct or made.staged else costs.merge_gap
        slots *= threads
        slots = min(slots, made.read_bytes + 2 * _PAGE * threads)
        return Preview(
            made,
            tuple(legs),
            adapter.name,
            slots + min(sum(need.nbytes for need in copied), self._overhead(copied)),
            threads,
            tuple(notes),
        )

    def _costs(self, threads: int) -> Costs:
        limit = self._settings.max_host_overhead
        if limit is None:
            return Costs()
        block = min(Costs().block, limit // threads // _PAGE * _PAGE - 2 * _PAGE)
        if block < _LEAST_BLOCK:
            raise errors.UsageError(
                "max_host_overhead is too small for a slot a reader",
                expected=f"{threads * (_LEAST_BLOCK + 3 * _PAGE)} bytes or more, or fewer threads",
                found=limit,
            )
        return Costs(block=block)

    def _lendable(self, needs: Sequence[Need], notes: list[str]) -> frozenset[int]:
        """Positions of the needs that land in the framework's own memory."""
        adapter = self._adapter
        if self._settings.landing != "framework" or not adapter.on_host:
            return frozenset()
        lent = [n for n, need in enumerate(needs) if need.dtype.name in adapter.lendable]
        if len(lent) < len(needs):
            notes.append(
                f"{len(needs) - len(lent)} tensors land in mfload's memory: "
                f"{adapter.name} can't lend any for their dtypes"
            )
        return frozenset(lent)

    def _copied(self, needs: Sequence[Need]) -> list[Need]:
        """The needs that the framework copies out of mfload's memory."""
        if not self._adapter.on_host:
            return list(needs)
        names = {name for name, form in self._adapter.forms.items() if form.how == "copy"}
        return [need for need in needs if need.dtype.name in names] if names else []

    def _overhead(self, copied: Sequence[Need]) -> int:
        """Bytes of tensors that may wait at once to be copied by the framework."""
        if not copied:
            return 0
        limit = self._settings.max_host_overhead
        largest = max(copied, key=lambda need: need.nbytes)
        if limit is None:
            return max(OVERHEAD, largest.nbytes)
        if largest.nbytes > limit:
            raise errors.MemoryLimitError(
                f"{self._adapter.name} must copy the tensor, which is larger than the overhead",
                tensor=largest.info.name,
                expected=f"max_host_overhead of {largest.nbytes} bytes or more",
                found=limit,
            )
        return limit

    def load(
        self,
        needs: Sequence[Need],
        *,
        report: Report | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Loads.

        Args:
            needs: What is wanted.
            report: Filled, whatever it held before.
            advance: Told of progress, in bytes since the last call.

        Returns:
            An array for each need, in order.
        """
        clock = _Clock()
        self._check(needs)
        buffers.peak_bytes(reset=True)
        arrays: list[Any] = [None] * len(needs)
        previews: list[Preview] = []
        try:
            for wave in self._waves(needs):
                wanted = [needs[n] for n in wave]
                made, preview = self._wave(wanted, clock, advance)
                previews.append(preview)
                for n, array in zip(wave, made, strict=True):
                    arrays[n] = array
                del made
        except BaseException as error:
            arrays.clear()
            _let_go(error)
            if isinstance(error, MemoryError) and not isinstance(error, errors.MfloadError):
                raise errors.MemoryLimitError(
                    "the system refused memory", found=str(error) or None
                ) from error
            raise
        if report is not None:
            self._fill(report, needs, previews, clock)
        return arrays

    def _waves(self, needs: Sequence[Need]) -> list[list[int]]:
        """Groups of needs; what the framework copies never exceeds the overhead in any."""
        copied = self._copied(needs)
        limit = self._overhead(copied)
        if sum(need.nbytes for need in copied) <= limit:
            return [list(range(len(needs)))]
        names = {need.info.name for need in copied}
        waves: list[list[int]] = [[]]
        held = 0
        for n, need in enumerate(needs):
            waiting = need.nbytes if need.info.name in names else 0
            if waiting and held + waiting > limit:
                waves.append([])
                held = 0
            held += waiting
            waves[-1].append(n)
        return waves

    def _wave(
        self,
        needs: Sequence[Need],
        clock: _Clock,
        advance: Callable[[int], None] | None,
    ) -> tuple[list[Any], Preview]:
        with clock.stage("plan"), collector_paused():
            preview = self.preview(needs)
        made = preview.plan
        route = {leg.file: leg for leg in preview.route}
        with clock.stage("allocate"):
            transfer.check_room(made, preview.overhead_bytes)
            lent = self._lend(made)
            memory = self._allocate(made, {n: x.memory for n, x in lent.items()})
        with clock.stage("transfer"):
            notes = transfer.run(
                made,
                memory,
                self._sources,
                [route.get(source.path) for source in self._sources],
                threads=preview.threads,
                deadline=self._settings.deadline,
                advance=advance,
            )
        with clock.stage("arrays"), collector_paused():
            arrays = self._arrays(made, memory, lent)
        return arrays, replace(preview, notes=preview.notes + notes)

    def _allocate(self, made: Plan, lent: dict[int, Any]) -> list[Any]:
        if all(spec.source is None for spec in made.buffers):
            return transfer.allocate(made, self._sources, lent)
        # A map reads from the disk, which may hang.
        return self._settings.deadline.bound(
            lambda: transfer.allocate(made, self._sources, lent), "mapping the files"
        )

    def _lend(self, made: Plan) -> dict[int, Any]:
        """The framework's own arrays, by the number of the buffer that each stands for."""
        alone = self._lendable([place.need for place in made.places], [])
        places = [made.places[n] for n in sorted(alone)]
        arrays = self._adapter.lend([place.need for place in places]) if places else []
        return {place.buffer: array for place, array in zip(places, arrays, strict=True)}

    def _arrays(self, made: Plan, memory: list[Any], lent: dict[int, Any]) -> list[Any]:
        adapter = self._adapter
        if adapter.readonly_maps:
            for spec, array in zip(made.buffers, memory, strict=True):
                if spec.source is not None:
                    array.flags.writeable = False
        views: list[View] = []
        as_bytes = {name for name, form in adapter.forms.items() if form.how == "bytes"}
        for need, buffer, at in made.places:
            if buffer in lent:
                continue
            view = View(need.info.name, need.dtype, need.shape, memory[buffer], at)
            views.append(view.as_bytes() if need.dtype.name in as_bytes else view)
        arrays = adapter.wrap(views)
        if not lent:
            return arrays
        rest = iter(arrays)
        return [
            lent[place.buffer].array if place.buffer in lent else next(rest)
            for place in made.places
        ]

    def _fill(
        self, report: Report, needs: Sequence[Need], previews: list[Preview], clock: _Clock
    ) -> None:
        legs = {leg.file: leg for preview in previews for leg in preview.route}
        result = sum(preview.plan.result_bytes for preview in previews)
        report.framework = self._adapter.name
        report.tensors = len(needs)
        report.result_bytes = result
        report.read_bytes = sum(preview.plan.read_bytes for preview in previews)
        report.over_read_bytes = sum(preview.over_read_bytes for preview in previews)
        report.mapped_bytes = sum(preview.plan.mapped_bytes for preview in previews)
        report.aliased_bytes = result - sum(need.nbytes for need in self._copied(needs))
        report.peak_bytes = buffers.peak_bytes()
        report.threads = max((preview.threads for preview in previews), default=0)
        report.route = tuple((leg.file, leg.engine, leg.why) for leg in legs.values())
        report.notes = tuple(dict.fromkeys(n for preview in previews for n in preview.notes))
        report.stages = {**report.stages, **clock.stages}


def _threads(legs: Sequence[routing.Leg]) -> int:
    wanted = min(probes.cores(), _MOST_THREADS)
    if any(leg.engine == "direct" for leg in legs):
        return max(wanted, _DIRECT_THREADS)
    return wanted


def _let_go(error: BaseException) -> None:
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


def _span(need: Need) -> int:
    """Bytes that strides have to reach over, were the dims of no length of length one."""
    count = math.prod(filter(None, need.info.shape[:_MAX_RANK]))
    return count * max(need.info.dtype.nbytes, need.dtype.nbytes)


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
