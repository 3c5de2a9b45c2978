"""Device memory that mfload refers to, and counts where it owns it."""

from __future__ import annotations

import os
import threading
from typing import Any


class _Counter:
    """Bytes live now, by device. Each buffer keeps it, so it outlives the module at exit."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.renew()

    def renew(self) -> None:
        """Makes the lock anew: a fork may have copied it while another thread held it."""
        # Reentrant: the garbage collector may free a buffer in the middle of counting one.
        self._lock = threading.RLock()

    def add(self, device: str, nbytes: int) -> None:
        with self._lock:
            live = self.live.get(device, 0) + nbytes
            self.live[device] = live
            self.peak[device] = max(self.peak.get(device, 0), live)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak = dict(self.live)


_counter = _Counter()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_counter.renew)


class DeviceBuffer:
    """Bytes at an address of a device: never to be touched from the host.

    Args:
        device: Whose (see `device.Device`).
        address: First byte.
        nbytes: Length in bytes.
        owner: What keeps the memory alive; it goes with the last user of the buffer.
        own: Whether it counts as mfload's.
    """

    __slots__ = ("__weakref__", "_count", "address", "device", "nbytes", "owner")

    def __init__(
        self, device: Any, address: int, nbytes: int, owner: Any, *, own: bool = True
    ) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self._count = _counter.add if own else None
        if self._count is not None:
            self._count(device.name, nbytes)

    def __del__(self) -> None:
        if getattr(self, "_count", None) is not None:
            self._count(self.device.name, -self.nbytes)  # pyright: ignore

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.device.name} at {self.address:#x}>"


def live_bytes() -> int:
    """Bytes of mfload's own on all devices that something still refers to."""
    return sum(_counter.live.values())


def peak_bytes(*, reset: bool = False) -> int:
    """The most bytes that were live at once since the last reset, devices added up."""
    peak = sum(_counter.peak.values())
    if reset:
        _counter.reset_peak()
    return peak
