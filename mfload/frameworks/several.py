"""Several devices of one framework: each tensor on all of them, or on the one for its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from mfload import errors
from mfload.dlpack import View
from mfload.frameworks.base import Adapter, Lent, Pool
from mfload.options import LoadOptions
from mfload.planning.requests import Allocation, Request
from mfload.planning.selection import compiled, hint

_SHOWN = 10


class SeveralAdapter(Adapter):
    """An adapter made of others of one framework, one a device (see `base.Adapter`).

    Each request is for one of them, by its number in `Request.devices`, and each array is a tuple
    of one here. `choose` gives that number for a tensor's name, None if no rule says. Default: all
    parts get all tensors.
    """

    def __init__(
        self, parts: Sequence[Adapter], choose: Callable[[str], int | None] | None = None
    ) -> None:
        super().__init__(notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)))
        first = parts[0]
        self._parts = parts
        self._choose = choose
        self.name = first.name
        self.forms = first.forms
        self.alignment = first.alignment
        self.readonly_maps = first.readonly_maps
        self.on_host = all(part.on_host for part in parts)
        # What two parts have in common is one device, with one set of buffers.
        found = {device: part for part in reversed(parts) for device in part.devices}
        self.devices = list(dict.fromkeys(device for part in parts for device in part.devices))
        self._pools = [found[device] for device in self.devices]

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        (number,) = request.devices
        part = self._parts[number]
        made = part.allocation(request, options)
        if made.device is None:
            return made
        return made._replace(device=self.devices.index(part.devices[made.device]))

    def assign(self, requests: Sequence[Request]) -> list[Request]:
        if self._choose is None:
            every = range(len(self._parts))
            return [request._replace(devices=(number,)) for request in requests for number in every]
        assigned: list[Request] = []
        missing: list[str] = []
        for request in requests:
            number = self._choose(request.info.name)
            if number is None:
                missing.append(request.info.name)
            else:
                assigned.append(request._replace(devices=(number,)))
        if missing:
            raise errors.DeviceError(
                f"device= says nothing about {len(missing)} tensors",
                expected="a device for each name; of a list of (regex, device) pairs, "
                "a last ('.*', device) is for the rest",
                found=", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else ""),
            )
        return assigned

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        alone = [array for (array,) in arrays]
        if self._choose is not None:
            return alone
        count = len(self._parts)
        return [alone[at : at + count] for at in range(0, len(alone), count)]

    def pool(self, number: int) -> Pool | None:
        return self._pools[number].pool(0)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        made: dict[int, Any] = {}
        for number, at in _by_part(view.devices for view in views):
            arrays = self._parts[number].wrap([views[n] for n in at])
            made.update(zip(at, ((array,) for array in arrays), strict=True))
        return [made[n] for n in range(len(views))]

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        """Tuples of one array of the framework's own allocator, one for each request."""
        made: dict[int, Lent] = {}
        for number, at in _by_part(request.devices for request in requests):
            lent = self._parts[number].lend([requests[n] for n in at])
            made.update(zip(at, (Lent((each.array,), each.memory) for each in lent), strict=True))
        return [made[n] for n in range(len(requests))]


def _by_part(devices: Iterable[tuple[int, ...]]) -> list[tuple[int, list[int]]]:
    """Positions by the number of their part."""
    at: dict[int, list[int]] = {}
    for n, (number,) in enumerate(devices):
        at.setdefault(number, []).append(n)
    return list(at.items())


def make(
    make_one: Callable[[object], Adapter], device: object, names: Collection[str]
) -> SeveralAdapter:
    """The adapter for a list of devices, a list of (regex, device) pairs or {name: device}."""
    if isinstance(device, Mapping):
        rules = list(cast(Mapping[str, object], device).items())
    else:
        rules = _pairs(cast(Sequence[Any], device))
    if not device:
        raise errors.DeviceError("no device", expected="at least one", found=repr(device))
    if rules is None:
        return SeveralAdapter([make_one(each) for each in cast(Sequence[object], device)])
    # One adapter for each device, however many rules name it.
    numbers = {text: n for n, text in enumerate(dict.fromkeys(repr(each) for _, each in rules))}
    parts = {repr(each): each for _, each in rules}
    choose = _exactly if isinstance(device, Mapping) else _by_search
    table = [(rule, numbers[repr(each)]) for rule, each in rules]
    return SeveralAdapter([make_one(each) for each in parts.values()], choose(table, names))


def _pairs(devices: Sequence[Any]) -> list[tuple[Any, Any]] | None:
    # TensorFlow's own devices are tuples of a kind.
    pairs = [each for each in devices if type(each) in (tuple, list) and len(each) == 2]
    if pairs and len(pairs) != len(devices):
        raise errors.UsageError(
            "device= mixes devices and rules",
            expected="a list of devices or a list of (regex, device) pairs",
            found=repr(devices),
        )
    return [(rule, device) for rule, device in pairs] or None


def _exactly(
    table: Sequence[tuple[Any, int]], names: Collection[str]
) -> Callable[[str], int | None]:
    for name, _ in table:
        if names and name not in names:
            errors.warn(
                f"device= names {name!r}, which is not in the checkpoint{hint(name, names)}"
            )
    return dict(table).get


def _by_search(
    table: Sequence[tuple[Any, int]], names: Collection[str]
) -> Callable[[str], int | None]:
    rules: list[tuple[re.Pattern[str], int]] = []
    for rule, number in table:
        regex = compiled(rule)
        if names and not any(map(regex.search, names)):
            errors.warn(f"device= has a rule {regex.pattern!r} that matches no tensor")
        rules.append((regex, number))
    return lambda name: next((number for regex, number in rules if regex.search(name)), None)
