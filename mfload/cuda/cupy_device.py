"""A CUDA device through CuPy's thin wrappers of the CUDA runtime.

CuPy 14.2 gives up the GIL in copies, allocation, freeing, page-locking and waits, and keeps it in
calls that return at once. What each block needs keeps it: readers that give it up more often than
they must wait for each other. Nothing here waits for the whole device, which breaks captures of
graphs.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Any

from mfload import errors
from mfload.cuda.device import CUDA, Device, DeviceRows, MemoryInfo
from mfload.cuda.memory import DeviceBuffer
from mfload.io import probes
from mfload.planning.layout import DEVICE_ALIGNMENT

# From the headers of the driver and the runtime; CuPy has no names for them.
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
# cudaHostRegisterPortable, for all devices and not this one alone, and cudaHostRegisterMapped.
_LOCKED = 1 | 2
_U64 = ctypes.c_uint64  # CUdeviceptr
_OUT_OF_MEMORY = 2
NOT_INITIALISED = 3  # What a forked process gets.
# CUDA keeps it as the last error of its runtime; CuPy has a runtime of its own, so it is not seen.
_NOT_READY = 600
_PEERS_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
# `device`: that whose context a reader is in. Not noted for the main thread, where an interrupt may
# come before a context is left, and the user's own calls after it.
_here = threading.local()
# After these no call works any more.
_LOST = frozenset((226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))

FORKED = (
    "CUDA does not work in a process that was forked from one that used it: start processes by "
    "'spawn' or 'forkserver' (multiprocessing.set_start_method)"
)


class CupyDevice:
    """See `device.Device`. `discovery.find` makes them.

    `driver` is CUDA's driver library, initialised, in a form that keeps the GIL.

    Attributes:
        brief: Whether copies into it return at once, since all memory they read is page-locked.
    """

    def __init__(self, number: int, cupy: Any, driver: Any) -> None:
        self.name = f"cuda:{number}"
        self.place: tuple[int, int] = (CUDA, number)
        self.runtime = cupy.cuda.runtime
        self.driver, self.brief = driver, True
        self.memcpy = driver.cuMemcpyAsync
        self.memcpy.argtypes = _U64, _U64, ctypes.c_size_t, ctypes.c_void_p
        self.context = ctypes.c_void_p()
        self.drive("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
        # CUDA writes "0000:3B:00.0".
        self.pci: str | None = str(self.ask("deviceGetPCIBusId", number)).lower()
        limit = self.runtime.cudaDevAttrMaxPitch
        self.longest_pitch: int = self.ask("deviceGetAttribute", limit, number)
        # Not those that have memory of their own beside the host's, such as a GH200: there it lies
        # nearer, and managed memory would not stay in it.
        kind = self.runtime.cudaDevAttrIntegrated
        self._integrated = bool(self.ask("deviceGetAttribute", kind, number))
        kind = self.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        self.unified = self._integrated and bool(self.ask("deviceGetAttribute", kind, number))
        self._reached: dict[str, bool] = {self.name: True}

    def reaches(self, other: Device) -> bool:
        if other.name not in self._reached:
            self._reached[other.name] = self._connects(other.place[1])
        return self._reached[other.name]

    def _connects(self, number: int) -> bool:
        """Has the other's memory mapped for this device; False where that can't be."""
        try:
            if self.ask("deviceCanAccessPeer", self.place[1], number):
                self.ask("deviceEnablePeerAccess", number)
                return True
        except errors.DeviceError as error:
            return getattr(error.__cause__, "status", 0) == _PEERS_ALREADY
        return False

    def memory_info(self) -> MemoryInfo:
        free, total = self.ask("memGetInfo")
        room = probes.memory_room(swap=False) if self._integrated else None
        # CUDA does not count what the page cache would give back.
        return MemoryInfo(free if room is None else min(total, room[0]), total)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        memory = _CudaMemory(self, nbytes)
        return DeviceBuffer(self, memory.address, nbytes, memory)

    def pin(self, array: Any) -> None:
        try:
            self.ask("hostRegister", array.ctypes.data, array.nbytes, _LOCKED)
        except errors.MemoryLimitError:
            self.brief = False  # To copy from pageable memory takes as long as to read it.
            raise

    def unpin(self, array: Any) -> None:
        with suppress(errors.MfloadError):
            self.ask("hostUnregister", array.ctypes.data)

    def stream(self) -> _CupyStream:
        return _CupyStream(self)

    def current(self) -> _Current:
        return _Current(self)

    def ask(self, call: str, *args: Any) -> Any:
        """Calls a function of CUDA's runtime with this device current (errors: see `failed`)."""
        # Some calls a block, all of them with the GIL: nothing here costs more than it must.
        try:
            if getattr(_here, "device", None) is self:
                return getattr(self.runtime, call)(*args)
            with _Current(self):
                return getattr(self.runtime, call)(*args)
        except errors.MfloadError:
            raise
        except Exception as error:
            said = str(error) or type(error).__name__
            raise self.failed(call, getattr(error, "status", 0), said, *args) from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begins to copy contiguous bytes, from what is not pageable; keeps the GIL."""
        if getattr(_here, "device", None) is self:
            status = self.memcpy(target, source, nbytes, stream)
        else:
            with _Current(self):
                status = self.memcpy(target, source, nbytes, stream)
        if status:
            raise self.told("memcpyAsync", status)

    def told(self, call: str, status: int) -> errors.MfloadError:
        """The error to raise for a call that only returns CUDA's error number."""
        return self.failed(call, status, str(self.runtime.CUDARuntimeError(status)))

    def failed(self, call: str, status: int, said: str, *args: Any) -> errors.MfloadError:
        """The error to raise for CUDA's error number `status` (0: unknown)."""
        what = f"{self.name} failed in {call}"
        if status in _LOST:
            what += ", and no call works any more: restart the process"
        elif status == NOT_INITIALISED:
            what += f": {FORKED}"
        elif call == "malloc" and status == _OUT_OF_MEMORY:
            return errors.MemoryLimitError(
                f"{self.name} refused memory", expected=errors.amount(args[0]), found=said
            )
        elif call == "hostRegister":
            return errors.MemoryLimitError(
                "the driver refused to lock pages; see `ulimit -l`",
                expected=f"{errors.amount(args[1])} for {self.name}",
                found=said,
            )
        return errors.DeviceError(what, found=said)

    def drive(self, call: str, *args: Any) -> None:
        """Calls a function of CUDA's driver; raises DeviceError if it refuses."""
        status = getattr(self.driver, call)(*args)
        if status:
            raise self.failed(call, status, f"the driver's error {status}")


