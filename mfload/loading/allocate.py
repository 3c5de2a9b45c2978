"""Memory for a plan's buffers: mfload's own, the framework's, a device's, or a map of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfload import errors
from mfload.frameworks.base import Adapter, Lent
from mfload.io import buffers
from mfload.planning.planner import Plan
from mfload.sources.local import LocalFile


def lend(plan: Plan, adapter: Adapter) -> dict[int, Lent]:
    """The framework's own arrays, filled in place, by the number of their buffer."""
    places = [
        place
        for place, (_, owner, _) in zip(plan.places, plan.allocations, strict=True)
        if owner == "framework"
    ]
    lent = adapter.lend([place.request for place in places]) if places else []
    return {place.buffer: each for place, each in zip(places, lent, strict=True)}


def allocate(
    plan: Plan, sources: Sequence[LocalFile], adapter: Adapter, lent: Mapping[int, Lent]
) -> list[Any]:
    """The memory of each buffer: a uint8 array, or a `DeviceBuffer`.

    Raises:
        MemoryLimitError: The system or a device refused memory.
        SourceChangedError: A file to be mapped has shrunk.
    """
    memory: list[Any] = []
    for number, (nbytes, source, device) in enumerate(plan.buffers):
        if number in lent:
            memory.append(lent[number].memory)
        elif source is not None:
            memory.append(_map(plan, number, sources[source], adapter.readonly_maps))
        elif device is None:
            memory.append(buffers.allocate(nbytes))
        else:
            try:
                memory.append(adapter.devices[device].allocate(nbytes))
            except errors.MfloadError as error:
                inside = (p.request.info.name for p in plan.places if p.buffer == number)
                error.tensor = error.tensor or next(inside, None)
                raise
    return memory


def _map(plan: Plan, number: int, source: LocalFile, readonly: bool) -> Any:
    """A private map of a file, of which the parts that the plan uses are brought in."""
    from mfload.io.mapped import map_file

    ranges: list[tuple[int, int]] = []
    for request, buffer, at in plan.places:
        if buffer != number or not request.nbytes:
            continue
        if ranges and sum(ranges[-1]) == at:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + request.nbytes
        else:
            ranges.append((at, request.nbytes))
    mapped = map_file(source, ranges)
    if readonly:
        mapped.flags.writeable = False
    return mapped
