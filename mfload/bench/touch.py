"""Touching what was loaded: every page of every array is read, the same way for every framework.

A map that nobody has touched is not loaded yet, and a copy is finished only when it can be read.
Arrays are reached by their address, so that no framework pays for a conversion and none can copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mfload import dlpack

PAGE = 4096
Span = tuple[int, int]
"""Address and bytes of an array."""


class _Strided:
    """Every 4096th byte of a span, as NumPy takes foreign memory."""

    def __init__(self, span: Span) -> None:
        address, nbytes = span
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (-(-nbytes // PAGE),),
            "strides": (PAGE,),
            "typestr": "|u1",
        }


def touch(spans: Iterable[Span]) -> int:
    """Sum bytes 0, 4096, 8192, … of every span."""
    return sum(int(np.asarray(_Strided(span)).sum(dtype=np.uint64)) for span in spans if span[1])


def _numpy(array: Any) -> Span:
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.__array_interface__["data"][0], array.nbytes


def _torch(array: Any) -> Span:
    return array.data_ptr(), array.nbytes


def _jax(array: Any) -> Span:
    return array.unsafe_buffer_pointer(), array.nbytes


def _paddle(array: Any) -> Span:
    nbytes = int(array.size) * array.element_size()
    return array.data_ptr() if nbytes else 0, nbytes


def _tensorflow(array: Any) -> Span:
    nbytes = int(array.shape.num_elements()) * array.dtype.size
    if not nbytes:
        return 0, 0
    # Whoever made the array has imported it.
    to_dlpack = sys.modules["tensorflow"].experimental.dlpack.to_dlpack
    return dlpack.data_address(to_dlpack(array)), nbytes


SPAN: dict[str, Callable[[Any], Span]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "tensorflow": _tensorflow,
    "paddle": _paddle,
}
"""How to find an array's memory, by framework."""
