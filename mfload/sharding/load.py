"""A load on a mesh: from shardings to sharded arrays, on one process or on several at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from mfload import errors, frameworks, preparing, spelling
from mfload.index import Index, TensorInfo
from mfload.io.blocks import Witness
from mfload.io.deadline import Deadline
from mfload.io.source import LocalFile
from mfload.loading import Loader
from mfload.pause import collector_paused
from mfload.placement import Need
from mfload.preview import Preview
from mfload.progress import Progress, shown
from mfload.report import Report
from mfload.settings import EXCHANGES, UNMATCHED, Settings
from mfload.sharding import fetching
from mfload.sharding.agreement import Party, fingerprint, together
from mfload.sharding.shares import Wanted, needs

MERGE_GAP = 64 << 10
"""Unwanted bytes between the parts of a shard that are rather read over than skipped: a read of
its own for each takes as long as to read so many more."""


class Request(NamedTuple):
    """What `mfload.load` was asked for about devices.

    Attributes:
        mesh: The user's mesh, or None.
        shardings: What splits each tensor.
        unmatched: What becomes of tensors that no rule matches.
        exchange: Whether processes read for each other.
    """

    mesh: Any
    shardings: Any
    unmatched: str
    exchange: str


class Chosen(NamedTuple):
    """What there is to load.

    Attributes:
        index: The checkpoint's table.
        sources: Its files.
        needs: The whole of each tensor that is wanted.
        settings: How.
    """

    index: Index
    sources: Sequence[LocalFile]
    needs: Sequence[Need]
    settings: Settings


class Checking(Protocol):
    """Compares bytes while they come (see `checks.checking`)."""

    witness: Witness

    def settle(self, arrays: list[Any], report: Report | None) -> None:
        """Compares, once all was loaded."""
        ...


class Job:
    """What each process needs of a checkpoint, and how it becomes arrays here.

    Args:
        chosen: What there is to load.
        request: Onto which devices.

    Attributes:
        needs: What each process needs, by its number.
        rank: This process.
        processes: How many take part.
        loader: Loads what this process needs.

    Raises:
        UsageError: An argument makes no sense.
        ShardingError: A sharding does not fit its tensor.
    """

    def __init__(self, chosen: Chosen, request: Request) -> None:
        self._jax = frameworks.module("jax", "mesh")
        shardings = frameworks.module("jax", "sharding")
        self.rank: int = shardings.rank()
        self.exchange = request.exchange
        self.processes = len(shardings.processes(request.mesh, request.shardings))
        self._notes: list[str] = []
        self._wanted = chosen.needs
        self._shardings = _resolve(shardings, self._jax, chosen.needs, request, self._notes)
        self._spots = shardings.Spots()
        # Whole rows are read over rather than skipped, where a few are not wanted.
        self._settings = replace(chosen.settings, merge_gap=MERGE_GAP)
        apart = chosen.settings.landing == "framework"
        self.needs: Mapping[int, list[Need]] = needs(
            [
                self._share(need, sharding, apart)
                for need, sharding in zip(chosen.needs, self._shardings, strict=True)
            ]
        )
        self.needs.setdefault(self.rank, [])
        self._adapter = self._jax.JaxMeshAdapter(self._spots.of(self.rank))
        self.loader = Loader(chosen.index, chosen.sources, self._adapter, self._settings)

    def _share(self, need: Need, sharding: Any, apart: bool) -> Wanted:
        info = need.info
        shares = self._spots.shares(sharding, info.shape)
        lendable = need.dtype.name in self._jax.JaxMeshAdapter.lendable
        own = lendable and (apart or not self._spots.plain(sharding))
        return Wanted(info, need.dtype, need.checked, shares, own)

    def links(self, ranks: Sequence[int]) -> fetching.Links | None:
        """How bytes get from one process to another; None for one process."""
        if len(ranks) < 2 or not self._shardings:
            return None
        platform = next(iter(self._shardings[0].device_set)).platform
        processes = frameworks.module("jax", "processes")
        return processes.Links(ranks, platform, self._settings.deadline)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        seen = {(need.info.name, need.selection): need for need in self.needs[self.rank]}
        return sum(need._replace(dtype=need.info.dtype).nbytes for need in seen.values())

    @property
    def whole(self) -> bool:
        """Whether this process wants every tensor, and all of it."""
        return self.stored_bytes == sum(need.info.nbytes for need in self._wanted)

    def lines(self) -> list[str]:
        """What is wanted and how, the same where processes want the same."""
        how = self._settings
        lines = [f"landing={how.landing!r}, max_host_overhead={how.max_host_overhead}"]
        for wanted, sharding in zip(self._wanted, self._shardings, strict=True):
            shares = self._spots.shares(sharding, wanted.info.shape)
            digest = hashlib.sha256(repr(shares).encode()).hexdigest()[:16]
            checked = " checked" if wanted.checked else ""
            lines.append(f"{wanted.info.name}: {wanted.dtype}{checked} {sharding} {digest}")
        return lines

    def assemble(self, fetched: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The sharded arrays, by name.

        Args:
            fetched: For each need of this process an array for each of its devices; emptied.
        """
        spots = self._spots.of(self.rank)
        parts: dict[str, dict[Any, Any]] = {need.info.name: {} for need in self._wanted}
        for need, arrays in zip(self.needs[self.rank], fetched, strict=True):
            held = parts[need.info.name]
            for number, array in zip(need.devices, arrays, strict=True):
                held[spots[number].device] = array
        fetched.clear()
        made: dict[str, Any] = {}
        for need, sharding in zip(self._wanted, self._shardings, strict=True):
            shape, dtype = self._jax.arrives(need.dtype, need.info.shape)
            name = need.info.name
            made[name] = self._jax.assemble(shape, sharding, parts.pop(name), dtype)
        return made

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided without being asked for."""
        return tuple(self._notes)


def load(
    choose: Callable[[], Chosen],
    request: Request,
    deadline: Deadline,
    *,
    report: Report | None = None,
    progress: Progress = False,
    check: Callable[[Index, Sequence[TensorInfo]], Checking] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint onto the devices of this process, together with the other processes.

    Args:
        choose: Checks the other arguments and reads headers: an error there reaches the other
            processes too.
        request: Onto which devices.
        deadline: When to give up.
        report: Filled.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        check: Makes what compares bytes while they come, from the index and the tensors.

    Returns:
        The arrays by name.

    Raises:
        MfloadError: As `mfload.load` does.
    """
    made: dict[str, Any] = {}
    shardings = frameworks.module("jax", "sharding")
    taking_part = shardings.processes(request.mesh, request.shardings)
    try:
        with _together(taking_part, shardings.rank(), deadline) as party:
            with collector_paused():
                clock = time.perf_counter()
                chosen = choose()
                headers = time.perf_counter() - clock
                job = Job(chosen, request)
            if report is not None:
                stage = time.perf_counter() - clock - headers
                report.stages = {"headers": headers, "shardings": stage}
            if len(taking_part) > 1:
                party.agree("files", fingerprint(_seen(chosen)))
                lines = [f"exchange={request.exchange!r}", *job.lines()]
                party.agree("arguments", fingerprint(lines))
            _run(job, chosen, party, made, report, progress, check)
    except BaseException:
        made.clear()
        raise
    return made


