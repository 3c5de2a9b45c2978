"""Slots: reused memory in which blocks land on their way to a device, and the ring of a thread.

With two slots or more a thread reads into one while the other is copied.
"""

from __future__ import annotations

import atexit
import collections
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import le
from typing import Any, NamedTuple

from mfload import errors
from mfload.cuda import memory
from mfload.cuda.copies import Methods
from mfload.cuda.device import Device, DeviceStream, Event
from mfload.io import buffers
from mfload.io.engine import Share
from mfload.planning.blocks import Block
from mfload.runtime import Forked, close_all, in_forks, start

SLOT = 8 << 20
"""Bytes of a file that a slot holds, at most."""
DEPTH = 2
"""Slots a thread."""
KEPT = 512 << 20
"""Bytes of slots that a process keeps for its next loads, at most."""
IDLE = 5.0
"""Seconds after which slots that no load has used are given back."""
_COUNTERS = buffers.counter, memory.counter


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
        if block.nbytes > longest:
            longest = block.nbytes
        if not any(segment.copy for segment in block.segments):
            continue
        prepared = methods.working_bytes(block)
        spare, largest = max(spare, sum(prepared)), max(largest, *prepared, 0)
    return Staging(methods, longest, max(largest, min(spare, most_spare)))


class PinnedSlot(buffers.WorkerSlot):
    """Host memory of huge pages, page-locked for all devices.

    Where the driver refuses to lock it, `note` is told so, and it stays pageable: what is copied
    from there waits for a stage of the driver's own.
    """

    def __init__(self, device: Device, size: Staging, note: Callable[[str], object] = str) -> None:
        self._device, self._forked = device, None  # Of a slot which is locked.
        self._slower = ""
        self._memory = buffers.allocate(_whole(size))
        buffers.never_forked(self._memory)
        # The driver would make the pages too, but of one slot after another.
        self._memory[:: buffers.PAGE] = 0
        try:
            device.pin(self._memory)
            self._forked = Forked()
        except errors.MemoryLimitError as error:
            self._slower = f"slower copies, from pageable memory: {error}"
        self.tell(note)
        self.fits(size)

    def fits(self, size: Staging) -> bool:
        """Whether it is large enough for a load; if so, it is cut as the load needs it."""
        if self._memory.nbytes < _whole(size):
            return False
        self._read, self.spare = self._memory[: size.slot], self._memory[size.slot :]
        return True

    def tell(self, note: Callable[[str], object]) -> None:
        """Tells `note` if it is not locked."""
        if self._slower:
            note(self._slower)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._memory.nbytes

    def bytes(self, nbytes: int) -> Any:
        """The part for what is read."""
        assert nbytes <= self._read.nbytes, (nbytes, self._read.nbytes)
        return self._read

    def close(self) -> None:
        """Unlocks the pages, before they can be another's. Idempotent."""
        if self._forked is not None and not self._forked:  # A child has none of them.
            self._device.unpin(self._memory)
        self._forked = None

    def __del__(self, suppress: Any = suppress) -> None:
        with suppress(Exception):  # Modules are empty at the end.
            self.close()


class Kit:
    """What a thread lands blocks with.

    Attributes:
        slots: In host memory.
        past: In the memory of the device, for what cuFile reads.
        streams: One for each device, by its name.
        since: When the last load was done with it.
    """

    since = 0.0

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.past: list[Any] = []
        self.streams: dict[str, DeviceStream] = {}
        self._aside = 0, 0

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of its slots, on the host and on the device."""
        return sum(slot.nbytes for slot in self.slots), sum(slot.nbytes for slot in self.past)

    def count(self, kept: bool) -> None:
        """Counts its memory as a load's, or no longer while it is kept: that is no leak."""
        before, self._aside = self._aside, self.nbytes if kept else (0, 0)
        for counter, now, was in zip(_COUNTERS, self._aside, before, strict=True):
            counter.set_aside(now - was)

    def fit(self, size: Staging) -> None:
        """Closes the slots that a load has no use for: those too small, and what is too many."""
        for slots in (self.slots, self.past):
            kept = [slot for slot in slots if slot.fits(size)][: size.depth]
            for slot in [slot for slot in slots if slot not in kept]:
                slots.remove(slot)
                slot.close()

    def close(self) -> None:
        """Ends the streams once all they were given is over, and then the slots.

        Never raises: what failed was told by an event, or follows from an error told already.
        """
        self.count(False)
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        for slots in (self.past, self.slots):
            while slots:
                slots.pop().close()

    def __del__(self, suppress: Any = suppress) -> None:
        with suppress(Exception):  # Of one that Ctrl-C got lost. Modules are empty at the end.
            self.close()


