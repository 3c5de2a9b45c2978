"""A clock that only reads and copies move, and a device by it: what overlaps is seen without a GPU.

Threads that are in `TimedDevice.current` run for nothing between two waits. Time goes on, to the
next end of a wait, when all of them wait. So a load takes as long as the machine that a test
describes would need, whatever the one is that runs the test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from devices.fake import FakeDevice, span

from mfload.cuda.device import DeviceRows
from mfload.cuda.memory import DeviceBuffer

_PATIENCE, _START = 3.0, 10.0
"""Seconds after which a thread that is there is not waited for, since it waits for another; and one
that has not come yet."""


class Clock:
    """Seconds since it was made.

    Args:
        threads: How many come before time goes on.

    Attributes:
        now: The time.
        stuck: How often time went on without a thread, because that waits for another.
    """

    def __init__(self, threads: int) -> None:
        self.now, self.stuck = 0.0, 0
        self._threads, self._moved = threads, time.monotonic()
        self._turn = threading.Condition()
        self._present: dict[int, int] = {}
        self._ends: dict[int, float] = {}

    @contextmanager
    def present(self) -> Generator[None]:
        """Time waits for this thread."""
        me = threading.get_ident()
        with self._turn:
            self._present[me] = self._present.get(me, 0) + 1
            if len(self._present) >= self._threads:
                self._threads = 0
        try:
            yield
        finally:
            with self._turn:
                self._present[me] -= 1
                if not self._present[me]:
                    del self._present[me]
                    self._threads = 0
                self._turn.notify_all()

    def sleep(self, seconds: float) -> None:
        """Returns after some time."""
        self.until(self.now + seconds)

    def until(self, end: float) -> None:
        """Returns at a time; at once if that is over."""
        me = threading.get_ident()
        with self._turn:
            self._ends[me] = end
            while self.now < end:
                late = time.monotonic() - self._moved > (_START if self._threads else _PATIENCE)
                waiting = {each for each, wake in self._ends.items() if wake > self.now}
                if late and self._threads:
                    self._threads, self._moved = 0, time.monotonic()
                elif late or (not self._threads and self._present.keys() <= waiting):
                    self.stuck += late
                    self._move()
                else:
                    self._turn.wait(0.1)
            del self._ends[me]
            self._moved = time.monotonic()

    def _move(self) -> None:
        self.now = min(wake for wake in self._ends.values() if wake > self.now)
        self._moved = time.monotonic()
        self._turn.notify_all()


class TimedDevice(FakeDevice):
    """A device whose copies go one after the other, in the order in which they are given.

    Args:
        clock: Its time.
        copies: Bytes of the host that it copies in a second.
        locks: Bytes that are page-locked in a second.
        allocation: Seconds that each allocation takes.
    """

    def __init__(
        self,
        clock: Clock,
        copies: float,
        *,
        locks: float = float("inf"),
        allocation: float = 0,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.clock, self.copies = clock, copies
        self._locks, self._allocation = locks, allocation
        self.link = 0.0
        """When the last copy is over."""

    @contextmanager
    def current(self) -> Generator[None]:
        with super().current(), self.clock.present():
            yield

    def allocate(self, nbytes: int) -> DeviceBuffer:
        if self._allocation:
            with self.clock.present():
                self.clock.sleep(self._allocation)
        return super().allocate(nbytes)

    def pin(self, array: Any) -> None:
        self.clock.sleep(array.nbytes / self._locks)
        super().pin(array)

    def stream(self) -> Any:
        self.called("stream")
        self.streams += 1
        return _TimedStream(self)


class _TimedEvent:
    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self.at = clock, at

    def done(self) -> bool:
        return self._clock.now >= self.at

    def wait(self) -> None:
        self._clock.until(self.at)


class _TimedStream:
    """What it copies is there at once; tests of the order have the fake device."""

    def __init__(self, device: TimedDevice) -> None:
        self.device, self._clock = device, device.clock
        self._end, self._open = 0.0, True

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: DeviceRows) -> None:
        device, nbytes = self.device, rows.count * rows.nbytes
        device.called("copy_in", nbytes)
        given = source.reshape(-1)[: span(rows)]
        strided = np.lib.stride_tricks.as_strided(given, (rows.count, rows.nbytes), (rows.pitch, 1))
        memory: Any = target.owner
        first = target.address - memory.address + at
        memory.bytes[first : first + nbytes] = strided.reshape(-1)
        device.link = self._end = max(self._clock.now, self._end, device.link) + (
            nbytes / device.copies
        )

    def record(self) -> _TimedEvent:
        return _TimedEvent(self._clock, self._end)

    def wait(self, event: _TimedEvent) -> None:
        self._end = max(self._end, event.at)

    def synchronize(self) -> None:
        self._clock.until(self._end)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.synchronize()
            self.device.streams -= 1
