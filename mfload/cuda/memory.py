"""Device memory that mfload refers to, counted if mfload owns it."""

from __future__ import annotations

from typing import Any

from mfload import errors
from mfload.io import buffers

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

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.place

    def __repr__(self) -> str:
        return f"<{errors.amount(self.nbytes)} on {self.device.name} at {self.address:#x}>"


def live_bytes() -> int:
    """Bytes of mfload's own memory, on the host and on devices, that something refers to.

    Slots that are kept for the next loads onto devices do not count.
    """
    return buffers.live_bytes() + counter.live
