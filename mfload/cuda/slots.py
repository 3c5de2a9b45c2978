"""Slots: reused memory in which blocks land on their way to a device, and the ring of a worker.

A slot is taken again only when every copy out of it is over, as its events say. With two slots
or more a worker reads into one while the other is copied.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from mfload.cuda.device import Device, Event
from mfload.io import advise, buffers
from mfload.planning.blocks import Block

SLOT = 8 << 20
"""Bytes of a file that a slot holds, at most."""
DEPTH = 2
"""Slots a worker."""


class PinnedSlot:
    """Page-locked host memory of huge pages (see `io.blocks.Slot`).

    Args:
        device: Locks the pages, for all devices like it.
        nbytes: Bytes for what is read, a multiple of a page.
        spare: Bytes for what is put in order before it is copied.
    """

    def __init__(self, device: Device, nbytes: int, spare: int) -> None:
        self._device = device
        self._memory = buffers.allocate(nbytes + spare)
        advise.never_forked(self._memory)
        device.pin(self._memory)
        self._read = self._memory[:nbytes]
        self.spare = self._memory[nbytes:]

    def bytes(self, nbytes: int) -> Any:
        """The part for what is read."""
        assert nbytes <= self._read.nbytes, (nbytes, self._read.nbytes)
        return self._read

    def close(self) -> None:
        """Unlocks the pages."""
        self._device.unpin(self._memory)


class _Closable(Protocol):
    def close(self) -> None: ...


AnySlot = TypeVar("AnySlot", bound=_Closable)


class Ring(Generic[AnySlot]):
    """The slots of one worker, made when they are first needed.

    Args:
        make: Makes one.
        depth: How many, at most.
        finished: Told of each block whose copies are over.
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
        """A slot that nobody copies from; waits for one where all are in use.

        Raises:
            DeviceError: A copy out of the slot that comes next failed.
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
        """Waits for all copies.

        Raises:
            DeviceError: One failed.
        """
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
        """Gives the slots back; no copy out of any is under way."""
        for slot in self._made:
            slot.close()
        self._made.clear()
        self._free.clear()
        self._busy.clear()
