"""As much of CuPy and of CUDA's driver as mfload uses, on host memory, to run where no GPU is.

It has no name that CuPy lacks, and its functions have the parameters of CuPy's: a test compares
them with the package. Work runs as late and as oddly as on the fake device. The order is CUDA's: to
destroy a stream waits for nothing, to free memory waits for all work of the device, and the stream
0 of a device waits for those that users made to block, and they for it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from devices.queues import Mark, Mode, Queue, Queues, Span

from mfload.cuda.staging import KITS

_NAMES = {1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation", 101: "cudaErrorInvalidDevice",
          400: "cudaErrorInvalidResourceHandle", 712: "cudaErrorHostMemoryAlreadyRegistered",
          713: "cudaErrorHostMemoryNotRegistered", 719: "cudaErrorLaunchFailure",
          900: "cudaErrorStreamCaptureUnsupported"}  # fmt: skip
_RELAXED = 2
# What CUDA does not allow while a graph is captured anywhere, but in a thread that is relaxed.
_UNSAFE = ("malloc", "free", "hostRegister", "hostUnregister")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{_NAMES.get(status, 'cudaErrorUnknown')}: as the stub says")


class Machine:
    """What lies under the stub.

    Args:
        count: Devices.
        total: Bytes of each.
        mode: When work runs (see `queues`).
        seed: Of chance.

    Attributes:
        capturing: Whether somebody captures a graph, in the mode that is the default.
        broken: Whether a call has made that capture worthless.
        lost: The error that every call returns since one has ended the context; 0 for none.
    """

    def __init__(
        self, count: int = 2, total: int = 1 << 30, mode: Mode = "lazy", seed: int = 0
    ) -> None:
        self.count, self.total = count, total
        self.queues = Queues(mode, seed)
        self.lock = threading.RLock()
        self.handles = iter(range(1 << 20, 1 << 40))
        self.memory: dict[int, tuple[int, Any]] = {}  # Address to device and bytes.
        self.pinned: dict[int, Span] = {}
        self.streams: dict[int, tuple[int, Queue]] = {}
        self.work: dict[int, list[Queue]] = {n: [self.queues.new()] for n in range(count)}
        """Queues of a device, of streams that were destroyed too; the first is that of stream 0."""
        self.blocking: set[int] = set()
        self.events: dict[int, tuple[int, list[Mark]]] = {}
        self.misuse: list[str] = []
        self.calls: Counter[str] = Counter()
        self.opened: Counter[int] = Counter()  # Addresses of memory of other processes.
        self.peers = True  # Whether devices reach each other's memory,
        self.connected: set[tuple[int, int]] = set()  # and which do so.
        self.fail: dict[str, int] = {}  # Call to the status that it returns from now on.
        self.late: dict[str, int] = {}  # Call to the number of that whose work ends the context.
        self.ran: Counter[str] = Counter()
        self.local = threading.local()
        self.capturing = self.broken = False
        self.lost = 0
        self.kind = 0, 1
        """Whether devices are integrated, and work on what is page-locked of the host's memory."""

    @property
    def stack(self) -> list[Any]:
        """Contexts of this thread; None where it has set none."""
        if not hasattr(self.local, "stack"):
            self.local.stack = [None]
        return self.local.stack

    @property
    def current(self) -> list[Any]:
        if not hasattr(self.local, "streams"):
            self.local.streams = []
        return self.local.streams

    def status(self, call: str) -> int:
        """Counts a call; the error that it is to return, 0 for none."""
        self.calls[call] += 1
        relaxed = getattr(self.local, "mode", 0) == _RELAXED
        if self.capturing and call in _UNSAFE and not relaxed:
            self.broken = True
            return 900
        return self.lost or self.fail.get(call, 0)

    def begin(self, call: str, error: type[Exception] = CUDARuntimeError) -> int:
        """The device that is current for a call, which CUDA would else make 0."""
        if status := self.status(call):
            raise error(status)
        if self.stack[-1] is None:
            self.misuse.append(f"{call} with no device current")
            return 0
        return self.stack[-1]

    def find(self, address: int, nbytes: int) -> Any | None:
        """The bytes there, None for memory of the host."""
        with self.lock:
            for base, (_, held) in self.memory.items():
                if base <= address < base + held.size:
                    if address + nbytes > base + held.size:
                        raise CUDARuntimeError(1)
                    return held[address - base :][:nbytes]
        return None

    def is_pinned(self, span: Span) -> bool:
        with self.lock:
            return any(p.start <= span.start and span.end <= p.end for p in self.pinned.values())

    def free_of_work(self, span: Span, what: str) -> None:
        if self.queues.drop(span):
            self.misuse.append(what)

    def over(self, waited: Callable[[], Any]) -> Any:
        """What a wait returns; raises the error of work that ended the context meanwhile."""
        found = waited()
        if self.lost:
            raise CUDARuntimeError(self.lost)
        return found

    def ordered(self, device: int, stream: int) -> Queue:
        """The queue of a stream, behind what CUDA has it wait for."""
        first = self.work[device][0]
        if stream == 0:
            for handle in self.blocking:
                number, queue = self.streams[handle]
                if number == device and queue.work:
                    first.wait(queue.mark())
            return first
        if stream not in self.streams:
            raise CUDARuntimeError(400)
        queue = self.streams[stream][1]
        if stream in self.blocking and first.work:
            queue.wait(first.mark())
        return queue

    def assert_clean(self) -> None:
        KITS.give_back()
        until = time.monotonic() + 5  # Another thread may be giving memory back.
        while any(self._left().values()) and time.monotonic() < until:
            gc.collect()  # A look at all objects takes as long as many a test.
            time.sleep(0.01)
        assert not self.misuse, self.misuse
        assert not any(self._left().values()), self._left()
        assert self.lost or not self.queues.busy(), "work that nobody waited for"

    def _left(self) -> dict[str, int]:
        return {"bytes": sum(held.size for _, held in self.memory.values()),
                "pinned": len(self.pinned), "streams": len(self.streams),
                "events": len(self.events), "opened": self.opened.total()}  # fmt: skip

    def driver(self) -> Any:
        """CUDA's driver library."""

        def retain(context: Any, number: int) -> int:
            if number >= self.count:
                return 101
            context._obj.value = number + 1
            return 0

        def push(context: Any) -> int:
            self.stack.append(context.value - 1)
            return 0

        def pop(context: Any) -> int:
            self.stack.pop()
            return 0

        def exchange(mode: Any) -> int:
            before = getattr(self.local, "mode", 0)
            self.local.mode, mode._obj.value = mode._obj.value, before
            return 0

        def allocation(base: Any, size: Any, address: Any) -> int:
            for start, (_, held) in self.memory.items():
                if start <= address.value < start + held.size:
                    base._obj.value, size._obj.value = start, held.size
                    return self.status("cuMemGetAddressRange_v2")
            return 1

        def copy(dst: int, src: int, size: int, stream: int) -> int:
            try:
                Runtime(self).memcpyAsync(dst, src, size, Runtime.memcpyDefault, stream)
            except CUDARuntimeError as error:
                return error.status
            return 0

        return SimpleNamespace(
            cuMemcpyAsync=copy,
            cuMemGetAddressRange_v2=allocation,
            cuDevicePrimaryCtxRetain=retain,
            cuCtxPushCurrent_v2=push,
            cuCtxPopCurrent_v2=pop,
            cuThreadExchangeStreamCaptureMode=exchange,
        )

    def cupy(self) -> Any:
        """The package."""
        return SimpleNamespace(
            __version__="14.2.0",
            cuda=SimpleNamespace(runtime=Runtime(self)),
        )


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4
    streamNonBlocking = 1
    eventBlockingSync = 1
    eventDisableTiming = 2
    cudaDevAttrMaxPitch = 11
    cudaDevAttrIntegrated = 18
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        self._machine.begin("deviceGetAttribute")
        if attrib == self.cudaDevAttrMaxPitch:
            return 100  # Small, so that tests come by what is longer.
        kinds = self.cudaDevAttrIntegrated, self.cudaDevAttrCanUseHostPointerForRegisteredMem
        return self._machine.kind[kinds.index(attrib)]

    def deviceGetPCIBusId(self, device: int) -> str:
        self._machine.begin("deviceGetPCIBusId")
        return f"0000:{0x3B + device:02X}:00.0"

    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        self._machine.begin("deviceCanAccessPeer")
        return int(self._machine.peers)

    def deviceEnablePeerAccess(self, peerDevice: int) -> None:
        device = self._machine.begin("deviceEnablePeerAccess")
        if (device, peerDevice) in self._machine.connected:
            raise CUDARuntimeError(704)
        self._machine.connected.add((device, peerDevice))

    def memGetInfo(self) -> tuple[int, int]:
        device = self._machine.begin("memGetInfo")
        with self._machine.lock:
            used = sum(held.size for at, held in self._machine.memory.values() if at == device)
        return self._machine.total - used, self._machine.total

    def malloc(self, size: int) -> int:
        device = self._machine.begin("malloc")
        if size > self.memGetInfo()[0]:
            raise CUDARuntimeError(2)
        room = np.full(size + 512, 0xA5, np.uint8)
        start = -room.ctypes.data % 512
        held = room[start : start + size]
        with self._machine.lock:
            self._machine.memory[held.ctypes.data] = device, held
        return held.ctypes.data

    def free(self, ptr: int) -> None:
        device = self._machine.begin("free")
        for queue in list(self._machine.work[device]):
            queue.synchronize()  # As CUDA does.
        with self._machine.lock:
            del self._machine.memory[ptr]

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        self._machine.begin("ipcGetMemHandle")
        assert devPtr in self._machine.memory
        return devPtr.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        """The memory of this process, as if it were another's."""
        self._machine.begin("ipcOpenMemHandle")
        address = int.from_bytes(handle, "little")
        if address not in self._machine.memory:
            raise CUDARuntimeError(400)
        self._machine.opened[address] += 1
        return address

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        self._machine.begin("ipcCloseMemHandle")
        assert self._machine.opened[devPtr] > 0
        self._machine.opened[devPtr] -= 1

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self._machine.begin("hostRegister")
        span = Span(ptr, size)
        with self._machine.lock:
            if any(span.meets(other) for other in self._machine.pinned.values()):
                raise CUDARuntimeError(712)
            assert flags == 3  # cudaHostRegisterPortable, cudaHostRegisterMapped.
            self._machine.pinned[ptr] = span

    def hostUnregister(self, ptr: int) -> None:
        self._machine.begin("hostUnregister")
        with self._machine.lock:
            span = self._machine.pinned.pop(ptr, None)
        if span is None:
            raise CUDARuntimeError(713)
        self._machine.free_of_work(span, "unregistered while work touches it")

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        device = self._machine.begin("memcpyAsync")
        self._copy("memcpyAsync", device, dst, size, src, size, size, 1, kind, stream)

    def memcpy2DAsync(self, dst: int, dpitch: int, src: int, spitch: int, width: int,
                      height: int, kind: int, stream: int) -> None:  # fmt: skip
        device = self._machine.begin("memcpy2DAsync")
        if not width <= min(dpitch, spitch) or max(dpitch, spitch) > 100:
            raise CUDARuntimeError(1)
        self._copy("memcpy2DAsync", device, dst, dpitch, src, spitch, width, height, kind, stream)

    def streamCreateWithFlags(self, flags: int) -> int:
        machine = self._machine
        device, queue = machine.begin("streamCreateWithFlags"), machine.queues.new()
        handle = next(machine.handles)
        machine.streams[handle] = device, queue
        machine.work[device] = [each for each in machine.work[device] if not each.ended] + [queue]
        if not flags & self.streamNonBlocking:
            machine.blocking.add(handle)
        return handle

    def streamDestroy(self, stream: int) -> None:
        self._machine.begin("streamDestroy")
        if stream not in self._machine.streams:
            raise CUDARuntimeError(400)
        self._machine.blocking.discard(stream)
        self._machine.streams.pop(stream)[1].leave()

    def streamSynchronize(self, stream: int) -> None:
        device = self._machine.begin("streamSynchronize")
        self._machine.over(self._machine.ordered(device, stream).synchronize)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        device = self._machine.begin("streamWaitEvent")
        for mark in self._marks(event):
            self._machine.ordered(device, stream).wait(mark)

    def eventCreateWithFlags(self, flags: int) -> int:
        device = self._machine.begin("eventCreateWithFlags")
        assert flags == self.eventDisableTiming | self.eventBlockingSync
        handle = next(self._machine.handles)
        self._machine.events[handle] = device, []
        return handle

    def eventDestroy(self, event: int) -> None:
        self._machine.begin("eventDestroy")
        del self._machine.events[event]

    def eventRecord(self, event: int, stream: int) -> None:
        current = self._machine.begin("eventRecord")
        device = self._machine.streams[stream][0] if stream in self._machine.streams else current
        queue = self._machine.ordered(device, stream)
        if self._machine.events[event][0] != device:
            raise CUDARuntimeError(400)
        self._marks(event)[:] = [queue.mark()]

    def eventQuery(self, event: int) -> int:
        """Returns the status, as CuPy's does, and raises nothing."""
        if status := self._machine.status("eventQuery"):
            return status
        done = all(mark.done() for mark in self._marks(event))
        return self._machine.lost or (0 if done else 600)

    def eventSynchronize(self, event: int) -> None:
        self._machine.begin("eventSynchronize")
        for mark in self._marks(event):
            self._machine.over(mark.wait)

    def _marks(self, event: int) -> list[Mark]:
        if event not in self._machine.events:
            raise CUDARuntimeError(400)
        return self._machine.events[event][1]

    def _copy(self, call: str, device: int, dst: int, dpitch: int, src: int, spitch: int,
              width: int, height: int, kind: int, stream: int) -> None:  # fmt: skip
        assert kind == self.memcpyDefault
        machine = self._machine
        queue = machine.ordered(device, stream)
        spans = [Span(dst, (height - 1) * dpitch + width), Span(src, (height - 1) * spitch + width)]
        ends = [(machine.find(span.start, span.end - span.start), span) for span in spans]

        def run() -> None:
            machine.ran[call] += 1
            if machine.ran[call] == machine.late.get(call):
                machine.lost = 719
            for row in range(0 if machine.lost else height):
                ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

        queue.give(run, spans)
        if any(held is None and not machine.is_pinned(span) for held, span in ends):
            # Memory that is not locked is done with when the call returns.
            machine.over(queue.synchronize)
