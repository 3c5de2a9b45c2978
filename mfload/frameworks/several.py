"""Several devices of one framework: each tensor on all of them, or on the one for its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mfload import errors
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.frameworks import ground
from mfload.frameworks.base import Adapter, Lent, Pool, Whose
from mfload.planning.requests import Request

_SHOWN = 10


class SeveralAdapter(ground.Landing):
    """See `adapter.Adapter`: an adapter made of others, one a device.

    Each need is for one of them (see `assign`), by its number in `Need.devices`, and each array
    is a tuple of one here.

    Args:
        parts: The others, of one framework.
        rules: Regexes and the number of the part whose tensors have such names, the first that
            is found in a name first; None where all parts get all tensors.
    """

    def __init__(
        self, parts: Sequence[Adapter], rules: Sequence[tuple[re.Pattern[str], int]] | None = None
    ) -> None:
        super().__init__(notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)))
        first = parts[0]
        self._parts = parts
        self._rules = rules
        self.name = first.name
        self.forms = first.forms
        self.lendable = first.lendable
        self.alignment = first.alignment
        self.readonly_maps = first.readonly_maps
        self.on_host = all(part.on_host for part in parts)
        self._landing = [part for part in parts if part.devices]
        # What two parts have in common is one device, with one set of buffers.
        self.devices: Sequence[Device] = list(
            dict.fromkeys(device for part in self._landing for device in part.devices)
        )
        if self._landing:
            self.landings = frozenset.intersection(*(part.landings for part in self._landing))

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on all of the devices (see `adapter.Adapter`)."""
        whose = {part.allocator for part in self._landing}
        return "framework" if whose == {"framework"} else "mfload"

    def assign(self, requests: Sequence[Request]) -> list[Request]:
        """A need for each device that is to have a tensor (see `adapter.Adapter`).

        Raises:
            DeviceError: There is no rule for some tensors.
        """
        if self._rules is None:
            every = range(len(self._parts))
            return [request._replace(devices=(number,)) for request in requests for number in every]
        numbers = [self._ruled(request.info.name) for request in requests]
        missing = [
            request.info.name
            for request, number in zip(requests, numbers, strict=True)
            if number is None
        ]
        if missing:
            names = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
            raise errors.DeviceError(
                f"device= has no rule for {len(missing)} tensors",
                expected="a regex for each name, such as a last one of '.*' for the rest",
                found=names,
            )
        return [
            request._replace(devices=(number,))
            for request, number in zip(requests, numbers, strict=True)
            if number is not None
        ]

    def _ruled(self, name: str) -> int | None:
        return next((n for regex, n in self._rules or () if regex.search(name)), None)

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        """A list of arrays for each tensor, or its one array (see `adapter.Adapter`)."""
        alone = [array for (array,) in arrays]
        if self._rules is not None:
            return alone
        count = len(self._parts)
        return [alone[at : at + count] for at in range(0, len(alone), count)]

    def copies(self, request: Request) -> bool:
        """Whether a need is copied out of mfload's memory (see `adapter.Placing`)."""
        return self.forms[request.dtype.name].how == "copy" or not self._part(request).on_host

    def lends(self, request: Request) -> bool:
        """Whether a need must land in the framework's memory (see `adapter.Placing`)."""
        return False

    def lands(self, request: Request) -> int | None:
        """The number of the device that a need lands on (see `adapter.Adapter`)."""
        part = self._part(request)
        number = part.lands(request)
        return None if number is None else self.devices.index(part.devices[number])

    def pool(self, number: int) -> Pool | None:
        """What the framework's allocator has of a device (see `adapter.Adapter`)."""
        return next(p.pool(0) for p in self._landing if p.devices[0] is self.devices[number])

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tuple of one array for each view, in order."""
        made: dict[int, Any] = {}
        for number, at in self._by_part(view.devices for view in views):
            arrays = self._parts[number].wrap([views[n] for n in at])
            made.update(zip(at, ((array,) for array in arrays), strict=True))
        return [made[n] for n in range(len(views))]

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        """Tuples of one array of the framework's own allocator, one for each need."""
        made: dict[int, Lent] = {}
        for number, at in self._by_part(request.devices for request in requests):
            lent = self._parts[number].lend([requests[n] for n in at])
            made.update(zip(at, (Lent((each.array,), each.memory) for each in lent), strict=True))
        return [made[n] for n in range(len(requests))]

    def _part(self, request: Request) -> Adapter:
        (number,) = request.devices
        return self._parts[number]

    def _by_part(self, devices: Iterable[tuple[int, ...]]) -> list[tuple[int, list[int]]]:
        """Positions by the number of their part."""
        at: dict[int, list[int]] = {}
        for n, (number,) in enumerate(devices):
            at.setdefault(number, []).append(n)
        return list(at.items())


def rules_of(table: Mapping[Any, object]) -> list[re.Pattern[str]]:
    """The regexes of `device={regex: device}`.

    Raises:
        UsageError: One is malformed.
    """
    found: list[re.Pattern[str]] = []
    for rule in table:
        try:
            regex = re.compile(rule)
            regex.search("")  # One of bytes matches no name.
        except (re.error, TypeError) as error:
            raise errors.UsageError(
                "malformed regular expression in device=", expected=str(error), found=repr(rule)
            ) from None
        found.append(regex)
    return found
