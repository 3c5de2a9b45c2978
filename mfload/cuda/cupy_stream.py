"""Streams and events of a CUDA device."""

from __future__ import annotations

import collections
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.cuda.device import Device, Rows
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Copy

if TYPE_CHECKING:
    from mfload.cuda.cupy_device import CupyDevice

# cudaErrorNotReady; CuPy has no name for it. CUDA keeps it as the last error of its runtime, of
# which CuPy has one of its own: nobody else's next question is answered by it.
_NOT_READY = 600


class _Events:
    """Events of a stream, used again: to make and to destroy one takes longer than to record it.

    Args:
        device: Whose.
    """

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        # No lock: the garbage collector may come to `give` anywhere.
        self._free: collections.deque[int] = collections.deque()
        self._closed = False

    def take(self) -> int:
        """One that nobody uses."""
        with suppress(IndexError):
            return self._free.pop()
        runtime = self._device.runtime
        # A wait sleeps instead of spinning: the processors are for the readers.
        flags = runtime.eventDisableTiming | runtime.eventBlockingSync
        return self._device.ask("eventCreateWithFlags", flags)

    def give(self, handle: int) -> None:
        """Takes one back. A stream that waits for it goes on to wait for what it was then."""
        self._free.append(handle)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Destroys them, those that are still in use later. Never raises."""
        self._closed = True
        with suppress(IndexError):
            while True:
                handle = self._free.pop()
                with suppress(Exception):  # The driver may be gone when the interpreter ends.
                    self._device.ask("eventDestroy", handle)


class CupyEvent:
    """See `device.Event`."""

    def __init__(self, device: CupyDevice, events: _Events) -> None:
        self._device = device
        self._events = events
        self.handle = 0
        self.handle = events.take()

    def done(self) -> bool:
        """See `device.Event`."""
        status = self._device.ask("eventQuery", self.handle)
        if status and status != _NOT_READY:
            said = str(self._device.runtime.CUDARuntimeError(status))
            raise self._device.failed("eventQuery", status, said)
        return not status

    def wait(self) -> None:
        """See `device.Event`."""
        self._device.ask("eventSynchronize", self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            # Gone from here: by the time that a finaliser asks, it may be another's.
            handle, self.handle = self.handle, 0
            self._events.give(handle)


class CupyStream:
    """See `device.Stream`."""

    def __init__(self, device: CupyDevice) -> None:
        self.device: Device = device
        self._device = device
        self._events = _Events(device)
        self._handle: int | None = device.ask(
            "streamCreateWithFlags", device.runtime.streamNonBlocking
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        """What CuPy asks for to put its kernels here: version of the protocol, and the handle."""
        return 0, self._open()

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: Rows) -> None:
        """See `device.Stream`."""
        self._copy(target.address + at, source.ctypes.data, rows)

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: Rows
    ) -> None:
        """See `device.Stream`."""
        self._copy(target.address + at, source.address + start, rows)

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        """See `device.Stream`."""
        rows = Rows(1, target.nbytes, target.nbytes)
        self._copy(target.ctypes.data, source.address + start, rows)

    def convert(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, copy: Copy
    ) -> None:
        """See `device.Stream`."""
        cupy, number = self._device.cupy, self._device.place[1]

        def array(buffer: DeviceBuffer, first: int, dtype: Any, strides: Any) -> Any:
            # The owner is left out: CuPy need not keep alive what the caller does.
            memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, None, number)
            return cupy.ndarray(copy.shape, dtype, cupy.cuda.MemoryPointer(memory, first), strides)

        if 0 in copy.shape:
            return
        try:
            with self._device.current(), cupy.cuda.Stream.from_external(self):
                given = array(source, start + copy.start, copy.source, copy.strides)
                cupy.copyto(array(target, at, copy.target, None), given, casting="unsafe")
        except errors.MfloadError:
            raise
        except Exception as error:
            raise self._device.ours(error, "convert") from error

    def record(self) -> CupyEvent:
        """See `device.Stream`."""
        event = CupyEvent(self._device, self._events)
        self._device.ask("eventRecord", event.handle, self._open())
        return event

    def wait(self, event: Any) -> None:
        """See `device.Stream`."""
        self._device.ask("streamWaitEvent", self._open(), event.handle)

    def synchronize(self) -> None:
        """See `device.Stream`."""
        self._device.ask("streamSynchronize", self._open())

    def close(self) -> None:
        """See `device.Stream`."""
        if self._handle is None:
            return
        # What failed shows at events and at `synchronize`; this is called on the way out.
        with suppress(errors.DeviceError):
            self.synchronize()
        handle, self._handle = self._handle, None
        try:
            with suppress(errors.DeviceError):
                self._device.ask("streamDestroy", handle)
        finally:
            self._events.close()  # They may outlive it.

    def _open(self) -> int:
        if self._handle is None:
            # CUDA would take 0 for the default stream, which waits for all others.
            raise errors.DeviceError("the stream is closed", found=self._device.name)
        return self._handle

    def _copy(self, target: int, source: int, rows: Rows) -> None:
        stream, kind = self._open(), self._device.runtime.memcpyDefault
        count, nbytes, pitch = rows.count, rows.nbytes, rows.pitch
        if not count * nbytes:
            return
        if count == 1 or pitch == nbytes:
            self._device.ask("memcpyAsync", target, source, count * nbytes, kind, stream)
        elif nbytes < pitch <= self._device.longest_pitch:
            args = target, nbytes, source, pitch, nbytes, count, kind, stream
            self._device.ask("memcpy2DAsync", *args)
        else:
            for row in range(count):
                ends = target + row * nbytes, source + row * pitch
                self._device.ask("memcpyAsync", *ends, nbytes, kind, stream)
