"""Made the golden files, once; kept so that one can see how, and make more.

The files are by the reference writer where it can write the dtype. What each should load as is
worked out here from the bytes alone, by the formulas of the formats, without NumPy or
ml_dtypes, and kept in expected.json: numbers as JSON numbers, what JSON lacks as "nan", "inf"
and "-inf", complex ones as [real, imaginary].

    python tests/golden/make.py      # from the root; writes over what is there
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from reference import WRITTEN, Tensor, join, write  # noqa: E402


def minifloat(exponent: int, mantissa: int, bias: int, special: str) -> Callable[[int], float]:
    """Decodes a float of 1 + exponent + mantissa bits.

    Args:
        exponent: Bits.
        mantissa: Bits.
        bias: Of the exponent.
        special: "ieee", infinities and NaNs at the largest exponent; "fn", NaN where all bits
            but the sign are set; "fnuz", NaN in place of minus zero; "finite", none.
    """

    def decode(code: int) -> float:
        sign = -1.0 if code >> (exponent + mantissa) else 1.0
        e = code >> mantissa & (1 << exponent) - 1
        m = code & (1 << mantissa) - 1
        top = e == (1 << exponent) - 1
        if special == "ieee" and top:
            return math.nan if m else sign * math.inf
        if special == "fn" and top and m == (1 << mantissa) - 1:
            return math.nan
        if special == "fnuz" and sign < 0 and e == m == 0:
            return math.nan
        if e == 0:
            return sign * math.ldexp(m, 1 - bias - mantissa)
        return sign * math.ldexp(m + (1 << mantissa), e - bias - mantissa)

    return decode


def scale(code: int) -> float:
    """E8M0: a power of two and nothing else (OCP Microscaling 1.0, 5.4.1)."""
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


FLOATS = {
    "F16": (2, minifloat(5, 10, 15, "ieee")),
    "BF16": (2, minifloat(8, 7, 127, "ieee")),
    "F32": (4, minifloat(8, 23, 127, "ieee")),
    "F64": (8, minifloat(11, 52, 1023, "ieee")),
    "F8_E4M3": (1, minifloat(4, 3, 7, "fn")),
    "F8_E5M2": (1, minifloat(5, 2, 15, "ieee")),
    "F8_E4M3FNUZ": (1, minifloat(4, 3, 8, "fnuz")),
    "F8_E5M2FNUZ": (1, minifloat(5, 2, 16, "fnuz")),
    "F8_E8M0": (1, scale),
}
PACKED = {
    "F4": (4, minifloat(2, 1, 1, "finite")),
    "F6_E2M3": (6, minifloat(2, 3, 1, "finite")),
    "F6_E3M2": (6, minifloat(3, 2, 3, "finite")),
}
INTS = {"U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}

# Patterns at the edges of the types of that many bytes: zeros, ones, signs, largest, smallest.
WORDS = {
    2: [0x0000, 0x8000, 0x0001, 0x3C00, 0x3F80, 0xBF80, 0x7BFF, 0x7C00,
        0xFC00, 0x7C01, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x1234],
    4: [0x00000000, 0x80000000, 0x00000001, 0x3F800000, 0x7F7FFFFF, 0x7F800000,
        0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x40490FDB, 0x12345678],
    8: [0, 1 << 63, 1, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000,
        0xFFF0000000000000, 0x7FF8000000000000, (1 << 63) - 1, (1 << 64) - 1,
        0x400921FB54442D18, 0x123456789ABCDEF0],
}  # fmt: skip


def number(value: float) -> Any:
    return value if math.isfinite(value) else str(value)


def tensor(dtype: str) -> tuple[Tensor, list[Any]]:
    """A tensor with every code of a small type, or the edges of a large one, and its values."""
    if dtype in PACKED:
        bits, decode = PACKED[dtype]
        codes = [*range(1 << bits)]
        word = sum(code << bits * n for n, code in enumerate(codes))
        data = word.to_bytes(len(codes) * bits // 8, "little")
        return Tensor(dtype, (2, len(codes) // 2), data), [number(decode(c)) for c in codes]
    if dtype == "BOOL":
        return Tensor(dtype, (2, 2), bytes([0, 1, 1, 0])), [False, True, True, False]
    if dtype == "C64":
        part = FLOATS["F32"][1]
        words = [WORDS[4][n] for n in (0, 1, 3, 4, 10, 11)]
        data = b"".join(struct.pack("<I", each) for each in words)
        pairs = zip(words[::2], words[1::2], strict=True)
        return Tensor(dtype, (3,), data), [[part(a), part(b)] for a, b in pairs]
    size = INTS.get(dtype) or FLOATS[dtype][0]
    words = [*range(256)] if size == 1 else WORDS[size]
    data = b"".join(each.to_bytes(size, "little") for each in words)
    if dtype in INTS:
        values: list[Any] = [int.from_bytes(each.to_bytes(size, "little"), "little",
                                            signed=dtype[0] == "I") for each in words]  # fmt: skip
    else:
        values = [number(FLOATS[dtype][1](each)) for each in words]
    return Tensor(dtype, (2, len(words) // 2), data), values


def described(held: Tensor, values: list[Any] | None = None) -> dict[str, Any]:
    found = {"dtype": held.dtype, "shape": list(held.shape), "data": held.data.hex()}
    return found if values is None else {**found, "values": values}


def main() -> None:
    files: dict[str, bytes] = {}
    expected: dict[str, Any] = {}
    for dtype in ["BOOL", *INTS, *FLOATS, "C64", *PACKED]:
        held, values = tensor(dtype)
        name = f"{dtype.lower()}.safetensors"
        if dtype not in WRITTEN:
            span = {"dtype": dtype, "shape": list(held.shape), "data_offsets": [0, len(held.data)]}
            files[name] = join(json.dumps({"w": span}), held.data)
        else:
            files[name] = write({"w": held})
        expected[name] = {"tensors": {"w": described(held, values)}, "metadata": None}

    mixed = {
        "scalar": Tensor("F32", (), struct.pack("<f", 1.5)),
        "empty": Tensor("F16", (0, 3), b""),
        "": Tensor("U8", (3,), b"abc"),
        "layer/0.é\n": Tensor("I16", (1, 1, 2), struct.pack("<2h", -1, 2)),
        "half": Tensor("BF16", (1,), b"\x80\x3f"),
    }
    files["mixed.safetensors"] = write(mixed, {"format": "pt", "é": ""})
    expected["mixed.safetensors"] = {
        "tensors": {name: described(held) for name, held in mixed.items()},
        "metadata": {"format": "pt", "é": ""},
    }
    files["nothing.safetensors"] = write({})
    expected["nothing.safetensors"] = {"tensors": {}, "metadata": None}
    text = ' {"b":["U8",[2],[4,6]], "a":{"x":[{}],"data_offsets":[0,4],"dtype":"F32","shape":[1]}}'
    files["unusual.safetensors"] = join(text, b"\0\0\x80\x3f!?")
    expected["unusual.safetensors"] = {
        "tensors": {"a": described(Tensor("F32", (1,), b"\0\0\x80\x3f")),
                    "b": described(Tensor("U8", (2,), b"!?"))},
        "metadata": None,
    }  # fmt: skip

    files["sharded/model-00001-of-00002.safetensors"] = write({"a": mixed["scalar"]}, {"n": "1"})
    files["sharded/model-00002-of-00002.safetensors"] = write({"b": mixed["half"]}, {"n": "2"})
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 6}, "weight_map": weights}
    files["sharded/model.safetensors.index.json"] = json.dumps(index).encode()
    expected["sharded"] = {
        "tensors": {"a": described(mixed["scalar"]), "b": described(mixed["half"])},
        "metadata": {"n": "2"},
    }

    for name, raw in files.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in expected.items())
    (HERE / "expected.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
