"""A CUDA device through CuPy's thin wrappers of the CUDA runtime.

CuPy 14.2 gives up the GIL in copies, allocation, freeing, page-locking and waits, and keeps it in
calls that return at once. Nothing here waits for the whole device, which breaks captures of graphs.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mfload import errors
from mfload.cuda import conversions
from mfload.cuda.device import CUDA, Device, MemoryInfo, Rows
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.layout import DEVICE_ALIGNMENT
from mfload.planning.steps import Copy

# From the headers of the driver and the runtime; CuPy has no names for them.
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices, not this one alone.
_OUT_OF_MEMORY = 2
NOT_INITIALISED = 3  # What a forked process gets.
# CUDA keeps it as the last error of its runtime; CuPy has a runtime of its own, so it is not seen.
_NOT_READY = 600
# After these no call works any more.
_LOST = frozenset((226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))

FORKED = (
    "CUDA does not work in a process that was forked from one that used it: start processes by "
    "'spawn' or 'forkserver' (multiprocessing.set_start_method)"
)


class CupyDevice:
    """See `device.Device`. `discovery.find` makes them.

    `driver` is CUDA's driver library, initialised, in a form that keeps the GIL.
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
        # Memory yet to be freed. No lock: the garbage collector may call `release` anywhere.
        self._unused: collections.deque[DeviceBuffer] = collections.deque()

    def memory_info(self) -> MemoryInfo:
        self._free()
        return MemoryInfo(*self.ask("memGetInfo"))

    def allocate(self, nbytes: int) -> DeviceBuffer:
        self._free()
        memory = _Memory(self, nbytes)
        return DeviceBuffer(self, memory.address, nbytes, memory)

    def release(self, address: int, nbytes: int) -> None:
        """Frees memory. If CUDA refuses, it stays counted, and the next call tries again."""
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
        self.ask("hostRegister", array.ctypes.data, array.nbytes, _PORTABLE)

    def unpin(self, array: Any) -> None:
        with suppress(errors.MfloadError):
            self.ask("hostUnregister", array.ctypes.data)

    def stream(self) -> _CupyStream:
        return _CupyStream(self)

    def converts(self, source: Any, target: Any) -> bool:
        # No lock, which a fork might leave taken: at worst two threads find out the same.
        pair = source, target
        if pair not in self._known:
            self._known[pair] = conversions.agrees(self, source, target)
        return self._known[pair]

    def current(self) -> _Current:
        return _Current(self)

    def ask(self, call: str, *args: Any) -> Any:
        """Calls a function of CUDA's runtime with this device current (errors: see `failed`)."""
        return self.run(call, getattr(self.runtime, call), *args)

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of CuPy's with this device current (errors: see `failed`)."""
        # Some calls a block, all of them with the GIL: nothing here costs more than it must.
        try:
            with _Current(self):
                return function(*args)
        except errors.MfloadError:
            raise
        except Exception as error:
            said = str(error) or type(error).__name__
            raise self.failed(name, getattr(error, "status", 0), said, *args) from error

    def failed(self, call: str, status: int, said: str, *args: Any) -> errors.MfloadError:
        """The error to raise for CUDA's error number `status` (0: unknown)."""
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
        """Calls a function of CUDA's driver; raises DeviceError if it refuses."""
        status = getattr(self.driver, call)(*args)
        if status:
            raise self.failed(call, status, f"the driver's error {status}")


class _Memory:
    """Owner of memory from `cudaMalloc` itself, not from CuPy's pool.

    `cudaFree` waits for all work on the device, so no kernel loses the memory that it works on; a
    pool would hand it to its next user at once.
    """

    __slots__ = ("_device", "_nbytes", "address")

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.address = 0
        self._device = device
        self._nbytes = nbytes
        # Zero bytes would have no address, and frameworks don't agree what to make of that.
        self.address = device.ask("malloc", max(nbytes, DEVICE_ALIGNMENT))

    def __del__(self) -> None:
        if self.address:
            with suppress(Exception):  # Modules may be gone when the interpreter ends.
                self._device.release(self.address, self._nbytes)


class _Current:
    """See `Device.current`. Pushes the device's primary context, and pops it again.

    `cudaSetDevice` would not do: since CUDA 12 `cudaSetDevice(0)` creates a context of hundreds of
    megabytes on a device 0 that was not asked for. Inside, the thread is in CUDA's relaxed capture
    mode. Otherwise allocating, freeing and page-locking would fail while any thread captures a
    graph, and invalidate it.
    """

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


