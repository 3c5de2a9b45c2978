"""How the segments of a landed block get to their places, on devices or on the host.

The device copies bytes, contiguous or in rows. NumPy prepares the rest in host memory: conversions,
steps backwards, and rows too narrow to be worth a transfer each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from mfload.cuda.device import Device, DeviceRows, DeviceStream, Event
from mfload.cuda.memory import DeviceBuffer
from mfload.io.pread import put
from mfload.planning.blocks import Block, Copy, Segment

# From here on one device copies rows as fast as eight threads of the host gather them (H200, 64
# bytes: 38 GB/s; one thread 5.7), and these have other work.
_NARROW = 64
_CACHE_LINE = 64


class Methods:
    """How each segment of a plan is copied, given the device of each buffer (None: the host)."""

    def __init__(self, devices: Sequence[Device | None]) -> None:
        self._devices = devices

    def devices(self, block: Block) -> list[Device]:
        """The devices that a block's segments go to, in the order in which they come up."""
        found = (self._devices[segment.buffer] for segment in block.segments)
        return list(dict.fromkeys(device for device in found if device is not None))

    def working_bytes(self, block: Block) -> list[int]:
        """Bytes of host memory for each segment that NumPy prepares; of replicas, for one."""
        prepared: dict[object, int] = {}
        for segment in block.segments:
            copy = segment.copy
            if copy and self._devices[segment.buffer] and as_rows(segment, _NARROW) is None:
                prepared[segment.offset, copy] = _in_lines(_prepared_bytes(copy))
        return list(prepared.values())

    def stay_on_devices(self, block: Block) -> bool:
        """Whether a block that landed on a device gets to its places without the host."""
        if block.rows is not None:  # Each is read by itself.
            return False
        return all(
            self._devices[segment.buffer] is not None and as_rows(segment, 1) is not None
            for segment in block.segments
        )


class DeviceCopier:
    """Gives copies to the streams of one thread, one stream a device.

    `memory` has the destination buffers by number. `streams` has the streams that are there
    already, by the name of the device, and gets the others; its owner closes them. Bytes that
    several places get are copied from the host once, to the device `near` if it is among them, and
    from there to the devices that reach it.
    """

    def __init__(
        self,
        memory: list[Any],
        streams: dict[str, DeviceStream],
        near: Device | None = None,
    ) -> None:
        self._memory, self._streams, self._near = memory, streams, near

    def copy(self, block: Block, landed: Any, start: int = 0, spare: Any = None) -> list[Event]:
        """Begins to copy a landed block to its places; an event for each stream that does.

        `landed` has the block from byte `start` on: page-locked memory, or a `DeviceBuffer` if
        `Methods.stay_on_devices` is true of it. With page-locked memory comes more of it, `spare`,
        for what is prepared, enough for the largest segment. Both are free again when the events
        are done.
        """
        used: dict[str, DeviceStream] = {}
        prepared: dict[object, Any] = {}
        whole = left = spare
        narrow, there = 1 if spare is None else _NARROW, isinstance(landed, DeviceBuffer)
        firsts, replicas = (block.segments, ()) if there else self._shared_out(block)
        for segment in joined(firsts):
            target, copy = self._memory[segment.buffer], segment.copy
            first = start + segment.offset - block.offset
            if not isinstance(target, DeviceBuffer):
                put(landed[first:], segment, target, segment.at)
                continue
            stream = used[target.device.name] = self._stream(target.device)
            if (found := as_rows(segment, narrow)) is not None:
                first += 0 if copy is None else copy.start
                if there:
                    stream.copy_within(target, segment.at, landed, first, found)
                else:
                    stream.copy_in(target, segment.at, landed[first:], found)
                continue
            assert copy is not None
            key = segment.offset, copy  # For devices out of each other's reach, it is done once.
            if key not in prepared:
                nbytes = _prepared_bytes(copy)
                if left.nbytes < nbytes:
                    for each in used.values():
                        each.synchronize()
                    prepared.clear()
                    left = whole
                prepared[key], left = left[:nbytes], left[_in_lines(nbytes) :]
                put(landed[first:], segment, prepared[key], 0)
            stream.copy_in(target, segment.at, prepared[key], DeviceRows.one(prepared[key].nbytes))
        if not replicas:
            return [stream.record() for stream in used.values()]
        marks = {name: stream.record() for name, stream in used.items()}
        behind: set[tuple[str, str]] = set()
        for segment, first in replicas:
            target, source = self._memory[segment.buffer], self._memory[first.buffer]
            to, of = pair = target.device.name, source.device.name
            stream = used[to] = self._stream(target.device)
            if to != of and pair not in behind:
                stream.wait(marks[of])
            behind.add(pair)
            stream.copy_within(target, segment.at, source, first.at, DeviceRows.one(segment.landed))
        late = {to for to, _ in behind}
        return [each.record() if name in late else marks[name] for name, each in used.items()]

    def _device(self, segment: Segment) -> Device | None:
        memory = self._memory[segment.buffer]
        return memory.device if isinstance(memory, DeviceBuffer) else None

    def _stream(self, device: Device) -> DeviceStream:
        if device.name not in self._streams:
            self._streams[device.name] = device.stream()
        return self._streams[device.name]

    def _shared_out(
        self, block: Block
    ) -> tuple[Sequence[Segment], Sequence[tuple[Segment, Segment]]]:
        """Segments to copy from the host, and pairs: a segment, and which of those has its bytes.

        One of a pair is on a device that reaches the other's.
        """
        segments = block.segments
        if block.shared is None or len({each.offset for each in segments}) == len(segments):
            return segments, ()
        firsts, replicas = list[Segment](), list[tuple[Segment, Segment]]()
        held: dict[object, list[Segment]] = {}
        for segment in sorted(segments, key=lambda s: self._device(s) is not self._near):
            device = self._device(segment)
            if device is None or not segment.landed:
                firsts.append(segment)
                continue
            alike = held.setdefault((segment.offset, segment.nbytes, segment.copy), [])
            reached = (each for each in alike if device.reaches(self._memory[each.buffer].device))
            if (first := next(reached, None)) is None:
                firsts.append(segment)
                alike.append(segment)
            else:
                replicas.append((segment, first))
        return firsts, replicas


