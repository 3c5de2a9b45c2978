"""A load on a mesh: from shardings to sharded arrays, on one process or on several at once."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.index import Box, Index, TensorInfo
from mfload.loading import session
from mfload.loading.preview import Preview
from mfload.loading.session import Loader
from mfload.mesh import base
from mfload.mesh.base import DeviceShare, MeshArguments, MeshBackend, Requests, TensorShares, Whole
from mfload.options import LoadOptions
from mfload.planning.memory import Ledger
from mfload.planning.request import HOST, Request, stored_bytes
from mfload.planning.slicing import shape_of
from mfload.progress import Progress, shown
from mfload.report import Report, human
from mfload.runtime import Deadline, gc_paused, local_processes
from mfload.sources.base import Source

if TYPE_CHECKING:  # Only loads of several processes import them.
    from mfload.cuda.device import Device
    from mfload.mesh.agree import ProcessGroup
    from mfload.mesh.link import Link

# Pages of each file that processes compare, and of all files together; two of each at least.
_SAMPLED, _IN_ALL = 16, 512
_PAGE = 4096  # The same on every host.
# What a byte from another process costs on accelerators, in bytes read: assumed, since their links
# are faster than disks.
_PRICE = 0.2
# What a byte costs at least, in bytes read from the page cache. From a server: processor time over
# the loopback. From a network disk: a FUSE of 2 ms a request gave a second, third to seventh part
# on two cores, and of what it gives each process takes its share.
# A store is read over a link that all processes of a machine share: a tenth or so of the page
# cache's bytes a second on 10 Gbit, for each of them its part.
_READ = {"": 1.0, "held": 2.0, "server": 2.0, "disk": 8.0, "store": 8.0}
_WORTH = 1.1  # An exchange must save a tenth of what is read.
_NARROWEST = 4096  # Bytes of a row,
_DEVICE_ROW = 16 << 20  # and at most between devices, where it passes through no cache.
_HELD = "each process reads its own: a source holds it on devices"
_BETWEEN = "; bytes travel between devices"
_OUT_OF_STEP = "an exchange broke off before, so that the collectives are out of step"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What there is to load: the whole of each tensor that is requested of a checkpoint."""

    index: Index
    sources: Sequence[Source]
    requests: Sequence[Request]
    options: LoadOptions


class MeshCall(NamedTuple):
    """A call for arrays on a mesh, before its headers are read.

    Attributes:
        choose: Checks all other arguments and reads headers: what it raises reaches the other
            processes too.
        deadline: For headers and agreement.
    """

    backend: MeshBackend
    asked: MeshArguments
    choose: Callable[[], Chosen]
    deadline: Deadline
    report: Report | None


