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
from mfload.io.engine import Observer
from mfload.loading import session
from mfload.loading.preview import Preview
from mfload.loading.session import Loader
from mfload.mesh import base
from mfload.mesh.base import TensorShares
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.progress import Progress, shown
from mfload.report import Report
from mfload.runtime import Deadline, gc_paused
from mfload.sources.local import LocalFile

if TYPE_CHECKING:  # Only loads of several processes import them.
    from mfload.mesh.agree import ProcessGroup
    from mfload.mesh.jax_backend import JaxBackend

# Pages of each file that processes compare, and of all files together; two of each at least.
_SAMPLED, _IN_ALL = 16, 512
_PAGE = 4096  # The same on every host.


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
        self._backend = backend
        self._whole = chosen.requests
        self._shardings = backend.resolve(
            chosen.requests, mesh, shardings, unmatched, chosen.index.tensors
        )
        # Whole rows are read over rather than skipped, where a few are not wanted.
        options = replace(chosen.options, merge_gap=base.MESH_GAP)
        wanted: list[TensorShares] = []
        for each, sharding in zip(chosen.requests, self._shardings, strict=True):
            shares = backend.shares(sharding, each.info.shape)
            separate = backend.separate(sharding, each.dtype, options)
            wanted.append(TensorShares(each.info, each.dtype, each.checked, shares, separate))
        self.requests = base.requests(wanted)
        self.mine = self.requests.setdefault(backend.rank, [])
        self.stored_bytes = base.stored_bytes(self.mine)
        self.loader = Loader(chosen.index, chosen.sources, backend.adapter(), options)

    def arguments(self) -> list[str]:
        """What is wanted of each tensor: lines that must be the same on all processes."""
        lines: list[str] = []
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
            agree_on_inputs(group, chosen.index, chosen.sources, chosen.options, job.arguments())
        checking = None
        if check is not None:
            infos = [request.info for request in chosen.requests]
            if group is not None or job.stored_bytes != sum(info.nbytes for info in infos):
                raise errors.UsageError(
                    "verify= compares whole tensors, and this process reads parts of them",
                    expected="one process, whose shards make up each tensor; or mfload.verify",
                    found=f"{len(ranks)} processes; this one wants {job.stored_bytes} bytes",
                )
            checking = check(chosen.index, infos)
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
        if report is not None:
            report.tensors, report.processes = len(chosen.requests), len(ranks)
        with gc_paused():
            return job.assemble(fetched)


def together(
    backend: JaxBackend, ranks: tuple[int, ...], deadline: Deadline
) -> contextlib.AbstractContextManager[ProcessGroup | None]:
    """A load of several processes (see `agree.joined`); None if it is this process alone."""
    if ranks == (backend.rank,):
        return contextlib.nullcontext()
    from mfload.mesh import agree

    return agree.joined(backend, ranks, deadline)


def agree_on_inputs(
    group: ProcessGroup,
    index: Index,
    sources: Sequence[LocalFile],
    options: LoadOptions,
    arguments: Sequence[str],
) -> None:
    """Raises if the processes do not see the same files, or were not given the same arguments.

    Files are compared by size and a sample of evenly spread pages. That tells one step of a
    training from another, and misses a single number that differs.
    """
    rows = [
        (each.name, each.dtype.name, each.shape, each.pieces) for each in index.tensors.values()
    ]
    header = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    count = max(2, min(_SAMPLED, _IN_ALL // max(1, len(sources))))
    lines = group.deadline.bound(
        lambda: [_sample(source, count) for source in sources], "comparing files"
    )
    group.agree("files", [*lines, f"headers: {header}"])
    same = ("exchange", "allocator", "max_host_overhead")
    lines = [f"{name}: {getattr(options, name)!r}" for name in same]
    group.agree("arguments", [*lines, *arguments])


def _sample(source: LocalFile, count: int) -> str:
    last = max(0, source.size - _PAGE)
    digest = hashlib.sha256()
    for at in sorted({last * n // (count - 1) for n in range(count)}):
        digest.update(source.read(at, min(_PAGE, source.size - at)))
    name = os.path.basename(source.path)
    return f"{name}: {source.size} bytes, sampled {digest.hexdigest()[:16]}"


def fetch(
    requests: Mapping[int, Sequence[Request]],
    loader: Loader,
    backend: JaxBackend,
    *,
    group: ProcessGroup | None = None,
    report: Report | None = None,
    advance: Callable[[int], None] | None = None,
    observer: Observer | None = None,
) -> list[tuple[Any, ...]]:
    """Loads what this process requests: by itself, or by an exchange with the others.

    `requests` are those of each process, the same everywhere. Returns for each request of this
    process an array for each of its devices.
    """
    arrays, note = None, ""
    if group is not None:
        from mfload.mesh import exchange

        arrays, note = exchange.load(requests, loader, backend, group, report, advance)
    if arrays is None:
        mine = requests.get(backend.rank, [])
        arrays = loader.load(mine, report=report, advance=advance, observer=observer)
    if report is not None and note:
        report.notes = (*report.notes, note)
    return arrays


def preview(chosen: Chosen, framework: str, mesh: Any, shardings: Any, unmatched: str) -> Preview:
    """Says what `load` would do on this process; reads nothing."""
    backend = base.backend(framework)
    ranks = backend.processes(mesh, shardings)
    job = MeshLoad(backend, chosen, mesh, shardings, unmatched)
    here = job.loader.preview(job.mine)
    notes, width = list(here.notes), None
    if len(ranks) > 1:
        from mfload.mesh import redistribute

        requests = {rank: job.requests.get(rank, []) for rank in ranks}
        width, note = redistribute.choose(requests, chosen.options, backend.platform())
        notes += [note] if note else []
        if width is not None:
            if here.plan.device_bytes:
                # What is exchanged is put together on the host.
                here = job.loader.preview(job.mine, by_host=True)
            schedule = redistribute.schedule(requests, width)
            read, received = schedule.read[backend.rank], schedule.received(backend.rank)
            notes.append("the blocks of this plan are what the process would read on its own")
            here = replace(
                here,
                read_bytes=read,
                wanted_bytes=read,
                copied_bytes=here.copied_bytes + received,
                overhead_bytes=here.overhead_bytes + schedule.overhead,
                peak_bytes=here.peak_bytes + schedule.overhead,
                exchanged_bytes=received,
            )
    return replace(here, notes=tuple(notes), processes=len(ranks))


def abstract(
    chosen: Chosen, framework: str, mesh: Any, shardings: Any, unmatched: str
) -> dict[str, Any]:
    """What the arrays will be, without any data; without shardings if none are given."""
    session.check(chosen.requests, chosen.index)
    backend = base.backend(framework)
    resolved: list[Any] = [None] * len(chosen.requests)
    if mesh is not None or shardings is not None:
        known = chosen.index.tensors
        resolved = backend.resolve(chosen.requests, mesh, shardings, unmatched, known)
    return backend.abstract(chosen.requests, resolved)
