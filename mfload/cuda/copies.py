"""How the segments of a landed block get to their places, on devices or on the host.

Plain bytes, and bytes in rows, go through the device's copy engine. Elements of another dtype are
copied as they are and converted on the device. NumPy prepares the rest in host memory: steps
backwards, rows too narrow to be worth a transfer each, values that must be checked, and conversions
that the device does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from mfload.cuda.device import Device, Event, Rows, Stream
from mfload.cuda.memory import DeviceBuffer
from mfload.io.pread import put
from mfload.planning.blocks import Block, Copy, Segment

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

    def of(self, segment: Segment, *, narrow: int = _NARROW) -> Method:
        """The method for a segment that goes to a device; narrow rows are prepared on the host."""
        copy = segment.copy
        if copy is None:
            return Rows.one(segment.nbytes)
        device = self._devices[segment.buffer]
        assert device is not None
        if copy.source != copy.target:
            known = not copy.checked and device.converts(copy.source, copy.target)
            return "convert" if known else "prepare"
        found = rows(copy)
        if found is None or (found.count > 1 and found.nbytes < narrow):
            return "prepare"
        return found

    def prepared_bytes(self, block: Block) -> list[int]:
        """Bytes of host memory for each segment that NumPy prepares; of replicas, for one."""
        found = {
            _key(segment): _in_lines(_prepared_bytes(segment))
            for segment in self._copied(block)
            if self.of(segment) == "prepare"
        }
        return list(found.values())

    def scratch_bytes(self, block: Block) -> int:
        """Bytes of device memory that it takes to convert the largest segment of a block."""
        converted = (s.nbytes for s in self._copied(block) if self.of(s) == "convert")
        return max(converted, default=0)

    def stay_on_devices(self, block: Block) -> bool:
        """Whether a block that landed on a device gets to its places without the host."""
        return all(
            self._devices[segment.buffer] is not None and self.of(segment, narrow=1) != "prepare"
            for segment in block.segments
        )

    def _copied(self, block: Block) -> Iterator[Segment]:
        """The segments that go to devices and are more than plain bytes."""
        for segment in block.segments:
            if segment.copy is not None and self._devices[segment.buffer] is not None:
                yield segment


class Copier:
    """Gives copies to the streams of one worker, one stream a device.

    `memory` has the destination buffers by number; `scratch` is the bytes of device memory for what
    is to be converted.
    """

    def __init__(self, memory: list[Any], methods: Methods, scratch: int) -> None:
        self._memory = memory
        self._methods = methods
        self._scratch_bytes = scratch
        self._streams: dict[str, Stream] = {}
        self._scratch: dict[str, DeviceBuffer] = {}

    def from_host(self, block: Block, landed: Any, spare: Any) -> list[Event]:
        """Copies a block that landed in page-locked memory to its places.

        `spare` is page-locked memory for what is prepared, enough for the largest segment. When the
        events are done, `landed` and `spare` are free again.
        """
        used: dict[str, Stream] = {}
        prepared: dict[object, Any] = {}
        left = spare
        for segment in block.segments:
            target = self._memory[segment.buffer]
            bytes_ = landed[segment.offset - block.offset :]
            if not isinstance(target, DeviceBuffer):
                put(bytes_, segment, target, segment.at)
                continue
            stream = used[target.device.name] = self._stream(target.device)
            method = self._methods.of(segment)
            if isinstance(method, Rows):
                start = 0 if segment.copy is None else segment.copy.start
                stream.copy_in(target, segment.at, bytes_[start:], method)
                continue
            assert segment.copy is not None
            if method == "convert":
                scratch = self._scratch_of(target.device)
                stream.copy_in(scratch, 0, bytes_, Rows.one(segment.nbytes))
                stream.convert(target, segment.at, scratch, 0, segment.copy)
                continue
            found = prepared.get(_key(segment))
            if found is None:
                nbytes = _prepared_bytes(segment)
                if left.nbytes < nbytes:
                    for each in used.values():
                        each.synchronize()
                    prepared.clear()
                    left = spare
                found, left = left[:nbytes], left[_in_lines(nbytes) :]
                put(bytes_, segment, found, 0)
                prepared[_key(segment)] = found
            stream.copy_in(target, segment.at, found, Rows.one(found.nbytes))
        return [stream.record() for stream in used.values()]

    def from_device(self, block: Block, landed: DeviceBuffer, start: int) -> list[Event]:
        """Copies a block that landed in device memory, from byte `start` on, to its places.

        `Methods.stay_on_devices` is true of it. Events and their meaning as for `from_host`.
        """
        used: dict[str, Stream] = {}
        for segment in block.segments:
            target: DeviceBuffer = self._memory[segment.buffer]
            stream = used[target.device.name] = self._stream(target.device)
            first = start + segment.offset - block.offset
            method = self._methods.of(segment, narrow=1)
            if isinstance(method, Rows):
                first += 0 if segment.copy is None else segment.copy.start
                stream.copy_within(target, segment.at, landed, first, method)
            else:
                assert segment.copy is not None
                # Through scratch memory as well: kernels need elements on their own boundaries.
                scratch = self._scratch_of(target.device)
                stream.copy_within(scratch, 0, landed, first, Rows.one(segment.nbytes))
                stream.convert(target, segment.at, scratch, 0, segment.copy)
        return [stream.record() for stream in used.values()]

    def _stream(self, device: Device) -> Stream:
        stream = self._streams.get(device.name)
        if stream is None:
            stream = self._streams[device.name] = device.stream()
        return stream

    def _scratch_of(self, device: Device) -> DeviceBuffer:
        # One is enough: what a stream is given next waits for what it was given before.
        scratch = self._scratch.get(device.name)
        if scratch is None:
            scratch = self._scratch[device.name] = device.allocate(self._scratch_bytes)
        return scratch

    def close(self) -> None:
        """Ends the streams once all they were given is over, and frees the scratch memory.

        Never raises: what failed was told by an event, or follows from an error told already.
        """
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._scratch.clear()


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


def _key(segment: Segment) -> object:
    """What replicas of a segment have in common: they are prepared once."""
    return segment.offset, segment.copy


def _prepared_bytes(segment: Segment) -> int:
    assert segment.copy is not None
    return int(np.prod(segment.copy.shape, dtype=np.int64)) * segment.copy.target.itemsize


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