class _CudaMemory:
    """Owner of memory from `cudaMalloc` itself, not from CuPy's pool.

    `cudaFree` waits for all work on the device, so no kernel loses the memory that it works on; a
    pool would hand it to its next user at once.
    """

    __slots__ = ("_device", "address")

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.address = 0
        self._device = device
        # Zero bytes would have no address, and frameworks don't agree what to make of that.
        self.address = device.ask("malloc", max(nbytes, DEVICE_ALIGNMENT))

    def __del__(self, suppress: Any = suppress) -> None:
        if self.address:
            with suppress(Exception):  # Modules are empty at the end.
                self._device.ask("free", self.address)


class _Current:
    """See `Device.current`. Pushes the device's primary context, and pops it again.

    `cudaSetDevice` would not do: since CUDA 12 `cudaSetDevice(0)` creates a context of hundreds of
    megabytes on a device 0 that was not asked for. Inside, the thread is in CUDA's relaxed capture
    mode. Otherwise allocating, freeing and page-locking would fail while any thread captures a
    graph, and invalidate it. Calls of the same device inside need not do it again.
    """

    __slots__ = ("_before", "_device", "_mode")

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._mode = ctypes.c_int(_RELAXED)
        self._before: CupyDevice | None = None

    def __enter__(self) -> None:
        self._before = getattr(_here, "device", None)
        self._device.drive("cuCtxPushCurrent_v2", self._device.context)
        try:
            self._device.drive("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))
            if threading.get_ident() != threading.main_thread().ident:
                _here.device = self._device
        except BaseException:
            # Refused; or an interrupt came behind it, and what was exchanged is exchanged back.
            if self._mode.value != _RELAXED:
                self.__exit__()
            else:
                _here.device = self._before
                self._pop()
            raise

    def __exit__(self, *_: object) -> None:
        _here.device = self._before
        try:
            self._device.driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        finally:
            self._pop()

    def _pop(self) -> None:
        self._device.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class _CupyStream:
    """See `device.DeviceStream`."""

    def __init__(self, device: CupyDevice) -> None:
        self.device: Device = device
        self._device = device
        self.events: list[int] | None = []  # That no `_CupyEvent` uses; None once it is closed.
        self._handle: int | None = device.ask(
            "streamCreateWithFlags", device.runtime.streamNonBlocking
        )

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: DeviceRows) -> None:
        brief = self._device.brief
        self._copy(target.address + at, source.ctypes.data, rows, brief)

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: DeviceRows
    ) -> None:
        self._copy(target.address + at, source.address + start, rows, brief=True)

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        rows = DeviceRows.one(target.nbytes)
        self._copy(target.ctypes.data, source.address + start, rows, brief=False)

    def _copy(self, target: int, source: int, rows: DeviceRows, brief: bool) -> None:
        stream, kind = self._open(), self._device.runtime.memcpyDefault
        count, nbytes, pitch = rows.count, rows.nbytes, rows.pitch
        if not count * nbytes:
            return
        if count == 1 or pitch == nbytes:
            if brief:
                self._device.copy(target, source, count * nbytes, stream)
            else:
                self._device.ask("memcpyAsync", target, source, count * nbytes, kind, stream)
        elif nbytes < pitch <= self._device.longest_pitch:
            args = target, nbytes, source, pitch, nbytes, count, kind, stream
            self._device.ask("memcpy2DAsync", *args)
        else:
            for row in range(count):
                ends = target + row * nbytes, source + row * pitch
                self._device.ask("memcpyAsync", *ends, nbytes, kind, stream)

    def record(self) -> _CupyEvent:
        event = _CupyEvent(self, self._device)
        self._device.ask("eventRecord", event.handle, self._open())
        return event

    def wait(self, event: Any) -> None:
        self._device.ask("streamWaitEvent", self._open(), event.handle)

    def synchronize(self) -> None:
        self._device.ask("streamSynchronize", self._open())

    @property
    def handle(self) -> int:
        return self._open()

    def close(self) -> None:
        if self._handle is None:
            return
        # What failed shows at events and at `synchronize`; this is called during cleanup.
        with suppress(errors.DeviceError):
            self.synchronize()
        handle, self._handle = self._handle, None
        with suppress(errors.DeviceError):
            self._device.ask("streamDestroy", handle)
        events, self.events = self.events or [], None
        while events:
            with suppress(errors.DeviceError):
                self._device.ask("eventDestroy", events.pop())

    def _open(self) -> int:
        if self._handle is None:
            # CUDA would take 0 for the default stream, which waits for all others.
            raise errors.DeviceError("the stream is closed", found=self._device.name)
        return self._handle


class _CupyEvent:
    """See `device.Event`. What CUDA has for it is used again by the next of its stream."""

    __slots__ = ("_device", "_stream", "handle")

    def __init__(self, stream: _CupyStream, device: CupyDevice) -> None:
        self._stream, self._device = stream, device
        self.handle = 0
        if stream.events:
            self.handle = stream.events.pop()
            return
        # A wait sleeps instead of spinning: the processors are for the readers.
        flags = device.runtime.eventDisableTiming | device.runtime.eventBlockingSync
        self.handle = device.ask("eventCreateWithFlags", flags)

    def done(self) -> bool:
        status = self._device.ask("eventQuery", self.handle)
        if status and status != _NOT_READY:
            raise self._device.told("eventQuery", status)
        return not status

    def wait(self) -> None:
        if not self.done():  # Without giving up the GIL.
            self._device.ask("eventSynchronize", self.handle)

    def __del__(self, suppress: Any = suppress) -> None:
        # A stream that waits for it goes on to wait for what it was then.
        if not self.handle:
            return
        if (events := self._stream.events) is not None:
            events.append(self.handle)
            return
        with suppress(Exception):  # Modules may be gone when the interpreter ends.
            self._device.ask("eventDestroy", self.handle)
