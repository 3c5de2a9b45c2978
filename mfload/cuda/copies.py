"""How the segments of a landed block get to their places, on devices or on the host.

The device copies bytes, contiguous or in rows, and converts elements. NumPy prepares the rest in
host memory: steps backwards, rows too narrow to be worth a transfer each, values that must be
checked, and conversions that the device does not know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from mfload.cuda.device import Device, Event, Rows, Stream
from mfload.cuda.memory import DeviceBuffer
from mfload.io.pread import put
from mfload.planning.blocks import Block, Segment
from mfload.planning.steps import Copy

Method = Rows | Literal["convert", "prepare"]
"""Rows to copy, or elements to convert on the device, or to prepare on the host."""

# A row over PCIe costs some hundred bytes of overhead.
_NARROW = 256
_CACHE_LINE = 64


class Methods:
    """How each segment of a plan is copied, given the device of each buffer (None: the host)."""

    def __init__(self, devices: Sequence[Device | None]) -> None:
        self._devices = devices

    def devices(self, block: Block) -> list[Device]:
        """The devices that a block's segments go to, in the order in which they come up."""
        found = (self._devices[segment.buffer] for segment in block.segments)
        return list(dict.fromkeys(device for device in found if device is not None))

    def of(self, segment: Segment, *, narrow: int = _NARROW) -> Method | None:
        """The method for a segment, None if it goes to the host; narrow rows are prepared there."""
        copy, device = segment.copy, self._devices[segment.buffer]
        if device is None:
            return None
        if copy is None:
            return Rows.one(segment.nbytes)
        if copy.source != copy.target:
            known = not copy.checked and device.converts(copy.source, copy.target)
            return "convert" if known else "prepare"
        found = rows(copy)
        if found is None or (found.count > 1 and found.nbytes < narrow):
            return "prepare"
        return found

    def working_bytes(self, block: Block) -> tuple[int, list[int]]:
        """Bytes of memory that it takes to copy a block, beside the block itself.

        Of device memory to convert the largest segment, and of host memory for each segment that
        NumPy prepares; of replicas, for one.
        """
        scratch, prepared = 0, dict[object, int]()
        for segment in block.segments:
            method = None if segment.copy is None else self.of(segment)
            if method == "convert":
                scratch = max(scratch, segment.nbytes)
            elif method == "prepare" and segment.copy is not None:
                prepared[segment.offset, segment.copy] = _in_lines(_prepared_bytes(segment.copy))
        return scratch, list(prepared.values())

    def stay_on_devices(self, block: Block) -> bool:
        """Whether a block that landed on a device gets to its places without the host."""
        methods = (self.of(segment, narrow=1) for segment in block.segments)
        return all(method not in (None, "prepare") for method in methods)


class Copier:
    """Gives copies to the streams of one thread, one stream a device.

    `memory` has the destination buffers by number; `scratch` is the bytes of device memory for what
    is to be converted.
    """

    def __init__(self, memory: list[Any], methods: Methods, scratch: int) -> None:
        self._memory = memory
        self._methods = methods
        self._scratch_bytes = scratch
        self._streams: dict[str, Stream] = {}
        self._scratch: dict[str, DeviceBuffer] = {}

    def copy(self, block: Block, landed: Any, start: int = 0, spare: Any = None) -> list[Event]:
        """Begins to copy a landed block to its places; an event for each stream that does.

        `landed` has the block from byte `start` on: page-locked memory, or a `DeviceBuffer` if
        `Methods.stay_on_devices` is true of it. With page-locked memory comes more of it, `spare`,
        for what is prepared, enough for the largest segment. Both are free again when the events
        are done.
        """
        used: dict[str, Stream] = {}
        prepared: dict[object, Any] = {}
        whole = left = spare
        narrow = 1 if spare is None else _NARROW
        for segment in block.segments:
            target, copy = self._memory[segment.buffer], segment.copy
            first = start + segment.offset - block.offset
            if not isinstance(target, DeviceBuffer):
                put(landed[first:], segment, target, segment.at)
                continue
            device = target.device
            if device.name not in self._streams:
                self._streams[device.name] = device.stream()
            stream = used[device.name] = self._streams[device.name]
            method = self._methods.of(segment, narrow=narrow)
            if isinstance(method, Rows):
                first += 0 if copy is None else copy.start
                _copy_rows(stream, target, segment.at, landed, first, method)
                continue
            assert copy is not None
            if method == "convert":
                # Kernels need elements on their own boundaries. One scratch memory is enough: what
                # a stream is given next waits for what it was given before.
                if device.name not in self._scratch:
                    self._scratch[device.name] = device.allocate(self._scratch_bytes)
                scratch = self._scratch[device.name]
                _copy_rows(stream, scratch, 0, landed, first, Rows.one(segment.nbytes))
                stream.convert(target, segment.at, scratch, 0, copy)
                continue
            key = segment.offset, copy  # Replicas are prepared once.
            if key not in prepared:
                nbytes = _prepared_bytes(copy)
                if left.nbytes < nbytes:
                    for each in used.values():
                        each.synchronize()
                    prepared.clear()
                    left = whole
                prepared[key], left = left[:nbytes], left[_in_lines(nbytes) :]
                put(landed[first:], segment, prepared[key], 0)
            stream.copy_in(target, segment.at, prepared[key], Rows.one(prepared[key].nbytes))
        return [stream.record() for stream in used.values()]

    def close(self) -> None:
        """Ends the streams once all they were given is over, and frees the scratch memory.

        Never raises: what failed was told by an event, or follows from an error told already.
        """
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._scratch.clear()


def _copy_rows(
    stream: Stream, target: DeviceBuffer, at: int, source: Any, start: int, rows: Rows
) -> None:
    if isinstance(source, DeviceBuffer):
        stream.copy_within(target, at, source, start, rows)
    else:
        stream.copy_in(target, at, source[start:], rows)


@functools.lru_cache(4096)
def rows(copy: Copy) -> Rows | None:
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
    return Rows(count, nbytes, pitch or nbytes)


def _prepared_bytes(copy: Copy) -> int:
    return math.prod(copy.shape) * copy.target.itemsize


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