def joined(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments, of which those that lie side by side both in the file and in memory are one.

    Many small tensors are one copy: each would take as long as one of a whole block.
    """
    if len(segments) == 1:
        return segments
    made = list[Segment]()
    start = nbytes = into = place = 0  # Of the one that may go on.
    for segment in segments:
        offset, more, buffer, at, copy = segment
        if copy is None and buffer == into and offset - start == at - place == nbytes:
            nbytes += more
            continue
        if nbytes:
            made.append(Segment(start, nbytes, into, place))
        nbytes = 0
        if copy is None:
            start, nbytes, into, place = offset, more, buffer, at
        else:
            made.append(segment)
    return [*made, Segment(start, nbytes, into, place)] if nbytes else made


def as_rows(segment: Segment, narrow: int) -> DeviceRows | None:
    """The rows that a device copies of a segment; None if NumPy prepares it, as narrower rows."""
    copy = segment.copy
    if copy is None:
        return DeviceRows.one(segment.nbytes)
    found = rows(copy) if copy.source == copy.target else None
    return None if found and found.count > 1 and found.nbytes < narrow else found


@functools.lru_cache(4096)
def rows(copy: Copy) -> DeviceRows | None:
    """A copy without conversion as rows counted from `copy.start`; None if it is not rows alone."""
    nbytes = copy.source.itemsize
    count, pitch = 1, 0
    for size, stride in zip(reversed(copy.shape), reversed(copy.strides), strict=True):
        if size == 0:
            return None
        if size == 1:
            continue
        if count == 1 and stride == nbytes:
            nbytes *= size
        elif count == 1 and stride > nbytes:
            count, pitch = size, stride
        elif count > 1 and stride == count * pitch:
            count *= size
        else:
            return None
    return DeviceRows(count, nbytes, pitch or nbytes)


def _prepared_bytes(copy: Copy) -> int:
    return math.prod(copy.shape) * copy.target.itemsize


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
