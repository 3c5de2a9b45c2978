"""Transport "cuda_ipc": a reader on the same machine opens a seed's device memory.

A seed that offers it leaves arrays on their CUDA devices, and makes no copy of them; its other
transports copy ranges to the host as they are asked for. A reader on the same device has arrays
over that memory, one on another device copies from device to device, and what is for the host is
copied there.

Handles go over a Unix socket to processes of the same user. The connection is a lease: the seed
keeps the memory, also of weights that were replaced, until the reader closes it or ends.
Run on one H200; from one device to another, on a stub of CuPy alone.
"""

from __future__ import annotations

import bisect
import ctypes
import io
import json
import logging
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import numpy as np

from mfload import dlpack, errors, runtime
from mfload.cuda import discovery
from mfload.cuda.device import CUDA
from mfload.cuda.memory import DeviceBuffer
from mfload.formats import strict_json
from mfload.peer import memfd
from mfload.peer.data import Data, cut, flat, take
from mfload.peer.http import HttpWay
from mfload.peer.planner import here
from mfload.peer.transports import Offer, Remote, malformed
from mfload.sources.base import Costs
from mfload.sources.timed import Timed

_HANDLE = 64  # Bytes of a handle.
_LENGTH = struct.Struct("<Q")
_ROW = 256  # Bytes of what is said of an array, at most.
_WAIT, _LEAST = 60.0, 64 << 10  # Seconds for them; bytes that must come while a seed may stall.
_PAUSE = 0.05  # Seconds between tries to accept a reader.
_log = logging.getLogger("mfload.peer")
_REFUSED = (errors.MfloadError, RuntimeError, TypeError, ValueError, BufferError)


class DeviceMemory:
    """The bytes of an array on a CUDA device, which it keeps; slices are copies on the host."""

    def __init__(self, device: Any, address: int, size: int, owner: Any) -> None:
        self.device, self.address, self.size = device, address, size
        self.number: int = device.place[1]
        self.buffer = DeviceBuffer(device, address, size, owner, own=False)

    def __getitem__(self, part: slice) -> Any:
        low, high, _ = part.indices(self.size)
        made = np.empty(high - low, np.uint8)
        with closing(self.device.stream()) as stream:
            stream.copy_out(made, self.buffer, low)
            stream.synchronize()
        return made


def find(array: Any, nbytes: int) -> DeviceMemory | None:
    """The memory of an array that lies on a CUDA device in C order; None for any other."""
    try:
        kind, number = array.__dlpack_device__()
    except (AttributeError, *_REFUSED):
        return None
    if kind != CUDA or not nbytes:
        return None
    try:
        device: Any = discovery.find(number)
        array = array.detach() if hasattr(array, "detach") else array
        with closing(device.stream()) as stream:
            exported = array.__dlpack__(stream=stream.handle)
            stream.synchronize()  # The stream waits for what the array waits for.
        if dlpack.compact_nbytes(exported) == nbytes:
            return DeviceMemory(device, dlpack.data_address(exported), nbytes, exported)
    except _REFUSED:
        pass
    return None