class MeshLoad:
    """What this process loads of a checkpoint, and how it becomes sharded arrays.

    `requests` are those of each process, by its number, `mine` those of this one.
    """

    def __init__(self, backend: MeshBackend, chosen: Chosen, asked: MeshArguments) -> None:
        self._backend = backend
        self._whole = list(chosen.requests)  # Rows that are made when asked for are made once.
        self._shardings = backend.resolve(self._whole, asked._replace(known=chosen.index.names))
        options = chosen.options
        wanted = self._wanted = list[TensorShares]()
        known: dict[Any, tuple[tuple[DeviceShare, ...], bool]] = {}
        for (info, dtype, _, checked, _), sharding in zip(
            self._whole, self._shardings, strict=True
        ):
            kind = id(sharding), dtype.name, info.shape
            if kind not in known:
                shares = backend.shares(sharding, info.shape)
                known[kind] = shares, backend.separate(sharding, dtype, options)
            wanted.append(TensorShares(info, dtype, checked, *known[kind]))
        self.requests = base.requests(wanted)
        self.mine = self.requests.setdefault(backend.rank, [])
        self.loader = Loader(chosen.index, chosen.sources, backend.adapter(late=True), options)

    @property
    def stored(self) -> list[TensorInfo]:
        """The tensors as the checkpoint has them."""
        return [request.info for request in self._whole]

    def check_whole(self, processes: int) -> None:
        """See `check_whole`, of all that is loaded."""
        options = self.loader.options
        if options.check is not None:
            stored = sum(info.nbytes for info in self.stored)
            check_whole(options, processes, abs(stored - stored_bytes(self.mine)))

    def part(self, numbers: range) -> MeshLoad:
        """The same for some of the tensors."""
        made = copy.copy(self)
        taken = slice(numbers.start, numbers.stop)
        made._whole, made._shardings = self._whole[taken], self._shardings[taken]
        made._wanted = self._wanted[taken]
        made.requests = base.requests(made._wanted)
        made.mine = made.requests.setdefault(self._backend.rank, [])
        return made

    def nbytes(self) -> list[int]:
        """Bytes of each tensor on the process that holds most of it."""
        made: list[int] = []
        known: dict[Any, int] = {}
        for each in self._wanted:
            kind = id(each.shares), each.info.shape, each.dtype.name
            if kind not in known:
                rows = base.requests([each]).values()
                known[kind] = max((sum(row.nbytes for row in some) for some in rows), default=0)
            made.append(known[kind])
        return made

    def arguments(self) -> list[str]:
        """What is wanted of each tensor: lines that must be the same on all processes."""
        lines: list[str] = []
        known: dict[int, str] = {}
        for request, sharding, (_, _, _, shares, _) in zip(
            self._whole, self._shardings, self._wanted, strict=True
        ):
            if (digest := known.get(id(shares))) is None:
                digest = hashlib.sha256(repr(shares).encode()).hexdigest()[:16]
                known[id(shares)] = digest
            dtype = f"{request.dtype}{' checked' if request.checked else ''}"
            lines.append(f"{request.info.name}: {dtype} {sharding} {digest}")
        return lines

    def assemble(self, fetched: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The sharded arrays by name, of an array for each device of each request."""
        held: dict[str, dict[int, Any]] = {request.info.name: {} for request in self._whole}
        for (info, _, _, _, devices), arrays in zip(self.mine, fetched, strict=True):
            parts = held[info.name]
            for number, array in zip(devices, arrays, strict=True):
                parts[number] = array
        fetched.clear()
        wholes = [
            Whole(info.shape, dtype, sharding, held[info.name])
            for (info, dtype, *_), sharding in zip(self._whole, self._shardings, strict=True)
        ]
        return dict(zip(held, self._backend.assemble(wholes), strict=True))


def backend(framework: str, device: object, shard: Any) -> MeshBackend:
    """The framework's backend, or that of an exchange of chunks of dims (see `shard`)."""
    if shard is None:
        return base.backend(framework)
    from mfload.mesh.shard import ShardBackend

    return ShardBackend(framework, device, shard)


def load(call: MeshCall, progress: Progress = False) -> dict[str, Any]:
    """Loads a checkpoint onto the devices of this process, together with the other processes."""
    backend, report = call.backend, call.report
    ranks = backend.processes(call.asked)
    with together(backend, ranks, call.deadline) as group:
        chosen, job = prepared(call, group)
        with shown(progress, stored_bytes(job.mine) if progress else 0) as advance:
            fetched = fetch(
                job.requests,
                job.loader,
                backend,
                group=group,
                report=report,
                advance=advance,
            )
        if report is not None:
            report.tensors, report.processes = len(chosen.requests), len(ranks)
        if (check := chosen.options.check) is not None:
            check.tell(report)
        with gc_paused():
            arrays = job.assemble(fetched)
            del job, chosen  # What was made of each tensor goes before the collector looks at it.
        return arrays


def prepared(call: MeshCall, group: ProcessGroup | None) -> tuple[Chosen, MeshLoad]:
    """What there is to load, once the processes agree on it."""
    backend, asked, choose, _, report = call
    start = time.perf_counter()
    with gc_paused():
        chosen = choose()
        read = time.perf_counter()
        job = MeshLoad(backend, chosen, asked)
    if report is not None:
        report.add_stage("headers", start, read)
        report.add_stage("shardings", read, time.perf_counter())
    if group is not None:
        agree_on_inputs(group, job.stored, chosen.sources, chosen.options, job.arguments())
    job.check_whole(1 if group is None else len(group.ranks))
    return chosen, job


def check_whole(options: LoadOptions, processes: int, missing: int = 0) -> None:
    """Refuses to compare tensors with a manifest of which this process reads parts.

    `missing` are the bytes of them that it does not read.
    """
    if options.check is not None and (processes > 1 or missing):
        raise errors.UsageError(
            "verify= compares whole tensors, and this process reads parts of them",
            expected="one process, whose shards make up each tensor; or mfload.verify",
            found=f"{errors.counted(processes, 'process', 'processes')}"
            + (f"; {errors.amount(missing)} are not read here" if missing else ""),
        )


def together(
    backend: MeshBackend, ranks: tuple[int, ...], deadline: Deadline
) -> contextlib.AbstractContextManager[ProcessGroup | None]:
    """A load of several processes (see `agree.joined`); None if it is this process alone."""
    if ranks == (backend.rank,):
        return contextlib.nullcontext()
    from mfload.mesh import agree

    return agree.joined(backend, ranks, deadline)


def agree_on_inputs(
    group: ProcessGroup,
    infos: Iterable[TensorInfo],
    sources: Sequence[Source],
    options: LoadOptions,
    arguments: Sequence[str],
) -> None:
    """Raises if the processes do not see the same files, or were not given the same arguments.

    Files are compared by size and a sample of evenly spread pages. That tells one step of a
    training from another, and misses a single number that differs. The version of mfload comes
    first: another one may not make the same schedule.
    """
    rows = [(each.name, each.dtype.name, each.shape, each.pieces) for each in infos]
    used = [sources[n] for n in sorted({piece.source for row in rows for piece in row[-1]})]
    header = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    count = max(2, min(_SAMPLED, _IN_ALL // max(1, len(used))))
    lines = group.deadline.bound(
        lambda: [_sample(source, count) for source in used], "comparing files"
    )
    version = sys.modules["mfload"].__version__  # It is above all layers.
    group.agree("files", [f"mfload: {version}", *lines, f"headers: {header}"])
    same = ("exchange", "allocator", "max_host_overhead")
    lines = [f"{name}: {getattr(options, name)!r}" for name in same]
    group.agree("arguments", [*lines, *arguments])


def _sample(source: Source, count: int) -> str:
    name = os.path.basename(source.name)
    if source.costs.concurrency is not None and source.file is None:
        return f"{name}: {source.identity}"  # Said by a server, and the same everywhere.
    last = max(0, source.size - _PAGE)
    digest = hashlib.sha256()
    for at in sorted({last * n // (count - 1) for n in range(count)}):
        digest.update(source.read(at, min(_PAGE, source.size - at)))
    return f"{name}: {errors.amount(source.size)}, sampled {digest.hexdigest()[:16]}"


def fetch(
    requests: Requests,
    loader: Loader,
    backend: MeshBackend,
    *,
    group: ProcessGroup | None = None,
    report: Report | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[tuple[Any, ...]]:
    """Loads what this process requests: by itself, or by an exchange with the others.

    `requests` are those of each process, the same everywhere. Returns for each request of this
    process an array for each of its devices.
    """
    arrays, note = None, ""
    if group is not None:
        arrays, note = _exchange(requests, loader, backend, group, report, advance)
    if arrays is None:
        mine = requests.get(backend.rank, [])
        arrays = loader.load(mine, report=report, advance=advance)
    if report is not None and note:
        report.notes = (*report.notes, note)
    return arrays


def _exchange(
    requests: Requests,
    loader: Loader,
    backend: MeshBackend,
    group: ProcessGroup,
    report: Report | None,
    advance: Callable[[int], None] | None,
) -> tuple[list[tuple[Any, ...]] | None, str]:
    """The arrays of this process by an exchange, or None if each process reads its own; and why."""
    requests = {rank: requests.get(rank, []) for rank in group.ranks}
    options = loader.options
    lying = told_where(group, loader.sources, options)
    if options.exchange == "auto" and "held" in lying:
        return None, _HELD
    given = requests, options, backend, loader.sources, lying
    width, why = exchanged(*given)
    if width is None:
        return None, why
    from mfload.mesh import redistribute

    link = backend.link(group.ranks, width, options.deadline)
    try:
        device = landing(requests[group.rank], loader, link, len(requests) * width)
        spot = "" if device is None else f"on {os.uname().nodename} {device.pci or device.name}"
        said = group.gather("exchange", "broken" if link.broken else spot).values()
        if "broken" in said:
            if options.exchange == "once":
                advice = "start the processes anew, or load with exchange='never'"
                raise errors.ProcessError(f"{_OUT_OF_STEP}: {advice}")
            return None, f"each process reads its own: {_OUT_OF_STEP}"
        if all(said) and len(set(said)) == len(said):  # NCCL refuses a device of two processes.
            problem = link.connect(device, [*said], lambda: group.check("connect"))
            problems = [*filter(None, group.gather("connect", problem).values())]
            link.device = None if problems else device
            why += f"; bytes travel by the host: {problems[0]}" if problems else _BETWEEN
        if link.device is None and between(backend):
            there, against = exchanged(*given, by_host=True)
            if there is None:  # What was worth it between devices is not so by the host.
                return None, f"{against}; {why}"
        # Results wait in host memory until they are copied to a device that is not the host.
        straight = link.device or backend.platform() == "cpu"
        limit = math.inf if straight else Ledger(options).most
        exchange = redistribute.Exchange(loader, group, link, width, limit, advance)
        return exchange.load(requests, report), why
    finally:
        link.close()


def held_on_devices(sources: Sequence[Source]) -> bool:
    """Whether devices may take what is wanted from where it lies (see `loading.near`)."""
    return any(hasattr(source, "lying") for source in sources)


def landing(mine: Sequence[Request], loader: Loader, link: Link, nbytes: int) -> Device | None:
    """The device that pieces travel from, if all results land on devices and rows fit there."""
    devices, most = loader.adapter.devices, Ledger(loader.options, device=True).given
    device = next(filter(link.moves, devices), None)
    if device is None:
        return None
    there = session.Session(loader, mine)
    if any(each.device is None for each in there.allocations or [HOST] * len(mine)):
        return None
    beside = 0 if most is None else max(there.plan().device_overhead.values(), default=0)
    return device if most is None or most >= link.rooms * nbytes + beside else None


def exchanged(
    requests: Requests,
    options: LoadOptions,
    backend: MeshBackend,
    sources: Sequence[Source],
    lying: Collection[str] = (),
    *,
    by_host: bool = False,
) -> tuple[int | None, str]:
    """Bytes of a row if processes read for each other, else None; and why. Alike on all.

    `lying` says where the sources lie for each process (see `_lying`). Default: as for this one.
    With `by_host`, bytes for devices travel by the host all the same.

    Raises MemoryLimitError if that is asked for and a round does not fit in the overhead.
    """
    own, asked = "each process reads its own", options.exchange == "once"
    if asked and options.engine == "mmap":
        message = "engine='mmap' reads nothing that could be exchanged"
        raise errors.UsageError(message, expected="another engine, or exchange='never'")
    if options.exchange == "never" or options.engine == "mmap":
        return None, ""
    why = "exchange='once'"
    if not asked:
        reading = _reading(lying or [_lying(sources)], len(requests))
        moved, known = price(backend, reading, by_host=by_host)
        # Of rows in the page cache only what is wanted is touched, but a device gets whole blocks.
        rows = reading > 1 or backend.platform() != "cpu"
        most, share, came = amounts(requests, rows=rows)
        why = (
            f"{human(most)} at most a process, or {human(share)} and {human(came)} exchanged, of "
            f"which a byte costs as much as reading {moved:g} ({known})"
        )
        if most <= _WORTH * (share + moved * came):
            return None, f"{own}: {why}"
    ledger, transport = Ledger(options), _transport(backend)
    widest, held = transport.width, transport.held * len(requests)
    if between(backend) and not by_host:
        widest = max(widest, _DEVICE_ROW)
    limit = ledger.share(2)  # The rest is for readers.
    width = min(widest, 2 * widest // len(requests), limit // held)
    width = max(_NARROWEST, 1 << max(0, width.bit_length() - 1))
    if held * width > limit:
        if not asked:
            return None, f"{own}: {base.SMALL}"
        enough = max(session.least_overhead(options), 2 * held * _NARROWEST)
        raise ledger.error(enough, base.SMALL, expected="{} or more, or exchange='never'")
    infos = {i.name: i for some in requests.values() for i, *_ in some if not i.simple}
    if count := sum(map(base.backwards, infos.values())):
        what = errors.counted(count, "tensor")
        why += f"; except {what} with encoded pieces not in C order, read by each that wants them"
    return width, f"every byte is read by one process: {why}"


def price(backend: MeshBackend, reading: float, *, by_host: bool = False) -> tuple[float, str]:
    """What a byte from another process costs, in bytes read of the sources; how that is known.

    `reading`: What one of these costs, in bytes read from the page cache.
    """
    if between(backend) and not by_host:
        return _PRICE, "assumed"
    return _transport(backend).price / reading, "measured"


def between(backend: MeshBackend) -> bool:
    """Whether bytes travel between devices, if these can be connected."""
    return _transport(backend).by_devices and backend.platform() != "cpu"


def _transport(backend: MeshBackend) -> base.ProcessTransport:
    return getattr(backend, "transport", base.GLOO)


def told_where(
    group: ProcessGroup, sources: Sequence[Source], options: LoadOptions
) -> Collection[str]:
    """Where the sources lie for each process (see `_lying`), if `exchanged` has to know.

    Processes differ: others may be on another machine than a seed, or on the one whose disk they
    see over the network.
    """
    if options.exchange != "auto":
        return ()
    return group.gather("sources", _lying(sources)).values()


def _lying(sources: Sequence[Source]) -> str:
    """Where sources lie: a "disk" of the network, a "store", a "server", or "held" on devices.

    The disk comes with what is alike for processes that share what their machine caches of it; the
    store, with what is alike for those that share its link.
    """
    if held_on_devices(sources):
        return "held"
    waited = [source for source in sources if source.costs.concurrency is not None]
    if waited and all(getattr(source, "shared_link", False) for source in waited):
        return f"store {os.uname().nodename}"
    disks = [disk for source in waited if (disk := getattr(source, "disk", None)) is not None]
    if len(disks) < len(waited) or not disks:
        return "server" if waited else ""
    return " ".join(["disk", *sorted({disk.place for disk in disks})])


def _reading(lying: Collection[str], processes: int) -> float:
    """What a byte of the sources costs, in bytes read from the page cache.

    What one process has read of a network disk is there for the others of its machine.
    """
    kinds = {each.partition(" ")[0] for each in lying}
    # Where each has told, or all are known to run here.
    together = len(lying) == processes or local_processes() >= processes
    if together and kinds == {"disk"} and len({*lying}) == 1:
        return _READ[""]
    if kinds == {"store"}:
        known = len(lying) == processes
        sharing = max(Counter(lying).values()) if known else min(processes, local_processes())
        return _READ["store"] * sharing
    return max(map(_READ.__getitem__, kinds))


def amounts(requests: Requests, *, rows: bool) -> tuple[float, float, float]:
    """Bytes that a process reads by itself at most, and once read by one: its share, what comes.

    With `rows`, whole rows count that a process wants parts of. Of an encoded piece all bytes do.
    """
    apart, came, total, largest, again = Counter[int](), Counter[int](), 0, 0, 0
    alike: dict[int, list[base.WantedTensor]] = {}
    for each in base.targets(requests):
        alike.setdefault(id(each.parts), []).append(each)
    for (info, parts, _), *others in alike.values():
        count, spans, wanted = 1 + len(others), dict[int, tuple[int, int]](), Counter[int]()
        nbytes = count * info.nbytes
        dim = next((n for n, length in enumerate(info.shape) if length > 1), None)
        length = 1 if dim is None else info.shape[dim]
        for rank, _, box, _ in parts:
            start, stop = (0, 1) if dim is None else box[dim]
            first, last = spans.get(rank, (start, stop))
            spans[rank] = min(first, start), max(last, stop)
            wanted[rank] += count * (info.dtype.size_of(shape_of(box)) or 0)
        read = wanted
        if pieces := base.encoded(info):
            sizes = [[n for _, n in base.encoded(each.info)] for each in others]
            sizes = np.array([[n for _, n in pieces], *sizes])
            read = _taken(info, pieces, parts, sizes.sum(0))
            nbytes = int(sizes.sum())
            if base.backwards(info):
                apart.update(read)
                again += max(read.values())
                continue
            largest = max(largest, int(sizes.max()))
        elif rows:
            read = {r: nbytes * (b - a) // length for r, (a, b) in spans.items()}
        total += nbytes
        starts, stops = map(sorted, zip(*spans.values(), strict=True))
        for rank, (start, stop) in spans.items():
            apart[rank] += read[rank]
            # Those that want parts of the same rows read equal shares of them for each other.
            among = bisect_left(starts, stop) - bisect_right(stops, start)
            came[rank] += wanted[rank] - wanted[rank] // among
    share = max(total / len(requests), largest) + again
    return max(apart.values(), default=0), share, max(came.values(), default=0)


def _taken(
    info: TensorInfo, pieces: Sequence[tuple[Box, int]], parts: Iterable[base.TargetBox], sizes: Any
) -> Counter[int]:
    """Stored bytes of the pieces that each process wants parts of; `sizes` has those of each."""
    boxes = np.array([box for box, _ in pieces]).reshape(len(pieces), len(info.shape), 2)
    hit: dict[int, Any] = {}
    for rank, _, box, _ in parts:
        first, stop = np.array(box).reshape(-1, 2).T
        found = ((boxes[..., 0] < stop) & (boxes[..., 1] > first)).all(1)
        hit[rank] = hit.get(rank, False) | found
    return Counter({rank: int(sizes[found].sum()) for rank, found in hit.items()})


def preview(chosen: Chosen, backend: MeshBackend, asked: MeshArguments) -> Preview:
    """Says what `load` would do on this process; reads nothing."""
    ranks = backend.processes(asked)
    job = MeshLoad(backend, chosen, asked)
    here = job.loader.preview(job.mine)
    notes, width = list(here.notes), None
    if len(ranks) > 1:
        requests = {rank: job.requests.get(rank, []) for rank in ranks}
        given = requests, chosen.options, backend, chosen.sources
        held = chosen.options.exchange == "auto" and held_on_devices(chosen.sources)
        width, note = (None, _HELD) if held else exchanged(*given)
        beside = 0
        if width is not None and here.plan.device_bytes:
            link, rows = backend.link(ranks, width, chosen.options.deadline), len(ranks) * width
            if landing(job.mine, job.loader, link, rows) is not None:
                beside = here.device_overhead_bytes + link.rooms * rows
            else:  # What is exchanged is put together on the host.
                width, note = exchanged(*given, by_host=True)
                if width is not None:
                    here = job.loader.preview(job.mine, by_host=True)
        notes += [note] if note else []
        if width is not None:
            from mfload.mesh.schedule import make_schedule

            schedule = make_schedule(requests, width, backend.rank)
            read, received = schedule.read[backend.rank], schedule.received[backend.rank]
            held = _transport(backend).held * len(ranks) * width if schedule.travels else 0
            notes.append("the blocks and requests of this plan are those of the process on its own")
            here = replace(
                here,
                read_bytes=read,
                wanted_bytes=read,
                copied_bytes=here.copied_bytes + received,
                overhead_bytes=here.overhead_bytes + held,
                peak_bytes=here.peak_bytes + held,
                exchanged_bytes=received,
                device_overhead_bytes=beside,
            )
    return replace(here, notes=tuple(notes), processes=len(ranks))


def abstract(chosen: Chosen, framework: str, asked: MeshArguments) -> dict[str, Any]:
    """What the arrays will be, without any data; without shardings if none are given."""
    session.check(chosen.requests, chosen.index)
    backend: Any = base.backend(framework)
    resolved: list[Any] = [None] * len(chosen.requests)
    if asked.mesh is not None or asked.shardings is not None:
        resolved = backend.resolve(chosen.requests, asked._replace(known=chosen.index.names))
    return backend.abstract(chosen.requests, resolved)
