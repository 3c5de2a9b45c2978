"""The two paths of a block to a device: by way of page-locked host memory, and past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mfload import errors
from mfload.cuda.copies import Ways
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.cuda.placing import Placer
from mfload.cuda.slots import PinnedSlot, Ring
from mfload.io import buffers
from mfload.io.engine import Opened
from mfload.planning.blocks import Block, Lander, Observer, stored


class Staging(NamedTuple):
    """What the slots of a load are.

    Attributes:
        block: Bytes of the longest block.
        spare: Bytes of it for what is put in order on the host.
        scratch: Bytes of device memory, for each reader and device, for what is converted.
        depth: Slots a reader.
    """

    block: int
    spare: int
    scratch: int
    depth: int

    @property
    def slot(self) -> int:
        """Bytes that a slot has for a block: whole pages, and one more at each end."""
        return _pages(self.block) + 2 * buffers.PAGE

    @property
    def pinned(self) -> int:
        """Bytes of page-locked memory for each reader."""
        return self.depth * (self.slot + _pages(self.spare))


class DeviceLander(Protocol):
    """Lands blocks of one open source in device memory; used by one thread at a time."""

    def land(self, block: Block, slot: DeviceBuffer) -> int:
        """Reads the block.

        Returns:
            The byte of the slot at which it begins.
        """
        ...

    def close(self) -> None:
        """Gives back what the reader holds open."""
        ...


class DeviceSlot(Protocol):
    """Memory of a device that storage can write to."""

    buffer: DeviceBuffer

    def close(self) -> None:
        """Gives it back; storage can't write to it any more."""
        ...


class Direct(NamedTuple):
    """The way past host memory.

    Attributes:
        sources: Numbers of the sources that take it.
        open: Opens the reader of a source, for a device.
        slot: Makes a slot on a device, for blocks of so many bytes.
        failed: Told why a source takes the way by the host after all.
    """

    sources: frozenset[int]
    open: Callable[[int, Device], DeviceLander]
    slot: Callable[[Device, int], DeviceSlot]
    failed: Callable[[int, Exception], None]


class HostPath:
    """Blocks land in page-locked memory.

    Args:
        device: Locks it.
        memory: The destination buffers.
        placer: Copies on.
        staging: What slots are.
        open_lander: Opens the reader of a source by its number.
        observer: Sees what came, before it is copied on.
        finished: Told of each block that is in place.

    Attributes:
        ring: The slots.
    """

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        placer: Placer,
        staging: Staging,
        open_lander: Callable[[int], Lander],
        observer: Observer | None,
        finished: Callable[[Block], None],
    ) -> None:
        self._memory = memory
        self._placer = placer
        self._witness = observer
        self._landers = Opened(open_lander)
        self.ring: Ring[PinnedSlot] = Ring(
            lambda: PinnedSlot(device, staging.slot, _pages(staging.spare)), staging.depth, finished
        )

    def begin(self, block: Block, stopped: Callable[[], bool]) -> bool:
        """Reads a block and begins to copy it on.

        Args:
            block: The block.
            stopped: Whether the work was given up meanwhile.

        Returns:
            Whether it did; else the block is to go another way.
        """
        slot = self.ring.take()
        landed = self._landers.of(block.source).land(block, slot)
        if self._witness is not None:
            for offset, data in stored(block, self._memory, landed):
                self._witness.saw(block.source, offset, data, stopped)
        self.ring.hold(slot, self._placer.from_host(block, landed, slot.spare), block)
        return True

    def close(self) -> None:
        """Gives everything back; nothing is under way."""
        self.ring.close()
        self._landers.close()


class DevicePath:
    """Blocks land in memory of the device.

    Args:
        device: Whose.
        placer: Copies on.
        staging: What slots are.
        ways: How segments get to their places.
        direct: The way past host memory.
        finished: Told of each block that is in place.

    Attributes:
        ring: The slots.
    """

    def __init__(
        self,
        device: Device,
        placer: Placer,
        staging: Staging,
        ways: Ways,
        direct: Direct,
        finished: Callable[[Block], None],
    ) -> None:
        self._placer = placer
        self._ways = ways
        self._sources = set(direct.sources)
        self._failed = direct.failed
        self._landers = Opened(lambda source: direct.open(source, device))
        self.ring: Ring[DeviceSlot] = Ring(
            lambda: direct.slot(device, staging.block), staging.depth, finished
        )

    def begin(self, block: Block, stopped: Callable[[], bool]) -> bool:
        """Reads a block and begins to copy it on (see `HostPath.begin`)."""
        if not self._takes(block):
            return False
        slot = None
        try:
            slot = self.ring.take()
            start = self._landers.of(block.source).land(block, slot.buffer)
        except errors.SourceChangedError:
            raise
        except errors.MfloadError as error:
            if self.ring.waiting is not None:
                raise  # Of a copy that was begun before.
            self._sources.discard(block.source)
            self._failed(block.source, error)
            if slot is not None:
                self.ring.give(slot)
            return False
        self.ring.hold(slot, self._placer.from_device(block, slot.buffer, start), block)
        return True

    def _takes(self, block: Block) -> bool:
        return block.source in self._sources and self._ways.stay_on_devices(block)

    def close(self) -> None:
        """Gives everything back; nothing is under way."""
        self.ring.close()
        self._landers.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // buffers.PAGE) * buffers.PAGE
