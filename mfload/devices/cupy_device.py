"""A CUDA device through CuPy's thin wrappers of the CUDA runtime.

Every call goes through `_ask`, which makes the device current first. It pushes the device's
primary context and pops it again: the runtime works on the context that is current to the
thread, so the caller finds its own as it was, and a thread that had none still has none. To set
the device and set it back would not do: since CUDA 12 `cudaSetDevice(0)` makes a context, which
takes hundreds of megabytes, on a device 0 that nobody asked for.

Of the calls used here, CuPy 14.2 holds the GIL in `eventQuery`, `memGetInfo` and those that ask
for attributes, as its compiled code shows. None of them waits for the device. All others, such as
copies, allocation, release, pinning and waits, let other threads run.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from mfload import errors
from mfload.devices import conversions
from mfload.devices.cupy_stream import CupyStream
from mfload.devices.device import ALIGNMENT, Room
from mfload.devices.memory import DeviceBuffer

CUDA = 2
"""DLPack's device type of CUDA memory (kDLCUDA)."""

# Of the runtime's headers; CuPy has no names for them.
_OUT_OF_MEMORY = 2
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices, not this one alone.


class _Memory:
    """Owner of memory that came from `cudaMalloc` itself, not from CuPy's pool.

    Before it goes, all that was given to the device is waited for, so kernels of whatever framework
    never lose the memory that they were started on. A pool would hand it to its next user at once.
    `cudaFree` is known to wait so, too, but nothing says that it must.
    """

    __slots__ = ("_device", "address")

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.address = 0
        self._device = device
        self.address = device.ask("malloc", nbytes)

    def __del__(self) -> None:
        if self.address:
            with suppress(Exception):  # The driver may be gone when the interpreter ends.
                self._device.ask("deviceSynchronize")
            with suppress(Exception):
                self._device.ask("free", self.address)


class CupyDevice:
    """See `device.Device`. `finding.find` makes them.

    Args:
        number: Its ordinal, as CUDA counts.
        cupy: The module.
        driver: CUDA's driver library, initialised, in a form that keeps the GIL.
    """

    def __init__(self, number: int, cupy: Any, driver: Any) -> None:
        self.name = f"cuda:{number}"
        self.place: tuple[int, int] = (CUDA, number)
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self._driver = driver
        self._context = ctypes.c_void_p()
        self._drive("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        # CUDA writes "0000:3B:00.0".
        self.pci: str | None = str(self.ask("deviceGetPCIBusId", number)).lower()
        limit = self.runtime.cudaDevAttrMaxPitch
        self.longest_pitch: int = self.ask("deviceGetAttribute", limit, number)
        self._known: dict[tuple[Any, Any], bool] = {}
        self._knowing = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def room(self) -> Room:
        """See `device.Device`."""
        return Room(*self.ask("memGetInfo"))

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """See `device.Device`."""
        # Nothing at all would have no address, and frameworks don't agree what to make of that.
        memory = _Memory(self, max(nbytes, ALIGNMENT))
        return DeviceBuffer(self, memory.address, nbytes, memory)

    def pin(self, array: Any) -> None:
        """See `device.Device`."""
        try:
            self.ask("hostRegister", array.ctypes.data, array.nbytes, _PORTABLE)
        except errors.DeviceError as error:
            raise errors.MemoryLimitError(
                "the driver refused to lock pages; see `ulimit -l`",
                expected=f"{array.nbytes} bytes for {self.name}",
                found=error.found,
            ) from error

    def unpin(self, array: Any) -> None:
        """See `device.Device`."""
        with suppress(errors.MfloadError):
            self.ask("hostUnregister", array.ctypes.data)

    def stream(self) -> CupyStream:
        """See `device.Device`."""
        return CupyStream(self)

    def converts(self, source: Any, target: Any) -> bool:
        """See `device.Device`."""
        pair = source, target
        with self._knowing:
            if pair not in self._known:
                self._known[pair] = conversions.agrees(self, source, target)
            return self._known[pair]

    def ask(self, call: str, *args: Any) -> Any:
        """Calls a function of CUDA's runtime with this device current.

        Raises:
            MemoryLimitError: The device has no such memory.
            DeviceError: Whatever else CUDA said.
        """
        with self.asking(call, *args):
            return getattr(self.runtime, call)(*args)

    @contextmanager
    def asking(self, call: str, *args: Any) -> Generator[None]:
        """Makes the device current meanwhile, and errors of CUDA ours."""
        self._drive("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        except self.runtime.CUDARuntimeError as error:
            raise self.failed(call, error, *args) from error
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def failed(self, call: str, error: Any, *args: Any) -> errors.MfloadError:
        """The error for what CUDA said."""
        if error.status == _OUT_OF_MEMORY and call == "malloc":
            return errors.MemoryLimitError(
                f"{self.name} refused memory", expected=f"{args[0]} bytes", found=str(error)
            )
        return errors.DeviceError(f"{self.name} failed in {call}", found=str(error))

    def _drive(self, call: str, *args: Any) -> None:
        status = getattr(self._driver, call)(*args)
        if status:
            raise errors.DeviceError(
                f"{self.name} failed in {call}", found=f"the driver's error {status}"
            )


def make(number: int, driver: Any) -> CupyDevice:
    """The device of a number that the driver is known to have.

    Args:
        number: Its ordinal, as CUDA counts.
        driver: See `CupyDevice`.

    Raises:
        FrameworkMissingError: CuPy is not installed.
        DeviceError: The device does not answer.
    """
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        raise errors.FrameworkMissingError(
            "CuPy is needed to land on a GPU: pip install 'mfload[cuda13]'", found=str(error)
        ) from error
    return CupyDevice(number, cupy, driver)
