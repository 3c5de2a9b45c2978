"""Memory: what a load may hold beside its result, and what is loaded together. Pure.

The limits of the user, the route and the number of readers give the size of a read, and the
batches in which tensors that a framework copies are loaded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, is_not
from typing import TypeVar

from mfload import errors
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.blocks import Costs
from mfload.planning.request import Allocation, Request, WholeTensors, sizes

T = TypeVar("T")

_PAGE = 4096
_LEAST_BLOCK = 64 << 10
_LEAST_SLOTS = _LEAST_BLOCK + 3 * _PAGE
_ROUNDED = 2 * _PAGE
"""What direct reads round their ends to, and where a block begins in a page."""
# What comes from a disk is read by more threads than there are cores, in smaller blocks. Slots of
# this size stay in the processor's cache until they are copied out.
_COLD_BLOCK = 4 << 20
# Onto a device slots are locked in any case. Longer reads of a disk were no faster, or much slower:
# O_DIRECT by four readers of 4 MiB 2.6 GB/s, of 16 MiB 1.85 (H200); of 8 MiB 1.5 to 1.8 (H100).
_COLD_SLOT = 8 << 20
# What the page cache holds is shared out so evenly: a load waits for its last block.
_SHARES, _LEAST_SHARE = 4, 2 << 20  # Blocks of each reader, at least; bytes of one.
# To make and lock pages takes three times as long as eight readers take to read as much from the
# page cache (H200, 16 cores). So of what is loaded no more than this part is locked, in slots that
# are still worth a read; but slots that are kept for other loads are made once. A block takes 0.13
# ms in which no other reader is served: by blocks of 1, 2 and 4 MiB 4.3 GB take 0.54, 0.28 and 0.13
# s (H200).
_PINNED = 16
_LEAST_SLOT = 4 << 20
# Slots in which a reader may hold what it fetches, and what it puts together, to decode a block.
_DECODING = 2
_COPIED, _DEVICE = map(attrgetter, ("copied", "device"))


class Readers:
    """The readers of a load, as far as memory is concerned."""

    threads: int = 1
    nbytes: int = 1 << 60  # What they read, about.
    direct: bool = False  # Whether a file is read with O_DIRECT.
    cold: bool = False  # Whether a file comes from a disk, with O_DIRECT or without.
    mapped: bool = False  # Whether all files are mapped.
    depth: int = 2  # Slots of each reader for what lands on devices.
    slot: int = 8 << 20  # Bytes of such a slot, at most.
    costs: Costs = Costs()  # Of the sources.
    decodes: bool = False  # Whether some tensors are not one raw range.
    kept: bool = False  # Whether other loads use the slots, too.
    gds: int | None = None  # Bytes on the device beside each slot's block; None without cuFile.


class Limits:
    """What a load may hold beside its result.

    Raises MemoryLimitError if a tensor that must be copied is larger than a limit, and UsageError
    if a limit is too small for one slot a reader.

    `allocations` may be empty, if all is in mfload's memory on the host.

    Attributes:
        batches: Positions of the requests that are loaded together.
        costs: How large a read may be, so that all slots together stay within the limits.
        slot: Bytes that a slot is made for where others use it after this load; else None.
        growth: How many times the bytes of a block it takes to put it in order on the host.
        least: The least `max_host_overhead` that leaves room for all slots.
        least_on_device: The same for `max_device_overhead`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        allocations: Sequence[Allocation],
        options: LoadOptions,
        readers: Readers,
    ) -> None:
        self._readers = readers
        self._limit = options.max_host_overhead
        self.batches: list[Sequence[int]] = [range(len(requests))]
        if True in map(_COPIED, allocations):
            self.batches = [*batches(requests, allocations, options)]
        self.growth = self.least_on_device = 0
        self.slot: int | None = None
        threads, limit, nbytes = readers.threads, self._limit, 0
        count, block = threads, _COLD_BLOCK if readers.cold else readers.costs.block
        there: Sequence[Request] = []
        if allocations and isinstance(requests, WholeTensors):  # They are allocated alike.
            there = requests if allocations[0].device is not None else there
        elif allocations:
            lands = map(is_not, map(_DEVICE, allocations), itertools.repeat(None))
            there = [*itertools.compress(requests, lands)]
        if there:
            self.growth = 0 if there is requests else max(map(_growth, there))
            # Page-locking memory takes long: its default is bounded as well.
            limit = OVERHEAD if limit is None else limit
            count = threads * readers.depth
            nbytes = sum(sizes(there))
            share = nbytes // _PINNED // count // _PAGE * _PAGE
            block = min(readers.slot, _COLD_SLOT) if readers.cold else readers.slot
            block = block if readers.kept else min(block, max(_LEAST_SLOT, share))
        count += _DECODING * threads * readers.decodes
        self.least = count * _LEAST_SLOTS * (1 + self.growth)
        self.costs = readers.costs
        if there or block != self.costs.block:
            # Rows are copied on to devices slot by slot, and read from a disk block by block.
            span = min(self.costs.span, 0 if there else block)
            self.costs = self.costs._replace(block=block, span=span)
        elif self.costs.concurrency is None:
            share = readers.nbytes // (threads * _SHARES) // _PAGE * _PAGE
            block = min(block, max(_LEAST_SHARE, share))
            self.costs = self.costs._replace(block=block)
        if limit is not None:
            most = limit // count // (1 + self.growth) // _PAGE * _PAGE - _ROUNDED
            # Of mapped files mostly nothing is read: see `slots`.
            if most < _LEAST_BLOCK and not readers.mapped:
                raise too_small("max_host_overhead", self.least, limit)
            block = min(block, max(_LEAST_BLOCK, most))
            # The pages of a map belong to the page cache, but count as resident in this process.
            self.costs = self.costs._replace(block=block, span=min(self.costs.span, max(0, most)))
        if there and readers.gds is not None:
            self._keep_within_device(readers.gds, options.max_device_overhead)
        if there and readers.kept and self.costs.concurrency is None:
            # Slots are as large as they may be; a read of one tensor is shared out all the same.
            self.slot, share = self.costs.block, nbytes // threads // _PAGE * _PAGE
            self.costs = self.costs._replace(block=min(self.slot, max(_LEAST_SHARE, share)))

    def _keep_within_device(self, gds: int, limit: int | None) -> None:
        """Makes reads small enough for the limit on devices."""
        limit = OVERHEAD if limit is None else limit
        count = self._readers.threads * self._readers.depth
        self.least_on_device = least_past_host(count, gds)
        block = limit // count // _PAGE * _PAGE - gds
        if block < _LEAST_BLOCK:
            raise too_small("max_device_overhead", self.least_on_device, limit)
        staged, block = min(self.costs.staged, block), min(self.costs.block, block)
        self.costs = self.costs._replace(block=block, staged=staged)

    def slots(self, read_bytes: int, staged: int, decoding: int = 0) -> int:
        """The most bytes of slots of a plan of which nothing lands on a device.

        `staged` are the bytes of its longest block that passes through a slot, `decoding` those
        that a reader holds to decode one. Raises UsageError if files are mapped, some must be read
        all the same, and there is no room for a slot a reader.
        """
        if not read_bytes:
            return decoding * self._readers.threads
        if self._limit is not None and self._limit < self.least:
            raise too_small("max_host_overhead", self.least, self._limit)
        if self._readers.direct:
            slot = max(self.costs.block, staged) + _ROUNDED
        else:
            slot = max(staged + _ROUNDED if staged else 0, self.costs.merge_gap)
        threads = self._readers.threads
        return min(slot * threads, read_bytes + _ROUNDED * threads) + decoding * threads