def _allocation(device: Any, address: int) -> tuple[int, int]:
    """Where the allocation begins that an address lies in, and how long it is."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    with device.current():
        ends = ctypes.byref(base), ctypes.byref(size)
        device.drive("cuMemGetAddressRange_v2", *ends, ctypes.c_uint64(address))
    return base.value, size.value


def offer(data: Data, generation: int) -> Offer | None:
    """Leases of the arrays on devices; those on the host are read over HTTP.

    Raises UsageError if CUDA can't share the memory.
    """
    del generation
    rows: list[list[Any]] = []
    handles: dict[tuple[str, int], str] = {}
    try:
        for each in data.arrays:
            if not isinstance(each, DeviceMemory):
                rows.append([each.size])
                continue
            base, _ = _allocation(each.device, each.address)
            key = each.device.pci, base
            if key not in handles:
                handles[key] = each.device.ask("ipcGetMemHandle", base).hex()
            rows.append([each.size, each.device.pci, handles[key], each.address - base])
    except errors.DeviceError as error:
        what = "CUDA can't share the memory: that of its pools, or of expandable segments"
        raise errors.UsageError(what, expected="cudaMalloc", found=str(error)) from error
    if not handles:
        return None
    lender = _Lender(data, json.dumps(rows).encode())
    return Offer({"host": here(), "socket": lender.name}, lender.close)


_lenders: weakref.WeakSet[_Lender] = weakref.WeakSet()


def leases() -> int:
    """How many readers have memory of this process open."""
    return sum(each.leases for each in list(_lenders))


class _Lender:
    """Hands out the handles of one generation, and keeps its memory while readers have it open.

    Attributes:
        leases: How many readers there are.
    """

    def __init__(self, data: Data, rows: bytes) -> None:
        self._data = data  # Until the thread ends.
        self._rows = _LENGTH.pack(len(rows)) + rows
        self.name, self._listener = memfd.listening()
        # Not epoll: a fork that closes its own copies would take them out of the parent's.
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.leases, self._closed = 0, False
        _lenders.add(self)
        runtime.forget_in_forks(self)
        runtime.start(self._run, "mfload-leases", service=True)

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                each: Any = key.fileobj
                if each is self._listener and not self._closed:
                    self._lend()
                elif key.data is None or not self._hand(each, key.data):
                    self._selector.unregister(each)  # Readers say nothing: it is the end.
                    each.close()
                    self.leases -= each is not self._listener

    def _lend(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:
                time.sleep(_PAUSE)  # No descriptors are left.
            return
        connection.setblocking(False)  # A reader that does not read holds up no other.
        if memfd.trusted(connection):
            self._selector.register(connection, selectors.EVENT_WRITE, memoryview(self._rows))
            self.leases += 1
        else:
            connection.close()

    def _hand(self, connection: socket.socket, left: memoryview) -> bool:
        """Sends a reader more of the rows; False if it is gone."""
        try:
            left = left[connection.send(left) :]
        except OSError:
            return False
        event = selectors.EVENT_WRITE if left else selectors.EVENT_READ
        self._selector.modify(connection, event, left or None)
        return True

    def close(self) -> None:
        """Lends to no more readers; those that are there keep what they have."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes the descriptors of a fork, which has no readers."""
        self.leases = 0
        for key in list((self._selector.get_map() or {}).values()):
            fork: Any = key.fileobj
            fork.close()


