"""Slots: reused memory in which blocks land on their way to a device, and the ring of a worker.

A slot is taken again only when every copy out of it is over, as its events say. With two slots
or more a worker reads into one while the other is copied.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from mfload.cuda.copies import Methods
from mfload.cuda.device import Device, Event
from mfload.io import buffers
from mfload.planning.blocks import Block

SLOT = 8 << 20
"""Bytes of a file that a slot holds, at most."""
DEPTH = 2
"""Slots a worker."""


class Staging(NamedTuple):
    """The slots and the scratch memory of a load onto devices, in bytes."""

    methods: Methods
    block: int  # The longest block.
    spare: int = 0  # Page-locked memory of a slot for what is prepared on the host.
    scratch: int = 0  # Device memory, for each worker and device, for what is converted.
    depth: int = DEPTH

    @property
    def slot(self) -> int:
        """Bytes that a slot has for a block: whole pages, and one more at each end."""
        return _pages(self.block) + 2 * buffers.PAGE

    @property
    def pinned(self) -> int:
        """Bytes of page-locked memory for each worker."""
        return self.depth * (self.slot + _pages(self.spare))


def staging(blocks: Iterable[Block], methods: Methods, most_spare: int) -> Staging:
    """The slots for a plan's blocks.

    What is prepared on the host waits for its turn beyond `most_spare` bytes; the largest segment
    always has room.
    """
    longest = spare = largest = scratch = 0
    for block in blocks:
        longest = max(longest, block.nbytes)
        scratch = max(scratch, methods.scratch_bytes(block))
        prepared = methods.prepared_bytes(block)
        spare, largest = max(spare, sum(prepared)), max(largest, *prepared, 0)
    return Staging(methods, longest, max(largest, min(spare, most_spare)), scratch, DEPTH)


class PinnedSlot:
    """Host memory of huge pages, page-locked for all devices (see `blocks.Slot`)."""

    def __init__(self, device: Device, size: Staging) -> None:
        self._device = device
        self._memory = buffers.allocate(size.slot + _pages(size.spare))
        buffers.never_forked(self._memory)
        device.pin(self._memory)
        self._read = self._memory[: size.slot]
        self.spare = self._memory[size.slot :]

    def bytes(self, nbytes: int) -> Any:
        """The part for what is read."""
        assert nbytes <= self._read.nbytes, (nbytes, self._read.nbytes)
        return self._read

    def close(self) -> None:
        """Unlocks the pages."""
        self._device.unpin(self._memory)


def _pages(nbytes: int) -> int:
    return -(-nbytes // buffers.PAGE) * buffers.PAGE


class _Closable(Protocol):
    def close(self) -> None: ...


AnySlot = TypeVar("AnySlot", bound=_Closable)


class Ring(Generic[AnySlot]):
    """The slots of one worker, at most `depth`, made when they are first needed.

    `finished` is told of each block whose copies are over.
    """

    def __init__(
        self, make: Callable[[], AnySlot], depth: int, finished: Callable[[Block], None]
    ) -> None:
        self._make = make
        self._depth = depth
        self._finished = finished
        self._made: list[AnySlot] = []
        self._free: list[AnySlot] = []
        self._busy: collections.deque[tuple[AnySlot, Sequence[Event], Block]] = collections.deque()
        self.waiting: Block | None = None
        """The block whose copies are waited for, for the error that names it."""

    def take(self) -> AnySlot:
        """A slot that no copy reads from; waits for one if all are in use.

        Raises DeviceError if a copy out of a slot in use failed.
        """
        while self._busy and self._is_over():
            self._end_oldest()
        if self._free:
            return self._free.pop()
        if len(self._made) < self._depth:
            self._made.append(self._make())
            return self._made[-1]
        self._wait_for_oldest()
        self._end_oldest()
        return self._free.pop()

    def hold(self, slot: AnySlot, events: Sequence[Event], block: Block) -> None:
        """Takes a slot back, from which copies are under way until the events are done."""
        self._busy.append((slot, events, block))

    def give(self, slot: AnySlot) -> None:
        """Takes a slot back from which nothing is copied."""
        self._free.append(slot)

    def drain(self) -> None:
        """Waits for all copies; raises DeviceError if one failed."""
        while self._busy:
            self._wait_for_oldest()
            self._end_oldest()

    def _is_over(self) -> bool:
        _, events, self.waiting = self._busy[0]
        over = all(event.done() for event in events)
        self.waiting = None
        return over

    def _wait_for_oldest(self) -> None:
        _, events, self.waiting = self._busy[0]
        for event in events:
            event.wait()
        self.waiting = None

    def _end_oldest(self) -> None:
        slot, _, block = self._busy.popleft()
        self._free.append(slot)
        self._finished(block)

    def close(self) -> None:
        """Closes the slots; no copy out of any is under way."""
        for slot in self._made:
            slot.close()
        self._made.clear()
        self._free.clear()
        self._busy.clear()
