"""What a device is: a few verbs, so that a fake one can run the engines where there is no GPU.

A stream runs what it was given in order, at some time after the call; streams know nothing of
each other. So whoever gives a copy to a stream leaves its source alone until an event that was
recorded behind it is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Copy

CUDA = 2
"""DLPack's device type of CUDA memory (kDLCUDA)."""

ALIGNMENT = 256
"""Bytes on which tensors lie in device memory: what CUDA's own allocator gives."""


class Room(NamedTuple):
    """Memory of a device, in bytes.

    Attributes:
        free: What can still be had of it.
        total: All of it.
    """

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Bytes in rows that lie apart in the source and follow each other in the target.

    Attributes:
        count: How many.
        nbytes: Bytes a row.
        pitch: Bytes from the start of one to that of the next in the source.
    """

    count: int
    nbytes: int
    pitch: int

    @property
    def span(self) -> int:
        """Bytes of the source from the first to the last."""
        return (self.count - 1) * self.pitch + self.nbytes if self.count else 0


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Whether all that the stream was given before the mark is over.

        Raises:
            DeviceError: Some of it failed.
        """
        ...

    def wait(self) -> None:
        """Returns when it is (see `done`); other threads run meanwhile."""
        ...


class Stream(Protocol):
    """Work for a device, done in order. Every call but `synchronize` and `close` returns at once.

    Used by one thread at a time; events may be asked and waited for by any.

    Raises:
        DeviceError: From any call: the device refused, or earlier work of it failed.
    """

    device: Device

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: Rows) -> None:
        """Copies from the host.

        Args:
            target: Where to; on this stream's device.
            at: First byte there.
            source: A contiguous uint8 array of at least `rows.span` bytes, page-locked by `pin`
                of this device or one like it.
            rows: What of it.
        """
        ...

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: Rows
    ) -> None:
        """Copies from device memory, also from that of another device like this.

        Args:
            target: Where to.
            at: First byte there.
            source: Where from.
            start: First byte there.
            rows: What of it, counted from `start`.
        """
        ...

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        """Copies to the host.

        Args:
            target: A contiguous uint8 array, filled whole; page-locked or not.
            source: Where from.
            start: First byte there.
        """
        ...

    def convert(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, copy: Copy
    ) -> None:
        """Copies elements, converting their values as NumPy's `astype` does.

        Args:
            target: Where to, in C order.
            at: First byte there, a multiple of the element's size.
            source: Where from.
            start: The byte that `copy.start` counts from.
            copy: Shape, strides and dtypes, for which `Device.converts` said yes; not checked.
                Elements lie at multiples of their size: kernels can't read others.
        """
        ...

    def record(self) -> Event:
        """A mark behind all that was given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Has what is given from now on wait for a mark of another stream."""
        ...

    def synchronize(self) -> None:
        """Returns when all that was given is over."""
        ...

    def close(self) -> None:
        """Ends it, once all that was given is over; more than once does nothing. Never raises."""
        ...


class Device(Protocol):
    """One device.

    Attributes:
        name: As people type it, such as "cuda:0".
        place: DLPack's (device type, number) of its memory.
        pci: Its address on the PCI bus in the spelling of sysfs ("0000:3b:00.0"); None for none.
    """

    name: str
    place: tuple[int, int]
    pci: str | None

    def current(self) -> AbstractContextManager[None]:
        """Makes it the device of the calling thread inside a `with`; for libraries that ask.

        Devices may be nested, also in themselves. Afterwards the thread has what it had before.

        Raises:
            DeviceError: When it is entered: the device refused.
        """
        ...

    def room(self) -> Room:
        """How much memory there is.

        Raises:
            DeviceError: The device does not answer.
        """
        ...

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """New memory on a boundary of 256 bytes, not initialised; it goes with its last user.

        Its release waits for all that runs on the device, so nobody's kernels lose it under them.

        Raises:
            MemoryLimitError: There is not so much.
        """
        ...

    def pin(self, array: Any) -> None:
        """Locks the pages of a uint8 array that has them to itself, so that copies need no stage.

        Raises:
            MemoryLimitError: The system or the driver refused.
        """
        ...

    def unpin(self, array: Any) -> None:
        """Takes `pin` back; nothing copies from the array any more. Never raises."""
        ...

    def stream(self) -> Stream:
        """A stream of its own, which waits for no other.

        Raises:
            DeviceError: The device refused.
        """
        ...

    def converts(self, source: Any, target: Any) -> bool:
        """Whether `Stream.convert` knows a pair of NumPy dtypes, with the very results of NumPy.

        Payloads of NaN may differ. The first question for a pair may take a second (a kernel is
        compiled and tried).
        """
        ...
