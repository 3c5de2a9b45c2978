"""What a device does: a few protocols, so that a fake device can run the engine without a GPU.

A stream runs what it is given in order, at some time after the call; streams do not wait for each
other. A source of a copy must stay as it is until an event recorded after the copy is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Block

CUDA = 2
"""DLPack's device type of CUDA memory (kDLCUDA)."""


class MemoryInfo(NamedTuple):
    """Memory of a device, in bytes."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of bytes with gaps between them in the source, and none in the target."""

    count: int
    nbytes: int  # Of a row.
    pitch: int  # Bytes from the start of one row to that of the next in the source.

    @staticmethod
    def one(nbytes: int) -> DeviceRows:
        """Contiguous bytes, as one row."""
        return DeviceRows(1, nbytes, nbytes)


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Whether the work before the mark is over; raises DeviceError if some of it failed."""
        ...

    def wait(self) -> None:
        """Returns when it is (see `done`); other threads run meanwhile."""


class DeviceStream(Protocol):
    """Work for a device, done in order. Every call but `synchronize` and `close` returns at once.

    Used by one thread at a time; any thread may ask and wait for events. Every call raises
    DeviceError if the device refused, or earlier work of the stream failed. Copies are of rows that
    begin at byte `start` of the source, to byte `at` of the target.
    """

    device: Device

    @property
    def handle(self) -> int:
        """CUDA's own name of it, for libraries that give it work."""
        ...

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: DeviceRows) -> None:
        """Copies rows out of a contiguous uint8 array, page-locked by `pin` of a device like it."""

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: DeviceRows
    ) -> None:
        """Copies rows out of memory of this or another device."""

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        """Fills a contiguous uint8 array of the host, page-locked or not."""

    def record(self) -> Event:
        """A mark behind all that was given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Has what is given from now on wait for a mark of another stream."""

    def synchronize(self) -> None:
        """Returns when all that was given is over."""

    def close(self) -> None:
        """Ends the stream once all that was given is over. Idempotent; never raises."""


class Device(Protocol):
    """One device. Every call but `unpin` raises DeviceError if the device refuses.

    `place` is DLPack's (device type, number) of its memory, and `pci` its address on the PCI bus as
    sysfs writes it ("0000:3b:00.0"), if it has one. If it is `unified`, its memory is that of the
    host, and it works on what `pin` has page-locked as on its own.
    """

    name: str
    place: tuple[int, int]
    pci: str | None
    unified: bool

    def current(self) -> AbstractContextManager[None]:
        """Makes it the calling thread's device inside a `with`, and restores what was before."""
        ...

    def reaches(self, other: Device) -> bool:
        """Whether its streams copy out of the other's memory directly, and not through the host."""
        ...

    def memory_info(self) -> MemoryInfo:
        """How much memory is free, and how much there is."""
        ...

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """New memory on a boundary of 256 bytes, not initialised; freed with its last user.

        The free waits for all work on the device, so no kernel loses memory that it works on.
        Raises MemoryLimitError if there is not enough.
        """
        ...

    def pin(self, array: Any) -> None:
        """Page-locks a uint8 array that has its pages to itself; MemoryLimitError if refused."""

    def unpin(self, array: Any) -> None:
        """Unlocks what `pin` locked, once no copy reads from it. Never raises."""

    def stream(self) -> DeviceStream:
        """A new stream, which waits for no other."""
        ...


class Reader(Protocol):
    """Lands blocks of one source in device memory; used by one thread at a time."""

    def land(self, block: Block, slot: DeviceBuffer) -> int:
        """Reads a block into a slot that is long enough.

        Returns where in the slot it begins. It lies there for every stream. After an error nothing
        writes to the slot any more, or the reader keeps its memory.
        """
        ...

    def close(self) -> None:
        """Lets go of the slots. Idempotent; never raises."""
