"""The dtype table, against what safetensors, NumPy and ml_dtypes say themselves."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
from conformance import material
from hypothesis import given, strategies as st

from mfload import dtypes, errors

WHOLE = [row for row in dtypes.TABLE.values() if row.numpy is not None]


def test_every_dtype_of_the_format_is_there() -> None:
    assert set(dtypes.TABLE) == set(material.BITS)
    assert {name: row.bits for name, row in dtypes.TABLE.items()} == material.BITS


def test_every_dtype_of_the_reference_writer_is_there() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.TensorSpec(dtype="none", shape=[], data_ptr=0, data_len=0)
    words = re.findall(r"\w+", str(caught.value).split("Supported dtypes:")[1])
    assert sorted(words) == sorted(material.WRITER.values())


@pytest.mark.parametrize("name", material.WRITER)
def test_sizes_are_those_of_the_reference(name: str) -> None:
    nbytes = dtypes.TABLE[name].size_of((6, 8))
    assert nbytes is not None
    memory = np.zeros(nbytes, np.uint8)
    shape = [6, 4] if name == "F4" else [6, 8]
    spec = safetensors.TensorSpec(
        dtype=material.WRITER[name], shape=shape, data_ptr=memory.ctypes.data, data_len=nbytes
    )
    header = safetensors.serialize({"w": spec})
    assert f'"dtype":"{name}","shape":[6,8],"data_offsets":[0,{nbytes}]'.encode() in header


@pytest.mark.parametrize("row", WHOLE, ids=str)
def test_numpy_agrees(row: dtypes.DType) -> None:
    assert row.numpy is not None
    assert (row.elements, row.nbytes) == (1, row.numpy.itemsize)
    assert row.aliases[0] == row.numpy.name
    kinds = {"b": "bool", "u": "uint", "i": "int", "f": "float", "c": "complex", "V": "float"}
    assert row.kind in (kinds[row.numpy.kind], "scale")


@pytest.mark.parametrize(
    ("name", "block"), [("F4", (2, 1)), ("F6_E2M3", (4, 3)), ("F6_E3M2", (4, 3)), ("F32", (1, 4))]
)
def test_smallest_blocks(name: str, block: tuple[int, int]) -> None:
    row = dtypes.TABLE[name]
    assert (row.elements, row.nbytes) == block


@given(
    name=st.sampled_from(list(dtypes.TABLE)),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
def test_sizes_and_storage_shapes(name: str, shape: tuple[int, ...]) -> None:
    row = dtypes.TABLE[name]
    bits = math.prod(shape) * material.BITS[name]
    if bits % 8 or math.prod(shape) % row.elements:
        assert row.size_of(shape) is None
        return
    assert row.size_of(shape) == bits // 8
    stored = material.Stored("w", name, shape, bytes(bits // 8))
    assert row.storage_shape(shape) == stored.bytes_shape()
    assert math.prod(row.storage_shape(shape)) == bits // 8


@pytest.mark.parametrize("row", list(dtypes.TABLE.values()), ids=str)
def test_rows_are_found_by_every_name(row: dtypes.DType) -> None:
    for name in (row.name, row.name.lower(), *row.aliases):
        assert dtypes.resolve(name) is row
        assert dtypes.resolve(f"torch.{name}") is row
    assert dtypes.lookup(row.name) is row
    if row.numpy is not None:
        assert dtypes.resolve(row.numpy) is row
        assert dtypes.resolve(row.numpy.type) is row


@pytest.mark.parametrize(
    ("spec", "name"),
    [("half", "F16"), ("double", "F64"), ("long", "I64"), ("BFLOAT16", "BF16"),
     (np.float16, "F16"), (ml_dtypes.float4_e2m1fn, "F4"), (np.dtype("<u2"), "U16"),
     (bool, "BOOL"), ("jnp.int8", "I8")],
)  # fmt: skip
def test_other_spellings(spec: object, name: str) -> None:
    assert dtypes.resolve(spec).name == name


@pytest.mark.parametrize(
    "spec",
    ["float31", "", "F6", object(), None, 4, np.dtype("U3"), "<f4", float, int, complex,
     "float", "int", "Float", "torch.float", "complex"],
)  # fmt: skip
def test_what_names_no_dtype(spec: object) -> None:
    with pytest.raises(errors.UsageError, match="dtype"):
        dtypes.resolve(spec)


def test_names_nobody_knows() -> None:
    row = dtypes.lookup("Q4_0")
    assert not row.known
    assert row.name == str(row) == "Q4_0"
    assert all(row.known for row in dtypes.TABLE.values())
