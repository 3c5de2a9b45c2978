"""Finds CUDA devices. The driver is asked before any package for them is imported.

Those packages take seconds to import, and without a driver some of their calls spin for ever.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

from mfload import errors
from mfload.cuda.cupy_device import FORKED, NOT_INITIALISED, CupyDevice
from mfload.cuda.device import Device
from mfload.runtime import in_forks

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: none is there, or none is visible.

_found: dict[int, Device] = {}
# Reentrant: the garbage collector may run code that asks for a device.
_lock = threading.RLock()


@in_forks
def _forked() -> None:
    """Forgets what CUDA can't give a child, and a lock that a thread of the parent may hold."""
    global _lock
    _lock = threading.RLock()
    _found.clear()


def find(number: int) -> Device:
    """The CUDA device of an ordinal, the same object each time.

    Raises DeviceError if there is no such device, FrameworkMissingError if CuPy is not installed.
    """
    with _lock:
        if number not in _found:
            there = count()
            if not 0 <= number < there:
                raise errors.DeviceError(
                    "no such CUDA device here",
                    expected=f"cuda:0 to cuda:{there - 1}" if there else "at least one device",
                    found=f"cuda:{number}, of {errors.counted(there, 'device')}",
                )
            try:
                cupy: Any = importlib.import_module("cupy")
            except Exception as error:  # A broken package raises what it likes.
                what = "CuPy is needed to land on a GPU"
                raise errors.missing(what, "cuda13", found=str(error)) from error
            # PyDLL: its calls take less time than giving the GIL away and waiting for it.
            _found[number] = CupyDevice(number, cupy, ctypes.PyDLL(_LIBRARY))
        return _found[number]


def count() -> int:
    """How many CUDA devices this process sees; raises DeviceError without a working driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise errors.DeviceError(
            "no CUDA driver on this machine; `mfload doctor` says what there is",
            expected=_LIBRARY,
            found=str(error),
        ) from error
    number = ctypes.c_int()
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number))
    if status in (0, _NO_DEVICE):
        return 0 if status else number.value
    name = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(name))
    said = (name.value or b"an error without a name").decode()
    raise errors.DeviceError(
        FORKED if status == NOT_INITIALISED else "the CUDA driver does not work",
        found=f"{said} ({status})",
    )


def numbered(pci: str) -> int:
    """The ordinal of the CUDA device at a PCI address; raises DeviceError if none is seen."""
    found = ctypes.c_int()
    there = count()
    if ctypes.CDLL(_LIBRARY).cuDeviceGetByPCIBusId(ctypes.byref(found), pci.encode()):
        expected = f"one of what this process sees: {errors.counted(there, 'device')}"
        raise errors.DeviceError("no such CUDA device here", expected=expected, found=pci)
    return found.value