def _run(
    job: Job,
    chosen: Chosen,
    party: Party,
    made: dict[str, Any],
    report: Report | None,
    progress: Progress,
    check: Callable[[Index, Sequence[TensorInfo]], Checking] | None,
) -> None:
    """Fills `made`."""
    witness = None if check is None else check(chosen.index, _whole(job, chosen))
    fetched: list[tuple[Any, ...]] = []
    with shown(progress, job.stored_bytes) as advance:
        if witness is not None:
            mine = job.needs[job.rank]
            fetched = job.loader.load(
                mine, report=report, advance=advance, witness=witness.witness
            )
        else:
            fetched = fetching.fetch(
                {rank: job.needs.get(rank, []) for rank in party.ranks},
                job.rank,
                job.loader,
                exchange=job.exchange,
                party=party,
                links=job.links(party.ranks),
                report=report,
                advance=advance,
            )
    if witness is not None:
        witness.settle(fetched, report)
    made.update(job.assemble(fetched))
    if report is not None:
        report.tensors = len(made)
        report.processes = job.processes
        report.notes += job.notes


def preview(chosen: Chosen, request: Request) -> Preview:
    """Says what `load` would do on this process; reads nothing.

    Raises:
        MfloadError: As `load` does.
    """
    job = Job(chosen, request)
    shown = job.loader.preview(job.needs[job.rank])
    return shown.told(job.notes)


