"""What a source holds on a device already: arrays over it, or copies from device to device.

Such a source has `lying(offset, nbytes)`: the device memory of a range of its bytes, or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from operator import itemgetter
from typing import Any

import numpy as np

from mfload import errors
from mfload.cuda import copies
from mfload.cuda.device import DeviceRows
from mfload.cuda.memory import DeviceBuffer
from mfload.frameworks.base import Adapter
from mfload.io.route import Leg
from mfload.options import LoadOptions
from mfload.planning import extents
from mfload.planning.blocks import Copy
from mfload.planning.layout import DEVICE_ALIGNMENT
from mfload.planning.plan import Plan, Position
from mfload.planning.request import Allocation, Request, box_of
from mfload.planning.slicing import Selection
from mfload.sources.base import Source
from mfload.stored import Stored

_SPOT = itemgetter(1, 2)  # Of a place: its buffer, and the first byte there.


def narrowed(request: Request) -> Request:
    """A request for a part of one box of a tensor that is held in boxes, as one for that box."""
    info, dtype, selection, checked, devices = request
    fits = not info.simple and dtype.elements == 1 and dtype is info.dtype and request.nbytes
    if not fits:
        return request
    if selection is not None and (selection.steps is not None or not selection.simple):
        return request  # The host puts together what lands with steps.
    wanted = box_of(request)
    for piece in info.pieces:
        held = None if piece.stored is None else piece.stored.box
        if held is None or piece.stored != Stored(box=held):
            continue
        if all(a <= c and d <= b for (a, b), (c, d) in zip(held, wanted, strict=True)):
            shape = tuple(high - low for low, high in held)
            alone = info._replace(shape=shape, pieces=(piece._replace(stored=None),))
            if selection is None:
                return Request(alone, dtype, None, checked, devices)
            pairs = zip(selection, held, strict=True)
            axes = [axis._replace(start=axis.start - low) for axis, (low, _) in pairs]
            some = any(a.drop or a.size != n for a, n in zip(axes, shape, strict=True))
            return Request(alone, dtype, Selection(axes) if some else None, checked, devices)
    return request


def allocation(
    request: Request,
    found: Allocation,
    sources: Sequence[Source],
    adapter: Adapter,
    options: LoadOptions,
) -> Allocation:
    """Where a request lands if devices take it from where it lies; else as was found."""
    rows = None if found.device is None else _rows(request)
    there = None if rows is None else _lying(request, sources)
    if rows is None or there is None:
        return found
    over = (
        rows[1].count == 1
        and there.device is adapter.devices[found.device or 0]
        and (there.address + rows[0]) % DEVICE_ALIGNMENT == 0
        and not (found.copied or adapter.lends_held or options.allocator != "auto")
        and not (options.peer is not None and options.peer.copy)
    )
    return Allocation(found.device, "source", False, True) if over else found._replace(near=True)


_WAYS = {
    (True, True): "arrays lie in its memory, not compared with checksums",
    (True, False): "copied from device to device, not compared with checksums",
    (False, False): "read through the host",
}


def legs(
    route: Mapping[int, Leg],
    requests: Sequence[Request],
    allocations: Sequence[Allocation],
    sources: Sequence[Source],
) -> dict[int, Leg]:
    """The route, which says for each source how what it holds on devices is used."""
    made, ways = dict(route), dict[int, dict[str, None]]()
    for request, each in zip(requests, allocations, strict=True):
        for piece in request.info.pieces if request.nbytes else ():
            said = ways.setdefault(piece.source, {})
            said[_WAYS[each.near, each.owner == "source"]] = None
    for number in made:
        if number in ways and hasattr(sources[number], "lying"):
            source: Any = sources[number]
            why = f"{source.why}: {', '.join(ways[number])}"
            made[number] = made[number]._replace(engine=source.engine, why=why)
    return made


def lying(plan: Plan, sources: Sequence[Source]) -> dict[int, DeviceBuffer]:
    """The buffers of a plan that are memory of sources, by number."""
    made: dict[int, DeviceBuffer] = {}
    for place, each in zip(plan.places, plan.allocations, strict=True):
        if each.owner == "source":
            there, (start, _) = _open(place.request, sources), _rows(place.request) or (0, None)
            if start or place.request.nbytes < there.nbytes:
                there = there.part(start, place.request.nbytes)
            made[place.buffer] = there
    return made


def copy(plan: Plan, memory: Sequence[Any], sources: Sequence[Source]) -> int:
    """Copies from where it lies on devices to the buffers of a plan; returns the bytes copied.

    Raises SourceError if the memory of a source can't be read, or is not what it was.
    """
    used: dict[int, int] = {}
    copied: list[Position] = []
    for place, each in zip(plan.places, plan.allocations, strict=True):
        if each.near and each.owner != "source":
            copied.append(place)
            number = place.request.info.pieces[0].source
            used[number] = used.get(number, 0) + place.request.nbytes
    streams: dict[str, Any] = {}
    try:
        with ExitStack() as stack:
            for target, at, there, start, rows in _copies(copied, memory, sources):
                name = target.device.name
                if name not in streams:
                    streams[name] = stack.enter_context(closing(target.device.stream()))
                streams[name].copy_within(target, at, there, start, rows)
            for stream in streams.values():
                stream.synchronize()
    except errors.DeviceError as error:
        what, file = "the seed's device memory can't be read", sources[min(used)].name
        raise errors.ReadError(what, file=file, found=str(error)) from error
    for number in used:
        sources[number].check()
    return sum(used.values())


_Copied = tuple[DeviceBuffer, int, DeviceBuffer, int, DeviceRows]


def _copies(
    places: Sequence[Position], memory: Sequence[Any], sources: Sequence[Source]
) -> Iterator[_Copied]:
    """Copies, with target and source, their first bytes, and rows.

    Tensors that lie at equal distances in both, with no more between them than their alignment, are
    copied together: a copy of less than 32 MiB takes longer by the byte.
    """
    last: _Copied | None = None
    for request, buffer, at in sorted(places, key=_SPOT):
        there, target = _open(request, sources), memory[buffer]
        start, rows = _rows(request) or (0, DeviceRows.one(0))
        if last is not None:
            held, begin, seen, first, before = last
            behind = at - begin - before.nbytes
            if (
                held is target
                and seen.owner is there.owner
                and 0 <= behind < DEVICE_ALIGNMENT
                and before.count == rows.count == 1
                and there.address + start - seen.address - first == at - begin
            ):
                last = (
                    held,
                    begin,
                    seen,
                    first,
                    DeviceRows.one(before.nbytes + behind + rows.nbytes),
                )
                continue
            yield last
        last = target, at, there, start, rows
    if last is not None:
        yield last


def _lying(request: Request, sources: Sequence[Source]) -> Any:
    """The memory of a device in which the tensor of a request lies; None if there is none."""
    source, offset, nbytes, _ = request.info.pieces[0]
    lying: Any = getattr(sources[source], "lying", None)
    return None if lying is None else lying(offset, nbytes)


def _open(request: Request, sources: Sequence[Source]) -> Any:
    """The same of a request that is planned to use it."""
    there = _lying(request, sources)
    if there is None:  # By another thread.
        name = sources[request.info.pieces[0].source].name
        raise errors.UsageError("the checkpoint was closed", file=name)
    return there


def _rows(request: Request) -> tuple[int, DeviceRows] | None:
    """First byte and rows of a request in its tensor; None if it is not rows alone."""
    info, dtype, selection, *_ = request
    if dtype is not info.dtype or not info.simple or not request.nbytes:
        return None
    if selection is None:
        return 0, DeviceRows.one(request.nbytes)
    if (first := extents.contiguous(request)) is not None:
        return first - info.pieces[0].offset, DeviceRows.one(request.nbytes)
    if not selection.simple or dtype.elements > 1:
        return None
    strides, unit = extents.c_strides(info.shape, dtype.nbytes), np.dtype(f"V{dtype.nbytes}")
    found = copies.rows(Copy(tuple(a.size for a in selection), strides, 0, unit, unit))
    start = sum(axis.start * stride for axis, stride in zip(selection, strides, strict=True))
    return None if found is None else (start, found)
