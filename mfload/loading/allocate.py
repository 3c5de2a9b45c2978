"""Slot providers: whose memory segments land in.

One protocol, so that memory of another owner (a framework's allocator, a file's map, a module's
existing parameters, a device) is one more provider and not one more path through the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mfload import errors
from mfload.cuda.device import Device
from mfload.frameworks.base import Adapter, Lent
from mfload.io import buffers
from mfload.io.mapped import map_file
from mfload.planning.layout import BufferSpec
from mfload.planning.planner import Plan
from mfload.sources.local import LocalFile


class SlotProvider(Protocol):
    """Memory for a plan's buffers."""

    def memory(self, number: int, spec: BufferSpec) -> Any | None:
        """The memory of one buffer.

        Args:
            number: Its number in the plan.
            spec: Its size, and the source it maps if it does.

        Returns:
            A uint8 array of at least `spec.nbytes` bytes that keeps its owner alive, or a
            `DeviceBuffer` where the spec names a device; None where another provider is to be
            asked.
        """
        ...

    def array(self, number: int) -> Any | None:
        """The array that is complete once the buffer is filled, None where a view is made."""
        ...


class OwnMemory:
    """mfload's own buffers: takes every buffer that maps no file.

    Args:
        plan: The plan.
        devices: The devices that its buffers name by number.
    """

    def __init__(self, plan: Plan, devices: Sequence[Device]) -> None:
        self._plan = plan
        self._devices = devices

    def memory(self, number: int, spec: BufferSpec) -> Any | None:
        """A fresh buffer (see `SlotProvider`)."""
        if spec.source is not None:
            return None
        if spec.device is None:
            return buffers.allocate(spec.nbytes)
        try:
            return self._devices[spec.device].allocate(spec.nbytes)
        except errors.MfloadError as error:
            inside = (
                place.request.info.name for place in self._plan.places if place.buffer == number
            )
            error.tensor = error.tensor or next(inside, None)
            raise

    def array(self, number: int) -> Any | None:
        """Views are made of these."""
        return None


class FileMaps:
    """Private maps of the files (see `io.mapped`).

    Args:
        plan: Which parts of them are used.
        sources: The files, by number.
        readonly: Whether writing is refused.
    """

    def __init__(self, plan: Plan, sources: Sequence[LocalFile], *, readonly: bool) -> None:
        self._sources = sources
        self._readonly = readonly
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for request, buffer, at in plan.places:
            if plan.buffers[buffer].source is None or not request.nbytes:
                continue
            ranges = self._ranges.setdefault(buffer, [])
            if ranges and sum(ranges[-1]) == at:
                ranges[-1] = ranges[-1][0], ranges[-1][1] + request.nbytes
            else:
                ranges.append((at, request.nbytes))

    def memory(self, number: int, spec: BufferSpec) -> Any | None:
        """A map of the file (see `SlotProvider`)."""
        if spec.source is None:
            return None
        mapped = map_file(self._sources[spec.source], self._ranges.get(number, []))
        if self._readonly:
            mapped.flags.writeable = False
        return mapped

    def array(self, number: int) -> Any | None:
        """Views are made of these."""
        return None


class FrameworkMemory:
    """Arrays of the framework's own allocator, one a buffer, filled in place.

    Args:
        plan: The plan.
        adapter: The framework.
        alone: Positions of the needs that it lends an array for.
    """

    def __init__(self, plan: Plan, adapter: Adapter, alone: frozenset[int]) -> None:
        places = [plan.places[n] for n in sorted(alone)]
        lent = adapter.lend([place.request for place in places]) if places else []
        self._lent: dict[int, Lent] = {
            place.buffer: each for place, each in zip(places, lent, strict=True)
        }

    def memory(self, number: int, spec: BufferSpec) -> Any | None:
        """The bytes of an array (see `SlotProvider`)."""
        return self._lent[number].memory if number in self._lent else None

    def array(self, number: int) -> Any | None:
        """The array itself."""
        return self._lent[number].array if number in self._lent else None


def allocate(plan: Plan, providers: Sequence[SlotProvider]) -> list[Any]:
    """The memory of each buffer, from the first provider that has it.

    Raises:
        MemoryLimitError: The system refused memory.
        SourceChangedError: A file to be mapped has shrunk.
    """
    return [_first(number, spec, providers) for number, spec in enumerate(plan.buffers)]


def _first(number: int, spec: BufferSpec, providers: Sequence[SlotProvider]) -> Any:
    for provider in providers:
        memory = provider.memory(number, spec)
        if memory is not None:
            return memory
    raise AssertionError(f"no provider has buffer {number}")
