"""Placing: from a block that has landed to the places of its segments, on devices or the host."""

from __future__ import annotations

from typing import Any

from mfload.cuda.copies import Ways, key, lines, ordered_bytes
from mfload.cuda.device import Device, Event, Rows, Stream
from mfload.cuda.memory import DeviceBuffer
from mfload.io.pread import put
from mfload.planning.blocks import Block, Segment


class Placer:
    """Gives copies to the streams of one worker, one stream a device.

    Args:
        memory: The destination buffers, by number: uint8 arrays, or `DeviceBuffer`s.
        ways: How segments get to their places.
        scratch: Bytes of device memory for what is to be converted, 0 for none.
    """

    def __init__(self, memory: list[Any], ways: Ways, scratch: int) -> None:
        self._memory = memory
        self._ways = ways
        self._room = scratch
        self._streams: dict[str, Stream] = {}
        self._scratch: dict[str, DeviceBuffer] = {}

    def from_host(self, block: Block, landed: Any, spare: Any) -> list[Event]:
        """Places a block that landed in page-locked memory.

        Args:
            block: The block.
            landed: Its bytes, uint8.
            spare: Page-locked memory for what is put in order first: `Ways.largest` at least, and
                up to `Ways.spare` the more the better.

        Returns:
            Events behind the copies: when they are done, `landed` and `spare` are free again.
        """
        used: dict[str, Stream] = {}
        ordered: dict[object, Any] = {}
        left = spare
        for segment in block.segments:
            target = self._memory[segment.buffer]
            bytes_ = landed[segment.offset - block.offset :]
            if not isinstance(target, DeviceBuffer):
                put(bytes_, segment, target, segment.at)
                continue
            stream = used[target.device.name] = self._stream(target.device)
            way = self._ways.of(segment)
            if way == "order":
                found = ordered.get(key(segment))
                if found is None:
                    nbytes = ordered_bytes(segment)
                    if left.nbytes < nbytes:
                        for each in used.values():
                            each.synchronize()
                        ordered.clear()
                        left = spare
                    found, left = left[:nbytes], left[lines(nbytes) :]
                    put(bytes_, segment, found, 0)
                    ordered[key(segment)] = found
                whole = Rows(1, found.nbytes, found.nbytes)
                stream.copy_in(target, segment.at, found, whole)
            elif way == "convert":
                scratch = self._scratch_of(target.device)
                span = Rows(1, segment.nbytes, segment.nbytes)
                stream.copy_in(scratch, 0, bytes_[: segment.nbytes], span)
                self._convert(stream, target, segment, scratch)
            else:
                start = 0 if segment.copy is None else segment.copy.start
                stream.copy_in(target, segment.at, bytes_[start : start + way.span], way)
        return [stream.record() for stream in used.values()]

    def from_device(self, block: Block, landed: DeviceBuffer, start: int) -> list[Event]:
        """Places a block that landed in device memory.

        Args:
            block: The block; none of its segments has to be put in order on the host.
            landed: Where it is.
            start: Its first byte there.

        Returns:
            Events behind the copies: when they are done, `landed` is free again.
        """
        used: dict[str, Stream] = {}
        for segment in block.segments:
            target: DeviceBuffer = self._memory[segment.buffer]
            stream = used[target.device.name] = self._stream(target.device)
            first = start + segment.offset - block.offset
            way = self._ways.of(segment, least=1)
            if way == "convert":
                # By way of scratch memory as well: kernels want elements on their own boundaries.
                scratch = self._scratch_of(target.device)
                span = Rows(1, segment.nbytes, segment.nbytes)
                stream.copy_within(scratch, 0, landed, first, span)
                self._convert(stream, target, segment, scratch)
            else:
                assert isinstance(way, Rows)
                first += 0 if segment.copy is None else segment.copy.start
                stream.copy_within(target, segment.at, landed, first, way)
        return [stream.record() for stream in used.values()]

    @staticmethod
    def _convert(
        stream: Stream, target: DeviceBuffer, segment: Segment, scratch: DeviceBuffer
    ) -> None:
        assert segment.copy is not None
        stream.convert(target, segment.at, scratch, 0, segment.copy)

    def _stream(self, device: Device) -> Stream:
        stream = self._streams.get(device.name)
        if stream is None:
            stream = self._streams[device.name] = device.stream()
        return stream

    def _scratch_of(self, device: Device) -> DeviceBuffer:
        """One is enough: what a stream is given next waits for what it was given before."""
        scratch = self._scratch.get(device.name)
        if scratch is None:
            scratch = self._scratch[device.name] = device.allocate(self._room)
        return scratch

    def close(self) -> None:
        """Ends the streams, once all they were given is over, and gives the scratch memory back.

        Never raises: what failed was told by an event, or follows from an error told already.
        """
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._scratch.clear()
