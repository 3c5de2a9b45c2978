"""Files that tests load: by the reference writer, or byte by byte where it would refuse."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
         "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "U8": np.uint8,
         "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
         "C64": np.complex64}  # fmt: skip


def save(path: Path, arrays: Mapping[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """A file by the reference writer."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # ascontiguousarray gives scalars a dim.
    whole = {name: array.reshape(np.shape(arrays[name])) for name, array in whole.items()}
    safetensors.numpy.save_file(whole, path, metadata)
    return path


def save_raw(
    path: Path,
    rows: Iterable[tuple[str, str, tuple[int, ...], bytes]],
    start: int = 0,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A file with any dtype, its data beginning at `start` mod 64."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, dtype, shape, raw in rows:
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((start - 8 - len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Random bits of a dtype, so that a byte out of place is seen."""
    generator = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(generator.bytes(count), dtype).reshape(shape)


def model() -> dict[str, Any]:
    """A little of everything: odd sizes, empty, scalars, and tensors of several blocks."""
    return {
        "embed": numbers((700, 129), np.float32, 1),
        "layer.0.q": numbers((257, 511), ml_dtypes.bfloat16, 2),
        "layer.0.norm": numbers((511,), np.float16, 3),
        "layer.1.q": numbers((300, 300), np.int16, 4),
        "odd": numbers((3, 5, 7), np.uint8, 5),
        "mask": numbers((13,), np.bool_, 6),
        "empty": numbers((0, 4), np.int64),
        "scalar": numbers((), np.float64, 7),
        "wide": numbers((2, 150_001), np.float32, 8),
        "steps": numbers((1,), np.int64, 9),
    }


def same(left: Any, right: Any) -> bool:
    """Equal in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.tobytes() == right.tobytes()


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fails with the names of the tensors that differ."""
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not same(found[name], expected[name])] == []


def memory(address: int, nbytes: int) -> bytes:
    """What lies at an address."""
    return ctypes.string_at(address, nbytes)


def whereabouts(part: Any) -> Any:
    """The places in the file of the bytes that a read lands (see `Rows`)."""
    if part.rows is None:
        return np.arange(part.offset, part.offset + part.nbytes)
    starts = part.offset + np.array(part.rows.numbers) * part.rows.stride
    return (starts[:, None] + np.arange(part.rows.nbytes)).reshape(-1)
