"""Adapters made of others: for several devices of one framework, and for memory that is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mfload import errors
from mfload.dlpack import View
from mfload.frameworks.base import Adapter, Lent, Pool
from mfload.io import buffers
from mfload.options import LoadOptions
from mfload.planning.request import Allocation, Request
from mfload.planning.selection import Rules

if TYPE_CHECKING:
    from mfload.cuda.memory import DeviceBuffer


class SeveralAdapter(Adapter):
    """An adapter made of others of one framework, one a device (see `base.Adapter`).

    Each request is for one of them, by its number in `Request.devices`, and each array is a tuple,
    one for each device. `choose` gives that number for a tensor's name, None if no rule says.
    Default: all parts get all tensors.
    """

    def __init__(
        self, parts: Sequence[Adapter], choose: Callable[[str], int | None] | None = None
    ) -> None:
        super().__init__(notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)))
        self._parts, self._choose = parts, choose
        self.take_traits(parts[0])
        for part in parts:
            part.unified = False  # Buffers of the host may serve several of them.
        self.on_host = all(part.on_host for part in parts)
        # What two parts have in common is one device, with one set of buffers.
        self._owners = {device: part for part in parts for device in part.devices}
        self.devices = list(self._owners)

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        part = self._parts[request.devices[0]]
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
                f"device= says nothing about {errors.counted(len(missing), 'tensor')}",
                expected="a device for each name; of a list of (regex, device) pairs, "
                "a last ('.*', device) is for the rest",
                found=", ".join(missing[:10]) + (", …" if len(missing) > 10 else ""),
            )
        return assigned

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        alone = [array for (array,) in arrays]
        if self._choose is not None:
            return alone
        count = len(self._parts)
        return [alone[at : at + count] for at in range(0, len(alone), count)]

    def follow(self) -> AbstractContextManager[object]:
        return _all([part.follow() for part in self._parts])

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        return self._owners[self.devices[number]].allocator(0, sizes)

    def allocating(self) -> AbstractContextManager[object]:
        return _all([part.allocating() for part in self._parts])

    def pool(self, number: int) -> Pool | None:
        return self._owners[self.devices[number]].pool(0)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        return self._by_part(list(views), lambda part, mine: part.wrap(mine))

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        firsts = [request._replace(devices=request.devices[:1]) for request in requests]
        lent = self._by_part(firsts, lambda part, mine: part.lend(mine))
        return [Lent((each.array,), each.memory) for (each,) in lent]

    def _by_part(
        self, items: Sequence[Any], act: Callable[[Adapter, list[Any]], Any]
    ) -> list[tuple[Any, ...]]:
        """What the parts make of each item, one for each of its devices, in their order."""
        at: dict[int, list[tuple[int, int]]] = {}
        for n, item in enumerate(items):
            for place, number in enumerate(item.devices):
                at.setdefault(number, []).append((n, place))
        made: list[list[Any]] = [[None] * len(item.devices) for item in items]
        for number, mine in at.items():
            results = act(self._parts[number], [items[n] for n, _ in mine])
            for (n, place), each in zip(mine, results, strict=True):
                made[n][place] = each
        return list(map(tuple, made))


class MeshAdapter(SeveralAdapter):
    """An adapter for the devices of a process in a mesh: requests name their devices already.

    Devices in host memory may share one array.
    """

    assign = Adapter.assign  # pyright: ignore[reportAssignmentType]
    results = Adapter.results  # pyright: ignore[reportAssignmentType]


class InPlaceAdapter(Adapter):
    """Requests name places by number, as their device; places without memory get new arrays.

    Memory may lie on the host and on devices (see `base.Lent`), on these for what the host need not
    put together (`Request.by_host`).

    Attributes:
        lent: Whether memory was lent, so that something may have been read into it.
    """

    lends_held = True

    def __init__(self, new: Adapter, memory: Mapping[int, Any]) -> None:
        super().__init__(new.place, None, new.notes)
        self._new, self._memory, self.lent = new, memory, False
        self.take_traits(new)
        new.unified = False  # Places on its device are filled through slots.
        there = (each.device for each in memory.values() if not isinstance(each, np.ndarray))
        self.devices = list(dict.fromkeys([*new.devices, *there]))

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        memory = self._memory.get(request.devices[0])
        if memory is not None:
            on_host = isinstance(memory, np.ndarray)
            assert on_host or not options.by_host, request
            device = None if on_host else self.devices.index(memory.device)
            return Allocation(device, "framework", copied=False)
        return self._new.allocation(request, options)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        return self._new.wrap(views)

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        self.lent = True
        held = [self._memory.get(request.devices[0]) for request in requests]
        for memory in held:
            if isinstance(memory, np.ndarray) and memory.nbytes >= buffers.HUGE:
                buffers.ask_huge(memory.ctypes.data, memory.nbytes)
        new = [each for each, memory in zip(requests, held, strict=True) if memory is None]
        rest = iter(self._new.lend(new) if new else ())
        return [next(rest) if memory is None else Lent(None, memory) for memory in held]

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        return self._new.allocator(number, sizes)

    def allocating(self) -> AbstractContextManager[object]:
        return self._new.allocating()

    def pool(self, number: int) -> Pool | None:
        return self._new.pool(number) if number < len(self._new.devices) else None


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[object]]) -> Generator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def make(
    make_one: Callable[[object], Adapter], device: object, names: Collection[str]
) -> SeveralAdapter:
    """The adapter for a list of devices, a list of (regex, device) pairs or {name: device}."""
    if not device:
        raise errors.DeviceError("no device", expected="at least one", found=repr(device))
    rules: list[Any] = list(
        device.items() if isinstance(device, Mapping) else cast(Sequence[Any], device)
    )
    # TensorFlow's own devices are tuples of a kind.
    pairs = [each for each in rules if type(each) in (tuple, list) and len(each) == 2]
    if not pairs:
        return SeveralAdapter([make_one(each) for each in rules])
    if len(pairs) != len(rules):
        raise errors.UsageError(
            "device= mixes devices and rules",
            expected="a list of devices or a list of (regex, device) pairs",
            found=repr(device),
        )
    # One adapter for each device, however many rules name it.
    parts = {repr(each): each for _, each in pairs}
    numbers = {text: number for number, text in enumerate(parts)}
    table = Rules("device=", device, lambda each: numbers[repr(each)])
    adapters = [make_one(each) for each in parts.values()]
    table.warn_of_unmatched(names)
    return SeveralAdapter(adapters, table.find)
