"""Views: typed windows on buffers, and the DLPack capsules that hand them to frameworks.

NumPy makes the capsules: its exporter holds the memory, and its deleter is C code that stays safe
when the interpreter shuts down. NumPy lacks bfloat16 and the 8-bit floats, so a view is exported as
unsigned integers of the same width, and the type field of the new capsule is corrected: DLPack's
struct is a public, fixed layout. That costs a microsecond. Device memory goes the same way: for
NumPy it is an address, which nothing reads from, and the device field is corrected too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from mfload.dtypes import TABLE, DType

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Offsets in DLTensor (dlpack.h 1.1): void *data; DLDevice {int32 type, int32 id}; int32 ndim;
# DLDataType {uint8 code, uint8 bits, uint16 lanes}; int64 *shape, *strides; uint64 byte_offset.
_DATA = 0
_DEVICE = 8
_RANK = 16
_TYPE = 20
_SHAPE, _STRIDES = 24, 32
_BYTE_OFFSET = 40
_TOLD = _SHAPE - _DEVICE

_Device, _Type = ctypes.c_int32 * 2, ctypes.c_uint32
_UNITS = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_HOST = (1, 0)  # kDLCPU
# What NumPy has itself, it exports as what it is.
_OWN = {
    name: np.dtype(row.numpy_name)
    for name, row in TABLE.items()
    if row.numpy_name is not None and hasattr(np, row.numpy_name)
}


class View(NamedTuple):
    """A tensor's bytes in a buffer, and what they mean.

    Attributes:
        memory: The buffer: a uint8 array, or a `DeviceBuffer`.
        at: First byte of the tensor in it.
        devices: Which of the adapter's devices want it (see `Request.devices`).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    memory: Any
    at: int
    devices: tuple[int, ...] = ()

    def as_bytes(self) -> View:
        """The same bytes as a view of dtype U8."""
        return self._replace(dtype=TABLE["U8"], shape=self.dtype.storage_shape(self.shape))


class Views(Sequence[View]):
    """Views of many tensors, in columns; one is made when it is asked for.

    Attributes:
        kinds: Each dtype and shape, once; `kind` has the number of each tensor's.
        memory: Buffers; `buffers` has the number of each tensor's, and `at` its first byte there.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[tuple[DType, tuple[int, ...]]],
        kind: Any,
        memory: Sequence[Any],
        buffers: Any,
        at: Any,
    ) -> None:
        self.names, self.kinds, self.kind = names, kinds, kind
        self.memory, self.buffers, self.at = memory, buffers, at

    @overload
    def __getitem__(self, number: int) -> View: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[View]: ...
    def __getitem__(self, number: int | slice) -> View | Sequence[View]:
        if isinstance(number, slice):
            return list(self)[number]
        (dtype, shape), memory = self.kinds[self.kind[number]], self.memory[self.buffers[number]]
        return View(self.names[number], dtype, shape, memory, int(self.at[number]))

    def __iter__(self) -> Iterator[View]:
        kinds, memory = self.kinds, self.memory
        columns = self.names, self.kind, self.buffers.tolist(), self.at.tolist()
        for name, kind, buffer, at in zip(*columns, strict=True):
            dtype, shape = kinds[kind]
            yield View(name, dtype, shape, memory[buffer], at)

    def __len__(self) -> int:
        return len(self.names)


def capsule(view: View, *, device_id: int = 0) -> Any:
    """A DLPack capsule over a view's memory, which lives until the consumer lets go.

    Packed types have their storage shape. Host memory appears on the framework's CPU device of
    number `device_id`.
    """
    _, dtype, shape, memory, at, _ = view
    unit, lanes, device = _OWN.get(dtype.name), 1, (1, device_id)
    exact = unit is not None
    if dtype.elements > 1:
        # Two F4 in a byte are one element of two lanes, as dlpack.h asks.
        unit, shape, lanes = _UNITS[1], dtype.storage_shape(shape), dtype.elements
    elif unit is None:
        unit = _UNITS[dtype.nbytes]
    if not isinstance(memory, np.ndarray):
        device = memory.__dlpack_device__()
        memory = array_at(memory, memory.address, (memory.nbytes,))
    made = np.ndarray(shape, unit, memory, at).__dlpack__()
    if exact and device == _HOST:
        return made
    start = _get_pointer(made, b"dltensor")
    _Type.from_address(start + _TYPE).value = dtype.code | dtype.bits << 8 | lanes << 16
    if device != _HOST:
        _Device.from_address(start + _DEVICE)[:] = device
    return made


def capsules(views: Views) -> Iterator[Any]:
    """The same of many views, three times as fast: those of a kind in a buffer are like the first.

    What tells their device, rank and type is the same for all of them.
    """
    known: dict[tuple[int, int], tuple[Any, Any, tuple[int, ...], bytes]] = {}
    columns = views.kind, views.buffers.tolist(), views.at.tolist()
    for kind, buffer, at in zip(*columns, strict=True):
        if (kind, buffer) not in known:
            (dtype, shape), memory = views.kinds[kind], views.memory[buffer]
            first = capsule(View("", dtype, shape, memory, at))
            told = ctypes.string_at(_get_pointer(first, b"dltensor") + _DEVICE, _TOLD)
            if not isinstance(memory, np.ndarray):
                memory = array_at(memory, memory.address, (memory.nbytes,))
            if dtype.elements > 1:
                known[kind, buffer] = memory, _UNITS[1], dtype.storage_shape(shape), told
            else:
                known[kind, buffer] = memory, _UNITS[dtype.nbytes], shape, told
        memory, unit, shape, told = known[kind, buffer]
        made = np.ndarray(shape, unit, memory, at).__dlpack__()
        ctypes.memmove(_get_pointer(made, b"dltensor") + _DEVICE, told, _TOLD)
        yield made


def data_address(exported: Any) -> int:
    """Where the tensor of an unconsumed, unversioned capsule begins; valid as long as it lives."""
    start = _get_pointer(exported, b"dltensor")
    data = ctypes.c_uint64.from_address(start + _DATA).value
    return data + ctypes.c_uint64.from_address(start + _BYTE_OFFSET).value


def compact_nbytes(exported: Any) -> int | None:
    """Bytes of the tensor of such a capsule, if it lies in C order without gaps; else None."""
    start = _get_pointer(exported, b"dltensor")
    kind = _Type.from_address(start + _TYPE).value
    rank = ctypes.c_int32.from_address(start + _RANK).value
    shape, strides = (ctypes.c_void_p.from_address(start + at).value for at in (_SHAPE, _STRIDES))
    dims, count = ctypes.c_int64 * rank, 1
    lengths = list(dims.from_address(shape)) if shape else []
    steps = list(dims.from_address(strides)) if strides else None
    for n in reversed(range(rank)):
        if steps is not None and lengths[n] > 1 and steps[n] != count:
            return None if 0 not in lengths else 0
        count *= lengths[n]
    return count * (kind >> 8 & 0xFF) * (kind >> 16) // 8


class _Memory:
    """Memory in NumPy's array interface."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def array_at(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    kind: str = "|u1",
    strides: tuple[int, ...] | None = None,
) -> Any:
    """A NumPy array over memory of `owner`, which it keeps alive; strides are in bytes."""
    if 0 in shape:
        return np.empty(shape, kind)  # Older versions of NumPy refuse address 0.
    where = {"version": 3, "typestr": kind, "shape": shape, "strides": strides}
    where["data"] = (address, False)
    return np.asarray(_Memory(owner, where))
