"""Waves: what a framework copies out of mfload's memory comes in turns, within the overhead.

Host and device memory have an overhead each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mfload import errors
from mfload.frameworks.base import Adapter, Placing, Whose
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.requests import Request

_HOST = None


def lands(request: Request, adapter: Adapter, options: LoadOptions) -> int | None:
    """The number of the adapter's device in whose memory a need lands, None for the host's."""
    if options.by_host or options.engine == "mmap" or not adapter.devices:
        return _HOST
    return adapter.lands(request)


def whose(adapter: Adapter, options: LoadOptions) -> Whose:
    """Whose memory needs land in on a device."""
    asked = adapter.allocator if options.allocator == "auto" else options.allocator
    if asked in adapter.landings:
        return "framework" if asked == "framework" else "mfload"
    return next(iter(adapter.landings))


def lendable(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> frozenset[int]:
    """Positions of the needs that land in the framework's own memory."""
    placing = _placing(adapter)
    if options.allocator != "framework" and not adapter.devices and placing is None:
        return frozenset()

    def lends(request: Request) -> bool:
        known = request.dtype.name in adapter.lendable
        if lands(request, adapter, options) is not _HOST:
            return known and whose(adapter, options) == "framework"
        asked = known and options.allocator == "framework"
        if placing is not None:
            return placing.lends(request) or (asked and not placing.copies(request))
        return asked and adapter.on_host and not adapter.devices

    return frozenset(n for n, request in enumerate(requests) if lends(request))


def _placing(adapter: Adapter) -> Placing | None:
    """The adapter where it knows more of each need; asked once, since Python takes its time."""
    return adapter if isinstance(adapter, Placing) else None


def copied(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> list[Request]:
    """The needs that the framework copies out of mfload's memory."""
    return [requests[n] for n in sorted(passing(requests, adapter, options))]


def passing(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> frozenset[int]:
    """Their positions."""
    plain = adapter.on_host and all(form.how != "copy" for form in adapter.forms.values())
    placing = _placing(adapter)
    if plain and placing is None:
        return frozenset()

    def copies(request: Request) -> bool:
        by_form = adapter.forms[request.dtype.name].how == "copy"
        if lands(request, adapter, options) is not _HOST:
            return by_form
        if placing is not None:
            return placing.copies(request)
        return by_form or not adapter.on_host

    return frozenset(n for n, request in enumerate(requests) if copies(request))


def groups(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> list[list[int]]:
    """Groups of needs; what the framework copies never exceeds an overhead in any.

    The parts of a tensor stay together where they fit.

    Raises:
        MemoryLimitError: One tensor exceeds it alone.
    """
    waiting = {n: requests[n] for n in sorted(passing(requests, adapter, options))}
    places = {n: lands(request, adapter, options) for n, request in waiting.items()}
    limits = waiting_limits(list(waiting.values()), adapter, options)
    if all(held <= limits[place] for place, held in _sums(waiting, places, waiting).items()):
        return [list(range(len(requests)))]
    made: list[list[int]] = [[]]
    held: Counter[int | None] = Counter()

    def exceeds(numbers: Sequence[int]) -> bool:
        more = _sums(numbers, places, waiting)
        return any(held[place] and held[place] + n > limits[place] for place, n in more.items())

    for run in _runs(requests):
        # A tensor whose parts come in several waves is read several times.
        if exceeds(run):
            made.append([])
            held.clear()
        for n in run:
            if exceeds([n]):
                made.append([])
                held.clear()
            held.update(_sums([n], places, waiting))
            made[-1].append(n)
    return made


def _sums(
    numbers: Iterable[int],
    places: dict[int, int | None],
    waiting: dict[int, Request],
) -> Counter[int | None]:
    """Bytes that wait, by where they do."""
    found: Counter[int | None] = Counter()
    for n in numbers:
        if n in waiting and waiting[n].nbytes:
            found[places[n]] += waiting[n].nbytes
    return found


def apart(requests: Sequence[Request], groups_: Sequence[Sequence[int]]) -> int:
    """How many tensors have parts in more than one group."""
    counts = Counter(name for group in groups_ for name in {requests[n].info.name for n in group})
    return sum(count > 1 for count in counts.values())


def _runs(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Positions of needs, those of one tensor together where they come together."""
    for _, run in itertools.groupby(range(len(requests)), key=lambda n: requests[n].info.name):
        yield list(run)


def waiting_bytes(
    requests: Sequence[Request], adapter: Adapter, options: LoadOptions
) -> dict[int | None, int]:
    """The most bytes of tensors that wait at once to be copied by the framework, by where."""
    waiting = copied(requests, adapter, options)
    limits = waiting_limits(waiting, adapter, options)
    held: Counter[int | None] = Counter()
    for request in waiting:
        held[lands(request, adapter, options)] += request.nbytes
    return {place: min(nbytes, limits[place]) for place, nbytes in held.items()}


def waiting_limits(
    waiting: Sequence[Request], adapter: Adapter, options: LoadOptions
) -> dict[int | None, int]:
    """Bytes of tensors that may wait at once to be copied by the framework, by where.

    Raises:
        MemoryLimitError: One tensor exceeds what the user allowed.
    """
    largest: dict[int | None, Request] = {}
    for request in waiting:
        place = lands(request, adapter, options)
        if place not in largest or request.nbytes > largest[place].nbytes:
            largest[place] = request
    return {place: _limit(place, request, adapter, options) for place, request in largest.items()}


def _limit(place: int | None, largest: Request, adapter: Adapter, options: LoadOptions) -> int:
    name = "max_host_overhead" if place is _HOST else "max_device_overhead"
    limit: int | None = getattr(options, name)
    if limit is None:
        return max(OVERHEAD, largest.nbytes)
    if largest.nbytes > limit:
        raise errors.MemoryLimitError(
            f"{adapter.name} must copy the tensor, which is larger than the overhead",
            tensor=largest.info.name,
            expected=f"{name} of {largest.nbytes} bytes or more",
            found=limit,
        )
    return limit
