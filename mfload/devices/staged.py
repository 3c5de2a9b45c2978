"""The engine of device memory: blocks land in slots, and are copied on while the next are read.

Each device has a crew of its own, on the processor cores next to it; where there are fewer readers
than devices, some devices share one. A block that several devices want is read once, by one of
their crews, and copied to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mfload import errors
from mfload.devices import numa
from mfload.devices.device import Device
from mfload.devices.memory import DeviceBuffer
from mfload.devices.placing import Placer
from mfload.devices.slots import PinnedSlot, Ring
from mfload.devices.ways import Ways
from mfload.io import buffers
from mfload.io.blocks import Block, Lander, Witness, stored
from mfload.io.engine import Crew, Opened, ThreadEngine


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


class _ByHost:
    """Blocks land in page-locked memory."""

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        placer: Placer,
        staging: Staging,
        open_lander: Callable[[int], Lander],
        witness: Witness | None,
        finished: Callable[[Block], None],
    ) -> None:
        self._memory = memory
        self._placer = placer
        self._witness = witness
        self._landers = Opened(open_lander)
        self.ring: Ring[PinnedSlot] = Ring(
            lambda: PinnedSlot(device, staging.slot, _pages(staging.spare)), staging.depth, finished
        )

    def begin(self, block: Block, stopped: Callable[[], bool]) -> bool:
        slot = self.ring.take()
        landed = self._landers.of(block.source).land(block, slot)
        if self._witness is not None:
            for offset, data in stored(block, self._memory, landed):
                self._witness.saw(block.source, offset, data, stopped)
        self.ring.hold(slot, self._placer.from_host(block, landed, slot.spare), block)
        return True

    def close(self) -> None:
        self.ring.close()
        self._landers.close()


class _PastHost:
    """Blocks land in memory of the device."""

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
        self.ring.close()
        self._landers.close()


class StagedWorker:
    """Fills blocks by way of slots (see `io.engine.Worker`).

    Args:
        device: Whose crew it is in.
        memory: The destination buffers: uint8 arrays, or `DeviceBuffer`s.
        ways: How segments get to their places.
        staging: What slots are.
        open_lander: Opens the reader of a source by its number.
        direct: The way past host memory, None for none; what it can't do goes by way of the host.
        witness: Sees what came, before it is copied on; it sees nothing of what goes past.
    """

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        ways: Ways,
        staging: Staging,
        open_lander: Callable[[int], Lander],
        direct: Direct | None,
        witness: Witness | None,
    ) -> None:
        self._block: Block | None = None
        self._blocks = self._nbytes = 0
        placer = self._placer = Placer(memory, ways, staging.scratch)
        host = _ByHost(device, memory, placer, staging, open_lander, witness, self._count)
        self._paths: list[_ByHost | _PastHost] = [host]
        if direct is not None:
            past = _PastHost(device, placer, staging, ways, direct, self._count)
            self._paths.insert(0, past)

    @property
    def block(self) -> Block | None:
        """The block that it is concerned with (see `Worker`)."""
        waiting = (path.ring.waiting for path in self._paths)
        return next((block for block in waiting if block is not None), self._block)

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block and begins to copy it to its places (see `Worker`)."""
        self._block = block
        for path in self._paths:
            if path.begin(block, stopped):
                break

    def _count(self, block: Block) -> None:
        self._blocks += 1
        self._nbytes += block.nbytes

    def finished(self) -> tuple[int, int]:
        """What is in place since the last question (see `Worker`)."""
        done = self._blocks, self._nbytes
        self._blocks = self._nbytes = 0
        return done

    def drain(self) -> None:
        """Waits for all copies (see `Worker`)."""
        for path in self._paths:
            path.ring.drain()

    def close(self) -> None:
        """Waits for what is under way and gives everything back (see `Worker`)."""
        self._placer.close()
        while self._paths:
            # Taken out, since a path knows its worker: a circle would keep the buffers.
            self._paths.pop().close()


def engine(
    blocks: Sequence[Block],
    memory: list[Any],
    ways: Ways,
    staging: Staging,
    open_lander: Callable[[int], Lander],
    *,
    threads: int,
    direct: Direct | None = None,
    witness: Witness | None = None,
) -> ThreadEngine:
    """The engine of a load onto devices.

    Args:
        blocks: What it will be given.
        memory: The destination buffers, by number.
        ways: How segments get to their places.
        staging: What slots are.
        open_lander: Opens the reader of a source by its number.
        threads: Readers at once, shared out among the devices; 0 for the thread that submits.
        direct: The way past host memory, None for none.
        witness: Sees what came, before it is copied on.
    """
    devices = list(dict.fromkeys(device for block in blocks for device in ways.devices(block)))
    # With one, blocks are begun in the order of their submission, as a witness is promised.
    count = 1 if witness is not None else max(1, min(threads, len(devices)))
    groups = [devices[number::count] for number in range(count)]
    number_of = {device.name: n for n, group in enumerate(groups) for device in group}
    given = [0] * count

    def crew(number: int, group: Sequence[Device]) -> Crew:
        def make() -> StagedWorker:
            return StagedWorker(group[0], memory, ways, staging, open_lander, direct, witness)

        near = [numa.cpus(device.pci) for device in group] if threads else [None]
        cores = None if None in near else frozenset().union(*(each for each in near if each))
        share = threads // count + (number < threads % count)
        return Crew(make, share, lambda: numa.bound(cores))

    def crew_of(block: Block) -> int:
        # What several devices want is read by the crew that has least to do of theirs.
        able = {number_of[device.name] for device in ways.devices(block)} or range(count)
        chosen = min(able, key=lambda number: (given[number], number))
        given[chosen] += block.nbytes
        return chosen

    return ThreadEngine([crew(*each) for each in enumerate(groups)], crew_of)


def _pages(nbytes: int) -> int:
    return -(-nbytes // buffers.PAGE) * buffers.PAGE
