"""Packed elements as numbers, and back.

F4 puts two elements in a byte, the first in the low half, as frameworks with an F4 type do. F6 puts
four in three bytes, a little-endian stream of bits; the safetensors format does not fix its order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mfload import dtypes, errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PACKED = {
    "F4": ml_dtypes.float4_e2m1fn,
    "F6_E2M3": ml_dtypes.float6_e2m3fn,
    "F6_E3M2": ml_dtypes.float6_e3m2fn,
}


def unpack(array: Any, dtype: object, shape: tuple[int, ...] | list[int]) -> NDArray[Any]:
    """Turns the bytes of a tensor into a NumPy array of its numbers.

    Args:
        array: The uint8 array that a load returned, of any framework that NumPy can read.
        dtype: The stored dtype: "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "U16", …
        shape: The stored shape, in elements (`mfload.open(...).info(name).shape`).

    Returns:
        An array of the NumPy or ml_dtypes dtype, one element for each stored one; packed
        elements are copied, others are a view where they can be.

    Raises:
        UsageError: The array has more or fewer bytes than dtype and shape ask for.
    """
    row = dtypes.resolve(dtype)
    raw = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
    if row.size_of(shape) != raw.size:
        raise errors.UsageError(
            "not the bytes of such a tensor",
            expected=f"{errors.amount(row.size_of(shape))} for {row} {list(shape)}",
            found=errors.amount(raw.size),
        )
    if row.numpy is not None:
        return raw.view(row.numpy).reshape(shape)
    kind = _PACKED[row.name]
    if row.bits == 4:
        codes = np.empty((raw.size, 2), np.uint8)
        np.bitwise_and(raw, 15, out=codes[:, 0])
        np.right_shift(raw, 4, out=codes[:, 1])
        return codes.reshape(shape).view(kind)
    low, middle, high = raw[0::3], raw[1::3], raw[2::3]
    codes = np.empty((raw.size // 3, 4), np.uint8)
    codes[:, 0] = low & 63
    codes[:, 1] = low >> 6 | (middle & 15) << 2
    codes[:, 2] = middle >> 4 | (high & 3) << 4
    codes[:, 3] = high >> 2
    return codes.reshape(shape).view(kind)


def pack(array: Any, row: dtypes.DType) -> Any:
    """The stored bytes, one dim of uint8, of an array with an F4 or F6 element in each byte."""
    codes = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << row.bits) - 1)
    if row.bits == 4:
        return codes[0::2] | codes[1::2] << 4
    first, second, third, fourth = (codes[n::4] for n in range(4))
    raw = np.empty((first.size, 3), np.uint8)
    raw[:, 0] = first | second << 6
    raw[:, 1] = second >> 2 | third << 4
    raw[:, 2] = third >> 4 | fourth << 2
    return raw.reshape(-1)
