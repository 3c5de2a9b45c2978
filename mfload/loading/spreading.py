"""Spreading: what several devices need is a unit for each that has memory of its own.

On the host one buffer serves all the devices of a need. In device memory each has its own, and
the plan sees to it that the bytes are read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfload.frameworks.base import Adapter
from mfload.loading import batches
from mfload.options import LoadOptions
from mfload.planning.requests import Request


def spread(
    requests: Sequence[Request], adapter: Adapter, options: LoadOptions
) -> tuple[Sequence[Request], Sequence[int]]:
    """The units of needs.

    Args:
        requests: What is wanted.
        adapter: The framework.
        options: How.

    Returns:
        Units, and for each the position of the need that it is of. Those of a need follow each
        other.
    """
    if not adapter.devices:
        return requests, range(len(requests))
    units: list[Request] = []
    owners: list[int] = []
    for position, request in enumerate(requests):
        for unit in _units(request, adapter, options):
            units.append(unit)
            owners.append(position)
    return units, owners


def _units(request: Request, adapter: Adapter, options: LoadOptions) -> list[Request]:
    if len(request.devices) < 2:
        return [request]
    alone = [request._replace(devices=(number,)) for number in request.devices]
    on_host = [each for each in alone if batches.lands(each, adapter, options) is None]
    found = [each for each in alone if each not in on_host]
    if on_host:
        found.append(request._replace(devices=tuple(each.devices[0] for each in on_host)))
    return found


def join(
    requests: Sequence[Request],
    units: Sequence[Request],
    owners: Sequence[int],
    arrays: Mapping[int, Any],
) -> list[Any]:
    """The arrays of needs.

    Args:
        requests: As for `spread`.
        units: What it returned.
        owners: That too.
        arrays: By the position of the unit; of a need with devices, a tuple of one for each.

    Returns:
        An array for each need, or a tuple of one for each of its devices, in its order.
    """
    if units is requests:
        return [arrays[n] for n in range(len(requests))]
    by_device: list[dict[int, Any]] = [{} for _ in requests]
    made: list[Any] = [None] * len(requests)
    for n, (unit, owner) in enumerate(zip(units, owners, strict=True)):
        if unit is requests[owner]:
            made[owner] = arrays[n]
        else:
            by_device[owner].update(zip(unit.devices, arrays[n], strict=True))
    for owner, found in enumerate(by_device):
        if found:
            made[owner] = tuple(found[number] for number in requests[owner].devices)
    return made
