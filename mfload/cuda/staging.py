"""Slots: reused memory in which blocks land on their way to a device, and the ring of a thread.

With two slots or more a thread reads into one while the other is copied.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mfload import errors
from mfload.cuda.copies import Methods
from mfload.cuda.device import Device, Event, Stream
from mfload.io import buffers
from mfload.io.engine import Share
from mfload.planning.blocks import Block

SLOT = 8 << 20
"""Bytes of a file that a slot holds, at most."""
DEPTH = 2
"""Slots a thread."""


class Staging(NamedTuple):
    """The slots of a load onto devices, in bytes."""

    methods: Methods
    block: int  # The longest block.
    spare: int = 0  # Page-locked memory of a slot for what is prepared on the host.
    depth: int = DEPTH

    @property
    def slot(self) -> int:
        """Bytes that a slot has for a block: whole pages, and one more at each end."""
        return _pages(self.block) + 2 * buffers.PAGE

    @property
    def pinned(self) -> int:
        """Bytes of page-locked memory for each thread."""
        return self.depth * _whole(self)


def staging(blocks: Iterable[Block], methods: Methods, most_spare: int) -> Staging:
    """The slots for a plan's blocks.

    What is prepared on the host waits for its turn beyond `most_spare` bytes; the largest segment
    always has room.
    """
    longest = spare = largest = 0
    for block in blocks:
        longest = max(longest, block.nbytes)
        prepared = methods.working_bytes(block)
        spare, largest = max(spare, sum(prepared)), max(largest, *prepared, 0)
    return Staging(methods, longest, max(largest, min(spare, most_spare)))


class PinnedSlot(buffers.WorkerSlot):
    """Host memory of huge pages, page-locked for all devices.

    Where the driver refuses to lock it, `note` is told so, and it stays pageable: what is copied
    from there waits for a stage of the driver's own.
    """

    def __init__(self, device: Device, size: Staging, note: Callable[[str], object] = str) -> None:
        self._device, self._process = device, 0  # That of a slot which is locked.
        self._memory = buffers.allocate(_whole(size))
        buffers.never_forked(self._memory)
        # The driver would make the pages too, but of one slot after another.
        self._memory[:: buffers.PAGE] = 0
        try:
            device.pin(self._memory)
            self._process = os.getpid()
        except errors.MemoryLimitError as error:
            note(f"slower copies, from pageable memory: {error}")
        self.fits(size)

    def fits(self, size: Staging) -> bool:
        """Whether it is large enough for a load; if so, it is cut as the load needs it."""
        if self._memory.nbytes < _whole(size):
            return False
        self._read, self.spare = self._memory[: size.slot], self._memory[size.slot :]
        return True

    def bytes(self, nbytes: int) -> Any:
        """The part for what is read."""
        assert nbytes <= self._read.nbytes, (nbytes, self._read.nbytes)
        return self._read

    def close(self) -> None:
        """Unlocks the pages, before they can be another's. Idempotent."""
        mine, self._process = self._process == os.getpid(), 0  # A child has none of them.
        if mine:
            self._device.unpin(self._memory)

    def __del__(self) -> None:
        with suppress(Exception):  # Modules may be gone when the interpreter ends.
            self.close()


class Kit:
    """What a thread lands blocks with: slots, and a stream for each device by its name."""

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.streams: dict[str, Stream] = {}

    def close(self) -> None:
        """Ends the streams, and then the slots that they copied from. Never raises."""
        while self.streams:
            self.streams.popitem()[1].close()
        while self.slots:
            self.slots.pop().close()


class Kits:
    """Kits that the loads of a stream, or of one open checkpoint, leave to each other.

    To make one takes longer than a small load: pages are locked, and threads wait for each other.
    No lock: what is closed by the collector must not wait.

    Attributes:
        most: How many are kept for a device: those of one load.
    """

    def __init__(self) -> None:
        self.most = 1
        self._process, self._closed = os.getpid(), False
        self._idle: dict[Device, collections.deque[Kit]] = {}

    def take(self, device: Device, size: Staging) -> Kit:
        """One that was left, without the slots that are too small; or a new one."""
        kit = self._left(device) or Kit()
        for slot in [each for each in kit.slots if not each.fits(size)]:
            kit.slots.remove(slot)
            slot.close()
        return kit

    def give(self, device: Device, kit: Kit) -> None:
        """Takes a kit with which nothing is under way."""
        idle = self._idle.setdefault(device, collections.deque())
        if len(idle) >= self.most:
            kit.close()
        else:
            idle.append(kit)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Closes those that are left, and those that come later."""
        self._closed = True
        for device in list(self._idle):
            while (kit := self._left(device)) is not None:
                kit.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _left(self, device: Device) -> Kit | None:
        if self._process != os.getpid():  # CUDA gives a forked process nothing.
            return None
        try:
            return self._idle[device].pop()
        except (KeyError, IndexError):
            return None


def _whole(size: Staging) -> int:
    """Bytes of a slot."""
    return size.slot + _pages(size.spare)


def _pages(nbytes: int) -> int:
    return -(-nbytes // buffers.PAGE) * buffers.PAGE


class Ring:
    """The slots of one thread, at most `depth`, made when they are first needed.

    `made` has those that are there already, and gets the others. A slot is taken again only when
    every copy out of it is over, as its events say. The share counts each block whose copies are
    over; if one failed, its `block` is the one concerned.
    """

    def __init__(
        self, make: Callable[[], Any], depth: int, share: Share, made: list[Any] | None = None
    ) -> None:
        self._make = make
        self._depth = depth
        self._share = share
        self._made: list[Any] = [] if made is None else made
        self._free: list[Any] = list(self._made)
        self._busy: collections.deque[tuple[Any, Sequence[Event], Block, float]] = (
            collections.deque()
        )

    def take(self) -> Any:
        """A slot that no copy reads from; waits for one if all are in use.

        Raises DeviceError if a copy out of a slot in use failed.
        """
        while self._busy and self._end_oldest(wait=False):
            pass
        if not self._free and len(self._made) < self._depth:
            self._made.append(self._make())
            return self._made[-1]
        if not self._free:
            self._end_oldest(wait=True)
        return self._free.pop()

    def hold(self, slot: Any, events: Sequence[Event], block: Block) -> None:
        """Takes a slot back, from which copies are under way until the events are done."""
        self._busy.append((slot, events, block, time.perf_counter()))

    def give(self, slot: Any) -> None:
        """Takes a slot back from which nothing is copied."""
        self._free.append(slot)

    def drain(self) -> None:
        """Waits for all copies; raises DeviceError if one failed."""
        while self._busy:
            self._end_oldest(wait=True)

    def _end_oldest(self, *, wait: bool) -> bool:
        """Frees the slot in use for longest if its copies are over, or waits until they are."""
        slot, events, block, begun = self._busy[0]
        at_hand, self._share.block = self._share.block, block
        track = self._share.track
        if wait:
            waited = time.perf_counter()
            for event in events:
                event.wait()
            if track is not None:
                track.add("wait", waited, 0, block.source)
        over = wait or all(event.done() for event in events)
        self._share.block = at_hand
        if over:
            self._busy.popleft()
            self._free.append(slot)
            if track is not None and events:  # It was over at some time until now.
                track.beside.add("copy", begun, block.wanted, block.source)
            self._share.done(block)
        return over

    def close(self) -> None:
        """Closes the slots, also if Ctrl-C cut it short before; no copy out of any is under way."""
        self._free.clear()
        self._busy.clear()
        while self._made:
            self._made.pop().close()