def batches(
    requests: Sequence[Request], allocations: Sequence[Allocation], options: LoadOptions
) -> list[list[int]]:
    """Groups of requests; in none does what the framework copies exceed a limit.

    The parts of a tensor stay together if they fit. Raises MemoryLimitError if a tensor does not.
    """
    waiting = {
        n: (allocation.device, requests[n].nbytes)
        for n, allocation in enumerate(allocations)
        if allocation.copied and requests[n].nbytes
    }
    largest: dict[int | None, Request] = {}
    for n, (device, nbytes) in waiting.items():
        if device not in largest or nbytes > largest[device].nbytes:
            largest[device] = requests[n]
    limits = {device: _limit(device, request, options) for device, request in largest.items()}
    made: list[list[int]] = [[]]
    held: Counter[int | None] = Counter()

    def exceeds(numbers: Iterable[int]) -> bool:
        more: Counter[int | None] = Counter()
        for device, nbytes in (waiting[n] for n in numbers if n in waiting):
            more[device] += nbytes
        return any(held[device] and held[device] + n > limits[device] for device, n in more.items())

    for _, run in itertools.groupby(range(len(requests)), key=lambda n: requests[n].info.name):
        numbers = list(run)
        # A tensor whose parts come in several batches is read several times.
        if exceeds(numbers):
            made.append([])
            held.clear()
        for n in numbers:
            if exceeds([n]):
                made.append([])
                held.clear()
            made[-1].append(n)
            if n in waiting:
                held[waiting[n][0]] += waiting[n][1]
    return made


def grouped(items: Iterable[T], limit: int, nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of up to `limit` bytes, in order; a larger item is a group of its own."""
    group: list[T] = []
    held = 0
    for item in items:
        size = nbytes(item)
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


def split_tensors(requests: Sequence[Request], batches: Sequence[Sequence[int]]) -> int:
    """How many tensors have parts in more than one batch."""
    counts = Counter(name for batch in batches for name in {requests[n].info.name for n in batch})
    return sum(count > 1 for count in counts.values())


def least(count: int) -> int:
    """The least overhead that leaves room for `count` slots in host memory."""
    return count * _LEAST_SLOTS


def least_past_host(count: int, gds: int) -> int:
    """The least `max_device_overhead` that leaves room for `count` slots past host memory."""
    return count * (_LEAST_BLOCK + _PAGE + gds)


def too_small(name: str, least: int, limit: int) -> errors.UsageError:
    """The error of an overhead that has no room for the slots of all readers."""
    expected = f"{errors.amount(least, limit)} or more, or fewer threads"
    what, found = f"{name} is too small for one slot for each reader", errors.amount(limit, limit)
    return errors.UsageError(what, expected=expected, found=found)


def _limit(device: int | None, largest: Request, options: LoadOptions) -> int:
    name = "max_host_overhead" if device is None else "max_device_overhead"
    limit: int | None = getattr(options, name)
    if limit is None:
        return max(OVERHEAD, largest.nbytes)
    if largest.nbytes > limit:
        raise errors.MemoryLimitError(
            "the framework must copy the tensor, which is larger than the overhead",
            tensor=largest.info.name,
            expected=f"{name} of {errors.amount(largest.nbytes, limit)} or more",
            found=errors.amount(limit, limit),
        )
    return limit


def _growth(request: Request) -> int:
    """How many times the bytes that are read it takes to put a request in order."""
    if request.dtype is not request.info.dtype:
        return max(1, -(-request.dtype.nbytes // request.info.dtype.nbytes))
    return 0 if request.selection is None else 1
