"""The one dtype table: what safetensors can hold, and how wide it is.

A row's `elements` and `nbytes` give its smallest whole block: F32 is (1, 4), F4 is (2, 1),
F6 is (4, 3). Sizes and slices everywhere follow from that pair alone. DLPack codes are those
of `DLDataTypeCode` in dlpack.h 1.1.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mfload import errors

if TYPE_CHECKING:
    import numpy as np

if sys.byteorder != "little":
    raise ImportError("mfload reads little-endian weights on little-endian machines only")

Kind = Literal["bool", "uint", "int", "float", "complex", "scale", "packed", "unknown"]


@dataclass(frozen=True, slots=True)
class DType:
    """One row.

    Attributes:
        nbytes: Bytes in the smallest block; 0 marks a dtype mfload does not know.
        kind: What sort of number it is. "scale" is E8M0, an exponent alone; "packed" has
            several elements in a byte; neither takes part in conversions.
    """

    name: str
    elements: int
    nbytes: int
    code: int
    bits: int
    kind: Kind
    numpy_name: str | None
    aliases: tuple[str, ...] = field(default=())

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """The NumPy (or ml_dtypes) dtype of one element; None if none is laid out as stored."""
        return None if self.numpy_name is None else _numpy_dtype(self.numpy_name)

    @property
    def known(self) -> bool:
        """Whether sizes can be computed."""
        return self.nbytes > 0

    def size_of(self, shape: Iterable[int]) -> int | None:
        """Bytes of a tensor of that shape, None where they are not whole."""
        blocks, rest = divmod(math.prod(shape), self.elements)
        return None if rest else blocks * self.nbytes

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the same bytes as uint8, with the last dim turned into bytes.

        One-byte types keep their shape. Where the last dim is no whole number of blocks
        (or there is none), the bytes are one flat dim.
        """
        if self.bits == 8:
            return shape
        row = self.size_of(shape[-1:]) if shape else None
        if row is None:
            return (self.size_of(shape) or 0,)
        return (*shape[:-1], row)

    def __str__(self) -> str:
        return self.name


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    # Imported late: reading headers needs neither, and `mfload ls` is over before they are loaded.
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


def _row(
    name: str, code: int, bits: int, kind: Kind, numpy: str | None, *aliases: str
) -> tuple[str, DType]:
    elements = 8 // math.gcd(8, bits)
    names = aliases if numpy is None else (numpy, *aliases)
    return name, DType(name, elements, bits * elements // 8, code, bits, kind, numpy, names)


TABLE: dict[str, DType] = dict(
    [
        _row("BOOL", 6, 8, "bool", "bool", "bool_"),
        _row("U8", 1, 8, "uint", "uint8"),
        _row("I8", 0, 8, "int", "int8"),
        _row("U16", 1, 16, "uint", "uint16"),
        _row("I16", 0, 16, "int", "int16", "short"),
        _row("U32", 1, 32, "uint", "uint32"),
        _row("I32", 0, 32, "int", "int32", "int"),
        _row("U64", 1, 64, "uint", "uint64"),
        _row("I64", 0, 64, "int", "int64", "long"),
        _row("F16", 2, 16, "float", "float16", "half", "fp16"),
        _row("BF16", 4, 16, "float", "bfloat16", "bf16"),
        _row("F32", 2, 32, "float", "float32", "float", "fp32"),
        _row("F64", 2, 64, "float", "float64", "double", "fp64"),
        _row("C64", 5, 64, "complex", "complex64", "cfloat"),
        _row("F8_E4M3", 10, 8, "float", "float8_e4m3fn"),
        _row("F8_E4M3FNUZ", 11, 8, "float", "float8_e4m3fnuz"),
        _row("F8_E5M2", 12, 8, "float", "float8_e5m2"),
        _row("F8_E5M2FNUZ", 13, 8, "float", "float8_e5m2fnuz"),
        _row("F8_E8M0", 14, 8, "scale", "float8_e8m0fnu"),
        _row("F6_E2M3", 15, 6, "packed", None, "float6_e2m3fn"),
        _row("F6_E3M2", 16, 6, "packed", None, "float6_e3m2fn"),
        _row("F4", 17, 4, "packed", None, "float4_e2m1fn"),
    ]
)
"""Every dtype mfload loads, by its safetensors name."""

_BY_ALIAS = {alias.lower(): row for row in TABLE.values() for alias in (row.name, *row.aliases)}


def lookup(name: str) -> DType:
    """The row of a format's dtype name; a row that is not `known` where there is none."""
    return TABLE.get(name) or DType(name, 1, 0, -1, 0, "unknown", None)


def resolve(spec: object) -> DType:
    """Finds the row for what a user passed as `dtype=`.

    Args:
        spec: A name ("bfloat16", "BF16", "torch.bfloat16") or any framework's dtype object.

    Raises:
        UsageError: It names no dtype of the table.
    """
    if spec is int or spec is float or spec is complex:
        # 64 bits to NumPy, 32 to others: nobody knows which was meant.
        raise errors.UsageError("a Python type is no dtype", expected="a name", found=repr(spec))
    for text in _spellings(spec):
        row = _BY_ALIAS.get(text.rsplit(".", 1)[-1].lower())
        if row is not None:
            return row
    known = ", ".join(row.aliases[0] for row in TABLE.values())
    meant = errors.did_you_mean(spec, list(_BY_ALIAS)) if isinstance(spec, str) else ""
    raise errors.UsageError(f"unknown dtype{meant}", expected=f"one of {known}", found=repr(spec))


def _spellings(spec: object) -> list[str]:
    if isinstance(spec, str):
        return [spec]
    # np.dtype and TF dtypes have a name, torch and Paddle dtypes print "torch.bfloat16",
    # and JAX's scalar types (jnp.bfloat16) carry the dtype.
    found = [getattr(spec, "name", None), getattr(spec, "__name__", None), str(spec)]
    return [text for text in found if isinstance(text, str)]
