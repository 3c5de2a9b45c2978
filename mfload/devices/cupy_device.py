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
from mfload.devices.device import ALIGNMENT, Device, Room, Rows
from mfload.devices.memory import DeviceBuffer
from mfload.io.blocks import Copy

CUDA = 2
"""DLPack's device type of CUDA memory (kDLCUDA)."""

# Values of the runtime's headers that CuPy has no names for.
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices, not this one alone.


class CupyEvent:
    """See `device.Event`."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        runtime = device.runtime
        # A wait sleeps instead of spinning: the processors are for the readers.
        flags = runtime.eventDisableTiming | runtime.eventBlockingSync
        self.handle = 0
        self.handle = device.ask("eventCreateWithFlags", flags)

    def done(self) -> bool:
        """See `device.Event`."""
        status = self._device.ask("eventQuery", self.handle)
        if status and status != _NOT_READY:
            raise self._device.failed("eventQuery", self._device.runtime.CUDARuntimeError(status))
        return not status

    def wait(self) -> None:
        """See `device.Event`."""
        self._device.ask("eventSynchronize", self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            with suppress(Exception):  # The driver may be gone when the interpreter ends.
                self._device.ask("eventDestroy", self.handle)


class CupyStream:
    """See `device.Stream`."""

    def __init__(self, device: CupyDevice) -> None:
        self.device: Device = device
        self._device = device
        self._handle: int | None = device.ask(
            "streamCreateWithFlags", device.runtime.streamNonBlocking
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        """What CuPy asks for to put its kernels here: version of the protocol, and the handle."""
        return 0, self._open()

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: Rows) -> None:
        """See `device.Stream`."""
        self._copy(target.address + at, source.ctypes.data, rows)

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: Rows
    ) -> None:
        """See `device.Stream`."""
        self._copy(target.address + at, source.address + start, rows)

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        """See `device.Stream`."""
        rows = Rows(1, target.nbytes, target.nbytes)
        self._copy(target.ctypes.data, source.address + start, rows)

    def convert(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, copy: Copy
    ) -> None:
        """See `device.Stream`."""
        cupy, number = self._device.cupy, self._device.place[1]

        def array(buffer: DeviceBuffer, first: int, dtype: Any, strides: Any) -> Any:
            # The owner is left out: CuPy need not keep alive what the caller does.
            memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, None, number)
            return cupy.ndarray(copy.shape, dtype, cupy.cuda.MemoryPointer(memory, first), strides)

        if 0 in copy.shape:
            return
        with self._device.asking("convert"), cupy.cuda.Stream.from_external(self):
            given = array(source, start + copy.start, copy.source, copy.strides)
            cupy.copyto(array(target, at, copy.target, None), given, casting="unsafe")

    def record(self) -> CupyEvent:
        """See `device.Stream`."""
        event = CupyEvent(self._device)
        self._device.ask("eventRecord", event.handle, self._open())
        return event

    def wait(self, event: Any) -> None:
        """See `device.Stream`."""
        self._device.ask("streamWaitEvent", self._open(), event.handle)

    def synchronize(self) -> None:
        """See `device.Stream`."""
        self._device.ask("streamSynchronize", self._open())

    def close(self) -> None:
        """See `device.Stream`."""
        if self._handle is None:
            return
        # What failed shows at events and at `synchronize`; this is called on the way out.
        with suppress(errors.DeviceError):
            self.synchronize()
        handle, self._handle = self._handle, None
        with suppress(errors.DeviceError):
            self._device.ask("streamDestroy", handle)

    def _open(self) -> int:
        if self._handle is None:
            # CUDA would take 0 for the default stream, which waits for all others.
            raise errors.DeviceError("the stream is closed", found=self._device.name)
        return self._handle

    def _copy(self, target: int, source: int, rows: Rows) -> None:
        stream, kind = self._open(), self._device.runtime.memcpyDefault
        count, nbytes, pitch = rows.count, rows.nbytes, rows.pitch
        if not count * nbytes:
            return
        if count == 1 or pitch == nbytes:
            self._device.ask("memcpyAsync", target, source, count * nbytes, kind, stream)
        elif nbytes < pitch <= self._device.longest_pitch:
            args = target, nbytes, source, pitch, nbytes, count, kind, stream
            self._device.ask("memcpy2DAsync", *args)
        else:
            for row in range(count):
                ends = target + row * nbytes, source + row * pitch
                self._device.ask("memcpyAsync", *ends, nbytes, kind, stream)


class _Memory:
    """Owner of memory that came from `cudaMalloc` itself, not from CuPy's pool.

    `cudaFree` waits until the device is idle, so kernels of whatever framework never lose the
    memory that they were started on. A pool would hand it to its next user at once.
    """

    __slots__ = ("_device", "address")

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.address = 0
        self._device = device
        self.address = device.ask("malloc", nbytes)

    def __del__(self) -> None:
        if self.address:
            with suppress(Exception):  # The driver may be gone when the interpreter ends.
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
