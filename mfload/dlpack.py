"""Views: typed windows on buffers, and the DLPack capsules that hand them to frameworks.

NumPy makes the capsules: its exporter holds the memory and its deleter is C code that stays
safe when the interpreter goes down. NumPy can't name the types it lacks (bfloat16, the 8-bit
floats), but DLPack's struct is a public, fixed layout, so the view is exported as unsigned
integers of the same width and the type field of the capsule is corrected before anybody has
seen it. That costs a microsecond and needs no callback into Python.

Device memory goes the same way: to NumPy it is an address, which nothing here ever looks at, and
the device is corrected beside the type.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from mfload.dtypes import DType

CPU = 1
"""DLPack's device type of host memory (kDLCPU)."""
_CUDA = 2

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Offsets in DLTensor (dlpack.h 1.1): void *data; DLDevice {int32 type, int32 id};
# int32 ndim; DLDataType {uint8 code, uint8 bits, uint16 lanes}; int64 *shape, *strides;
# uint64 byte_offset.
_DATA = 0
_DEVICE = 8
_TYPE = 20
_BYTE_OFFSET = 40
# NumPy 2.0 makes unversioned capsules only, which every consumer takes too.
_CAN_VERSION = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
# DLManagedTensorVersioned puts {uint32 major, minor}, two pointers and uint64 flags first.
_VERSIONED = 32


class View(NamedTuple):
    """A tensor's bytes in a buffer, and what they mean.

    Attributes:
        memory: The buffer: a uint8 array, or memory of a device, which has an `address`, a length
            `nbytes` and `__dlpack_device__()`.
        devices: Which of the adapter's devices want it (see `placement.Need`).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    memory: Any
    at: int
    devices: tuple[int, ...] = ()

    @property
    def address(self) -> int:
        """Memory address of the first byte."""
        if isinstance(self.memory, np.ndarray):
            return self.memory.ctypes.data + self.at
        return self.memory.address + self.at

    def storage(self) -> Any:
        """The bytes as a uint8 array (see `DType.storage_shape`); of host memory alone."""
        return np.ndarray(self.dtype.storage_shape(self.shape), np.uint8, self.memory, self.at)

    def as_bytes(self) -> View:
        """The same bytes as a view of dtype U8."""
        from mfload.dtypes import TABLE

        return self._replace(dtype=TABLE["U8"], shape=self.dtype.storage_shape(self.shape))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        kind, _ = device = self.__dlpack_device__()
        # The consumer's stream has nothing to wait for: when a view is there, all work on its
        # memory is over. So it is only looked at; 0 is what the array API forbids.
        if kind != _CUDA and stream is not None:
            raise BufferError("host memory has no streams")
        if stream is not None and (not isinstance(stream, int) or stream == 0 or stream < -1):
            raise BufferError(f"no CUDA stream: {stream!r}; use None, -1, 1, 2 or an address")
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"a view on device {device} can't be exported to another device")
        if copy:
            raise BufferError("a view is exported as it lies; copy what you get")
        return capsule(self, versioned=max_version is not None and max_version >= (1, 0))


def capsule(view: View, *, versioned: bool = False, device_id: int = 0) -> Any:
    """A DLPack capsule over a view's memory, which lives until the consumer lets go.

    Args:
        view: What to export. Packed types are exported with their storage shape.
        versioned: Whether to make the struct of DLPack 1.0 (it carries flags).
        device_id: Which of the framework's CPU devices host memory is to appear on.
    """
    dtype = view.dtype
    lanes = 1
    if dtype.elements == 1:
        unit, shape = _UNITS[dtype.nbytes], view.shape
    else:
        # Two F4 in a byte are one element of two lanes, as dlpack.h asks.
        unit, shape, lanes = _UNITS[1], dtype.storage_shape(view.shape), dtype.elements
    memory, device = view.memory, (CPU, device_id)
    if not isinstance(memory, np.ndarray):
        device = memory.__dlpack_device__()
        memory = np.asarray(_Address(memory))
    array = np.ndarray(shape, unit, memory, view.at)
    if versioned and _CAN_VERSION:
        made = array.__dlpack__(max_version=(1, 0))
        start = _get_pointer(made, b"dltensor_versioned") + _VERSIONED
    else:
        made = array.__dlpack__()
        start = _get_pointer(made, b"dltensor")
    word = dtype.code | dtype.bits << 8 | lanes << 16
    ctypes.c_uint32.from_address(start + _TYPE).value = word
    _Device.from_address(start + _DEVICE)[:] = device
    return made


class _Address:
    """Device memory as NumPy takes it: where it is, how long, and kept alive."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (memory.nbytes,),
            "data": (memory.address, False),
        }


def data_address(exported: Any) -> int:
    """Where the memory of somebody else's capsule begins.

    Args:
        exported: An unversioned capsule that nobody has consumed.

    Returns:
        Address of the first byte of the tensor; it lives as long as the tensor does.
    """
    start = _get_pointer(exported, b"dltensor")
    data = ctypes.c_uint64.from_address(start + _DATA).value
    return data + ctypes.c_uint64.from_address(start + _BYTE_OFFSET).value


_Device = ctypes.c_int32 * 2
_UNITS = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
