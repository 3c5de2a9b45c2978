"""cuFile through kvikio: from the disk into device memory, past the page cache and the host."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from mfload import errors
from mfload.cuda import finding
from mfload.cuda.cufile_errors import translate
from mfload.cuda.device import CUDA, Device
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile, OpenFile, shrunk

log = logging.getLogger("mfload")

UNIT = 4096
"""Bytes on which offsets, lengths and device addresses lie: the page of GPUDirect Storage."""

# Memory of a card is mapped for others in pages of this size.
_MAPPED = 64 << 10


def installed() -> bool:
    """Whether there is a kvikio to import; imports nothing."""
    try:
        return importlib.util.find_spec("kvikio") is not None
    except ValueError:  # Something stands in for it that says nothing of itself.
        return "kvikio" in sys.modules


def held(nbytes: int) -> int:
    """Bytes of device memory that a `CufileSlot` for blocks of `nbytes` takes."""
    return -(-room(nbytes) // _MAPPED) * _MAPPED


def room(nbytes: int) -> int:
    """Bytes of device memory that a block of `nbytes` may take with its rim."""
    return -(-nbytes // UNIT) * UNIT + 2 * UNIT


class CufileReader:
    """Lands blocks of one file in device memory; used by one thread at a time.

    It reads the very file that was checked when it was opened, whatever lies at the path
    later. `raw_read` is taken, which reads in the calling thread without the interpreter lock:
    kvikio's `read` and `pread` go through one pool for the whole process, of one thread by default.
    All of them wait first for what runs on the device's legacy default stream.

    Args:
        source: The file; it is open until `close`.
        device: Where blocks land.

    Raises:
        SourceError: The file can't be opened or registered, or is no longer the same.
        DeviceError: There is no such device, or cuFile is not what would read.
        FrameworkMissingError: kvikio is not installed.
    """

    def __init__(self, source: LocalFile, device: Device) -> None:
        self._source = source
        self._handle: Any = None
        self._device = device
        self._file: OpenFile | None = None
        try:
            kvikio = _kvikio(device)
            self._file = OpenFile(source)
            with device.current():
                # By descriptor: the path may lead to another file by now.
                opened = f"/proc/self/fd/{self._file.fd}"
                self._handle = _call(kvikio.CuFile, opened, "r", file=source.path, to="open")
        except BaseException:
            self.close()
            raise

    def land(self, block: Block, slot: DeviceBuffer, at: int = 0) -> int:
        """Reads a block; returns when it lies in device memory, for every stream.

        Args:
            block: What to read.
            slot: Where to: a buffer given to `register`, whole, as it was given.
            at: First byte of the slot that may be written to; `room(block.nbytes)` of them are
                enough.

        Returns:
            Where in the slot the block begins.

        Raises:
            SourceChangedError: The file ended before.
            SourceError: The read failed.
            DeviceError: The device, its driver or cuFile failed.
            ValueError: The slot is too small.
        """
        assert self._file is not None
        start = block.offset // UNIT * UNIT
        needed = block.offset + block.nbytes - start
        length = -(-needed // UNIT) * UNIT
        first = at + -(slot.address + at) % UNIT
        if first + length > slot.nbytes:
            raise ValueError(f"{slot} has no room for {length} bytes from {first} on")
        done = 0 if block.nbytes else needed
        with self._device.current():
            while done < needed:
                begin = done // UNIT * UNIT
                got = _call(
                    self._handle.raw_read, _Array(slot), length - begin, start + begin,
                    first + begin, file=self._source.path, to="read",
                )  # fmt: skip
                if begin + got <= done:
                    raise self._stuck(start + needed, start + done)
                done = begin + got
        return first + block.offset - start

    def _stuck(self, expected: int, found: int) -> errors.SourceError:
        assert self._file is not None
        size = os.fstat(self._file.fd).st_size
        if size < expected:
            return shrunk(self._source.path, expected, size)
        return errors.ReadError(
            "cuFile reads no further",
            file=self._source.path,
            expected=f"{expected} bytes",
            found=f"{found} bytes",
        )

    def close(self) -> None:
        """Closes the file; more than once does nothing. Never raises."""
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                with self._device.current():
                    handle.close()
        except Exception as error:  # noqa: BLE001 - what was read is right, what failed is told
            # As text: whoever keeps the record would keep the error, and the memory with it.
            log.warning("%s could not be taken back from cuFile: %s", self._source.path, str(error))
        finally:
            if self._file is not None:
                self._file.close()


class CufileSlot:
    """Device memory of its own for blocks to land in, registered with cuFile.

    Args:
        device: Whose.
        nbytes: Bytes of the largest block.

    Raises:
        MemoryLimitError: The device has not so much.
        DeviceError: cuFile refused; see `register`.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.buffer = device.allocate(held(nbytes))
        self._registered = False
        register(device, self.buffer)
        self._registered = True

    def close(self) -> None:
        """Takes the registration back, so that the memory may go; more than once does nothing."""
        if self._registered:
            self._registered = False
            deregister(self._device, self.buffer)


def register(device: Device, buffer: DeviceBuffer) -> None:
    """Pins device memory for reads into it.

    kvikio registers the whole allocation that the address lies in: never give part of a pool.

    Args:
        device: Whose.
        buffer: Memory that is an allocation of its own; `deregister` it before it goes, or
            nvidia-fs may hang in the free.

    Raises:
        DeviceError: Refused; the limit that processes on one GPU share may be reached.
    """
    _registration(device, buffer, "register")


def deregister(device: Device, buffer: DeviceBuffer) -> None:
    """Takes `register` back, once nothing reads into it any more. Never raises.

    Args:
        device: Whose.
        buffer: What was registered.
    """
    try:
        _registration(device, buffer, "deregister")
    except Exception as error:  # noqa: BLE001 - the load is over, and its result is right
        log.warning("%s is still registered with cuFile: %s", str(buffer), str(error))


def _registration(device: Device, buffer: DeviceBuffer, verb: str) -> None:
    function = getattr(_kvikio(device), f"memory_{verb}")
    with device.current():
        _call(function, _Array(buffer), file=None, to=f"{verb} memory")


class _Array:
    """Device memory as kvikio takes it."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._owner = buffer
        self.__cuda_array_interface__ = {
            "data": (buffer.address, False),
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _kvikio(device: Device) -> Any:
    """kvikio, where it would call cuFile and not read by itself.

    The driver is asked for the device first: without them, cuFile spins for ever. kvikio's
    settings are looked at and left alone.

    What mfload uses of kvikio, looked at in 26.10: `CuFile(path, "r")`, `CuFile.raw_read(buf,
    size, file_offset, dev_offset)`, `CuFile.close()`, `memory_register(buf)`,
    `memory_deregister(buf)`, `defaults.is_compat_mode_preferred()`. All are public.
    """
    kind, number = device.place
    if kind != CUDA or finding.count() <= number:
        raise errors.DeviceError("cuFile reads into CUDA devices alone", found=device.name)
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
    except Exception as error:
        raise errors.FrameworkMissingError(
            f"kvikio can't be imported: {error}; pip install kvikio-cu13 (or -cu12 for CUDA 12)"
        ) from error
    if defaults.is_compat_mode_preferred():
        raise errors.DeviceError(
            "kvikio is in its compatibility mode, which reads through host memory: see "
            "KVIKIO_COMPAT_MODE and /run/udev; engine='pinned' does that, and copies meanwhile"
        )
    return kvikio


def _call(function: Any, *arguments: Any, file: str | None, to: str) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise translate(error, file, to) from error
