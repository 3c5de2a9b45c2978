"""Waves: what a framework copies out of mfload's memory comes in turns, within the overhead.

Host and device memory have an overhead each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mfload import errors
from mfload.frameworks.adapter import Adapter, Placing, Whose
from mfload.placement import Need
from mfload.settings import OVERHEAD, Settings

_HOST = None


def lands(need: Need, adapter: Adapter, settings: Settings) -> int | None:
    """The number of the adapter's device in whose memory a need lands, None for the host's."""
    if settings.by_host or settings.engine == "mmap" or not adapter.devices:
        return _HOST
    return adapter.lands(need)


def whose(adapter: Adapter, settings: Settings) -> Whose:
    """Whose memory needs land in on a device."""
    asked = adapter.landing if settings.landing == "auto" else settings.landing
    if asked in adapter.landings:
        return "framework" if asked == "framework" else "mfload"
    return next(iter(adapter.landings))


def lendable(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> frozenset[int]:
    """Positions of the needs that land in the framework's own memory."""
    placing = _placing(adapter)
    if settings.landing != "framework" and not adapter.devices and placing is None:
        return frozenset()

    def lends(need: Need) -> bool:
        known = need.dtype.name in adapter.lendable
        if lands(need, adapter, settings) is not _HOST:
            return known and whose(adapter, settings) == "framework"
        asked = known and settings.landing == "framework"
        if placing is not None:
            return placing.lends(need) or (asked and not placing.copies(need))
        return asked and adapter.on_host and not adapter.devices

    return frozenset(n for n, need in enumerate(needs) if lends(need))


def _placing(adapter: Adapter) -> Placing | None:
    """The adapter where it knows more of each need; asked once, since Python takes its time."""
    return adapter if isinstance(adapter, Placing) else None


def copied(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> list[Need]:
    """The needs that the framework copies out of mfload's memory."""
    return [needs[n] for n in sorted(passing(needs, adapter, settings))]


def passing(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> frozenset[int]:
    """Their positions."""
    plain = adapter.on_host and all(form.how != "copy" for form in adapter.forms.values())
    placing = _placing(adapter)
    if plain and placing is None:
        return frozenset()

    def copies(need: Need) -> bool:
        by_form = adapter.forms[need.dtype.name].how == "copy"
        if lands(need, adapter, settings) is not _HOST:
            return by_form
        if placing is not None:
            return placing.copies(need)
        return by_form or not adapter.on_host

    return frozenset(n for n, need in enumerate(needs) if copies(need))


def groups(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> list[list[int]]:
    """Groups of needs; what the framework copies never exceeds an overhead in any.

    The parts of a tensor stay together where they fit.

    Raises:
        MemoryLimitError: One tensor exceeds it alone.
    """
    waiting = {n: needs[n] for n in sorted(passing(needs, adapter, settings))}
    places = {n: lands(need, adapter, settings) for n, need in waiting.items()}
    limits = waiting_limits(list(waiting.values()), adapter, settings)
    if all(held <= limits[place] for place, held in _sums(waiting, places, waiting).items()):
        return [list(range(len(needs)))]
    made: list[list[int]] = [[]]
    held: Counter[int | None] = Counter()

    def exceeds(numbers: Sequence[int]) -> bool:
        more = _sums(numbers, places, waiting)
        return any(held[place] and held[place] + n > limits[place] for place, n in more.items())

    for run in _runs(needs):
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
    waiting: dict[int, Need],
) -> Counter[int | None]:
    """Bytes that wait, by where they do."""
    found: Counter[int | None] = Counter()
    for n in numbers:
        if n in waiting and waiting[n].nbytes:
            found[places[n]] += waiting[n].nbytes
    return found


def apart(needs: Sequence[Need], groups_: Sequence[Sequence[int]]) -> int:
    """How many tensors have parts in more than one group."""
    counts = Counter(name for group in groups_ for name in {needs[n].info.name for n in group})
    return sum(count > 1 for count in counts.values())


def _runs(needs: Sequence[Need]) -> Iterator[list[int]]:
    """Positions of needs, those of one tensor together where they come together."""
    for _, run in itertools.groupby(range(len(needs)), key=lambda n: needs[n].info.name):
        yield list(run)


def waiting_bytes(
    needs: Sequence[Need], adapter: Adapter, settings: Settings
) -> dict[int | None, int]:
    """The most bytes of tensors that wait at once to be copied by the framework, by where."""
    waiting = copied(needs, adapter, settings)
    limits = waiting_limits(waiting, adapter, settings)
    held: Counter[int | None] = Counter()
    for need in waiting:
        held[lands(need, adapter, settings)] += need.nbytes
    return {place: min(nbytes, limits[place]) for place, nbytes in held.items()}


def waiting_limits(
    waiting: Sequence[Need], adapter: Adapter, settings: Settings
) -> dict[int | None, int]:
    """Bytes of tensors that may wait at once to be copied by the framework, by where.

    Raises:
        MemoryLimitError: One tensor exceeds what the user allowed.
    """
    largest: dict[int | None, Need] = {}
    for need in waiting:
        place = lands(need, adapter, settings)
        if place not in largest or need.nbytes > largest[place].nbytes:
            largest[place] = need
    return {place: _limit(place, need, adapter, settings) for place, need in largest.items()}


def _limit(place: int | None, largest: Need, adapter: Adapter, settings: Settings) -> int:
    name = "max_host_overhead" if place is _HOST else "max_device_overhead"
    limit: int | None = getattr(settings, name)
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
