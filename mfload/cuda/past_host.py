"""What lands on a device without host memory: files through cuFile, and what peers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mfload.cuda.cufile import CufileReader, CufileSlot
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Block
from mfload.sources.base import Source


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


class DeviceSlot:
    """Device memory for blocks of up to `nbytes`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.buffer = device.allocate(nbytes)

    def close(self) -> None:
        """Does nothing: the memory is registered nowhere."""


def holds(source: Any, block: Block) -> bool:
    """Whether a block of a source can land on a device without the host."""
    return source.file is not None or source.on_devices(block.offset, block.nbytes)


def reader(source: Any, device: Device) -> Reader:
    """What lands blocks of a source on a device: its own `onto`, or cuFile."""
    return CufileReader(source, device) if source.file is not None else source.onto(device)


def of_files(sources: Mapping[int, Source]) -> bool:
    """Whether cuFile reads some of them: slots are registered with it, and kept for other loads."""
    return any(each.file is not None for each in sources.values())


def slot(sources: Mapping[int, Source], device: Device, nbytes: int) -> Any:
    """Memory of a device that the readers of these sources land blocks in."""
    return (CufileSlot if of_files(sources) else DeviceSlot)(device, nbytes)
