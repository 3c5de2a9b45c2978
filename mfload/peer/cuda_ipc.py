"""Transport "cuda_ipc": a reader on the same machine copies out of a seed's device memory.

A seed that offers it leaves arrays on their CUDA devices, and makes no copy of them; its other
transports copy ranges to the host as they are asked for. Bytes land in the reader's host memory and
go on from there. Run on a stub of CuPy; not yet run on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np

from mfload import dlpack, errors
from mfload.cuda import discovery
from mfload.cuda.device import CUDA
from mfload.cuda.memory import DeviceBuffer
from mfload.peer.data import Data, cut, flat, take
from mfload.peer.http import HttpWay
from mfload.peer.planner import here
from mfload.peer.transports import Offer, Remote
from mfload.sources.base import Costs

_HANDLE = 64  # Bytes of a handle.
_REFUSED = (errors.MfloadError, RuntimeError, TypeError, ValueError, BufferError)


class DeviceMemory:
    """The bytes of an array on a CUDA device, which it keeps; slices are copies on the host."""

    def __init__(self, device: Any, address: int, size: int, owner: Any) -> None:
        self.device, self.address, self.size = device, address, size
        self.number: int = device.place[1]
        self._buffer = DeviceBuffer(device, address, size, owner, own=False)

    def __getitem__(self, part: slice) -> Any:
        low, high, _ = part.indices(self.size)
        made = np.empty(high - low, np.uint8)
        with closing(self.device.stream()) as stream:
            stream.copy_out(made, self._buffer, low)
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
    """Handles of the arrays on devices; those on the host are read over HTTP.

    Raises UsageError if CUDA can't share the memory.
    """
    del generation
    rows: list[list[Any]] = []
    try:
        for each in data.arrays:
            if isinstance(each, DeviceMemory):
                base, _ = _allocation(each.device, each.address)
                handle = each.device.ask("ipcGetMemHandle", base).hex()
                rows.append([each.size, each.device.pci, handle, each.address - base])
            else:
                rows.append([each.size])
    except errors.DeviceError as error:
        what = "CUDA can't share the memory: that of its pools, or of expandable segments"
        raise errors.UsageError(what, expected="cudaMalloc", found=str(error)) from error
    return Offer({"host": here(), "arrays": rows}) if any(row[1:] for row in rows) else None


def connect(given: Any, remote: Remote) -> CudaIpcWay | str:
    """Opens the handles, if their devices are seen here."""
    try:
        host, rows = given["host"], [_Row(*row) for row in given["arrays"]]
        if sum(row.nbytes for row in rows) != remote.manifest.size:
            raise ValueError("another size")
    except (KeyError, TypeError, ValueError):
        what = "the seed's manifest is malformed: what it says of its devices"
        raise errors.HeaderError(what, file=remote.name) from None
    if host != here():
        return "the seed runs on another machine"
    way = CudaIpcWay(rows, remote)
    try:
        way.open()
    except (errors.DeviceError, errors.FrameworkMissingError) as error:
        way.close()
        return str(error)
    except BaseException:
        way.close()
        raise
    return way


class _Row:
    """An array of the seed; without a handle it is not on a device."""

    def __init__(self, nbytes: int, pci: str = "", handle: str = "", at: int = 0) -> None:
        self.nbytes, self.pci, self.handle, self.at = nbytes, pci, bytes.fromhex(handle), at
        fine = type(nbytes) is type(at) is int and type(pci) is str and nbytes > 0 and at >= 0
        if not fine or len(self.handle) != (_HANDLE if pci else 0) or not pci.isascii():
            raise ValueError("no such array")


class CudaIpcWay:
    """Copies out of device memory of one seed (see `Way`)."""

    costs = Costs(concurrency=2)
    why = "CUDA IPC: copied out of the seed's device memory, the seed does nothing"

    def __init__(self, rows: Sequence[_Row], remote: Remote) -> None:
        self._rows, self._remote, self._http = rows, remote, HttpWay(remote)
        self.check = remote.check
        self._starts = np.cumsum([0, *(row.nbytes for row in rows)])[:-1].tolist()
        self._opened: dict[tuple[str, bytes], tuple[Any, int, int]] = {}
        self._arrays: list[DeviceBuffer | None] = []

    def open(self) -> None:
        """Opens each allocation once; raises DeviceError or FrameworkMissingError."""
        for row in self._rows:
            if not row.pci:
                self._arrays.append(None)
                continue
            key = row.pci, row.handle
            if key not in self._opened:
                device: Any = discovery.find(discovery.numbered(row.pci))
                base = device.ask("ipcOpenMemHandle", row.handle)
                self._opened[key] = device, base, 0
                self._opened[key] = device, base, _allocation(device, base)[1]
            device, base, size = self._opened[key]
            if row.at + row.nbytes > size:
                what, expected = "an array of the seed ends beyond its memory", errors.amount(size)
                found = f"bytes {row.at} to {row.at + row.nbytes}"
                raise errors.HeaderError(
                    what, file=self._remote.name, expected=expected, found=found
                )
            self._arrays.append(DeviceBuffer(device, base + row.at, row.nbytes, None, own=False))

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
        """Closes the handles."""
        self._arrays.clear()
        while self._opened:
            _, (device, base, _) = self._opened.popitem()
            with suppress(errors.DeviceError):
                device.ask("ipcCloseMemHandle", base)
        self._http.close()
