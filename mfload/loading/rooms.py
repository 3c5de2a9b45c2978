"""Rooms: a load that can't fit, on the host or on a device, is refused before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mfload import errors
from mfload.frameworks.base import Adapter
from mfload.io import probes
from mfload.loading import batches
from mfload.loading.preparing import Preparation
from mfload.options import LoadOptions
from mfload.planning.planner import Plan
from mfload.planning.requests import Request
from mfload.report import human

_WORTH_ASKING = 64 << 20


def check(requests: Sequence[Request], adapter: Adapter, options: LoadOptions) -> None:
    """Refuses a load whose result alone does not fit.

    Args:
        requests: All that is loaded.
        adapter: The framework.
        options: How.

    Raises:
        MemoryLimitError: It does not fit.
    """
    held: Counter[int | None] = Counter()
    lent: Counter[int] = Counter()
    for n, request in enumerate(requests):
        number = batches.lands(request, adapter, options)
        held[number] += request.nbytes
        if number is not None and batches.lendable([request], adapter, options):
            lent[number] += requests[n].nbytes
    on_host = held.pop(None, 0)
    if adapter.on_host:
        check_host(on_host)
    for number, nbytes in held.items():
        _check_device(adapter, number or 0, nbytes - lent[number or 0], lent[number or 0])


def check_plan(made: Plan, way: Preparation) -> None:
    """Refuses a plan that does not fit, with what it holds beside its result.

    Args:
        made: The plan.
        way: What it was made by.

    Raises:
        MemoryLimitError: It does not fit.
    """
    check_host(made.buffer_bytes + way.overheads.host(made))
    if not made.device_bytes:
        return
    requests = [place.request for place in made.places]
    borrowed = {made.places[n].buffer for n in way.lendable(requests)}
    beside = way.overheads.device(made)
    for number, nbytes in made.device_bytes.items():
        lent = sum(made.buffers[n].nbytes for n in borrowed if made.buffers[n].device == number)
        _check_device(way.adapter, number, nbytes - lent + beside[number], lent)


def check_host(needed: int) -> None:
    """Refuses a load that would have the kernel kill the process.

    Args:
        needed: Bytes of memory that it will hold. Below 64 MiB nobody is asked.

    Raises:
        MemoryLimitError: It does not fit in what the machine or a control group leaves.
    """
    if needed < _WORTH_ASKING:
        return
    room = probes.memory_room()
    if room is not None and needed > room[0]:
        raise errors.MemoryLimitError(
            f"the load does not fit in the {room[1]}",
            expected=f"{needed} bytes",
            found=f"{room[0]} bytes free",
        )


def _check_device(adapter: Adapter, number: int, own: int, lent: int) -> None:
    """Refuses what does not fit in a device's memory, or in a framework's part of it."""
    device, pool = adapter.devices[number], adapter.pool(number)
    room = device.room()
    advice = "" if pool is None else f"; {pool.advice}"
    if own > room.free:
        raise errors.MemoryLimitError(
            f"the load does not fit on {device.name}{advice}",
            expected=f"{own} bytes ({human(own)}) beside what {adapter.name} holds",
            found=f"{room.free} bytes free of {room.total}",
        )
    if lent and pool is not None and pool.free is not None and lent > pool.free:
        raise errors.MemoryLimitError(
            f"the load does not fit in the memory that {adapter.name} has on {device.name}{advice}",
            expected=f"{lent} bytes ({human(lent)})",
            found=f"{pool.free} bytes free",
        )
