"""Ways: how a segment of a landed block gets to its place in device memory.

Plain bytes and bytes in rows are copied by the device's copy engine. Elements of another dtype
are copied as they are and converted there. What the device can't do, NumPy does in the slot:
steps backwards, rows too narrow to be worth a transfer each, values that must be checked, and
conversions that the device does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mfload.cuda.device import Device, Rows
from mfload.planning.blocks import Block, Copy, Segment

Way = Rows | Literal["convert", "order"]
"""Rows to be copied, to be converted on the device, or to be put in order on the host."""

# A row over PCIe costs some hundred bytes of overhead.
_NARROW = 256
_LINE = 64


class Ways:
    """The ways of a plan's segments.

    Args:
        devices: The device of each buffer, by number; None for host memory.
    """

    def __init__(self, devices: Sequence[Device | None]) -> None:
        self._devices = devices

    def device(self, segment: Segment) -> Device | None:
        """Where a segment goes."""
        return self._devices[segment.buffer]

    def devices(self, block: Block) -> list[Device]:
        """The devices that a block's segments go to, in the order in which they come up."""
        found = (self._devices[segment.buffer] for segment in block.segments)
        return list(dict.fromkeys(device for device in found if device is not None))

    def of(self, segment: Segment, *, least: int = _NARROW) -> Way:
        """The way of a segment that goes to a device.

        Args:
            segment: The segment.
            least: Bytes that a row of several has at least to be copied by itself.
        """
        copy = segment.copy
        if copy is None:
            return Rows(1, segment.nbytes, segment.nbytes)
        device = self._devices[segment.buffer]
        assert device is not None
        if copy.source != copy.target:
            known = not copy.checked and device.converts(copy.source, copy.target)
            return "convert" if known else "order"
        found = rows(copy)
        if found is None or (found.count > 1 and found.nbytes < least):
            return "order"
        return found

    def spare(self, block: Block) -> int:
        """Bytes that a slot must have to put segments of a block in order."""
        ordered: dict[object, int] = {}
        for segment in self._copied(block):
            if self.of(segment) == "order":
                ordered[key(segment)] = lines(ordered_bytes(segment))
        return sum(ordered.values())

    def largest(self, block: Block) -> int:
        """The same for the largest of them alone: they can be put in order in turns."""
        ordered = (lines(ordered_bytes(s)) for s in self._copied(block) if self.of(s) == "order")
        return max(ordered, default=0)

    def scratch(self, block: Block) -> int:
        """Bytes of device memory that it takes to convert the largest segment of a block."""
        converted = (s.nbytes for s in self._copied(block) if self.of(s) == "convert")
        return max(converted, default=0)

    def stay_on_devices(self, block: Block) -> bool:
        """Whether a block that landed on a device gets to its places without the host."""
        return all(
            self.device(segment) is not None and self.of(segment, least=1) != "order"
            for segment in block.segments
        )

    def _copied(self, block: Block) -> Iterator[Segment]:
        """The segments that go to devices and are more than plain bytes."""
        for segment in block.segments:
            if segment.copy is not None and self.device(segment) is not None:
                yield segment


def key(segment: Segment) -> object:
    """What tells a segment's bytes from others': those of replicas are put in order once."""
    return segment.offset, segment.copy


def ordered_bytes(segment: Segment) -> int:
    """Bytes of a segment once it is in order."""
    assert segment.copy is not None
    return int(np.prod(segment.copy.shape, dtype=np.int64)) * segment.copy.target.itemsize


def lines(nbytes: int) -> int:
    """Bytes in whole lines of the processor's cache."""
    return -(-nbytes // _LINE) * _LINE


@functools.lru_cache(4096)
def rows(copy: Copy) -> Rows | None:
    """The rows of a copy without conversion that is nothing but rows, counted from `copy.start`."""
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
