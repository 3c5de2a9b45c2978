"""Capsules, field by field: the struct is read here as dlpack.h 1.1 lays it out."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices.fake import FakeDevice
from hypothesis import given, strategies as st

from mfload import dlpack
from mfload.cuda import memory
from mfload.dlpack import View, Views, capsule, capsules, data_address
from mfload.dtypes import TABLE
from mfload.io import buffers


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype = ctypes.c_void_p
_get.argtypes = [ctypes.py_object, ctypes.c_char_p]


def tensor(made: Any) -> _Tensor:
    return _Managed.from_address(_get(made, b"dltensor")).tensor


PLACES = [(1, 0), (1, 2), (2, 0), (2, 3)]


def placed(dtype: str, shape: tuple[int, ...], place: tuple[int, int], at: int = 0) -> View:
    return View("w", TABLE[dtype], shape, FakeDevice(place).allocate(4096), at)


def address(given: View) -> int:
    """Where a view's first byte lies."""
    host = isinstance(given.memory, np.ndarray)
    return (given.memory.ctypes.data if host else given.memory.address) + given.at


def view(dtype: str, shape: tuple[int, ...], at: int = 0, nbytes: int = 4096) -> View:
    return View("w", TABLE[dtype], shape, buffers.allocate(nbytes), at)


class Holder:
    """A view as consumers take it, who ask for the protocol."""

    def __init__(self, given: View) -> None:
        self.given = given

    def __dlpack__(self, **_: object) -> Any:
        return capsule(self.given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("dtype", TABLE)
def test_fields(dtype: str) -> None:
    row = TABLE[dtype]
    given = view(dtype, (2, 3, 4), 64)
    made = capsule(given, device_id=3)
    found = tensor(made)
    shape = (2, 3, 4) if row.elements == 1 else row.storage_shape((2, 3, 4))
    assert found.data + found.byte_offset == address(given)
    assert (found.device_type, found.device_id) == (1, 3)
    assert tuple(found.shape[: found.ndim]) == shape
    assert (found.code, found.bits) == (row.code, row.bits)
    # An element of DLPack is bits times lanes, and those must be the stored bytes.
    assert found.lanes == row.elements
    if found.strides:
        rows = [shape[1] * shape[2], shape[2], 1]
        assert found.strides[: found.ndim] == rows


@pytest.mark.parametrize("name", ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64",
                                  "F16", "F32", "F64", "C64"])  # fmt: skip
def test_types_are_those_of_numpy(name: str) -> None:
    theirs = np.zeros(2, TABLE[name].numpy).__dlpack__()
    ours = capsule(view(name, (2,)))
    words = [(found.code, found.bits, found.lanes) for found in map(tensor, (ours, theirs))]
    assert words[0] == words[1]


def test_codes_are_those_of_the_header() -> None:
    # DLDataTypeCode of dlpack.h 1.1, from kDLInt to kDLFloat4_e2m1fn.
    codes = {"I8": 0, "U8": 1, "F32": 2, "BF16": 4, "C64": 5, "BOOL": 6, "F8_E4M3": 10,
             "F8_E4M3FNUZ": 11, "F8_E5M2": 12, "F8_E5M2FNUZ": 13, "F8_E8M0": 14, "F6_E2M3": 15,
             "F6_E3M2": 16, "F4": 17}  # fmt: skip
    assert {name: TABLE[name].code for name in codes} == codes


@given(
    dtype=st.sampled_from(["U8", "I16", "F32", "F64", "C64"]),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    at=st.sampled_from([0, 64, 1, 3]),
)
def test_numpy_imports_the_same_memory(dtype: str, shape: tuple[int, ...], at: int) -> None:
    given = view(dtype, shape, at, 16384)
    array = np.from_dlpack(Holder(given))
    assert array.shape == shape
    assert array.dtype == given.dtype.numpy
    if array.size:
        assert array.ctypes.data == address(given)
        given.memory[:] = 65
        assert set(array.tobytes()) == {65}


@pytest.mark.parametrize("consumed", [True, False])
def test_memory_lives_as_long_as_the_capsule_or_its_consumer(consumed: bool) -> None:
    given = view("F32", (4,))
    kept: Any = capsule(given)
    if consumed:
        kept = np.from_dlpack(Holder(given))
    del given
    gc.collect()
    assert buffers.live_bytes() == 4096
    del kept
    gc.collect()
    assert buffers.live_bytes() == 0


def test_the_address_in_a_foreign_capsule() -> None:
    whole = np.arange(10, dtype=np.float32)
    assert data_address(whole.__dlpack__()) == whole.ctypes.data
    assert data_address(whole[3:].__dlpack__()) == whole.ctypes.data + 12


def test_views_as_bytes() -> None:
    given = view("F6_E2M3", (2, 8), 64)
    stored = given.as_bytes()
    assert (stored.dtype.name, stored.shape) == ("U8", (2, 6))
    assert address(stored) == address(given)


def test_a_capsule_holds_one_reference() -> None:
    given = view("F8_E5M2", (16,))
    before = sys.getrefcount(given.memory)
    made = [capsule(given) for _ in range(5)]
    during = sys.getrefcount(given.memory)
    del made
    after = sys.getrefcount(given.memory)
    assert (during, after) == (before + 5, before)


