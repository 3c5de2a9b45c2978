"""Overheads: what a load holds beside its result, and how large its reads may be for that."""

from __future__ import annotations

from collections.abc import Sequence

from mfload import errors
from mfload.cuda import cufile, slots
from mfload.cuda.copies import Ways
from mfload.cuda.device import Device
from mfload.cuda.paths import Staging
from mfload.frameworks.base import Adapter
from mfload.io import buffers
from mfload.io.route import Leg
from mfload.loading import batches
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.blocks import Costs
from mfload.planning.planner import Plan
from mfload.planning.requests import Request

_PAGE = buffers.PAGE
_LEAST_BLOCK = 64 << 10
_ROUNDED = 2 * _PAGE
"""What direct reads round their ends to, and where a block begins in a page."""
# Direct reads come in blocks whose slots stay in the processor's cache until they are copied out.
_DIRECT_BLOCK = 4 << 20

# To lock pages takes some twenty times as long as to read as much from the page cache (reported,
# not measured here). So of what is loaded no more than this part is locked, in slots that are
# still worth a read.
_PINNED = 16
_LEAST_SLOT = 1 << 20


class Overheads:
    """What the plans of a load hold beside their results.

    Args:
        requests: What is loaded.
        adapter: The framework.
        options: What the user allows.
        legs: The route.
        threads: Readers at once.

    Attributes:
        devices: Those that something lands on.
        costs: What a read may be, so that all slots together stay within what is allowed.
        least: The least `max_host_overhead` that leaves room for all slots.
        least_on_device: The least `max_device_overhead` that does.

    Raises:
        UsageError: Too little is allowed for a slot a reader.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        adapter: Adapter,
        options: LoadOptions,
        legs: Sequence[Leg],
        threads: int,
    ) -> None:
        self._adapter = adapter
        self._settings = options
        self._threads = threads
        self._direct = any(leg.direct for leg in legs)
        self._past_host = any(leg.engine == "gds" for leg in legs)
        self.devices = devices(requests, adapter, options)
        self._last: tuple[Plan, Staging | None] | None = None
        limit = options.max_host_overhead
        if not self.devices:
            block = _DIRECT_BLOCK if self._direct else Costs().block
            self._growth, self.least, self.least_on_device = 0, least(threads), 0
            self.costs = self._host_costs(limit, threads, block, 1)
            return
        allocator = [n for n in requests if batches.lands(n, adapter, options) is not None]
        self._growth = max(map(_growth, allocator), default=0)
        # Page-locked memory is dear: without a word of the user it is bounded as well.
        limit = OVERHEAD if limit is None else limit
        count = threads * slots.DEPTH
        share = sum(request.nbytes for request in allocator) // _PINNED // count // _PAGE * _PAGE
        block = min(slots.SLOT, max(_LEAST_SLOT, share))
        self.least = least(count) * (1 + self._growth)
        self.costs = self._host_costs(limit, count, block, 1 + self._growth)
        converts = any(request.dtype is not request.info.dtype for request in allocator)
        count = threads * (slots.DEPTH * self._past_host + converts)
        self.least_on_device = _least_on_device(count)
        if count:
            self._keep_to_devices(count)

    def _host_costs(self, limit: int | None, count: int, block: int, parts: int) -> Costs:
        """Reads for so many slots at once, each of which holds so many times what it reads."""
        options = self._settings
        gap = Costs().merge_gap if options.merge_gap is None else options.merge_gap
        if limit is None:
            return Costs(block=block, merge_gap=gap)
        block = min(block, limit // count // parts // _PAGE * _PAGE - _ROUNDED)
        if block < _LEAST_BLOCK:
            raise errors.UsageError(
                "max_host_overhead is too small for a slot a reader",
                expected=f"{self.least} bytes or more, or fewer threads",
                found=limit,
            )
        return Costs(block=block, merge_gap=gap)

    def _keep_to_devices(self, count: int) -> None:
        """Makes reads small enough for what is allowed on devices."""
        limit = self._settings.max_device_overhead
        limit = OVERHEAD if limit is None else limit
        block = limit // count // _PAGE * _PAGE - cufile.held(0) * self._past_host
        if block < _LEAST_BLOCK:
            raise errors.UsageError(
                "max_device_overhead is too small for a slot a reader",
                expected=f"{self.least_on_device} bytes or more, or fewer threads",
                found=limit,
            )
        staged = min(self.costs.staged, block)
        block = min(self.costs.block, block) if self._past_host else self.costs.block
        self.costs = self.costs._replace(block=block, staged=staged)

    def ways(self, made: Plan) -> Ways:
        """How segments of a plan get to their places on devices."""
        there = self._adapter.devices
        return Ways([None if s.device is None else there[s.device] for s in made.buffers])

    def staging(self, made: Plan) -> Staging | None:
        """The slots of a plan, None where nothing of it lands on a device."""
        if self._last is None or self._last[0] is not made:
            self._last = made, self._staging(made)
        return self._last[1]

    def _staging(self, made: Plan) -> Staging | None:
        if all(spec.device is None for spec in made.buffers):
            return None
        ways = self.ways(made)
        longest = max((block.nbytes for block in made.blocks), default=0)
        scratch = max(map(ways.scratch, made.blocks), default=0)
        # What is put in order beyond that has to wait for its turn.
        spare = min(max(map(ways.spare, made.blocks), default=0), self._growth * self.costs.slot)
        spare = max(spare, max(map(ways.largest, made.blocks), default=0))
        return Staging(longest, spare, scratch, slots.DEPTH)

    def host(self, made: Plan) -> int:
        """The most bytes of host memory that a plan holds beside the result."""
        staging = self.staging(made)
        if staging is not None:
            held = self._threads * staging.pinned
        else:
            few = made.read_bytes + _ROUNDED * self._threads
            held = min(self._slot(made) * self._threads, few)
        # Slots are gone before the framework copies, so the two don't add up.
        return max(held, self._waiting(made).get(None, 0))

    def device(self, made: Plan) -> dict[int, int]:
        """The most bytes that a plan holds beside the result on each device, by number."""
        staging = self.staging(made)
        if staging is None:
            return {}
        waiting = self._waiting(made)
        past = staging.depth * cufile.held(staging.block) if self._past_host else 0
        held = self._threads * (staging.scratch + past)
        return {number: max(held, waiting.get(number, 0)) for number in made.device_bytes}

    def _waiting(self, made: Plan) -> dict[int | None, int]:
        requests = [place.request for place in made.places]
        return batches.waiting_bytes(requests, self._adapter, self._settings)

    def _slot(self, made: Plan) -> int:
        """The most bytes that a reader's slot holds where all lands on the host."""
        if not self._direct:
            return max(made.staged + _ROUNDED if made.staged else 0, self.costs.merge_gap)
        return max(self.costs.block, made.staged) + _ROUNDED

    def copied(self, made: Plan) -> int:
        """Bytes of a plan that are copied in memory once they were read, at most.

        Args:
            made: The plan.
        """
        requests = [place.request for place in made.places]
        waiting = sum(
            request.nbytes for request in batches.copied(requests, self._adapter, self._settings)
        )
        if self.devices:
            return waiting + sum(s.wanted for block in made.blocks for s in block.segments)
        # Of a block that is read past the page cache, any may have to go through a slot.
        return waiting + sum(b.wanted for b in made.blocks if b.staged or self._direct)


def devices(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> list[Device]:
    """The devices that something lands on."""
    found = (
        {batches.lands(request, adapter, options) for request in requests}
        if adapter.devices
        else ()
    )
    return [adapter.devices[n] for n in sorted(n for n in found if n is not None)]


def least(count: int) -> int:
    """The least overhead that leaves room for some slots."""
    return count * (_LEAST_BLOCK + 3 * _PAGE)


def least_past_host(threads: int) -> int:
    """The least `max_device_overhead` that leaves room for slots past the host."""
    return _least_on_device(threads * (slots.DEPTH + 1))


def _least_on_device(count: int) -> int:
    return count * (_LEAST_BLOCK + _PAGE + cufile.held(0))


def _growth(request: Request) -> int:
    """How many times the bytes that are read it takes to put a need in order."""
    if request.dtype is not request.info.dtype:
        return max(1, -(-request.dtype.nbytes // request.info.dtype.nbytes))
    return 0 if request.selection is None else 1
