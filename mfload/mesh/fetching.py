"""Fetching: the needs of this process become arrays, read here or exchanged with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from mfload import errors
from mfload.io import buffers
from mfload.loading import overheads, preparing
from mfload.loading.preparing import Preparation
from mfload.loading.session import Fill, Filled, Loader
from mfload.mesh import choosing, exchange as exchanging
from mfload.mesh.fingerprints import fingerprint
from mfload.mesh.group import Party
from mfload.mesh.rounds import Exchange, Link, Reading
from mfload.mesh.schedule import Schedule
from mfload.options import OVERHEAD
from mfload.planning.planner import Plan
from mfload.planning.requests import Request
from mfload.report import Report
from mfload.sources.local import LocalFile

_PAGE = buffers.PAGE
_SUMMED = (
    *("tensors", "result_bytes", "read_bytes", "over_read_bytes"),
    *("mapped_bytes", "aliased_bytes", "exchanged_bytes"),
)
_LISTED = ("route", "notes")
_OUT_OF_STEP = "an exchange broke off before, so that JAX's collectives are out of step"


class Links(Protocol):
    """Makes links between the processes of a load.

    Attributes:
        platform: Of the devices that bytes travel over: "cpu", "gpu" or "tpu".
    """

    platform: str

    def standing(self) -> str:
        """What has been swapped so far, for the other processes."""
        ...

    def in_step(self, said: Mapping[int, str]) -> bool:
        """Whether processes of these standings can swap again; alike on all of them."""
        ...

    def open(self, width: int, said: Mapping[int, str], meanwhile: Callable[[], None]) -> Link:
        """A link with rows of `width` bytes, once what was given up before has ended."""
        ...


def fetch(
    requests: Mapping[int, Sequence[Request]],
    rank: int,
    loader: Loader,
    *,
    exchange: str = "never",
    party: Party | None = None,
    links: Links | None = None,
    report: Report | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[tuple[Any, ...]]:
    """Loads what this process needs.

    Args:
        requests: What each process needs, by its number: the same on every process.
        rank: This process.
        loader: Loads into the devices of this process.
        exchange: "never", "once", or "auto": see `choosing`. One process exchanges nothing.
        party: The load that this is part of, where there are several processes.
        links: How bytes get from one process to another.
        report: Filled.
        advance: Told of progress, in bytes.

    Returns:
        For each need of this process an array for each of its devices.

    Raises:
        ProcessError: Another process failed, or is gone.
        MfloadError: As `Loader.load` does.
    """
    if len(requests) < 2 or party is None or links is None:
        return loader.load(requests[rank], report=report, advance=advance)
    options = loader.options
    if options.engine == "mmap":
        if exchange == "once":
            raise errors.UsageError(
                "engine='mmap' reads nothing that could be exchanged",
                expected="another engine, or exchange='never'",
                found="exchange='once'",
            )
        exchange = "never"
    found = choosing.expected(
        requests,
        rank,
        exchange,
        platform=links.platform,
        overhead=options.max_host_overhead,
        merge_gap=options.merge_gap,
        readers=overheads.least(preparing.threads_at_most(options)),
    )
    note, arrays = found.note, None
    if found.schedule is not None:
        arrays = _once(requests, rank, loader, found.schedule, party, links, report, advance)
        if arrays is None:
            if exchange == "once":
                raise errors.ProcessError(
                    f"{_OUT_OF_STEP}: start the processes anew, or load with exchange='never'"
                )
            note = f"each process reads its own: {_OUT_OF_STEP}"
    if arrays is None:
        arrays = loader.load(requests[rank], report=report, advance=advance)
    if report is not None and note:
        report.notes = (*report.notes, note)
    return arrays


def _once(
    requests: Mapping[int, Sequence[Request]],
    rank: int,
    loader: Loader,
    whole: Schedule,
    party: Party,
    links: Links,
    report: Report | None,
    advance: Callable[[int], None] | None,
) -> list[tuple[Any, ...]] | None:
    """Loads what this process needs in one exchange, or in one for each part that fits.

    Returns:
        None where the processes can't exchange any more, which all find alike.
    """
    overhead = loader.options.max_host_overhead or OVERHEAD
    parts = [{r: list(range(len(each))) for r, each in requests.items()}]
    schedules = [whole]
    if links.platform != "cpu":
        # Elsewhere results wait in host memory until they are copied to their device.
        parts = exchanging.parts(requests, overhead)
        held = [{r: [requests[r][n] for n in part[r]] for r in part} for part in parts]
        schedules = [exchanging.make(each, whole.width) for each in held]
    plans = fingerprint([each.digest() for each in schedules])
    said = party.agree("plan of the exchange", plans, links.standing())
    if not links.in_step(said):
        return None
    link = None
    if any(each.rounds for each in schedules):
        link = links.open(whole.width, said, lambda: party.watch("exchange"))
    arrays: dict[int, tuple[Any, ...]] = {}
    reports: list[Report] = []
    try:
        for part, schedule in zip(parts, schedules, strict=True):
            reports.append(Report(stages={}))
            run = Exchange(schedule, rank, party, link)
            fill = _filling(run, schedule.came(rank), loader, advance)
            wanted = [requests[rank][n] for n in part[rank]]
            made = loader.load(wanted, report=reports[-1], fill=fill)
            arrays.update(zip(part[rank], made, strict=True))
    finally:
        if link is not None:
            link.close()
    if report is not None:
        _add(report, reports)
    return [arrays[n] for n in range(len(requests[rank]))]


def _filling(
    run: Exchange, came: int, loader: Loader, advance: Callable[[int], None] | None
) -> Fill:
    def fill(
        made: Plan, memory: list[Any], way: Preparation, sources: Sequence[LocalFile]
    ) -> Filled:
        run.run(made.places, memory, _reading(way, sources, loader, advance))
        return Filled(run.plans, tuple(run.notes), came)

    return fill


def _reading(
    way: Preparation,
    sources: Sequence[LocalFile],
    loader: Loader,
    advance: Callable[[int], None] | None,
) -> Reading:
    overhead = loader.options.max_host_overhead or OVERHEAD
    # Half of it is for what travels.
    slot = overhead // 2 // way.threads // _PAGE * _PAGE - 2 * _PAGE
    block = max(_PAGE, min(way.overheads.costs.block, slot))
    costs = way.overheads.costs._replace(block=block, merge_gap=choosing.MERGE_GAP)
    legs = [way.route.get(number) for number in range(len(sources))]
    return Reading(sources, legs, way.threads, costs, loader.options.deadline, advance)


def _add(report: Report, parts: Sequence[Report]) -> None:
    """Fills a report from those of the parts of a load."""
    stages = dict(report.stages)
    for each in parts:
        for name, seconds in each.stages.items():
            stages[name] = stages.get(name, 0.0) + seconds
    for field in fields(report):
        values = [getattr(each, field.name) for each in parts]
        if field.name in _SUMMED:
            setattr(report, field.name, sum(values))
        elif field.name in _LISTED:
            setattr(report, field.name, tuple(dict.fromkeys(x for each in values for x in each)))
        elif field.name not in ("stages", "processes"):
            setattr(report, field.name, max(values))
    report.stages = stages
