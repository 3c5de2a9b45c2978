"""The engine of device memory: blocks land in slots, and are copied on while the next are read.

Each device has a crew of its own, on the processor cores next to it; where there are fewer readers
than devices, some devices share one. A block that several devices want is read once, by one of
their crews, and copied to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mfload.cuda import numa
from mfload.cuda.copies import Ways
from mfload.cuda.device import Device
from mfload.cuda.paths import DevicePath, Direct, HostPath, Staging
from mfload.cuda.placing import Placer
from mfload.io.engine import Crew, Tally, ThreadEngine
from mfload.planning.blocks import Block, Lander, Observer


class StagedWorker:
    """Fills blocks by way of slots (see `io.engine.Worker`).

    Args:
        device: Whose crew it is in.
        memory: The destination buffers: uint8 arrays, or `DeviceBuffer`s.
        ways: How segments get to their places.
        staging: What slots are.
        open_lander: Opens the reader of a source by its number.
        direct: The way past host memory, None for none; what it can't do goes by way of the host.
        observer: Sees what came, before it is copied on; it sees nothing of what goes past.
    """

    def __init__(
        self,
        device: Device,
        memory: list[Any],
        ways: Ways,
        staging: Staging,
        open_lander: Callable[[int], Lander],
        direct: Direct | None,
        observer: Observer | None,
    ) -> None:
        self._block: Block | None = None
        self._tally = Tally()
        placer = self._placer = Placer(memory, ways, staging.scratch)
        host = HostPath(device, memory, placer, staging, open_lander, observer, self._tally.add)
        self._paths: list[HostPath | DevicePath] = [host]
        if direct is not None:
            past = DevicePath(device, placer, staging, ways, direct, self._tally.add)
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

    def finished(self) -> tuple[int, int]:
        """What is in place since the last question (see `Worker`)."""
        return self._tally.take()

    def drain(self) -> None:
        """Waits for all copies (see `Worker`)."""
        for path in self._paths:
            path.ring.drain()

    def close(self) -> None:
        """Waits for what is under way and gives everything back (see `Worker`)."""
        self._placer.close()
        for path in self._paths:
            path.close()


def engine(
    blocks: Sequence[Block],
    memory: list[Any],
    ways: Ways,
    staging: Staging,
    open_lander: Callable[[int], Lander],
    *,
    threads: int,
    direct: Direct | None = None,
    observer: Observer | None = None,
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
        observer: Sees what came, before it is copied on.
    """
    devices = list(dict.fromkeys(device for block in blocks for device in ways.devices(block)))
    # With one, blocks are begun in the order of their submission, as a witness is promised.
    count = 1 if observer is not None else max(1, min(threads, len(devices)))
    groups = [devices[number::count] for number in range(count)]
    number_of = {device.name: n for n, group in enumerate(groups) for device in group}
    given = [0] * count

    def crew(number: int, group: Sequence[Device]) -> Crew:
        def make() -> StagedWorker:
            return StagedWorker(group[0], memory, ways, staging, open_lander, direct, observer)

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
