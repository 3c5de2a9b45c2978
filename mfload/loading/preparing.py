"""Which way a load goes: engines, threads, slots and batches, chosen before data is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mfload import errors
from mfload.cuda.past import PastHost
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.io import probes, route as routing
from mfload.loading import batches, overheads
from mfload.loading.overheads import Overheads
from mfload.options import LoadOptions
from mfload.planning import planner
from mfload.planning.planner import Plan
from mfload.planning.preview import Preview
from mfload.planning.requests import Request
from mfload.sources.local import LocalFile

_PLAIN = (None, "C", "raw")  # A piece's box, order and encoding.
_MAX_RANK = 64  # NumPy's, and every view is a NumPy array first.
_MAX_SPAN = 2**63 - 1
_MOST_THREADS = 8
_A_DEVICE = 4  # Readers for each of several devices, where there are cores for them.
# Reads past the page cache wait for the disk, not for a core: as many as keep it busy.
_DIRECT_THREADS = 4


class Preparation:
    """The way a load goes, decided once: every wave of it goes the same way.

    Opens the files, reads nothing.

    Args:
        requests: What is wanted, as `check` lets it pass.
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        options: How.
        observed: Whether somebody on the host sees all bytes.

    Attributes:
        adapter: The framework.
        route: The leg of each source that is used, by its number.
        threads: Readers at once.
        batches: Positions of the needs that are loaded together, wave by wave.
        overheads: What it holds beside the result.
        notes: What was decided without being asked for.

    Raises:
        MemoryLimitError: A tensor that must be copied is larger than the overhead allowed.
        SourceError: A file can't be opened or has changed.
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
        self._needs = requests
        self._sources = sources
        self.adapter = adapter
        self._settings = options
        self.batches = batches.groups(requests, adapter, options)
        wanted: dict[int, int] = {}
        for request in requests:
            source = request.info.pieces[0].source
            stored = request.info.nbytes if request.selection is None else request.nbytes
            wanted[source] = wanted.get(source, 0) + stored
        used = sorted(wanted)
        self._devices = overheads.devices(requests, adapter, options)
        legs = options.deadline.bound(
            lambda: self._legs([(sources[n], wanted[n]) for n in used], observed),
            "opening the files",
        )
        self.route = dict(zip(used, legs, strict=True))
        self.threads = options.threads or _threads(legs, len(self._devices))
        self.overheads = Overheads(requests, adapter, options, legs, self.threads)
        self.notes = (*index.notes, *adapter.notes, *self._decided())

    def _legs(
        self, wanted: Sequence[tuple[LocalFile, int]], observed: bool
    ) -> Sequence[routing.Leg]:
        options = self._settings
        if not self._devices:
            return routing.choose(wanted, options.engine)
        against = None
        limit = options.max_device_overhead
        if observed:
            against = "verify= sees the bytes on the host"
        elif limit is not None and limit < overheads.least_past_host(threads_at_most(options)):
            against = "max_device_overhead= leaves no room for its slots"
        past = PastHost(self._devices, options.deadline, against)
        return routing.choose_onto_device(wanted, options.engine, past)

    def _decided(self) -> Iterator[str]:
        adapter = self.adapter
        if len(self.batches) > 1:
            yield (
                f"loaded in {len(self.batches)} batches, since {adapter.name} copies tensors; the "
                "buffers of a wave go before the next"
            )
        if parted := batches.apart(self._needs, self.batches):
            yield (
                f"{parted} tensors are read once a wave, since their parts together exceed the "
                "overhead; a larger max_host_overhead= reads them once"
            )
        options, devices = self._settings, self._devices
        lent = batches.lendable(self._needs, adapter, options)
        rest = (request.info.name for n, request in enumerate(self._needs) if n not in lent)
        missing = len(set(rest))
        if options.allocator == "framework" and (adapter.on_host or devices) and missing:
            yield (
                f"{missing} tensors land in mfload's memory: "
                f"{adapter.name} can't lend any for their dtypes"
            )
        if devices and options.allocator not in ("auto", batches.whose(adapter, options)):
            yield f"tensors land in memory of {adapter.name}, which takes none of mfload's there"

    def plan(self, requests: Sequence[Request]) -> Plan:
        """The plan of a wave, or of all."""
        route = self.route
        adapter, options = self.adapter, self._settings
        devices = None
        if self._devices:
            devices = [batches.lands(request, adapter, options) for request in requests]
        return planner.make(
            requests,
            alignment=adapter.alignment,
            costs=self.overheads.costs,
            separate=self.lendable(requests),
            mapped={n: self._sources[n].size for n in route if route[n].engine == "mmap"},
            devices=devices,
            passing=batches.passing(requests, adapter, options),
        )

    def lendable(self, requests: Sequence[Request]) -> frozenset[int]:
        """Positions of the needs that land in the framework's own memory."""
        return batches.lendable(requests, self.adapter, self._settings)

    def preview(self) -> Preview:
        """All of it, for people."""
        made = self.plan(self._needs)
        plans = (made,)
        notes = self.notes
        if len(self.batches) > 1:
            plans = tuple(self.plan([self._needs[n] for n in batch]) for batch in self.batches)
            notes += ("this plan shows its waves as one",)
        overhead = max(map(self.overheads.host, plans))
        return Preview(
            made,
            tuple(self.route.values()),
            self.adapter.name,
            overhead,
            self.threads,
            notes,
            read_bytes=sum(each.read_bytes for each in plans),
            wanted_bytes=sum(each.wanted_bytes for each in plans),
            copied_bytes=sum(map(self.overheads.copied, plans)),
            peak_bytes=overhead + sum(_padding(each) for each in plans),
            device_overhead_bytes=max(
                max(self.overheads.device(each).values(), default=0) for each in plans
            ),
        )


def _padding(made: Plan) -> int:
    """Bytes of a plan's buffers in host memory that belong to no result."""
    on_host = (place for place in made.places if made.buffers[place.buffer].device is None)
    return made.buffer_bytes - sum(place.request.nbytes for place in on_host) + made.mapped_bytes


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
        if request.dtype.known and len(shape) <= _MAX_RANK and not large:
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


def _threads(legs: Sequence[routing.Leg], devices: int) -> int:
    wanted = min(probes.cores(), max(_MOST_THREADS, _A_DEVICE * devices))
    if any(leg.direct for leg in legs):
        return max(wanted, _DIRECT_THREADS)
    return wanted


def threads_at_most(options: LoadOptions) -> int:
    """Readers at once onto the host, at most, whatever files there are."""
    return options.threads or max(min(probes.cores(), _MOST_THREADS), _DIRECT_THREADS)
