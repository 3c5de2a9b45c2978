"""cuFile through kvikio: reads from the disk into device memory, without page cache and host.

Whatever fails here, a load goes on through the host, and a note tells why.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.cuda import discovery
from mfload.cuda.device import CUDA, Device, DeviceStream
from mfload.cuda.memory import DeviceBuffer
from mfload.planning.blocks import Block
from mfload.sources.base import Source, shrunk

if TYPE_CHECKING:
    from mfload.cuda.staging import Staging

log = logging.getLogger("mfload")

UNIT = 4096
"""Bytes on which offsets, lengths and device addresses lie: the page of GPUDirect Storage."""

# Memory of a card is mapped for others in pages of this size.
_MAPPED = 64 << 10

_GDS = "GPUDirect Storage"
_VOLUME = "overlayfs can't be registered: mount a volume for the weights"
_LOAD = "load nvidia-fs, or set use_pci_p2pdma in cufile.json where kernel and driver have P2PDMA"
MEANINGS = {
    5001: ("nvidia-fs driver is not loaded", _LOAD),
    5007: (f"{_GDS} not supported on current platform", "most virtual machines and WSL lack it"),
    5008: (f"{_GDS} not supported on current file", "use local NVMe with ext4 or xfs"),
    5016: (
        "access beyond maximum pinned size",
        "processes on one GPU share what can be pinned (BAR1): use fewer of them at once, or a "
        "greater max_device_pinned_mem_size_kb in cufile.json",
    ),
    5018: ("unsupported file type", _VOLUME),
    5027: ("file descriptor is not registered", _VOLUME),
    5030: ("internal error", _VOLUME),
    5036: ("failed to allocate pinned GPU Memory", "the GPU's memory or its BAR1 is used up"),
}
"""cuFile's errors that are met in practice: wording of cufile.h 1.20, and what to do."""

_NUMBER = re.compile(r"\b(50[0-5]\d)\b")


def installed() -> bool:
    """Whether kvikio can be imported; imports nothing."""
    return importlib.util.find_spec("kvikio") is not None


def configuration() -> str:
    """Where cuFile looks for its configuration."""
    return os.environ.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"


def slot_bytes(nbytes: int) -> int:
    """Bytes of device memory of a `CufileSlot` for blocks of `nbytes`."""
    with_rim = -(-nbytes // UNIT) * UNIT + 2 * UNIT
    return -(-with_rim // _MAPPED) * _MAPPED


class CufileReader:
    """Lands blocks of one file in device memory; used by one thread at a time.

    `raw_read` reads in the calling thread without the interpreter lock; kvikio's `read` and `pread`
    go through one pool for the whole process, of one thread by default. All of them wait first for
    the device's legacy default stream, in which consumers compute. So reads are given to a stream
    of their own, if cuFile has a configuration: without it, kvikio would take the host's memory.
    """

    def __init__(self, source: Source, device: Device) -> None:
        self._path = source.name
        self._device = device
        self._handle: Any = None
        self._stream: DeviceStream | None = None
        kvikio = _kvikio(device)
        self._file = source.open()
        try:
            with device.current():
                # By descriptor: the path may lead to another file by now.
                opened = f"/proc/self/fd/{self._file.fd}"
                self._handle = _call("open", kvikio.CuFile, opened, "r")
                if os.path.exists(configuration()):
                    self._stream = device.stream()
        except BaseException:
            self.close()
            raise

    def land(self, block: Block, slot: DeviceBuffer) -> int:
        """Reads a block into the buffer of a `CufileSlot` for blocks of that length.

        Returns where in the buffer the block begins. It lies there for every stream.
        """
        start = block.offset // UNIT * UNIT
        needed = block.offset + block.nbytes - start
        length = -(-needed // UNIT) * UNIT
        first = -slot.address % UNIT
        assert first + length <= slot.nbytes, (block, slot)
        done = 0 if block.nbytes else needed
        with self._device.current():
            while done < needed:
                begin = done // UNIT * UNIT
                where = length - begin, start + begin, first + begin
                got = _call("read", self._read, _array(slot), *where)
                if begin + got <= done:
                    size = os.fstat(self._file.fd).st_size
                    if size < start + needed:
                        raise shrunk(self._path, start + needed, size)
                    raise errors.ReadError(
                        "cuFile reads no further",
                        expected=errors.amount(start + needed),
                        found=errors.amount(start + done),
                    )
                done = begin + got
        return first + block.offset - start

    def _read(self, array: Any, *where: int) -> int:
        if self._stream is None:
            return self._handle.raw_read(array, *where)
        return self._handle.raw_read_async(array, self._stream.handle, *where).check_bytes_done()

    def close(self) -> None:
        """Closes the file. Idempotent; never raises."""
        handle, self._handle = self._handle, None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        try:
            if handle is not None:
                with self._device.current():
                    handle.close()
        except Exception as error:  # noqa: BLE001 - what was read is right
            # As text: a record that keeps the error would keep the memory.
            log.warning("%s could not be closed in cuFile: %s", self._path, str(error))
        finally:
            self._file.close()


class CufileSlot:
    """Device memory for blocks of up to `nbytes`, registered with cuFile.

    An allocation of its own: kvikio registers all of the allocation that an address lies in.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._kvikio: Any = _kvikio(device)
        self.nbytes = slot_bytes(nbytes)
        self.buffer = device.allocate(self.nbytes)
        with device.current():
            _call("register memory", self._kvikio.memory_register, _array(self.buffer))

    def fits(self, size: Staging) -> bool:
        """Whether it is large enough for a load."""
        return self.nbytes >= slot_bytes(size.block)

    def close(self) -> None:
        """Ends the registration, or nvidia-fs may hang in the free; never raises."""
        try:
            with self.buffer.device.current():
                self._kvikio.memory_deregister(_array(self.buffer))
        except Exception as error:  # noqa: BLE001 - what was read is right
            log.warning("%s is still registered with cuFile: %s", str(self.buffer), str(error))


def _array(buffer: DeviceBuffer) -> Any:
    """Device memory as kvikio takes it."""
    interface = {"data": (buffer.address, False), "shape": (buffer.nbytes,), "typestr": "|u1"}
    interface |= {"strides": None, "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface)


def _kvikio(device: Device) -> Any:
    """Kvikio (public names, as of 26.10), if it calls cuFile for this device.

    The driver is asked for the device first: without them, cuFile spins for ever.
    """
    kind, number = device.place
    if kind != CUDA or discovery.count() <= number:
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
            "KVIKIO_COMPAT_MODE and /run/udev"
        )
    return kvikio


def _call(action: str, function: Any, *args: Any) -> Any:
    """Calls a function of kvikio's; raises DeviceError with what to do about cuFile's error."""
    try:
        return function(*args)
    except Exception as error:
        text = str(error) or type(error).__name__
        number = error_code(text)
        if number is not None:
            wording, advice = MEANINGS[number]
            text = f"{wording} ({number}): {advice}"
        raise errors.DeviceError(f"cuFile could not {action}: {text}") from error


def error_code(text: str) -> int | None:
    """The number of the error that a message speaks of, if it is one of `MEANINGS`."""
    for found in _NUMBER.findall(text):
        if int(found) in MEANINGS:
            return int(found)
    # kvikio passes on the wording alone, after "cuFile error at: file:line: ".
    says = text.rsplit(": ", 1)[-1].strip()
    return next((n for n, (wording, _) in MEANINGS.items() if says.startswith(wording)), None)
