"""Memory of a load: whether there is enough, and what each buffer lies in."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.dlpack import array_at
from mfload.frameworks.base import Adapter, Lent
from mfload.io import buffers
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import Plan
from mfload.sources.base import Source

if TYPE_CHECKING:
    from mfload.cuda.memory import DeviceBuffer

Allocators = Mapping[int, "Callable[[int], DeviceBuffer]"]
"""What makes a buffer of so many bytes on a device, by its number."""

# For less, no limit is looked at: if it is refused, the system says so.
_WORTH_LOOKING = 64 << 10
# For less, files of the system are not read: they take some 0.1 ms.
_WORTH_ASKING = 16 << 20


def check_host(needed: int, specs: Sequence[BufferSpec] = ()) -> int:
    """Refuses a load that can't have its memory, or would have the kernel kill the process.

    It needs bytes of memory beside its buffers, some of which may be maps of files. Returns the
    bytes that are left then, 0 if that is not known. Raises MemoryLimitError if it does not fit in
    what the process, a control group or the machine has.
    """
    mapped = 0
    for nbytes, source, device in specs:
        if source is not None:
            mapped += nbytes
        elif device is None:
            needed += nbytes
    if needed + mapped < _WORTH_LOOKING:
        return 0
    from mfload.io import probes
    from mfload.report import human

    left: list[int] = []
    for limit in probes.process_limits():
        left.append(limit.limit - limit.used - needed - mapped)
        if needed + mapped > limit.limit - limit.used:
            raise errors.MemoryLimitError(
                f"the load does not fit in {limit.name}, the limit of this process",
                expected=f"{human(needed + mapped)} for the result and what it takes to load it",
                found=f"{limit.name} {human(limit.limit)}, in use {human(limit.used)}",
            )
    room = probes.memory_room() if needed >= _WORTH_ASKING else None
    if room is not None and needed > room[0]:
        raise errors.MemoryLimitError(
            f"the load does not fit in the {room[1]}",
            expected=errors.amount(needed),
            found=f"{errors.amount(room[0])} free",
        )
    return 0 if room is None else min([room[0] - needed, *left])


def check_device(adapter: Adapter, number: int, own: int, lent: int) -> None:
    """Raises MemoryLimitError if mfload's own bytes, or those lent by the framework, don't fit."""
    from mfload.report import human

    device, pool = adapter.devices[number], adapter.pool(number)
    room = device.memory_info()
    advice = "" if pool is None else f"; {pool.advice}"
    if own > room.free:
        raise errors.MemoryLimitError(
            f"the load does not fit on {device.name}{advice}",
            expected=f"{errors.amount(own)} ({human(own)}) beside what {adapter.name} holds",
            found=f"{errors.amount(room.free)} free of {room.total}",
        )
    if lent and pool is not None and pool.free is not None and lent > pool.free:
        raise errors.MemoryLimitError(
            f"the load does not fit in the memory that {adapter.name} has on {device.name}{advice}",
            expected=f"{errors.amount(lent)} ({human(lent)})",
            found=f"{errors.amount(pool.free)} free",
        )


def not_lent(plan: Plan) -> list[BufferSpec]:
    """The buffers that are not lent."""
    pairs = zip(plan.places, plan.allocations, strict=True)
    lent = {place.buffer for place, allocation in pairs if allocation.owner == "framework"}
    return [spec for number, spec in enumerate(plan.buffers) if number not in lent]


def lend(plan: Plan, adapter: Adapter) -> dict[int, Lent]:
    """The framework's own arrays, filled in place, by the number of their buffer."""
    pairs = zip(plan.places, plan.allocations, strict=True)
    places = [place for place, allocation in pairs if allocation.owner == "framework"]
    lent = adapter.lend([place.request for place in places]) if places else []
    return {place.buffer: each for place, each in zip(places, lent, strict=True)}


