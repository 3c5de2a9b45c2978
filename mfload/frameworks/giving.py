"""What every adapter makes of an array that is to be written: its dtype, its shape, its bytes.

Bytes are read late. An array that lies in host memory as the file wants it is written from where
it lies; anything else is copied when its turn comes, so that never more than one copy is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mfload import dtypes, errors, packed
from mfload.dtypes import DType

Span = tuple[int, int]


class Outgoing(NamedTuple):
    """An array on its way to a file.

    Attributes:
        name: The tensor.
        dtype: Row of the dtype table.
        shape: In elements of that dtype.
        nbytes: Stored bytes.
        span: Host addresses [first, past last) between which its elements lie, gaps between
            them counted; None where they lie on a device or in several pieces.
        fetch: Gives its bytes, one dim of uint8, in C order and little-endian: a view where
            that is how they lie, a copy elsewhere. To be called once, right before writing.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    span: Span | None
    fetch: Callable[[], Any]


_ROWS: dict[Any, DType] = {
    **{row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None},
    np.dtype(ml_dtypes.float4_e2m1fn): dtypes.TABLE["F4"],
    np.dtype(ml_dtypes.float6_e2m3fn): dtypes.TABLE["F6_E2M3"],
    np.dtype(ml_dtypes.float6_e3m2fn): dtypes.TABLE["F6_E3M2"],
}

BY_NAME = {kind.name: row for kind, row in _ROWS.items()}
"""Rows by the name that NumPy, ml_dtypes and most frameworks have for a dtype."""


def refused(framework: str, name: str, why: str, found: object) -> errors.UnsupportedArrayError:
    """The error for an array that can't be saved.

    Args:
        framework: Whose array it is.
        name: The tensor.
        why: What it is, and what to save in its place.
        found: Its dtype, type or device.
    """
    return errors.UnsupportedArrayError(f"{framework}: {why}", tensor=name, found=found)


def no_word(framework: str, name: str, dtype: object) -> errors.UnsupportedArrayError:
    """The error for a dtype that is not in the table."""
    return errors.UnsupportedArrayError(
        f"{framework}: safetensors has no dtype for this one; convert it, or view its bytes",
        tensor=name,
        expected=f"one of {', '.join(dtypes.TABLE)}",
        found=dtype,
    )


def row_of(framework: str, name: str, dtype: Any) -> DType:
    """The row of a NumPy dtype in either byte order.

    Raises:
        UnsupportedArrayError: There is none.
    """
    row = _ROWS.get(dtype if dtype.byteorder != ">" else dtype.newbyteorder("="))
    if row is None:
        raise no_word(framework, name, dtype)
    return row


def host(framework: str, name: str, array: Any) -> Outgoing:
    """A NumPy array, one item an element.

    Args:
        framework: Whose array it was, for errors.
        name: The tensor.
        array: Of a dtype of NumPy or ml_dtypes, with any strides.

    Raises:
        UnsupportedArrayError: The dtype has no row, or its elements fill no whole byte.
    """
    row = row_of(framework, name, array.dtype)
    return late(framework, name, row, array.shape, lambda: array, span_of(array))


def late(
    framework: str,
    name: str,
    row: DType,
    shape: tuple[int, ...],
    read: Callable[[], Any],
    span: Span | None = None,
    *,
    as_stored: bool = False,
) -> Outgoing:
    """An array that becomes a NumPy array when it is written.

    Args:
        framework: Whose array it is, for errors.
        name: The tensor.
        row: Its dtype.
        shape: In elements.
        read: Gives the NumPy array: one item an element, whatever the items are called.
        span: See `Outgoing`.
        as_stored: Whether its items are bytes as the file holds them, several elements in each.

    Raises:
        UnsupportedArrayError: Its elements fill no whole byte.
    """
    nbytes = row.size_of(shape)
    if nbytes is None:
        raise errors.UnsupportedArrayError(
            f"{framework}: the elements fill no whole number of bytes; pad the array",
            tensor=name,
            expected=f"a multiple of {row.elements} elements of {row}",
            found=f"shape {list(shape)}",
        )
    if row.elements > 1 and not as_stored:
        return Outgoing(name, row, shape, nbytes, span, lambda: packed.pack(read(), row))
    return Outgoing(name, row, shape, nbytes, span, lambda: _plain(read()))


def span_of(array: Any) -> Span:
    """Between which addresses the items of a NumPy array lie."""
    if not array.size:
        return array.ctypes.data, array.ctypes.data
    return np.lib.array_utils.byte_bounds(array)


def strided(
    owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int
) -> Any:
    """Somebody else's memory as a NumPy array that keeps its owner alive.

    Args:
        owner: Whoever owns it.
        address: Of the first item.
        shape: In items.
        strides: In items.
        width: Bytes an item.
    """
    if 0 in shape:
        return np.empty(shape, f"<u{width}")
    return np.asarray(_Strided(owner, address, shape, strides, width))


class _Strided:
    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self, owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{width}",
            "shape": shape,
            "strides": tuple(width * step for step in strides),
            "data": (address, True),
        }


def _plain(array: Any) -> Any:
    """The bytes of an array, item by item; nothing is copied where they lie like that."""
    native = array.dtype.newbyteorder("=")
    return array.astype(native, order="C", copy=False, subok=False).reshape(-1).view(np.uint8)
