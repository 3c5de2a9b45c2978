"""The engine of device memory: blocks land in slots, and are copied on while the next are read.

A block lands in page-locked memory, or through cuFile in memory of the device. Each device has a
pool of workers of its own, on the processor cores next to it; with fewer readers than devices, some
devices share one. A block that several devices want is read once, by a worker of one of them, and
copied to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.cuda import numa
from mfload.cuda.copies import Copier
from mfload.cuda.cufile import CufileReader, CufileSlot
from mfload.cuda.device import Device
from mfload.cuda.staging import PinnedSlot, Ring, Staging
from mfload.io.engine import OpenReader, Tally, ThreadEngine, WorkerPool
from mfload.planning.blocks import Block, Lander, Observer, stored
from mfload.sources.local import LocalFile


class Gds(NamedTuple):
    """The files of a load that cuFile reads."""

    sources: Sequence[LocalFile]  # All files, by number.
    numbers: frozenset[int]  # Those that cuFile reads.
    note: Callable[[str], None]  # Told why cuFile gave up on one.


class _CufileStage:
    """Blocks land in memory of the device, unless cuFile or a copy can't do that."""

    def __init__(
        self,
        device: Device,
        copier: Copier,
        staging: Staging,
        gds: Gds,
        finished: Callable[[Block], None],
    ) -> None:
        self._copier = copier
        self._methods = staging.methods
        self._gds = gds
        self._numbers = set(gds.numbers)  # Less the files that cuFile gave up on.
        self.readers = OpenReader(lambda number: CufileReader(gds.sources[number], device))
        self.ring: Ring[CufileSlot] = Ring(
            lambda: CufileSlot(device, staging.block), staging.depth, finished
        )

    def begin(self, block: Block) -> bool:
        """Reads a block and begins to copy it on; False if it has to go through the host."""
        if block.source not in self._numbers or not self._methods.stay_on_devices(block):
            return False
        slot = None
        try:
            slot = self.ring.take()
            start = self.readers.of(block.source).land(block, slot.buffer)
        except errors.SourceChangedError:
            raise
        except errors.MfloadError as error:
            if self.ring.waiting is not None:
                raise  # Of a copy that was begun before.
            self._numbers.discard(block.source)
            path = self._gds.sources[block.source].path
            self._gds.note(f"{path}: fell back from gds to pinned: {error}")
            if slot is not None:
                self.ring.give(slot)
            return False
        self.ring.hold(slot, self._copier.from_device(block, slot.buffer, start), block)
        return True


class DeviceWorker:
    """Fills blocks through slots, in the pool of a device (see `io.engine.Worker`)."""

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        staging: Staging,
        open_lander: Callable[[int], Lander],
        gds: Gds | None,
        observer: Observer | None,
    ) -> None:
        self._memory = memory
        self._observer = observer
        self._block: Block | None = None
        self._tally = Tally()
        self.finished = self._tally.take
        self._copier = Copier(memory, staging.methods, staging.scratch)
        self._landers = OpenReader(open_lander)
        add = self._tally.add
        self._ring = Ring(lambda: PinnedSlot(device, staging), staging.depth, add)
        self._cufile = _CufileStage(device, self._copier, staging, gds, add) if gds else None
        self._rings = [self._ring] if self._cufile is None else [self._cufile.ring, self._ring]

    @property
    def block(self) -> Block | None:
        """The block at hand, or the one whose copies are waited for."""
        waiting = (ring.waiting for ring in self._rings)
        return next((block for block in waiting if block is not None), self._block)

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block and begins to copy it to its places."""
        self._block = block
        if self._cufile is not None and self._cufile.begin(block):
            return
        slot = self._ring.take()
        landed = self._landers.of(block.source).land(block, slot)
        if self._observer is not None:
            for offset, data in stored(block, self._memory, landed):
                self._observer.saw(block.source, offset, data, stopped)
        self._ring.hold(slot, self._copier.from_host(block, landed, slot.spare), block)

    def drain(self) -> None:
        """Waits for all copies."""
        for ring in self._rings:
            ring.drain()

    def close(self) -> None:
        """Waits for the copies under way, and only then gives the slots back."""
        self._copier.close()
        for ring in self._rings:
            ring.close()
        self._landers.close()
        if self._cufile is not None:
            self._cufile.readers.close()


def onto_devices(
    blocks: Sequence[Block],
    memory: list[Any],
    staging: Staging,
    open_lander: Callable[[int], Lander],
    *,
    threads: int,
    gds: Gds | None = None,
    observer: Observer | None = None,
) -> ThreadEngine:
    """The engine of a load of blocks onto devices.

    `memory` has the destination buffers by number: uint8 arrays, or `DeviceBuffer`s. `threads` are
    shared out among the devices; 0 for the thread that submits. `observer` sees what came, before
    it is copied on, but nothing of what cuFile reads.
    """
    devices_of = staging.methods.devices
    devices = list(dict.fromkeys(device for block in blocks for device in devices_of(block)))
    # With one pool, blocks are begun in the order of their submission, as observers expect.
    count = 1 if observer is not None else max(1, min(threads, len(devices)))
    groups = [devices[number::count] for number in range(count)]
    number_of = {device.name: n for n, group in enumerate(groups) for device in group}
    given = [0] * count
    if gds is not None:
        stay = staging.methods.stay_on_devices
        if rest := sum(block.source in gds.numbers and not stay(block) for block in blocks):
            gds.note(f"{rest} blocks are read through the host: devices can't put them in place")

    def pool(number: int, group: Sequence[Device]) -> WorkerPool:
        near = [numa.cpus(device.pci) for device in group] if threads else [None]
        cores = None if None in near else frozenset().union(*(each for each in near if each))
        share = threads // count + (number < threads % count)
        return WorkerPool(
            lambda: DeviceWorker(group[0], memory, staging, open_lander, gds, observer),
            share,
            lambda: numa.bound(cores),
        )

    def pool_of(block: Block) -> int:
        # The least busy pool of those whose devices want it.
        able = {number_of[device.name] for device in devices_of(block)} or range(count)
        chosen = min(able, key=lambda number: (given[number], number))
        given[chosen] += block.nbytes
        return chosen

    return ThreadEngine([pool(*each) for each in enumerate(groups)], pool_of)