class _CupyStream:
    """See `device.Stream`."""

    def __init__(self, device: CupyDevice) -> None:
        self.device: Device = device
        self._device = device
        # Events are reused: creating and destroying one takes longer than recording it. No lock:
        # the garbage collector may give one back anywhere.
        self._events: collections.deque[int] = collections.deque()
        self._handle: int | None = device.ask(
            "streamCreateWithFlags", device.runtime.streamNonBlocking
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._open()  # The protocol's version, and the handle, for CuPy's kernels.

    def copy_in(self, target: DeviceBuffer, at: int, source: Any, rows: Rows) -> None:
        self._copy(target.address + at, source.ctypes.data, rows)

    def copy_within(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, rows: Rows
    ) -> None:
        self._copy(target.address + at, source.address + start, rows)

    def copy_out(self, target: Any, source: DeviceBuffer, start: int) -> None:
        self._copy(target.ctypes.data, source.address + start, Rows.one(target.nbytes))

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

    def convert(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, copy: Copy
    ) -> None:
        if 0 not in copy.shape:
            self._device.run("convert", self._convert, target, at, source, start, copy)

    def _convert(
        self, target: DeviceBuffer, at: int, source: DeviceBuffer, start: int, copy: Copy
    ) -> None:
        cupy, number = self._device.cupy, self._device.place[1]

        def array(buffer: DeviceBuffer, first: int, dtype: Any, strides: Any) -> Any:
            # No owner: the caller keeps the memory alive.
            memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, None, number)
            return cupy.ndarray(copy.shape, dtype, cupy.cuda.MemoryPointer(memory, first), strides)

        with cupy.cuda.Stream.from_external(self):
            given = array(source, start + copy.start, copy.source, copy.strides)
            cupy.copyto(array(target, at, copy.target, None), given, casting="unsafe")

    def record(self) -> _CupyEvent:
        event = _CupyEvent(self._device, self)
        self._device.ask("eventRecord", event.handle, self._open())
        return event

    def wait(self, event: Any) -> None:
        self._device.ask("streamWaitEvent", self._open(), event.handle)

    def synchronize(self) -> None:
        self._device.ask("streamSynchronize", self._open())

    def close(self) -> None:
        if self._handle is None:
            return
        # What failed shows at events and at `synchronize`; this is called during cleanup.
        with suppress(errors.DeviceError):
            self.synchronize()
        handle, self._handle = self._handle, None
        try:
            with suppress(errors.DeviceError):
                self._device.ask("streamDestroy", handle)
        finally:
            self._destroy_events()

    def _open(self) -> int:
        if self._handle is None:
            # CUDA would take 0 for the default stream, which waits for all others.
            raise errors.DeviceError("the stream is closed", found=self._device.name)
        return self._handle

    def take_event(self) -> int:
        """The handle of an event that is not in use."""
        with suppress(IndexError):
            return self._events.pop()
        runtime = self._device.runtime
        # A wait sleeps instead of spinning: the processors are for the readers.
        flags = runtime.eventDisableTiming | runtime.eventBlockingSync
        return self._device.ask("eventCreateWithFlags", flags)

    def give_event(self, handle: int) -> None:
        """Takes an event back. A stream that waits for it goes on to wait for what it was then."""
        self._events.append(handle)
        if self._handle is None:
            self._destroy_events()  # It has outlived the stream.

    def _destroy_events(self) -> None:
        with suppress(IndexError):
            while True:
                handle = self._events.pop()
                with suppress(Exception):  # The driver may be gone when the interpreter ends.
                    self._device.ask("eventDestroy", handle)


class _CupyEvent:
    """See `device.Event`."""

    def __init__(self, device: CupyDevice, stream: _CupyStream) -> None:
        self._device = device
        self._stream = stream
        self.handle = 0
        self.handle = stream.take_event()

    def done(self) -> bool:
        status = self._device.ask("eventQuery", self.handle)
        if status and status != _NOT_READY:
            said = str(self._device.runtime.CUDARuntimeError(status))
            raise self._device.failed("eventQuery", status, said)
        return not status

    def wait(self) -> None:
        self._device.ask("eventSynchronize", self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            # Gone from here: by the time that a finaliser asks, it may be another's.
            handle, self.handle = self.handle, 0
            self._stream.give_event(handle)
