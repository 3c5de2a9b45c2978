"""The dtype table: what safetensors and other formats can hold, and how wide it is."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mfload import errors

if TYPE_CHECKING:
    import numpy as np

if sys.byteorder != "little":
    raise ImportError("mfload reads little-endian weights on little-endian machines only")

DTypeLike = Any
"""A dtype of NumPy, ml_dtypes or a framework, or its name, such as "bfloat16" or "BF16"."""

Kind = Literal["bool", "uint", "int", "float", "complex", "scale", "packed", "unknown"]


class DType:
    """One row; rows are compared by their name.

    Attributes:
        elements: Elements in the smallest block of whole bytes: 1 for F32, 2 for F4, 4 for F6.
        nbytes: Bytes in that block: 4, 1 and 3. Sizes and slices follow from this pair alone. 0
            marks a dtype that mfload does not know.
        code: `DLDataTypeCode` of dlpack.h 1.1.
        kind: What sort of number it is. "scale" is E8M0, an exponent alone; "packed" has
            several elements in a byte; neither takes part in conversions.
        aliases: Names in NumPy and other frameworks.
    """

    __slots__ = ("aliases", "bits", "code", "elements", "kind", "name", "nbytes", "numpy_name")

    def __init__(
        self,
        name: str,
        elements: int,
        nbytes: int,
        code: int,
        bits: int,
        kind: Kind,
        numpy_name: str | None,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.elements, self.nbytes = elements, nbytes
        self.code, self.bits, self.kind = code, bits, kind
        self.numpy_name, self.aliases = numpy_name, aliases

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """The NumPy or ml_dtypes dtype of an element; None if none is laid out as stored."""
        return None if self.numpy_name is None else _numpy_dtype(self.numpy_name)

    @property
    def wide(self) -> DType:
        """The row itself, or for one of `NARROW` that of the 8-bit integer in each of its bytes."""
        return TABLE["U8" if self.kind == "uint" else "I8"] if self.name in NARROW else self

    @property
    def known(self) -> bool:
        """Whether sizes can be computed."""
        return self.nbytes > 0

    def size_of(self, shape: Iterable[int]) -> int | None:
        """Bytes of a tensor of that shape; None if the elements do not fill whole blocks."""
        blocks, rest = divmod(math.prod(shape), self.elements)
        return None if rest else blocks * self.nbytes

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the same bytes as uint8: the last dim counts bytes.

        The bytes are one flat dim if the last dim is not whole blocks, or there is none.
        """
        if self.bits == 8:
            return shape
        row = self.size_of(shape[-1:]) if shape else None
        if row is None:
            return (self.size_of(shape) or 0,)
        return (*shape[:-1], row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return lookup, (self.name,)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name!r})"


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    # Late: reading headers needs neither, and `mfload ls` is over before they are loaded.
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
        _row("I32", 0, 32, "int", "int32"),
        _row("U64", 1, 64, "uint", "uint64"),
        _row("I64", 0, 64, "int", "int64", "long"),
        _row("F16", 2, 16, "float", "float16", "half", "fp16"),
        _row("BF16", 4, 16, "float", "bfloat16", "bf16"),
        _row("F32", 2, 32, "float", "float32", "fp32"),
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
"""Every dtype of safetensors, by its name there."""

NARROW: dict[str, DType] = {
    name: DType(name, 1, 1, kind == "uint", 8, kind, name, (name,))
    for kind in ("int", "uint")
    for name in (f"{kind}2", f"{kind}4")
}
"""Integers of 2 and 4 bits, which safetensors lacks, by NumPy's name.

An element takes a byte, which is also the 8-bit integer of that value.
"""
KNOWN = TABLE | NARROW
"""Every dtype that mfload loads."""

NO_INFINITY = frozenset(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
"""Floats in which a number beyond their range has no place."""

_WITHOUT_NAME = (
    "the array saved as unsigned integers, or in safetensors: NumPy's files drop the name"
)
INSTEAD = {
    "object": "arrays of numbers; this one is a pickle, which may run code",
    "structured": "an array for each field",
    "V1": f"{_WITHOUT_NAME} of float8",
    "V2": f"{_WITHOUT_NAME} of bfloat16",
}
"""What to store instead of some dtypes that are not in the table."""

_BY_ALIAS = {alias.lower(): row for row in KNOWN.values() for alias in (row.name, *row.aliases)}


def lookup(name: str, rows: Mapping[str, DType] = KNOWN) -> DType:
    """The row of a dtype's name; one that is not `known` if it is not among the rows."""
    if name in rows:
        return rows[name]
    return DType(f"{name}?" if name in KNOWN else name, 1, 0, -1, 0, "unknown", None)


def is_name(name: str) -> bool:
    """Whether it is the name of a dtype."""
    return name.lower() in _BY_ALIAS


def resolve(spec: object) -> DType:
    """The row for `dtype=`: a name ("bfloat16", "BF16", "torch.bfloat16") or a dtype object."""
    name = getattr(spec, "__name__", None)
    if isinstance(spec, str):
        name = spec.rpartition(".")[2].lower()
    if name in ("int", "float"):
        raise errors.UsageError(
            f"the dtype {name!r} has no fixed width: NumPy's and PyTorch's differ",
            expected=f"{name}32 or {name}64",
            found=repr(spec),
        )
    spellings = [spec]
    if not isinstance(spec, str):
        # NumPy's and TensorFlow's dtypes have a name, torch's and Paddle's print as
        # "torch.bfloat16", and JAX's scalar types (jnp.bfloat16) carry the dtype.
        spellings = [getattr(spec, "name", None), getattr(spec, "__name__", None), str(spec)]
    for text in spellings:
        row = _BY_ALIAS.get(text.rpartition(".")[2].lower()) if isinstance(text, str) else None
        if row is not None:
            return row
    known = ", ".join(row.aliases[0] for row in KNOWN.values())
    meant = errors.did_you_mean(spec, _BY_ALIAS.keys()) if isinstance(spec, str) else ""
    raise errors.UsageError(f"unknown dtype{meant}", expected=f"one of {known}", found=repr(spec))
