"""Memory: what a call may hold beside its result, and what is loaded together. Pure.

`Ledger` counts temporary bytes, and is the one place where an overhead is divided. The limits of
the user, the route and the number of readers give the size of a read (`Limits`), and the batches
in which tensors that a framework copies are loaded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any, TypeVar, cast

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
_OR_MORE = "{} or more"
_READERS = 4
"""One in so many bytes is for readers where what they read waits to be put in order."""


class Ledger:
    """The temporary bytes of a call: those of host memory, or with `device` those of each device.

    Attributes:
        name: The option that limits them.
        given: That limit; None if the caller sets none.
        most: The bytes that may be held: the limit, or the default.
    """

    def __init__(self, options: LoadOptions, *, device: bool = False) -> None:
        self.name = "max_device_overhead" if device else "max_host_overhead"
        self.given: int | None = getattr(options, self.name)
        self.most = OVERHEAD if self.given is None else self.given

    def share(self, parts: int, most: int | None = None) -> int:
        """Bytes of one of so many equal parts, at most `most`."""
        return self.most // parts if most is None else min(most, self.most // parts)

    def slot(self, count: int, beside: int = 0) -> int:
        """Bytes of each of so many slots of whole pages, less those that are held beside it."""
        return self.most // count // _PAGE * _PAGE - beside

    def readers(self, held: int, asked: int | None, usual: int, *, fewer: bool = False) -> int:
        """The number of readers that hold so many bytes each, as far as a given limit allows.

        The page at each end of a slot, 16 KiB a reader at most, is not counted. Raises UsageError
        if there is no room for one, or for as many as are asked for. With `fewer` the default
        limits them, too, fewer come than are asked for, and one may hold more than the limit.
        """
        count = asked or usual
        if (self.given is None and not fewer) or not held:
            return count
        if asked is None or fewer:
            count = max(1, min(count, self.most // held))
        if count * held > self.most and not fewer:
            raise self.too_small(count * held)
        return count

    def split(self, floor: int = 0) -> tuple[int, int]:
        """Bytes for readers, at least `floor`, and for what waits until it is put in order."""
        slots = max(self.most // _READERS, floor)
        return slots, self.most - slots

    @staticmethod
    def least(waits: int, floor: int = 0) -> int:
        """The least limit that leaves so many bytes for what waits (see `split`)."""
        return max(floor + waits, (waits - 1) * _READERS // (_READERS - 1) + 1)

    @staticmethod
    def least_for(slots: int) -> int:
        """The least limit that leaves readers so many bytes (see `split`)."""
        return slots * _READERS

    def check(
        self, least: int, what: str, tensor: str | None = None, expected: str = _OR_MORE
    ) -> None:
        """Raises MemoryLimitError if a limit is given that is less than what must be held."""
        if self.given is not None and least > self.given:
            raise self.error(least, what, tensor, expected)

    def error(
        self, least: int, what: str, tensor: str | None = None, expected: str = _OR_MORE
    ) -> errors.MemoryLimitError:
        """The error of a limit that is less than what must be held."""
        found = None if self.given is None else errors.amount(self.given, self.given)
        expected = expected.format(errors.amount(least, self.given))
        return errors.MemoryLimitError(what, tensor=tensor, expected=expected, found=found)

    def too_small(self, least: int) -> errors.UsageError:
        """The error of a limit that has no room for the slots of all readers."""
        expected = f"{errors.amount(least, self.most)} or more, or fewer threads"
        what, found = f"{self.name} is too small for one slot for each reader", self.most
        return errors.UsageError(what, expected=expected, found=errors.amount(found, found))


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
        self._ledger = ledger = Ledger(options)
        self.batches: list[Sequence[int]] = [range(len(requests))]
        if True in map(_COPIED, allocations):
            self.batches = [*batches(requests, allocations, options)]
        self.growth = self.least_on_device = 0
        self.slot: int | None = None
        # Page-locking memory takes long: the default bounds it as well.
        threads, limited, nbytes = readers.threads, ledger.given is not None, 0
        count, block = threads, _COLD_BLOCK if readers.cold else readers.costs.block
        there: Sequence[Request] = []
        if allocations and isinstance(requests, WholeTensors):  # They are allocated alike.
            there = requests if allocations[0].device is not None else there
        elif allocations:
            lands = map(is_not, map(_DEVICE, allocations), itertools.repeat(None))
            there = [*itertools.compress(requests, lands)]
        if there:
            self.growth = 0 if there is requests else max(map(_growth, there))
            count, limited = threads * readers.depth, True
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
        if limited:
            most = ledger.slot(count * (1 + self.growth), _ROUNDED)
            # Of mapped files mostly nothing is read: see `slots`.
            if most < _LEAST_BLOCK and not readers.mapped:
                raise ledger.too_small(self.least)
            block = min(block, max(_LEAST_BLOCK, most))
            # The pages of a map belong to the page cache, but count as resident in this process.
            self.costs = self.costs._replace(block=block, span=min(self.costs.span, max(0, most)))
        if there and readers.gds is not None:
            self._keep_within_device(readers.gds, Ledger(options, device=True))
        if there and readers.kept and self.costs.concurrency is None:
            # Slots are as large as they may be; a read of one tensor is shared out all the same.
            self.slot, share = self.costs.block, nbytes // threads // _PAGE * _PAGE
            self.costs = self.costs._replace(block=min(self.slot, max(_LEAST_SHARE, share)))

    def _keep_within_device(self, gds: int, ledger: Ledger) -> None:
        """Makes reads small enough for the limit on devices."""
        count = self._readers.threads * self._readers.depth
        self.least_on_device = least_past_host(count, gds)
        block = ledger.slot(count, gds)
        if block < _LEAST_BLOCK:
            raise ledger.too_small(self.least_on_device)
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
        if self._ledger.given is not None and self._ledger.given < self.least:
            raise self._ledger.too_small(self.least)
        if self._readers.direct:
            slot = max(self.costs.block, staged) + _ROUNDED
        else:
            slot = max(staged + _ROUNDED if staged else 0, self.costs.merge_gap)
        threads = self._readers.threads
        return min(slot * threads, read_bytes + _ROUNDED * threads) + decoding * threads


def batches(
    requests: Sequence[Request], allocations: Sequence[Allocation], options: LoadOptions
) -> Iterator[list[int]]:
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

    def held(numbers: Iterable[int]) -> dict[int | None, int]:
        made: dict[int | None, int] = {}
        for n in numbers:
            if n in waiting:
                device, nbytes = waiting[n]
                made[device] = made.get(device, 0) + nbytes
        return made

    runs = itertools.groupby(range(len(requests)), key=lambda n: requests[n].info.name)
    # A tensor whose parts come in several batches is read several times.
    units = (unit for _, run in runs for unit in grouped(run, limits, lambda n: held((n,))))
    return map(list, map(itertools.chain.from_iterable, grouped(units, limits, held)))


def grouped(
    items: Iterable[T],
    limit: float | Mapping[Any, float],
    nbytes: Callable[[T], int] | Callable[[T], Mapping[Any, int]],
) -> Iterator[list[T]]:
    """Groups of up to `limit` bytes, in order; a larger item exceeds it alone.

    Of several places, each has a limit, and `nbytes` says how much of each an item takes.
    """
    group: list[T] = []
    each, held = isinstance(limit, Mapping), cast("Any", 0)
    for item in items:
        more: Any = nbytes(item)
        if group and (_exceeds(held, more, limit) if each else held + more > limit):
            yield group
            group, held = [], 0
        group.append(item)
        if not each:
            held += more  # Streams of small tensors take 3 us for each.
        elif not held:
            held = {**more}
        else:
            held |= {place: held.get(place, 0) + n for place, n in more.items()}
    if group:
        yield group


def _exceeds(held: Any, more: Any, limit: Any) -> bool:
    """Whether what is held in a place, and what would be added there, exceed its limit."""
    for place, nbytes in more.items():
        if held and (before := held.get(place)) and before + nbytes > limit[place]:
            return True
    return False


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


def _limit(device: int | None, largest: Request, options: LoadOptions) -> int:
    ledger = Ledger(options, device=device is not None)
    what = "the framework must copy the tensor, which is larger than the overhead"
    expected = f"{ledger.name} of {{}} or more"
    ledger.check(largest.nbytes, what, largest.info.name, expected)
    return max(ledger.most, largest.nbytes)


def _growth(request: Request) -> int:
    """How many times the bytes that are read it takes to put a request in order."""
    if request.dtype is not request.info.dtype:
        return max(1, -(-request.dtype.nbytes // request.info.dtype.nbytes))
    return 0 if request.selection is None else 1
