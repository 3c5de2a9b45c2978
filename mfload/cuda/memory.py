"""Device memory that mfload refers to, counted if mfload owns it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from mfload import errors
from mfload.io import buffers
from mfload.runtime import Forked

counter = buffers.ByteCounter()
peak_bytes = counter.peak_bytes  # Of all devices together.


class DeviceBuffer:
    """Bytes at an address of a device, never touched from the host.

    `owner` keeps the memory alive as long as the buffer lives; `own` bytes count as mfload's.
    """

    __slots__ = ("__weakref__", "_count", "address", "device", "nbytes", "owner")

    def __init__(
        self, device: Any, address: int, nbytes: int, owner: Any, *, own: bool = True
    ) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self._count = counter.add if own else None
        if self._count is not None:
            self._count(nbytes)

    def __del__(self) -> None:
        if getattr(self, "_count", None) is not None:
            self._count(-self.nbytes)  # pyright: ignore

    def part(self, at: int, nbytes: int) -> DeviceBuffer:
        """A range of it, which keeps its memory alive, too."""
        return DeviceBuffer(self.device, self.address + at, nbytes, self.owner, own=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.place

    def __repr__(self) -> str:
        return f"<{errors.amount(self.nbytes)} on {self.device.name} at {self.address:#x}>"


class _Locked:
    """Owner of a buffer of the host that a unified device uses: page-locked as long as it lives.

    Raises MemoryLimitError if the driver refuses to lock it.
    """

    __slots__ = ("_device", "_forked", "_guard", "_memory")
    _parents: ClassVar[list[Any]] = []

    def __init__(self, device: Any, memory: Any) -> None:
        self._device, self._memory, self._forked = device, memory, None
        # To free memory of the device waits for all that runs there, and so for what uses this.
        self._guard = device.allocate(0)
        buffers.never_forked(memory)
        device.pin(memory)
        self._forked = Forked()

    def __del__(self, suppress: Any = suppress) -> None:
        with suppress(Exception):  # Modules are empty at the end.
            del self._guard
            if self._forked:  # A child has no pages there: others may lie at their addresses.
                self._parents.append(self._memory)
            elif self._forked is not None:
                self._device.unpin(self._memory)


def share(device: Any, memory: Any) -> DeviceBuffer:
    """A whole buffer of the host as one of a unified device; the host's bytes count as before."""
    owner = _Locked(device, memory)
    return DeviceBuffer(device, memory.ctypes.data, memory.nbytes, owner, own=False)


def live_bytes() -> int:
    """Bytes of mfload's own memory, on the host and on devices, that something refers to.

    Slots that are kept for the next loads onto devices do not count.
    """
    return buffers.live_bytes() + counter.live
