"""Pools that fill device memory: blocks land in slots and are copied on while the next are read.

Each device has a pool of threads on the processor cores next to it; with fewer threads than
devices, some share one. A block that several devices want is read once, copied to one of them, and
from there to those that reach it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mfload import errors
from mfload.cuda import numa
from mfload.cuda.copies import DeviceCopier
from mfload.cuda.cufile import CufileReader, CufileSlot
from mfload.cuda.device import Device, Reader
from mfload.cuda.staging import KITS, PinnedSlot, Ring, Staging
from mfload.io.engine import Observer, OpenReaders, Pool, Share
from mfload.io.pread import PreadReader
from mfload.planning.blocks import Block, stored
from mfload.runtime import close_all
from mfload.sources.base import Source


class DeviceSlot:
    """Device memory for blocks of up to `nbytes`; it is registered nowhere."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.buffer = device.allocate(nbytes)


class DeviceWorker:
    """Fills the blocks of one thread."""

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        staging: Staging,
        open_reader: Callable[[int], PreadReader],
        gds: Mapping[int, Source],
        note: Callable[[str], None],
        observer: Observer | None,
        share: Share,
    ) -> None:
        self._share, self._device, self._there = share, device, False
        self._kit = kit = KITS.take(device, staging)
        for slot in kit.slots:
            slot.tell(note)
        self._memory = memory
        self._methods = staging.methods
        self._observer = observer
        self._gds = dict(gds)  # Less the files that cuFile gives up on.
        self._note = note
        self._copier = DeviceCopier(memory, kit.streams, device)
        self._readers = OpenReaders(open_reader)
        make = lambda: PinnedSlot(device, staging, note)  # noqa: E731
        self._ring = Ring(make, staging.depth, share, kit.slots)
        self._cufile_readers = OpenReaders(partial(_past_host, gds, device))
        # Slots of files are registered with cuFile, and kept for other loads.
        of_files = any(source.file is not None for source in gds.values())
        past, kept = (CufileSlot, kit.past) if of_files else (DeviceSlot, None)
        self._cufile_ring = Ring(partial(past, device, staging.block), staging.depth, share, kept)
        readers, rings = [self._cufile_readers, self._readers], [self._ring, self._cufile_ring]
        self._open = [*readers, *rings, kit]  # The last is closed first.

    def run(self) -> None:
        """Fills the blocks of its share; the next load has the slots, if that went well.

        If not, they are given back once no copy uses them.
        """
        try:
            for block in self._share:
                self.fill(block)
            self._cufile_ring.drain()
            self._ring.drain()
            self._open = [self._readers, self._cufile_readers]
            KITS.give(self._device, self._kit)
        finally:
            self.close()

    def fill(self, block: Block) -> None:
        """Reads a block and begins to copy it to its places."""
        if block.source in self._gds and self._filled_by_cufile(block):
            return
        slot, track = self._ring.take(), self._share.track
        landed = self._readers.of(block.source).land(block, slot)
        if not self._there:
            self._share.memory()
            self._there = True
        if self._observer is not None:
            for offset, data in stored(block, self._memory, landed):
                self._observer.saw(block.source, offset, data, self._share.stopped)
            if track is not None:
                track.mark("check", 0, block.source)
        self._ring.hold(slot, self._copier.copy(block, landed, spare=slot.spare), block)

    def _filled_by_cufile(self, block: Block) -> bool:
        """Does so through a slot in device memory; False if its reader or a copy can't do that."""
        source: Any = self._gds[block.source]
        there = source.file is not None or source.on_devices(block.offset, block.nbytes)
        if not there or not self._methods.stay_on_devices(block):
            return False
        slot = None
        try:
            slot, begun = self._cufile_ring.take(), time.perf_counter()
            start = self._cufile_readers.of(block.source).land(block, slot.buffer)
            if self._share.track is not None:
                self._share.track.add("read", begun, block.nbytes, block.source)
        except errors.SourceChangedError:
            raise
        except errors.MfloadError as error:
            if self._share.block is not block:
                raise  # A copy of an earlier block failed.
            del self._gds[block.source]
            if source.file is None:
                raise  # A peer: what it fails at, it fails at on the host as well.
            self._note(f"{source.name}: fell back from gds to pinned: {error}")
            if slot is not None:
                self._cufile_ring.give(slot)
            return False
        self._share.memory()
        self._cufile_ring.hold(slot, self._copier.copy(block, slot.buffer, start), block)
        return True

    def close(self) -> None:
        """Waits for the copies under way, and only then gives the slots back."""
        close_all(self._open)


def _past_host(sources: Mapping[int, Any], device: Device, number: int) -> Reader:
    """What lands blocks of a source on a device without the host: cuFile, or its own `onto`."""
    source = sources[number]
    return CufileReader(source, device) if source.file is not None else source.onto(device)


def onto_devices(
    blocks: Sequence[Block],
    memory: list[Any],
    staging: Staging,
    open_reader: Callable[[int], PreadReader],
    threads: int,
    gds: Mapping[int, Source],
    note: Callable[[str], None],
    observer: Observer | None = None,
) -> list[Pool]:
    """The pools of a load onto devices, which share out the threads.

    `memory` has a uint8 array or a `DeviceBuffer` for each buffer. `gds` are the sources that land
    past the host, by number (see `device.Reader`); `note` is told why that failed for one.
    `observer` sees what came before it is copied on, but nothing of these.
    """
    devices_of = staging.methods.devices
    devices = list(dict.fromkeys(device for block in blocks for device in devices_of(block)))
    # With one pool, blocks are begun in their own order, as observers expect.
    count = 1 if observer is not None else max(1, min(threads, len(devices)))
    groups = [devices[number::count] for number in range(count)]
    number_of = {device.name: n for n, group in enumerate(groups) for device in group}
    parts: list[list[Block]] = [[] for _ in groups]
    given = [0] * count
    for block in blocks:
        # The least busy pool of those whose devices want it.
        able = {number_of[device.name] for device in devices_of(block)} or range(count)
        chosen = min(able, key=lambda number: (given[number], number))
        given[chosen] += block.nbytes
        parts[chosen].append(block)
    stay = staging.methods.stay_on_devices
    files = {number for number, source in gds.items() if source.file is not None}
    if rest := sum(block.source in files and not stay(block) for block in blocks):
        blocks_read = errors.counted(rest, "block")
        note(f"read through the host, since devices can't put them in place: {blocks_read}")

    pools: list[Pool] = []
    for number, group in enumerate(groups):
        near = [numa.cpus(device.pci) for device in group] if threads else [None]
        cores = None if None in near else frozenset().union(*(each for each in near if each))
        given = memory, staging, open_reader, gds, note, observer
        work = partial(_work, cores, group[0], *given)
        pools.append((parts[number], work, threads // count + (number < threads % count)))
    return pools


def _work(cores: frozenset[int] | None, device: Device, *args: Any) -> None:
    with numa.bound(cores), device.current():  # Or each of its calls would make it so.
        DeviceWorker(device, *args).run()