def allocators(specs: Sequence[BufferSpec], adapter: Adapter) -> Allocators:
    """What the adapter allocates those of the buffers with that lie on devices."""
    sizes: dict[int, list[int]] = {}
    for nbytes, source, device in specs:
        if device is not None and source is None:
            sizes.setdefault(device, []).append(nbytes)
    return {device: adapter.allocator(device, each) for device, each in sizes.items()}


def allocate(
    plan: Plan,
    sources: Sequence[Source],
    adapter: Adapter,
    lent: Mapping[int, Lent],
    there: Allocators,
) -> list[Any]:
    """The memory of each buffer: a uint8 array, or a `DeviceBuffer`.

    On devices that `allocators` gave nothing for, it is mfload's own. Raises MemoryLimitError if
    memory is refused, SourceChangedError if a file to map has shrunk.
    """
    memory: list[Any] = []
    lying: dict[int, Any] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    with adapter.allocating() if there else nullcontext():
        for number, (nbytes, source, device) in enumerate(plan.buffers):
            if number in lent:
                memory.append(lent[number].memory)
            elif source is not None and device is not None:
                if not lying:
                    from mfload.loading import near  # Only some sources lie on devices.

                    lying = near.lying(plan, sources)
                memory.append(lying[number])
            elif source is not None:
                ranges = ranges or _mapped_ranges(plan)
                some = ranges[number] or [(0, 1)]  # Of empty tensors alone.
                memory.append(_map(sources[source], some, adapter.readonly_maps))
            elif device is None:
                memory.append(buffers.allocate(nbytes))
            else:
                try:
                    make = there.get(device) or adapter.devices[device].allocate
                    memory.append(make(nbytes))
                except errors.MfloadError as error:
                    inside = (p.request.info.name for p in plan.places if p.buffer == number)
                    error.tensor = error.tensor or next(inside, None)
                    raise
    return memory


def share(plan: Plan, memory: list[Any], adapter: Adapter) -> list[str]:
    """Has the unified device of an adapter use what landed in buffers of the host; notes on that.

    They are locked when they are full, since a driver makes the pages of one after another.
    """
    from mfload.cuda.memory import share as shared

    (device,) = adapter.devices
    pairs = zip(plan.places, plan.allocations, strict=False)  # None, if nothing is copied.
    copied = {place.buffer for place, allocation in pairs if allocation.copied}
    nbytes = 0
    for number, spec in enumerate(plan.buffers):
        if number in copied or not spec.nbytes or not buffers.is_own(memory[number]):
            continue
        try:
            memory[number] = shared(device, memory[number])
        except errors.MemoryLimitError as error:
            return [f"copied to {device.name}, which shares the memory of the host: {error}"]
        nbytes += spec.nbytes
    note = f"read into memory that {device.name} and the host share: {errors.amount(nbytes)}"
    return [note] if nbytes else []


def _mapped_ranges(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """The parts of maps that the plan uses, by the number of their buffer."""
    found: dict[int, list[tuple[int, int]]] = {
        number: []
        for number, spec in enumerate(plan.buffers)
        if spec.source is not None and spec.device is None
    }
    for request, buffer, at in plan.places:
        if buffer not in found or not request.nbytes:
            continue
        ranges = found[buffer]
        if ranges and sum(ranges[-1]) == at:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + request.nbytes
        else:
            ranges.append((at, request.nbytes))
    return found


def _map(source: Source, ranges: list[tuple[int, int]], readonly: bool) -> Any:
    """A private map of what the plan uses of a file; indices are offsets in the file."""
    from mfload.io.mapped import map_file

    # For one tensor of a large file, to map all would take address space again and again.
    begin = min(ranges)[0] // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = max(map(sum, ranges))
    wanted = [(start - begin, nbytes) for start, nbytes in ranges]
    part = map_file(source, wanted, begin, end - begin)
    # What lies around it is not mapped, and no place of the plan.
    mapped = array_at(part, part.ctypes.data - begin, (source.size,))
    if readonly:
        mapped.flags.writeable = False
    return mapped
