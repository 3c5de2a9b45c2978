"""A device on host memory: it runs copies late, in odd orders, fails on demand, and sees misuse."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from devices.entered import entered
from devices.queues import Mark, Mode, Queue, Queues, Span

from mfload import errors
from mfload.cuda.device import DeviceRows, MemoryInfo
from mfload.cuda.memory import DeviceBuffer
from mfload.cuda.staging import KITS
from mfload.planning.layout import DEVICE_ALIGNMENT as ALIGNMENT

_PAGE = 4096
_lock = threading.RLock()
_pinned: dict[int, tuple[Span, FakeDevice]] = {}  # What any fake device page-locked.


class _Memory:
    """Owner of device memory."""

    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        self.held = -(-nbytes // ALIGNMENT) * ALIGNMENT
        room = np.empty(self.held + 2 * ALIGNMENT, np.uint8)
        room[: 1 << 24] = 0xA5  # New memory holds anything but what one hopes for.
        # On its boundary and on no greater one.
        start = (ALIGNMENT - room.ctypes.data) % (2 * ALIGNMENT)
        self.bytes = room[start : start + self.held]
        self.address: int = room.ctypes.data + start
        self._device = device
        with _lock:
            device.memory[self.address] = self.held

    def __del__(self) -> None:
        span = Span(self.address, self.held)
        if self._device.queues.pending(span):
            self._device.misused("memory died while queued work touches it")
            self._device.graves.append(self.bytes)
        with _lock:
            del self._device.memory[self.address]


class FakeEvent:
    """See `device.Event`."""

    def __init__(self, device: FakeDevice, mark: Mark) -> None:
        self._device = device
        self.mark = mark
        device.events += 1

    def __del__(self) -> None:
        self._device.events -= 1

    def done(self) -> bool:
        self._device.called("event_done")
        return self.mark.done()

    def wait(self) -> None:
        self._device.called("event_wait")
        self.mark.wait()


class FakeStream:
    """See `device.DeviceStream`."""

    def __init__(self, device: FakeDevice, queue: Queue) -> None:
        self.device = device
        self._queue = queue
        self._open = True

    @property
    def handle(self) -> int:
        return id(self._queue)

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: DeviceRows) -> None:
        host = self._host(source, span(rows))
        if not self._begin("copy_in", rows.count * rows.nbytes, target, at, host is not None):
            return
        assert host is not None
        locked = self.device.holds_pinned(host)
        if not locked and not self.device.refused(host):
            self.device.misused("copy_in from memory that is not page-locked")
        self._rows(target, at, source.reshape(-1), host.start, rows, "copy_in")
        if not locked:
            self._queue.synchronize()  # As CUDA does.

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: DeviceRows
    ) -> None:
        fits = _inside(source, start, span(rows))
        if self._begin("copy_within", rows.count * rows.nbytes, target, at, fits):
            self._rows(
                target, at, _peek(source), source.address + start, rows, "copy_within", start
            )

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        host = self._host(target, target.nbytes)
        fits = host is not None and _inside(source, start, target.nbytes)
        if not self._begin("copy_out", target.nbytes, source, start, fits) or not target.nbytes:
            return
        given, memory = target.reshape(-1), _peek(source)
        assert host is not None

        def run() -> None:
            self.device.late("copy_out")
            given[...] = memory[start : start + given.size]

        self._queue.give(run, [host, Span(source.address + start, given.size)])

    def record(self) -> FakeEvent:
        self._begin("record")
        return FakeEvent(self.device, self._queue.mark())

    def wait(self, event: Any) -> None:
        if self._begin("wait"):
            self._queue.wait(event.mark)

    def synchronize(self) -> None:
        if self._begin("synchronize"):
            self._queue.synchronize()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._queue.close()
            self.device.streams -= 1

    def _begin(
        self,
        verb: str,
        nbytes: int = 0,
        buffer: DeviceBuffer | None = None,
        at: int = 0,
        fits: bool = True,
    ) -> bool:
        """Counts and checks a call; whether there is anything sensible to do."""
        if not self._open:
            self.device.misused(f"{verb} on a closed stream")
            return False
        self.device.called(verb, nbytes)
        self._queue.check()
        if not fits or (buffer is not None and not _inside(buffer, at, nbytes)):
            self.device.misused(f"{verb} out of bounds")
            return False
        return True

    def _host(self, array: Any, nbytes: int) -> Span | None:
        if array.dtype != np.uint8 or not array.flags.c_contiguous or array.nbytes < nbytes:
            return None
        return Span(array.ctypes.data, nbytes)

    def _rows(
        self,
        target: DeviceBuffer,
        at: int,
        given: Any,
        address: int,
        rows: DeviceRows,
        verb: str,
        start: int = 0,
    ) -> None:
        nbytes = rows.count * rows.nbytes
        if not nbytes:
            return
        to = _peek(target)[at : at + nbytes].reshape(rows.count, rows.nbytes)

        def run() -> None:
            self.device.late(verb)
            strides = (rows.pitch, 1)
            # Over a copy: real copies don't mind that ranges meet, but nobody may count on it.
            to[...] = np.ndarray((rows.count, rows.nbytes), np.uint8, given, start, strides).copy()

        self._queue.give(run, [Span(address, span(rows)), Span(target.address + at, nbytes)])


class FakeDevice:
    """See `device.Device`.

    Args:
        place: What DLPack calls the memory. (1, 0), host memory, lets real frameworks take it.
        name: As in errors.
        total: Bytes that it has.
        mode: When work runs (see `queues`).
        seed: Of chance.
        fail: Verb ("current", "allocate", "pin", "stream", "copy_in", "copy_within", "copy_out",
            "record", "wait", "synchronize", "event_done", "event_wait") to the
            number of the call, from 1, that raises.
        fail_later: The same for work ("copy_in", …) that fails when it runs: events,
            waits and later calls of its stream raise.
        pci: Address on the bus.
        unified: Whether its memory is the host's.

    Attributes:
        near: Names of the other devices whose memory it reaches.
        taken: Bytes of `total` that others hold; set it at will.
        calls: How often each verb was called.
        nbytes: Bytes that each verb was to move.
        memory: Bytes of each live allocation by address.
        streams: How many are open.
        depth: How often it is current, in all threads.
        events: How many are alive.
        misuse: What should not have been done, in words.
    """

    def __init__(
        self,
        place: tuple[int, int] = (1, 0),
        name: str = "fake:0",
        *,
        total: int = 1 << 30,
        mode: Mode = "lazy",
        seed: int = 0,
        fail: Mapping[str, int] | None = None,
        fail_later: Mapping[str, int] | None = None,
        pci: str | None = None,
        unified: bool = False,
    ) -> None:
        self.place, self.name, self.pci, self.unified = place, name, pci, unified
        self.total, self.taken = total, 0
        self.fail, self.fail_later = dict(fail or {}), dict(fail_later or {})
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.memory: dict[int, int] = {}
        self.streams = self.events = self.depth = 0
        self.misuse: list[str] = []
        self.graves: list[Any] = []
        self.pageable: list[Span] = []
        self.queues = Queues(mode, seed)
        self.near: set[str] = set()

    def reaches(self, other: Any) -> bool:
        return other is self or other.name in self.near

    @contextmanager
    def current(self) -> Iterator[None]:
        self.called("current")
        entered().append(self)
        with _lock:
            self.depth += 1
        try:
            yield
        finally:
            entered().pop()
            with _lock:
                self.depth -= 1

    def memory_info(self) -> MemoryInfo:
        with _lock:
            return MemoryInfo(
                max(self.total - self.taken - sum(self.memory.values()), 0), self.total
            )

    def allocate(self, nbytes: int) -> DeviceBuffer:
        self.called("allocate", nbytes)
        free = self.memory_info().free
        if nbytes > free:
            raise errors.MemoryLimitError(
                f"{self.name} refused memory", expected=f"{nbytes} bytes", found=f"{free} free"
            )
        memory = _Memory(self, nbytes)
        return DeviceBuffer(self, memory.address, nbytes, memory)

    def pin(self, array: Any) -> None:
        span = Span(array.ctypes.data, array.nbytes)
        try:
            self.called("pin", array.nbytes)
        except errors.MemoryLimitError:
            self.pageable.append(span)
            raise
        if span.start % _PAGE:
            self.misused("pin of memory that does not begin on a page")
        with _lock:
            if any(span.meets(other) for other, _ in _pinned.values()):
                self.misused("pin of memory that is pinned")
            else:
                _pinned[span.start] = span, self

    def unpin(self, array: Any) -> None:
        self.calls["unpin"] += 1
        with _lock:
            span, device = _pinned.pop(array.ctypes.data, (None, None))
        if span is None or device is not self:
            self.misused("unpin of memory that this device did not pin")
        elif self.queues.drop(span):
            self.misused("unpin while queued work touches the memory")

    def stream(self) -> FakeStream:
        self.called("stream")
        self.streams += 1
        return FakeStream(self, self.queues.new())

    @property
    def pinned(self) -> int:
        """Ranges that are page-locked now."""
        with _lock:
            return sum(device is self for _, device in _pinned.values())

    def assert_clean(self, *, result: bool = False) -> None:
        """Nobody did wrong, and nothing is left.

        Args:
            result: Whether arrays of a load are alive, and may hold memory.
        """
        KITS.give_back()
        found = self._left(result)
        if found:  # A look at all objects takes longer than most loads of tests.
            gc.collect()
            found = self._left(result)
        if self.queues.busy():
            found.append("work that nobody waited for")
        assert not self.misuse, f"{self.name}: {'; '.join(self.misuse)}"
        assert not found, f"{self.name}: left over: {', '.join(found)}"

    def _left(self, result: bool) -> list[str]:
        left = {
            "ranges pinned": self.pinned,
            "streams open": self.streams,
            "times current": self.depth,
            "events": self.events,
            "bytes": 0 if result else sum(self.memory.values()),
        }
        return [f"{count} {what}" for what, count in left.items() if count]

    # For the parts above.

    def misused(self, what: str) -> None:
        self.misuse.append(what)

    def called(self, verb: str, nbytes: int = 0) -> None:
        with _lock:
            self.calls[verb] += 1
            self.nbytes[verb] += nbytes
            failing = self.calls[verb] == self.fail.get(verb)
        if failing:
            kind = errors.MemoryLimitError if verb in ("allocate", "pin") else errors.DeviceError
            raise kind(f"{self.name} was told to fail", found=f"{verb}, call {self.calls[verb]}")

    def late(self, verb: str) -> None:
        self.ran[verb] += 1
        if self.ran[verb] == self.fail_later.get(verb):
            raise errors.DeviceError(f"{self.name} was told to fail late", found=verb)

    def holds_pinned(self, span: Span) -> bool:
        with _lock:
            return span.start == span.end or any(held.holds(span) for held, _ in _pinned.values())

    def refused(self, span: Span) -> bool:
        """Whether a page-lock of it was refused."""
        return any(held.holds(span) for held in self.pageable)


def span(rows: DeviceRows) -> int:
    """Bytes of the source from the first to the last."""
    if not rows.nbytes or not rows.count:
        return 0
    return (rows.count - 1) * rows.pitch + rows.nbytes


def _inside(buffer: DeviceBuffer, start: int, nbytes: int) -> bool:
    return not nbytes or (start >= 0 and start + nbytes <= buffer.nbytes)


def _peek(buffer: DeviceBuffer) -> Any:
    """The bytes of a buffer, which this device alone may look at."""
    if isinstance(buffer.owner, _Memory):
        start = buffer.address - buffer.owner.address
        return buffer.owner.bytes[start : start + buffer.nbytes]
    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    kept: Any = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    kept.owner = buffer.owner  # Memory that was lent lives until the work on it is over.
    return np.frombuffer(kept, np.uint8)
