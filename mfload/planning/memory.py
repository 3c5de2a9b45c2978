"""Memory: where each request lands, and what a load may hold beside its result. Pure.

Decided once a load. Each adapter says where a request lands (`Allocation`); the limits of the
user, the route and the number of readers then give the size of a read and the batches in which
tensors that a framework copies are loaded.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload import errors
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.blocks import Costs
from mfload.planning.requests import HOST, Allocation, Owner, Request

__all__ = [
    "HOST",
    "Allocation",
    "Limits",
    "Owner",
    "Readers",
    "batches",
    "least",
    "least_past_host",
    "split_tensors",
]

_PAGE = 4096
_LEAST_BLOCK = 64 << 10
_LEAST_SLOTS = _LEAST_BLOCK + 3 * _PAGE
_ROUNDED = 2 * _PAGE
"""What direct reads round their ends to, and where a block begins in a page."""
# Direct reads come in blocks whose slots stay in the processor's cache until they are copied out.
_DIRECT_BLOCK = 4 << 20
# To lock pages takes some twenty times as long as to read as much from the page cache (reported,
# not measured here). So of what is loaded no more than this part is locked, in slots that are
# still worth a read.
_PINNED = 16
_LEAST_SLOT = 1 << 20


_COPIED = operator.attrgetter("copied")


class Readers(NamedTuple):
    """What the readers of a load are, as far as memory is concerned.

    Attributes:
        direct: Whether a file is read with O_DIRECT.
        depth: Slots of each reader for what lands on devices.
        slot: Bytes of such a slot, at most.
        gds: Bytes of device memory that a slot takes beside its block where a file is read past
            host memory; None if no file is.
    """

    threads: int
    direct: bool = False
    mapped: bool = False
    depth: int = 2
    slot: int = 8 << 20
    gds: int | None = None


class Limits:
    """What a load may hold beside its result.

    Attributes:
        batches: Positions of the requests that are loaded together.
        costs: How large a read may be, so that all slots together stay within the limits.
        least: The least `max_host_overhead` that leaves room for all slots.

    Raises:
        MemoryLimitError: A tensor that must be copied is larger than the limit.
        UsageError: A limit is too small for one slot a reader.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        allocations: Sequence[Allocation],
        options: LoadOptions,
        readers: Readers,
    ) -> None:
        self._options = options
        self._readers = readers
        self.batches = [list(range(len(requests)))]
        if True in map(_COPIED, allocations):
            self.batches = batches(requests, allocations, options)
        there: list[Request] = []
        for request, allocation in zip(requests, allocations, strict=True):
            if allocation.device is not None:
                there.append(request)
        limit, threads = options.max_host_overhead, readers.threads
        if not there:
            block = _DIRECT_BLOCK if readers.direct else Costs().block
            self.growth, self.least, self.least_on_device = 0, threads * _LEAST_SLOTS, 0
            self.costs = self._host_costs(limit, threads, block)
            return
        self.growth = max(map(_growth, there))
        """How many times the bytes of a block it takes to put it in order on the host."""
        # Page-locked memory is dear: its default is bounded as well.
        limit = OVERHEAD if limit is None else limit
        count = threads * readers.depth
        share = sum(request.nbytes for request in there) // _PINNED // count // _PAGE * _PAGE
        block = min(readers.slot, max(_LEAST_SLOT, share))
        self.least = least(count) * (1 + self.growth)
        self.costs = self._host_costs(limit, count, block)
        converts = any(request.dtype is not request.info.dtype for request in there)
        count = threads * ((0 if readers.gds is None else readers.depth) + converts)
        self.least_on_device = _least_on_device(count, readers.gds)
        if count:
            self._keep_to_devices(count)

    def _host_costs(self, limit: int | None, count: int, block: int) -> Costs:
        """Reads for `count` slots at once."""
        gap = self._options.merge_gap
        costs = Costs(block=block) if gap is None else Costs(block=block, merge_gap=gap)
        if limit is None:
            return costs
        block = min(block, limit // count // (1 + self.growth) // _PAGE * _PAGE - _ROUNDED)
        if block < _LEAST_BLOCK:
            if self._readers.mapped:
                return costs._replace(block=_LEAST_BLOCK)  # Mostly nothing is read: `check_slots`.
            raise self._too_small("max_host_overhead", self.least, limit)
        return costs._replace(block=block)

    def check_slots(self, read_bytes: int) -> None:
        """Refuses a plan of mapped files that has to read some of them all the same.

        Raises:
            UsageError: The limit is too small for one slot a reader.
        """
        limit = self._options.max_host_overhead
        if read_bytes and limit is not None and limit < self.least:
            raise self._too_small("max_host_overhead", self.least, limit)

    def _keep_to_devices(self, count: int) -> None:
        """Makes reads small enough for the limit on devices."""
        limit, gds = self._options.max_device_overhead, self._readers.gds
        limit = OVERHEAD if limit is None else limit
        block = limit // count // _PAGE * _PAGE - (gds or 0)
        if block < _LEAST_BLOCK:
            raise self._too_small("max_device_overhead", self.least_on_device, limit)
        staged = min(self.costs.staged, block)
        block = self.costs.block if gds is None else min(self.costs.block, block)
        self.costs = self.costs._replace(block=block, staged=staged)

    def _too_small(self, name: str, least: int, limit: int) -> errors.UsageError:
        return errors.UsageError(
            f"{name} is too small for a slot a reader",
            expected=f"{least} bytes or more, or fewer threads",
            found=limit,
        )

    def slots(self, read_bytes: int, staged: int) -> int:
        """The most bytes of slots that a plan takes whose requests all land on the host.

        Args:
            staged: Bytes of its longest block that passes through a slot.
        """
        if not read_bytes:
            return 0
        if self._readers.direct:
            slot = max(self.costs.block, staged) + _ROUNDED
        else:
            slot = max(staged + _ROUNDED if staged else 0, self.costs.merge_gap)
        threads = self._readers.threads
        return min(slot * threads, read_bytes + _ROUNDED * threads)


def batches(
    requests: Sequence[Request], allocations: Sequence[Allocation], options: LoadOptions
) -> list[list[int]]:
    """Groups of requests; in none does what the framework copies exceed a limit.

    The parts of a tensor stay together if they fit.

    Raises:
        MemoryLimitError: One tensor alone exceeds a limit.
    """
    waiting = {
        n: (allocation.device, requests[n].nbytes)
        for n, allocation in enumerate(allocations)
        if allocation.copied
    }
    limits: dict[int | None, int] = {}
    for device in {device for device, _ in waiting.values()}:
        largest = max((n for n in waiting if waiting[n][0] == device), key=lambda n: waiting[n][1])
        limits[device] = _limit(device, requests[largest], options)
    if all(held <= limits[device] for device, held in _sums(waiting.values()).items()):
        return [list(range(len(requests)))]
    made: list[list[int]] = [[]]
    held: Counter[int | None] = Counter()

    def exceeds(numbers: Iterable[int]) -> bool:
        more = _sums(waiting[n] for n in numbers if n in waiting)
        return any(held[device] and held[device] + n > limits[device] for device, n in more.items())

    for run in _runs(requests):
        # A tensor whose parts come in several batches is read several times.
        if exceeds(run):
            made.append([])
            held.clear()
        for n in run:
            if exceeds([n]):
                made.append([])
                held.clear()
            if n in waiting:
                held[waiting[n][0]] += waiting[n][1]
            made[-1].append(n)
    return made


def split_tensors(requests: Sequence[Request], batches: Sequence[Sequence[int]]) -> int:
    """How many tensors have parts in more than one batch."""
    counts = Counter(name for batch in batches for name in {requests[n].info.name for n in batch})
    return sum(count > 1 for count in counts.values())


def least(count: int) -> int:
    """The least overhead that leaves room for `count` slots in host memory."""
    return count * _LEAST_SLOTS


def _least_on_device(count: int, gds: int | None) -> int:
    return count * (_LEAST_BLOCK + _PAGE + (gds or 0))


def least_past_host(threads: int, depth: int, gds: int) -> int:
    """The least `max_device_overhead` that leaves room for slots past host memory."""
    return _least_on_device(threads * (depth + 1), gds)


def _sums(waiting: Iterable[tuple[int | None, int]]) -> Counter[int | None]:
    """Bytes by device."""
    found: Counter[int | None] = Counter()
    for device, nbytes in waiting:
        if nbytes:
            found[device] += nbytes
    return found


def _runs(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Positions of requests, those of one tensor together where they follow each other."""
    for _, run in itertools.groupby(range(len(requests)), key=lambda n: requests[n].info.name):
        yield list(run)


def _limit(device: int | None, largest: Request, options: LoadOptions) -> int:
    name = "max_host_overhead" if device is None else "max_device_overhead"
    limit = options.max_host_overhead if device is None else options.max_device_overhead
    if limit is None:
        return max(OVERHEAD, largest.nbytes)
    if largest.nbytes > limit:
        raise errors.MemoryLimitError(
            "the framework must copy the tensor, which is larger than the overhead",
            tensor=largest.info.name,
            expected=f"{name} of {largest.nbytes} bytes or more",
            found=limit,
        )
    return limit


def _growth(request: Request) -> int:
    """How many times the bytes that are read it takes to put a request in order."""
    if request.dtype is not request.info.dtype:
        return max(1, -(-request.dtype.nbytes // request.info.dtype.nbytes))
    return 0 if request.selection is None else 1
