"""A load on a mesh: from shardings to sharded arrays, on one process or on several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mfload import errors, frameworks
from mfload.index import Index, TensorInfo
from mfload.loading import overheads, preparing
from mfload.mesh import choosing, fetching, job as jobs
from mfload.mesh.barrier import meeting, seen
from mfload.mesh.fingerprints import fingerprint
from mfload.mesh.job import Chosen, Job, MeshArguments
from mfload.options import EXCHANGES, UNMATCHED
from mfload.planning import planner
from mfload.planning.blocks import Observer
from mfload.planning.preview import Preview
from mfload.progress import Progress, shown
from mfload.report import Report, human
from mfload.runtime import Deadline, gc_paused

__all__ = ["Chosen", "Job", "MeshArguments", "abstract", "check_choices", "load", "preview"]


_FEW = 50  # A share of so much is not worth a word.


class Checking(Protocol):
    """Compares bytes while they come (see `checks.checking`)."""

    @property
    def observer(self) -> Observer:
        """To be shown the bytes."""
        ...

    def settle(self, arrays: list[Any], report: Report | None) -> None:
        """Compares, once all was loaded."""
        ...


Check = Callable[[Index, Sequence[TensorInfo]], Checking]
"""Makes what compares, from the index and the tensors."""


def load(
    choose: Callable[[], Chosen],
    arguments: MeshArguments,
    deadline: Deadline,
    *,
    report: Report | None = None,
    progress: Progress = False,
    check: Check | None = None,
    wrong: Exception | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint onto the devices of this process, together with the other processes.

    Args:
        choose: Checks the other arguments and reads headers: an error there reaches the other
            processes too.
        arguments: Onto which devices.
        deadline: When to give up.
        report: Filled.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        check: Makes what compares bytes while they come.
        wrong: What is wrong with other arguments, to be raised where it reaches the others.

    Returns:
        The arrays by name.

    Raises:
        MfloadError: As `mfload.load` does.
    """
    made: dict[str, Any] = {}
    ranks: tuple[int, ...] = ()
    try:
        arguments = _here(arguments)
        ranks = frameworks.module("jax", "sharding").processes(arguments.mesh, arguments.shardings)
    except Exception as error:  # noqa: BLE001 - raised where the other processes hear of it
        wrong = wrong or error
    try:
        with meeting(ranks, deadline, wrong) as party:
            job, chosen = _job(choose, arguments, report)
            if len(ranks) > 1:
                party.agree("files", fingerprint(_files(chosen)))
                lines = [f"exchange={arguments.exchange!r}", *job.lines()]
                party.agree("arguments", fingerprint(lines))
            with shown(progress, job.stored_bytes) as advance:
                if check is not None:
                    fetched = _checked(job, chosen, check, report, advance)
                else:
                    fetched = fetching.fetch(
                        job.requests,
                        job.rank,
                        job.loader,
                        exchange=arguments.exchange,
                        party=party,
                        links=job.links(),
                        report=report,
                        advance=advance,
                    )
            with gc_paused():
                made.update(job.assemble(fetched))
            if report is not None:
                report.tensors = len(made)
                report.processes = len(ranks)
                report.notes += job.notes
                report.notes += _over(report.read_bytes, report.over_read_bytes)
    except BaseException:
        # Whoever keeps the error keeps this frame.
        made.clear()
        raise
    return made


def _files(chosen: Chosen) -> list[str]:
    return seen(chosen.index, chosen.sources, chosen.options.deadline)


def _here(arguments: MeshArguments) -> MeshArguments:
    """With the mesh of `jax.set_mesh` where nothing else says which devices are meant."""
    find = frameworks.module("jax", "sharding").mesh_of
    return arguments._replace(mesh=find(arguments.mesh, arguments.shardings))


def _job(
    choose: Callable[[], Chosen], arguments: MeshArguments, report: Report | None
) -> tuple[Job, Chosen]:
    with gc_paused():
        start = time.perf_counter()
        chosen = choose()
        headers = time.perf_counter() - start
        job = Job(chosen, arguments)
    if report is not None:
        took = time.perf_counter() - start - headers
        report.stages = {"headers": headers, "shardings": took}
    return job, chosen


