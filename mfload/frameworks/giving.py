"""What every adapter makes of an array that is to be written: its dtype, its shape, its bytes.

Bytes are read late. An array that lies in host memory as the file wants it is written from where
it lies; anything else is copied when its turn comes, so that never more than one copy is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

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
        where: Host addresses [first, past last) between which its elements lie, gaps between
            them counted, or a function that says it; None where they lie on a device or in
            several pieces.
        fetch: Gives its bytes, one dim of uint8, in C order and little-endian: a view where
            that is how they lie, a copy elsewhere. To be called once, right before writing.
        owner: A number that no array has beside it, where it has memory to itself unless
            somebody else's is a view of that; None where it may be such a view.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    where: Span | Callable[[], Span] | None
    fetch: Callable[[], Any]
    owner: int | None = None

    @property
    def span(self) -> Span | None:
        """Host addresses [first, past last) of its elements; None where there are none."""
        return self.where() if callable(self.where) else self.where


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


_U8 = np.dtype(np.uint8)
_NATIVE = {
    row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None and row.elements == 1
}


def plain(name: str, array: NDArray[Any]) -> Outgoing | None:
    """A NumPy array that lies as the file wants it; None for any other.

    What `host` says of it, in a fifth of the time: there may be hundreds of thousands.
    """
    row = _NATIVE.get(array.dtype)
    if row is None or not array.flags.c_contiguous:
        return None
    fetch = functools.partial(_as_bytes, array)
    where = functools.partial(span_of, array)
    owner = id(array) if array.base is None else None
    return Outgoing(name, row, array.shape, array.nbytes, where, fetch, owner)


def _as_bytes(array: NDArray[Any]) -> Any:
    return (array if array.ndim == 1 else array.reshape(-1)).view(_U8)


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
