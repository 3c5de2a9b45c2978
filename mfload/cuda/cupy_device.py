"""A CUDA device through CuPy's thin wrappers of the CUDA runtime.

Every call goes through `current`. It pushes the device's primary context and pops it again: the
runtime works on the context that is current to the thread, so the caller finds its own as it
was, and a thread that had none still has none. To set the device and set it back would not do:
since CUDA 12 `cudaSetDevice(0)` makes a context, which takes hundreds of megabytes, on a device 0
that nobody asked for.

Meanwhile the thread is relaxed, as CUDA calls it. Else to allocate, free or lock memory while
anybody in the process captures a graph would fail, and make that graph worthless. None of that
concerns the graph: mfload captures nothing, and its streams are its own. Relaxed or not, to
wait for the whole device breaks captures, so nothing here does it.

Of the calls used here, CuPy 14.2 holds the GIL in `eventQuery`, `memGetInfo` and those that ask
for attributes, as its compiled code shows. None of them waits for the device. All others, such as
copies, allocation, release, pinning and waits, let other threads run.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
from contextlib import suppress
from typing import Any

from mfload import errors
from mfload.cuda import conversions
from mfload.cuda.cupy_stream import CupyStream
from mfload.cuda.device import ALIGNMENT, CUDA, Room
from mfload.cuda.memory import DeviceBuffer

# Of the headers of the driver and the runtime; CuPy has no names for them.
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices, not this one alone.
_OUT_OF_MEMORY = 2
NOT_INITIALISED = 3  # What a forked process is told.
# After these no call works any more, as the headers say of each.
_LOST = frozenset((226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))

FORKED = (
    "CUDA does not work in a process that was forked from one that used it: start processes by "
    "'spawn' or 'forkserver' (multiprocessing.set_start_method)"
)


class _Memory:
    """Owner of memory that came from `cudaMalloc` itself, not from CuPy's pool.

    `cudaFree` waits for all that was given to the device, so kernels of whatever framework never
    lose the memory that they were started on. A pool would hand it to its next user at once.
    CUDA's header says only that it may wait; a test on a GPU looks whether it does.
    """

    __slots__ = ("_device", "_nbytes", "address")

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.address = 0
        self._device = device
        self._nbytes = nbytes
        # Nothing at all would have no address, and frameworks don't agree what to make of that.
        self.address = device.ask("malloc", max(nbytes, ALIGNMENT))

    def __del__(self) -> None:
        if self.address:
            with suppress(Exception):  # Modules may be gone when the interpreter ends.
                self._device.release(self.address, self._nbytes)


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
        self.driver = driver
        self.context = ctypes.c_void_p()
        self.drive("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
        # CUDA writes "0000:3B:00.0".
        self.pci: str | None = str(self.ask("deviceGetPCIBusId", number)).lower()
        limit = self.runtime.cudaDevAttrMaxPitch
        self.longest_pitch: int = self.ask("deviceGetAttribute", limit, number)
        self._known: dict[tuple[Any, Any], bool] = {}
        # Memory that nobody uses and that is yet to be freed. No lock: the garbage collector may
        # come to `release` anywhere.
        self._unused: collections.deque[DeviceBuffer] = collections.deque()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def room(self) -> Room:
        """See `device.Device`."""
        self._free()
        return Room(*self.ask("memGetInfo"))

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """See `device.Device`."""
        self._free()
        memory = _Memory(self, nbytes)
        return DeviceBuffer(self, memory.address, nbytes, memory)

    def release(self, address: int, nbytes: int) -> None:
        """Frees memory. Where CUDA refuses, it stays counted, and is tried again later."""
        self._unused.append(DeviceBuffer(self, address, nbytes, None))
        self._free()

    def _free(self) -> None:
        for _ in range(len(self._unused)):
            try:
                memory = self._unused.popleft()
            except IndexError:
                return  # Another thread was faster.
            try:
                self.ask("free", memory.address)
            except errors.MfloadError:
                self._unused.append(memory)

    def pin(self, array: Any) -> None:
        """See `device.Device`."""
        self.ask("hostRegister", array.ctypes.data, array.nbytes, _PORTABLE)

    def unpin(self, array: Any) -> None:
        """See `device.Device`."""
        with suppress(errors.MfloadError):
            self.ask("hostUnregister", array.ctypes.data)

    def stream(self) -> CupyStream:
        """See `device.Device`."""
        return CupyStream(self)

    def converts(self, source: Any, target: Any) -> bool:
        """See `device.Device`."""
        # No lock, which a fork might leave taken: at worst two threads find out the same.
        pair = source, target
        if pair not in self._known:
            self._known[pair] = conversions.agrees(self, source, target)
        return self._known[pair]

    def current(self) -> _Current:
        """See `device.Device`."""
        return _Current(self)

    def ask(self, call: str, *args: Any) -> Any:
        """Calls a function of CUDA's runtime with this device current.

        Raises:
            MemoryLimitError: The device has no such memory, or pages can't be locked.
            DeviceError: Whatever else CUDA said.
        """
        # Some calls a block, all of them with the GIL: nothing here costs more than it must.
        try:
            with _Current(self):
                return getattr(self.runtime, call)(*args)
        except errors.MfloadError:
            raise
        except Exception as error:
            raise self.ours(error, call, *args) from error

    def ours(self, error: Exception, call: str, *args: Any) -> errors.MfloadError:
        """What a call raised as an error of ours.

        Args:
            error: It.
            call: What was called.
            args: What the call was given.
        """
        # The runtime, the driver and compilers have each errors of their own.
        said = str(error) or type(error).__name__
        return self.failed(call, getattr(error, "status", 0), said, *args)

    def failed(self, call: str, status: int, said: str, *args: Any) -> errors.MfloadError:
        """The error for what CUDA said.

        Args:
            call: What was called.
            status: CUDA's number of the error, 0 for none.
            said: What it is in words.
            args: What the call was given.
        """
        what = f"{self.name} failed in {call}"
        if status in _LOST:
            what += ", and no call works any more: restart the process"
        elif status == NOT_INITIALISED:
            what += f": {FORKED}"
        elif call == "malloc" and status == _OUT_OF_MEMORY:
            return errors.MemoryLimitError(
                f"{self.name} refused memory", expected=f"{args[0]} bytes", found=said
            )
        elif call == "hostRegister":
            return errors.MemoryLimitError(
                "the driver refused to lock pages; see `ulimit -l`",
                expected=f"{args[1]} bytes for {self.name}",
                found=said,
            )
        return errors.DeviceError(what, found=said)

    def drive(self, call: str, *args: Any) -> None:
        """Calls a function of CUDA's driver.

        Raises:
            DeviceError: The driver refused.
        """
        status = getattr(self.driver, call)(*args)
        if status:
            raise self.failed(call, status, f"the driver's error {status}")


class _Current:
    """See `Device.current`."""

    __slots__ = ("_device", "_mode")

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._mode = ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._device.drive("cuCtxPushCurrent_v2", self._device.context)
        try:
            self._device.drive("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))
        except BaseException:
            # Refused; or an interrupt came behind it, and what was exchanged is exchanged back.
            if self._mode.value != _RELAXED:
                self.__exit__()
            else:
                self._pop()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._device.driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        finally:
            self._pop()

    def _pop(self) -> None:
        self._device.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


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
