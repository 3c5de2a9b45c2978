"""Files with every dtype in every shape, and what must come out of them.

Nothing here asks mfload: sizes and layouts are spelled out again, so that the dtype table is
tested too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import samples

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits an element of every dtype that the safetensors format names."""

# What safetensors' own writer calls them; it has no word for F6.
WRITER = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

NARROW = ("int2", "int4", "uint2", "uint4")
"""Integers that safetensors lacks."""

COMMON = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "BF16": "bfloat16",
}  # fmt: skip
FLOATS8 = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

PLAIN = ((), (1,), (7,), (0,), (3, 0, 2), (5, 3), (2, 3, 4), (129,))
# Packed elements come in whole bytes, whatever the last dim; (2, 2) and (2, 6) end a row
# of F6 within a block, (4, 3) one of F4.
PACKED = {6: ((4,), (0, 4), (2, 2), (2, 6), (2, 3, 8)), 4: ((2,), (0, 4), (4, 3), (2, 3, 4))}


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    def array(self) -> np.ndarray:
        """Its elements as opaque items of their width, for indexing; not for packed dtypes."""
        return np.frombuffer(self.raw, f"V{BITS[self.dtype] // 8}").reshape(self.shape)

    def bytes_shape(self) -> tuple[int, ...]:
        """The shape in which its bytes are handed out where a framework lacks the dtype."""
        bits = BITS[self.dtype]
        if bits == 8:
            return self.shape
        if not self.shape or self.shape[-1] * bits % 8:
            return (len(self.raw),)
        return (*self.shape[:-1], self.shape[-1] * bits // 8)


def stored(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Stored:
    """A tensor of random bits; the first elements are NaNs where the dtype has them."""
    nbytes = math.prod(shape) * BITS[dtype] // 8
    generator = np.random.default_rng([seed, nbytes, *map(ord, dtype)])
    if dtype == "BOOL":
        return Stored(name, dtype, shape, generator.integers(0, 2, nbytes, np.uint8).tobytes())
    raw = bytearray(generator.bytes(nbytes))
    # All ones is a NaN in all floats that have any; the signalling one must stay as it is.
    signalling = {"F16": 0x7D01, "BF16": 0x7FA1, "F32": 0x7FA00001, "F64": 0x7FF4000000000001}
    width = max(1, BITS[dtype] // 8)
    special = b"\xff" * width + signalling.get(dtype, 0).to_bytes(width, "little")
    special = special[:nbytes]
    raw[: len(special)] = special
    return Stored(name, dtype, shape, bytes(raw))


def shapes(dtype: str) -> Sequence[tuple[int, ...]]:
    """The shapes in which a dtype is tried."""
    return PACKED.get(BITS[dtype], PLAIN)


def zoo(names: Iterable[str] = BITS) -> list[Stored]:
    """Every dtype in every shape, with odd-sized neighbours that leave nothing aligned."""
    rows: list[Stored] = []
    for dtype in names:
        for shape in shapes(dtype):
            rows.append(stored(f"{dtype}{list(shape)}", dtype, shape, len(rows)))
            rows.append(stored(f"neighbour {len(rows)}", "U8", (1 + len(rows) % 3,), len(rows)))
    return rows


def aligned(names: Iterable[str] = BITS) -> list[Stored]:
    """Every dtype once, each a multiple of 64 bytes and so on a multiple of 64 in the file."""
    return [stored(dtype, dtype, (4, 128)) for dtype in names]


def narrow(raw: bytes, shape: tuple[int, int]) -> bytes:
    """A file of Flax with the same bytes as int2, int4, uint2 and uint4, shorter than 60,000."""
    file = bytes([0x84])
    for name in NARROW:
        key = bytes([0xA0 | len(name)]) + name.encode()
        data = b"\x93\x92" + bytes(shape) + key + b"\xc5" + struct.pack(">H", len(raw)) + raw
        file += key + b"\xc8" + struct.pack(">HB", len(data), 1) + data
    return file


def save(path: Path, rows: list[Stored], start: int = 0) -> Path:
    """A file whose data begins at `start` mod 64."""
    return samples.save_raw(path, [(r.name, r.dtype, r.shape, r.raw) for r in rows], start)


def save_reference(path: Path, rows: Iterable[Stored]) -> Path:
    """A file by safetensors' own writer, which counts F4 by the two."""
    arrays = {row.name: np.frombuffer(row.raw, np.uint8) for row in rows}
    specs = {
        row.name: safetensors.TensorSpec(
            dtype=WRITER[row.dtype],
            # It is told the shape in bytes for two elements to the byte.
            shape=[*row.shape[:-1], row.shape[-1] // 2] if row.dtype == "F4" else list(row.shape),
            data_ptr=arrays[row.name].ctypes.data if row.raw else 0,
            data_len=len(row.raw),
        )
        for row in rows
    }
    safetensors.serialize_file(specs, path, {"format": "test"})
    return path