def abstract(chosen: Chosen, request: Request | None) -> dict[str, Any]:
    """What the arrays will be, without any.

    Args:
        chosen: What there is to load.
        request: Onto which devices, None for none in particular.

    Returns:
        A `jax.ShapeDtypeStruct` for each name.

    Raises:
        ShardingError: A sharding does not fit its tensor.
    """
    needs = chosen.needs
    preparing.check(needs, chosen.index)
    jax_mesh = frameworks.module("jax", "mesh")
    shardings: Sequence[Any] = [None] * len(needs)
    if request is not None:
        jax_sharding = frameworks.module("jax", "sharding")
        shardings = _resolve(jax_sharding, jax_mesh, needs, request, [])
    rows = [(need.info.name, need.dtype, need.info.shape) for need in needs]
    return jax_mesh.abstract(rows, shardings)


def _resolve(
    jax_sharding: Any, jax_mesh: Any, needs: Sequence[Need], request: Request, notes: list[str]
) -> list[Any]:
    """A sharding for each need, that fits the tensor and the array it becomes."""
    rows = [(need.info.name, need.info.shape) for need in needs]
    infos = [need.info for need in needs]
    mesh, shardings, unmatched, _ = request
    made = jax_sharding.resolve(rows, mesh, shardings, unmatched, infos=infos, notes=notes)
    for need, sharding in zip(needs, made, strict=True):
        if need.dtype.elements > 1:
            shape, _ = jax_mesh.arrives(need.dtype, need.info.shape)
            _check_bytes(jax_sharding, need, shape, sharding)
    return made


def _check_bytes(jax_sharding: Any, need: Need, shape: tuple[int, ...], sharding: Any) -> None:
    """Some arrive as bytes: their dims need not be those of the tensor."""
    try:
        jax_sharding.check(need.info.name, shape, sharding)
    except errors.ShardingError as error:
        raise errors.ShardingError(
            f"shards would cut through elements of {need.dtype} that share a byte",
            tensor=need.info.name,
            expected=f"whole blocks of {need.dtype.elements} elements in the last dim of each",
            found=f"{sharding} for shape {list(need.info.shape)}",
        ) from error


def _whole(job: Job, chosen: Chosen) -> list[TensorInfo]:
    if not job.whole or len(job.needs) > 1:
        raise errors.UsageError(
            "verify= compares whole tensors, and this process reads parts of them",
            expected="shardings whose shards on this process make up each tensor, or mfload.verify",
            found=f"{job.stored_bytes} of {sum(n.info.nbytes for n in chosen.needs)} bytes",
        )
    return [need.info for need in chosen.needs]


def _seen(chosen: Chosen) -> list[str]:
    """Files and headers, the same where processes see the same; wherever the files lie."""
    index = chosen.index
    lines = [f"{os.path.basename(source.path)}: {source.size} bytes" for source in chosen.sources]
    for info in index.tensors.values():
        at = ", ".join(f"{piece.offset} in file {piece.source}" for piece in info.pieces)
        lines.append(f"{info.name}: {info.dtype} {list(info.shape)} at {at}")
    return lines


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
            meant = spelling.meant(value, known) if isinstance(value, str) else ""
            raise errors.UsageError(
                f"unknown {name}{meant}", expected=" | ".join(known), found=repr(value)
            )


@contextlib.contextmanager
def _together(processes: tuple[int, ...], rank: int, deadline: Deadline) -> Generator[Party]:
    board = frameworks.module("jax", "processes").board() if len(processes) > 1 else None
    with together(processes, rank, board, deadline) as party:
        yield party