class Kits:
    """Kits that the loads of a process leave to each other: `KITS`.

    To make one takes longer than a small load: pages are locked, and threads wait for each other.
    Of those that no load uses, the oldest are closed when together they hold more than `KEPT`
    bytes, each after `IDLE` seconds, and the rest at exit. A forked child has none of them.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[Device, Kit]] = []  # The one given last is the last.
        self._parents: list[Any] = []
        self._timer: threading.Event | None = None
        self._closed = False
        # Reentrant: the garbage collector may run code that ends a load.
        self._lock = threading.RLock()

    def renew(self) -> None:
        """Makes it one of a forked child, which unlocks and frees nothing of its parent's."""
        # Kept out of the child, the slots have no pages there: others may lie at their addresses.
        self._parents.append(self._idle)
        self._idle, self._timer, self._lock = [], None, threading.RLock()

    def take(self, device: Device, size: Staging) -> Kit:
        """The one that was given last for a device, with the slots that fit; or a new one."""
        kit = Kit()
        with self._lock:
            for number in reversed(range(len(self._idle))):
                if self._idle[number][0] is device:
                    kit = self._idle.pop(number)[1]
                    kit.count(False)
                    break
        kit.fit(size)
        buffers.counter.add(0)  # It may be the most that this load has.
        memory.counter.add(0)
        return kit

    def give(self, device: Device, kit: Kit) -> None:
        """Takes a kit with which nothing is under way."""
        kit.since = time.monotonic()
        if not (kit.slots or kit.past):  # Its thread came too late for a block.
            kit.close()
            return
        with self._lock:
            kit.count(True)
            self._idle.append((device, kit))
        self.give_back(0 if self._closed else KEPT, 0.0)
        self._watch()

    def keep_within(self, devices: Sequence[Device], count: int, most: tuple[float, float]) -> None:
        """Before a load with limits: keeps `count` kits of its devices, the others are given back.

        Each is of so many bytes at most, on the host and on the device.
        """
        with self._lock:
            fit = [
                (device, kit)
                for device, kit in self._idle
                if device in devices and all(map(le, kit.nbytes, most))
            ]
            fit = fit[max(0, len(fit) - count) :]
            gone = [kit for device, kit in self._idle if (device, kit) not in fit]
            self._idle = fit
        close_all(gone)

    def give_back(self, most: int = 0, until: float = math.inf) -> bool:
        """Closes the oldest until `most` bytes are left, and those given by the time `until`.

        Returns whether there were any.
        """
        gone: list[Kit] = []
        with self._lock:
            held = sum(sum(kit.nbytes) for _, kit in self._idle)
            while self._idle and (held > most or self._idle[0][1].since <= until):
                gone.append(self._idle.pop(0)[1])
                held -= sum(gone[-1].nbytes)
            if not self._idle and self._timer is not None:
                self._timer.set()
                self._timer = None
        there = bool(gone)
        close_all(gone)
        return there

    def close(self) -> None:
        """Closes all that are left, and those that come later."""
        self._closed = True
        self.give_back()

    def _watch(self) -> None:
        """Has a thread come when the oldest has been idle for long enough."""
        with self._lock:
            if self._timer is not None or not self._idle:
                return
            left = self._idle[0][1].since + IDLE - time.monotonic()
            self._timer = threading.Event()
            try:
                start(partial(self._end_idle, self._timer, left), "mfload-idle", service=True)
            except RuntimeError:  # The system gives no more threads, or the interpreter ends.
                self._timer = None
                self.give_back()

    def _end_idle(self, cancelled: threading.Event, seconds: float) -> None:
        if cancelled.wait(max(0.0, seconds)):
            return
        self._timer = None
        self.give_back(KEPT, time.monotonic() - IDLE)
        self._watch()


KITS = Kits()
atexit.register(KITS.close)
in_forks(KITS.renew)


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
        share, track = self._share, self._share.track
        at_hand, share.block = share.block, block
        if wait:
            waited = time.perf_counter()
            for event in events:
                event.wait()
            if track is not None:
                track.add("wait", waited, 0, block.source)
        else:
            for event in events:
                if not event.done():
                    share.block = at_hand
                    return False
        share.block = at_hand
        self._busy.popleft()
        self._free.append(slot)
        if track is not None and events:  # It was over at some time until now.
            track.beside.add("copy", begun, block.wanted, block.source)
        share.done(block)
        return True

    def close(self) -> None:
        """Forgets the slots; who has `made` closes those in it."""
        self._made = []
        self._free.clear()
        self._busy.clear()
