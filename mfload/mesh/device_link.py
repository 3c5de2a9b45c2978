"""Links that swap rows of device memory by the all-to-all of their framework.

Run on simulated devices; not yet on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from mfload.cuda.device import CUDA, Device, DeviceRows
from mfload.cuda.memory import DeviceBuffer
from mfload.io import buffers
from mfload.mesh.link import Link, Pieces

_NARROW = 4096  # Bytes of rows that are sent apart from pieces, if all of them are so short.
_STAGE = 1 << 20  # Page-locked bytes through which short pieces get from the host to the device.


class DeviceLink(Link):
    """A link whose framework has an all-to-all of device memory.

    The rows of the host travel first. Only if none of them tells of an error do those of the device
    follow, so that no process waits on a device for one that failed. Results may lie on several
    devices of this process; what travels passes through the link's own.
    """

    rooms = 4  # Two, and what came, and as much for the framework to work in.

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rooms: dict[int, DeviceBuffer] = {}  # By the address of the host's rows.
        self._stage: Any = None

    def by_host(self, rows: Any, pieces: Pieces) -> Any:
        """Swaps rows and pieces in host memory (see `Link.swap`)."""
        return super().swap(rows, pieces)

    def swap_there(self, room: DeviceBuffer) -> DeviceBuffer:
        """Swaps the rows in memory that `room` gave, and returns those that came.

        What is in the room is there; what is returned must be so.
        """
        raise NotImplementedError

    def moves(self, device: Device) -> bool:
        """Whether it is a CUDA device (see `Link`)."""
        return device.place[0] == CUDA

    def room(self, rows: Any) -> Any:
        """Memory of the device for pieces (see `Link`)."""
        made = super().room(rows)
        if self.device is not None:
            self._rooms[rows.ctypes.data] = made
        return made

    def part(self, view: Any, at: int, nbytes: int) -> Any:
        """A range of a buffer (see `Link`)."""
        return super().part(view, at, nbytes) if self.device is None else view.part(at, nbytes)

    def copy(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Copies to devices beside the user's work (see `Link`)."""
        if self.device is None or not copies:
            return super().copy(copies)
        return self._deadline.bound(lambda: self._copy(copies), "copying on a device")

    def swap(self, rows: Any, pieces: Pieces) -> Any:
        """Swaps the rows of the host, and then those of the device (see `Link`)."""
        if self.device is None:
            return self.by_host(rows, pieces)
        own = pieces._replace(sent=[], taken=[])
        came = self.by_host(rows[:, :_NARROW] if pieces.front <= _NARROW else rows, own)
        if not pieces.most or not self.well(rows, came):
            return came
        room, width = self._rooms[rows.ctypes.data], rows.shape[1]
        sent = [(room.part(n * width + at, p.nbytes), p) for n, at, p in pieces.sent]
        self._copy([(to, part) for to, part in sent if to.address != part.address])
        there = self.swap_there(room)
        self._copy([(p, there.part(n * width + at, p.nbytes)) for n, at, p in pieces.taken])
        return came

    def close(self) -> None:
        """Lets go of the memory."""
        super().close()
        self._rooms.clear()
        stage, self._stage = self._stage, None
        if stage is not None:
            self.device.unpin(stage)

    def _copy(self, copies: Sequence[tuple[DeviceBuffer, Any]]) -> None:
        streams: dict[str, Any] = {}
        used = 0
        with ExitStack() as stack:
            for target, source in copies:
                device = target.device
                if device.name not in streams:
                    streams[device.name] = stack.enter_context(closing(device.stream()))
                stream, rows = streams[device.name], DeviceRows.one(target.nbytes)
                if isinstance(source, DeviceBuffer):
                    behind = streams.get(source.device.name, stream)
                    if behind is not stream:  # What is copied on may have to get there first.
                        stream.wait(behind.record())
                    stream.copy_within(target, 0, source, 0, rows)
                    continue
                if self._stage is None:
                    stage = buffers.allocate(_STAGE)
                    self.device.pin(stage)
                    self._stage = stage
                if used + target.nbytes > _STAGE:
                    used = 0
                    for each in streams.values():
                        each.synchronize()
                passed = self._stage[used : used + target.nbytes]
                passed[:] = source
                stream.copy_in(target, 0, passed, rows)
                used += target.nbytes
            for stream in streams.values():
                stream.synchronize()
