"""CUDA's context of a device in the calling thread, and in no other: what cuFile asks for.

cuFile and kvikio take the context that is current in their thread, and a new thread has none.
`cudaSetDevice` would make one current, and to go back afterwards would start a context on
whatever device was the default before: hundreds of megabytes on a card that nobody asked for.
So the context is pushed and popped by the driver's own calls.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from mfload import errors
from mfload.devices import finding
from mfload.devices.device import Device

CUDA = 2
"""DLPack's number of CUDA memory."""


class Context:
    """The primary context of a device, current in a thread that is inside `with`.

    Args:
        device: A CUDA device.

    Raises:
        DeviceError: There is no such device, or it refused.
    """

    def __init__(self, device: Device) -> None:
        self._name = device.name
        self._handle: ctypes.c_void_p | None = None
        kind, number = device.place
        if kind != CUDA or finding.count() <= number:
            raise errors.DeviceError("cuFile reads into CUDA devices alone", found=device.name)
        self._driver = _driver()
        handle, self._number = ctypes.c_void_p(), ctypes.c_int()
        self._do("cuDeviceGet", ctypes.byref(self._number), number)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._number)
        self._handle = handle

    def __enter__(self) -> Context:
        self._do("cuCtxPushCurrent_v2", self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def release(self) -> None:
        """Gives it back; more than once does nothing."""
        if self._handle is not None:
            self._handle = None
            self._driver.cuDevicePrimaryCtxRelease_v2(self._number)

    def _do(self, call: str, *arguments: Any) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code:
            raise errors.DeviceError(f"{self._name} refused {call}", found=f"CUDA error {code}")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise errors.DeviceError(f"there is no CUDA driver: {error}") from error