def _checked(
    job: Job,
    chosen: Chosen,
    check: Check,
    report: Report | None,
    advance: Callable[[int], None] | None,
) -> list[tuple[Any, ...]]:
    """Loads, and compares what comes."""
    if not job.whole:
        raise errors.UsageError(
            "verify= compares whole tensors, and this process reads parts of them",
            expected="one process, whose shards make up each tensor; or mfload.verify beforehand",
            found=f"{len(job.ranks)} processes; this one wants {job.stored_bytes} bytes",
        )
    checking = check(chosen.index, [request.info for request in chosen.requests])
    fetched = job.loader.load(
        job.requests[job.rank], report=report, advance=advance, observer=checking.observer
    )
    checking.settle(fetched, report)
    return fetched


def preview(chosen: Chosen, arguments: MeshArguments) -> Preview:
    """Says what `load` would do on this process; reads nothing.

    Args:
        chosen: What there is to load.
        arguments: Onto which devices.

    Raises:
        MfloadError: As `load` does.
    """
    job = Job(chosen, _here(arguments))
    here = job.loader.preview(job.requests[job.rank])
    here = replace(here, notes=(*here.notes, *job.notes), processes=len(job.ranks))
    options = job.loader.options
    if len(job.ranks) == 1 or options.engine == "mmap":
        return replace(here, notes=here.notes + _over(here.read_bytes, here.over_read_bytes))
    found = choosing.expected(
        job.requests,
        job.rank,
        arguments.exchange,
        platform=job.platform,
        overhead=options.max_host_overhead,
        merge_gap=options.merge_gap,
        readers=overheads.least(preparing.threads_at_most(options)),
    )
    notes = (*here.notes, found.note) if found.note else here.notes
    if found.exchange == "never":
        return replace(here, notes=(*notes, *_over(here.read_bytes, here.over_read_bytes)))
    if here.plan.device_bytes:
        # What is exchanged is put together on the host.
        staged = job.loader.preview(job.requests[job.rank], by_host=True)
        here = replace(staged, processes=here.processes)
    return replace(
        here,
        notes=(*notes, "the blocks of this plan are what the process would read on its own"),
        read_bytes=found.read_bytes,
        wanted_bytes=found.read_bytes - found.over_read_bytes,
        copied_bytes=here.copied_bytes + found.exchanged_bytes,
        overhead_bytes=here.overhead_bytes + found.overhead_bytes,
        peak_bytes=here.peak_bytes + found.overhead_bytes,
        exchanged_bytes=found.exchanged_bytes,
    )


def _over(read: int, over: int) -> tuple[str, ...]:
    """Why bytes are read that nobody here wants, where they are more than a few."""
    if over <= read // _FEW:
        return ()
    return (
        f"{over / read:.0%} of what is read is not wanted here, or not yet: gaps shorter than "
        f"{human(planner.MESH_GAP)} between the parts of a shard are read over",
    )


def abstract(chosen: Chosen, arguments: MeshArguments | None) -> dict[str, Any]:
    """What the arrays will be, without any.

    Args:
        chosen: What there is to load.
        arguments: Onto which devices, None for none in particular.

    Returns:
        A `jax.ShapeDtypeStruct` for each name.

    Raises:
        ShardingError: A sharding does not fit its tensor.
    """
    preparing.check(chosen.requests, chosen.index)
    shardings: Sequence[Any] = [None] * len(chosen.requests)
    if arguments is not None:
        shardings = jobs.resolve(chosen.requests, _here(arguments), [], chosen.index.tensors)
    rows = [(request.info.name, request.dtype, request.info.shape) for request in chosen.requests]
    return frameworks.module("jax", "mesh").abstract(rows, shardings)


def check_choices(unmatched: object, exchange: object) -> None:
    """Refuses what is not to be chosen.

    Raises:
        UsageError: There is no such way.
    """
    for name, value, known in (
        ("unmatched", unmatched, UNMATCHED),
        ("exchange", exchange, EXCHANGES),
    ):
        if value not in known:
            meant = errors.did_you_mean(value, known) if isinstance(value, str) else ""
            raise errors.UsageError(
                f"unknown {name}{meant}", expected=" | ".join(known), found=repr(value)
            )
