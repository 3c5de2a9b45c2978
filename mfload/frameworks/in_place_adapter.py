"""An adapter that lends memory which is there already, and has another make new arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfload.dlpack import View
from mfload.frameworks.base import Adapter, Lent, Pool
from mfload.load_options import LoadOptions
from mfload.planning.request import Allocation, Request


class InPlaceAdapter(Adapter):
    """Requests name places by number, as their device; places without memory get new arrays.

    Attributes:
        lent: Whether memory was lent, so that something may have been read into it.
    """

    lends_held = True

    def __init__(self, new: Adapter, memory: Mapping[int, Any]) -> None:
        super().__init__(new.place, None, new.notes)
        self._new, self._memory, self.lent = new, memory, False
        self.name, self.forms, self.alignment = new.name, new.forms, new.alignment
        self.readonly_maps, self.on_host = new.readonly_maps, new.on_host
        self.devices = new.devices

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        if request.devices[0] in self._memory:
            return Allocation(None, "framework", copied=False)
        return self._new.allocation(request, options)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        return self._new.wrap(views)

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        self.lent = True
        held = [self._memory.get(request.devices[0]) for request in requests]
        new = [each for each, memory in zip(requests, held, strict=True) if memory is None]
        rest = iter(self._new.lend(new) if new else ())
        return [next(rest) if memory is None else Lent(None, memory) for memory in held]

    def pool(self, number: int) -> Pool | None:
        return self._new.pool(number)