def test_ml_dtypes_are_not_taken_for_numpy_s() -> None:
    # NumPy would read a corrected capsule as nothing it knows; it must say so, not guess.
    with pytest.raises((BufferError, RuntimeError, ValueError)):
        np.from_dlpack(Holder(view("BF16", (4,))))
    assert TABLE["BF16"].numpy == ml_dtypes.bfloat16


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", TABLE)
def test_fields_on_a_device(dtype: str, place: tuple[int, int]) -> None:
    row = TABLE[dtype]
    given = placed(dtype, (2, 3, 4), place, 64)
    made = capsule(given)
    found = tensor(made)
    assert found.data + found.byte_offset == address(given)
    assert (found.device_type, found.device_id) == place
    shape = (2, 3, 4) if row.elements == 1 else row.storage_shape((2, 3, 4))
    assert tuple(found.shape[: found.ndim]) == shape
    assert (found.code, found.bits, found.lanes) == (row.code, row.bits, row.elements)


@pytest.mark.parametrize("place", [None, *PLACES])
def test_capsules_of_many_are_those_of_each(place: tuple[int, int] | None) -> None:
    land = None if place is None else FakeDevice(place)
    held = [land.allocate(n) if land else buffers.allocate(n) for n in (8192, 4096)]
    kinds = [(row, shape) for row in TABLE.values() for shape in [(2, 12), (4, 3), (0, 4), (24,)]]
    many = [n for n in range(len(kinds)) for _ in range(3)]
    at = np.arange(len(many)) % 40 * 64
    views = Views(["w"] * len(many), kinds, many, held, np.arange(len(many)) % 2, at)
    made = list(capsules(views))
    for one, each in zip(made, views, strict=True):
        other = capsule(each)
        ours, theirs = tensor(one), tensor(other)
        for name in ("device_type", "device_id", "ndim", "code", "bits", "lanes"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.shape[: ours.ndim] == theirs.shape[: theirs.ndim]
        if 0 not in each.shape:  # NumPy has no place for nothing.
            assert data_address(one) == data_address(other) == address(each)
        assert dlpack.compact_nbytes(one) == dlpack.compact_nbytes(other)
        del other, ours, theirs
    del made, one, each, views, held
    gc.collect()
    assert memory.live_bytes() == buffers.live_bytes() == 0


@pytest.mark.parametrize("place", PLACES)
def test_device_memory_goes_with_a_capsule_that_nobody_takes(place: tuple[int, int]) -> None:
    made = capsule(placed("F32", (4,), place))
    gc.collect()
    assert memory.live_bytes() == 4096
    del made
    gc.collect()
    assert memory.live_bytes() == 0


def test_device_memory_goes_with_its_last_array() -> None:
    array = np.from_dlpack(Holder(placed("F32", (4,), (1, 0))))
    last = array[1:3]
    del array
    gc.collect()
    assert memory.live_bytes() == 4096
    del last
    gc.collect()
    assert memory.live_bytes() == 0


def test_views_of_device_memory() -> None:
    given = placed("F6_E2M3", (2, 8), (2, 3), 64)
    stored = given.as_bytes()
    assert (stored.dtype.name, stored.shape) == ("U8", (2, 6))
    assert address(stored) == address(given)


# JAX has a suite, and a process, of its own.
CONSUMERS = {
    "numpy": "import numpy as np; take = np.from_dlpack; look = np.asarray",
    "torch": "import torch; take = torch.from_dlpack; look = torch.Tensor.numpy",
}


@pytest.mark.parametrize("framework", CONSUMERS)
@pytest.mark.parametrize("dtype", ["F32", "I16", "U8", "BOOL", "C64"])
def test_frameworks_take_memory_of_a_device(framework: str, dtype: str) -> None:
    pytest.importorskip(framework)
    names: dict[str, Any] = {}
    exec(CONSUMERS[framework], names)
    given = placed(dtype, (3, 4), (1, 0), 256)
    held = given.memory.owner.bytes
    held[:] = np.arange(held.size) % 2
    array = names["take"](Holder(given))
    wanted = held[256:][: 12 * given.dtype.nbytes].tobytes()
    start = address(given)
    del given, held
    gc.collect()
    seen = names["look"](array)
    assert seen.tobytes() == wanted
    assert seen.ctypes.data == start
    del array, seen
    gc.collect()


def test_nothing_looks_at_device_memory() -> None:
    script = """
import gc, sys, types
sys.path.insert(0, sys.argv[1])
from mfload.dlpack import View, capsule
from mfload.cuda.memory import DeviceBuffer
from mfload.dtypes import TABLE
device = types.SimpleNamespace(name="cuda:0", place=(2, 0))
for address in (0x100, 0xDEAD00000000):
    for row in TABLE.values():
        memory = DeviceBuffer(device, address, 1 << 40, None)
        given = View("w", row, (8, 1 << 20), memory, 256)
        made = capsule(given), capsule(given.as_bytes())
        repr(given), repr(made)
    capsule(View("w", row, (0, 8), memory, 0))
print("alive")
"""
    root = str(dlpack.__file__).rsplit("/", 2)[0]
    ran = subprocess.run(
        [sys.executable, "-c", script, root], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "alive"), ran.stderr
