"""Waves: what a framework copies out of mfload's memory comes in turns, within the overhead."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from mfload import errors
from mfload.frameworks.adapter import Adapter, Placing
from mfload.placement import Need
from mfload.settings import OVERHEAD, Settings


def lendable(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> frozenset[int]:
    """Positions of the needs that land in the framework's own memory."""
    asked = settings.landing == "framework"
    if isinstance(adapter, Placing):
        names = adapter.lendable if asked else ()
        return frozenset(
            n
            for n, need in enumerate(needs)
            if adapter.lends(need) or (need.dtype.name in names and not adapter.copies(need))
        )
    if not asked or not adapter.on_host:
        return frozenset()
    return frozenset(n for n, need in enumerate(needs) if need.dtype.name in adapter.lendable)


def copied(needs: Sequence[Need], adapter: Adapter) -> list[Need]:
    """The needs that the framework copies out of mfload's memory."""
    return [needs[n] for n in _copied(needs, adapter)]


def _copied(needs: Sequence[Need], adapter: Adapter) -> Sequence[int]:
    if isinstance(adapter, Placing):
        return [n for n, need in enumerate(needs) if adapter.copies(need)]
    if not adapter.on_host:
        return range(len(needs))
    names = {name for name, form in adapter.forms.items() if form.how == "copy"}
    return [n for n, need in enumerate(needs) if need.dtype.name in names] if names else []


def groups(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> list[list[int]]:
    """Groups of needs; what the framework copies never exceeds the overhead in any.

    The parts of a tensor stay together where they fit.

    Raises:
        MemoryLimitError: One tensor exceeds it alone.
    """
    numbers = set(_copied(needs, adapter))
    waiting = [needs[n] for n in sorted(numbers)]
    limit = waiting_limit(waiting, adapter, settings)
    if sum(need.nbytes for need in waiting) <= limit:
        return [list(range(len(needs)))]
    made: list[list[int]] = [[]]
    held = 0
    for run in _runs(needs):
        # A tensor whose parts come in several waves is read several times.
        whole = sum(needs[n].nbytes for n in run if n in numbers)
        if held and whole and held + whole > limit:
            made.append([])
            held = 0
        for n in run:
            nbytes = needs[n].nbytes if n in numbers else 0
            if nbytes and held + nbytes > limit:
                made.append([])
                held = 0
            held += nbytes
            made[-1].append(n)
    return made


def apart(needs: Sequence[Need], groups_: Sequence[Sequence[int]]) -> int:
    """How many tensors have parts in more than one group."""
    counts = Counter(name for group in groups_ for name in {needs[n].info.name for n in group})
    return sum(count > 1 for count in counts.values())


def _runs(needs: Sequence[Need]) -> Iterator[list[int]]:
    """Positions of needs, those of one tensor together where they come together."""
    for _, run in itertools.groupby(range(len(needs)), key=lambda n: needs[n].info.name):
        yield list(run)


def waiting_limit(waiting: Sequence[Need], adapter: Adapter, settings: Settings) -> int:
    """Bytes of tensors that may wait at once to be copied by the framework.

    Raises:
        MemoryLimitError: One tensor exceeds what the user allowed.
    """
    if not waiting:
        return 0
    limit = settings.max_host_overhead
    largest = max(waiting, key=lambda need: need.nbytes)
    if limit is None:
        return max(OVERHEAD, largest.nbytes)
    if largest.nbytes > limit:
        raise errors.MemoryLimitError(
            f"{adapter.name} must copy the tensor, which is larger than the overhead",
            tensor=largest.info.name,
            expected=f"max_host_overhead of {largest.nbytes} bytes or more",
            found=limit,
        )
    return limit