class _Lease:
    """A reader's connection to a lender; the memory stays as long as it is open."""

    def __init__(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._watched, self._ended = False, threading.Event()
        runtime.forget_in_forks(self)

    def watch(self, name: str) -> None:
        """Warns, from now on, if the lender ends before the lease; raises RuntimeError."""
        self.connection.settimeout(None)
        watch = partial(_watch, self.connection, self._ended, name)
        runtime.start(watch, "mfload-lease", service=True)
        self._watched = True

    def forget(self) -> None:
        """Closes the descriptor of a fork."""
        self.connection.close()

    def __del__(self, suppress: Any = suppress) -> None:
        with suppress(Exception):  # It may be closed. Modules are empty at the end.
            self._ended.set()
            if self._watched:  # To close it is up to the thread that waits for it.
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.connection.close()


def _watch(connection: socket.socket, ended: threading.Event, name: str) -> None:
    with connection, suppress(OSError):
        connection.recv(1)
    if not ended.is_set():
        text = "%s is gone: CUDA does not promise that arrays in its memory stay; load them anew"
        _log.warning(text, name)


def connect(given: Any, remote: Remote) -> CudaIpcWay | str:
    """Takes a lease and opens the handles, if their devices are seen here."""
    name: Any = given.get("socket") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not memfd.is_socket(name):
        raise malformed(remote.name, "its devices")
    if given.get("host") != here():
        return "the seed runs on another machine"
    lease, count = _Lease(), sum(len(each.fragments) for each in remote.manifest.entries)
    try:
        told = _received(lease.connection, name, remote.stalled, _ROW * (1 + count))
    except OSError as error:
        return f"the seed's socket can't be reached, or hands nothing out: {error}"
    try:
        given = strict_json.loads(told, remote.name)
        if type(given) is not list or len(given) > count:
            raise ValueError("more arrays than fragments")
        rows = [_Row(*row) for row in given]
        if sum(row.nbytes for row in rows) != remote.manifest.size:
            raise ValueError("another size")
    except (errors.FormatError, TypeError, ValueError):
        raise malformed(remote.name, "its devices") from None
    way = CudaIpcWay(rows, remote)
    try:
        way.open(lease)
        lease.watch(remote.name)
    except (RuntimeError, errors.FrameworkMissingError) as error:  # Of a device, or of threads.
        way.close()
        return str(error)
    except BaseException:
        way.close()
        raise
    return way


def _received(connection: socket.socket, name: str, stalled: float, most: int) -> bytes:
    """What the lender of a name sends."""
    connection.settimeout(stalled)
    connection.connect(f"\0{name}")
    if not memfd.trusted(connection):
        raise PermissionError("the process there is another user's")
    timed = Timed(connection)
    timed.allow(stalled, least=_LEAST, total=_WAIT)
    with io.BufferedReader(timed) as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
        told = file.read(length) if length <= most else b""
    if not told or len(told) != length:
        raise ConnectionError("it closed")
    return told


class _Row:
    """An array of the seed; without a handle it is not on a device."""

    def __init__(self, nbytes: int, pci: str = "", handle: str = "", at: int = 0) -> None:
        self.nbytes, self.pci, self.handle, self.at = nbytes, pci, bytes.fromhex(handle), at
        fine = type(nbytes) is type(at) is int and type(pci) is str and nbytes > 0 and at >= 0
        if not fine or len(self.handle) != (_HANDLE if pci else 0) or not pci.isascii():
            raise ValueError("no such array")


class _Borrowed:
    """An allocation of the seed, closed with its last user; it keeps the lease."""

    def __init__(self, device: Any, handle: bytes, lease: _Lease) -> None:
        self.address = 0
        self.device, self._lease = device, lease
        # To free memory waits for all work on the device, as closing a handle does not.
        self._last = device.allocate(0)
        self.address = device.ask("ipcOpenMemHandle", handle)
        base, size = _allocation(device, self.address)
        self.size = base + size - self.address

    def __del__(self, suppress: Any = suppress) -> None:
        if self.address:
            with suppress(Exception):  # CUDA may be gone. Modules are empty at the end.
                self._last = None
                self.device.ask("ipcCloseMemHandle", self.address)


def _seen(addresses: Iterable[str]) -> dict[str, Any]:
    """Those of a seed's devices that this process sees, by PCI address."""
    found: dict[str, Any] = {}
    missing: errors.DeviceError | None = None
    for pci in addresses:
        try:
            number = discovery.numbered(pci)
        except errors.DeviceError as error:
            missing = error
        else:
            found[pci] = discovery.find(number)
    if missing is not None and not found:
        raise missing
    return found


class CudaIpcWay:
    """Reads device memory of one seed (see `Way`)."""

    costs = Costs(concurrency=2)
    why = "CUDA IPC: out of the seed's device memory, the seed does nothing"

    def __init__(self, rows: Sequence[_Row], remote: Remote) -> None:
        self._rows, self._remote, self._http = rows, remote, HttpWay(remote)
        self.check = remote.check
        self._starts = np.cumsum([0, *(row.nbytes for row in rows)])[:-1].tolist()
        self._arrays: list[DeviceBuffer | None] = []

    def open(self, lease: _Lease) -> None:
        """Opens each allocation once, of the devices that are seen here; the rest comes over HTTP.

        Raises DeviceError, if none is seen or one can't be opened, or FrameworkMissingError.
        """
        devices = _seen({row.pci: None for row in self._rows if row.pci})
        opened: dict[tuple[str, bytes], _Borrowed] = {}
        for row in self._rows:
            if row.pci not in devices:
                self._arrays.append(None)
                continue
            key = row.pci, row.handle
            if key not in opened:
                opened[key] = _Borrowed(devices[row.pci], row.handle, lease)
            there = opened[key]
            if row.at + row.nbytes > there.size:
                what, expected = "an array of the seed ends beyond its memory", there.size
                found = f"bytes {row.at} to {row.at + row.nbytes}"
                raise errors.HeaderError(
                    what, file=self._remote.name, expected=errors.amount(expected), found=found
                )
            at = there.address + row.at
            self._arrays.append(DeviceBuffer(there.device, at, row.nbytes, there, own=False))

    def lying(self, offset: int, nbytes: int) -> DeviceBuffer | None:
        """The memory of a range, if it is part of one array that lies on a device."""
        n = bisect.bisect_right(self._starts, offset) - 1
        there, ahead = self._arrays[n], offset - self._starts[n]
        if there is None or ahead + nbytes > there.nbytes:
            return None
        return there if nbytes == there.nbytes else there.part(ahead, nbytes)

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        size = sum(each.nbytes for each in vector)
        streams: dict[int, Any] = {}
        try:
            with ExitStack() as stack:
                for n, low, high in cut(
                    self._starts, self._remote.manifest.size, offset, offset + size
                ):
                    at = self._starts[n] + low - offset
                    source, parts = self._arrays[n], take(vector, at, at + high - low)
                    if source is None:
                        self._http.read(parts, offset + at)
                        continue
                    if id(source.device) not in streams:
                        made = stack.enter_context(closing(source.device.stream()))
                        streams[id(source.device)] = made
                    for part in parts:
                        streams[id(source.device)].copy_out(flat(part), source, low)
                        low += part.nbytes
                for each in streams.values():
                    each.synchronize()
        except errors.DeviceError as error:
            what = "the seed's device memory can't be read"
            raise errors.ReadError(what, file=self._remote.name, found=str(error)) from error

    def close(self) -> None:
        """Lets go of the memory; arrays over it keep it, with the lease. Reads go over HTTP."""
        self._arrays = [None] * len(self._rows)
        self._http.close()
