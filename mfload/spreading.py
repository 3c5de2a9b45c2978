"""Spreading: what several devices need is a unit for each that has memory of its own.

On the host one buffer serves all the devices of a need. In device memory each has its own, and
the plan sees to it that the bytes are read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfload import waves
from mfload.frameworks.adapter import Adapter
from mfload.placement import Need
from mfload.settings import Settings


def spread(
    needs: Sequence[Need], adapter: Adapter, settings: Settings
) -> tuple[Sequence[Need], Sequence[int]]:
    """The units of needs.

    Args:
        needs: What is wanted.
        adapter: The framework.
        settings: How.

    Returns:
        Units, and for each the position of the need that it is of. Those of a need follow each
        other.
    """
    if not adapter.devices:
        return needs, range(len(needs))
    units: list[Need] = []
    owners: list[int] = []
    for position, need in enumerate(needs):
        for unit in _units(need, adapter, settings):
            units.append(unit)
            owners.append(position)
    return units, owners


def _units(need: Need, adapter: Adapter, settings: Settings) -> list[Need]:
    if len(need.devices) < 2:
        return [need]
    alone = [need._replace(devices=(number,)) for number in need.devices]
    on_host = [each for each in alone if waves.lands(each, adapter, settings) is None]
    found = [each for each in alone if each not in on_host]
    if on_host:
        found.append(need._replace(devices=tuple(each.devices[0] for each in on_host)))
    return found


def join(
    needs: Sequence[Need],
    units: Sequence[Need],
    owners: Sequence[int],
    arrays: Mapping[int, Any],
) -> list[Any]:
    """The arrays of needs.

    Args:
        needs: As for `spread`.
        units: What it returned.
        owners: That too.
        arrays: By the position of the unit; of a need with devices, a tuple of one for each.

    Returns:
        An array for each need, or a tuple of one for each of its devices, in its order.
    """
    if units is needs:
        return [arrays[n] for n in range(len(needs))]
    by_device: list[dict[int, Any]] = [{} for _ in needs]
    made: list[Any] = [None] * len(needs)
    for n, (unit, owner) in enumerate(zip(units, owners, strict=True)):
        if unit is needs[owner]:
            made[owner] = arrays[n]
        else:
            by_device[owner].update(zip(unit.devices, arrays[n], strict=True))
    for owner, found in enumerate(by_device):
        if found:
            made[owner] = tuple(found[number] for number in needs[owner].devices)
    return made
