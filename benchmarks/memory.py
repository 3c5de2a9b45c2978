"""Memory by address: fresh pages, and where the arrays of a framework lie, also on a device."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

from mfload import dlpack
from mfload.bench.loaders import Span

_HUGE = 2 << 20


def fresh_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private memory on 2 MiB pages, not yet faulted in, and the offset of the first such page."""
    size = -(-nbytes // _HUGE) * _HUGE + _HUGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE


def _numpy(array: Any) -> Span:
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.__array_interface__["data"][0], array.nbytes


def _paddle(array: Any) -> Span:
    nbytes = int(array.size) * array.element_size()
    return array.data_ptr() if nbytes else 0, nbytes


def _tensorflow(array: Any) -> Span:
    nbytes = int(array.shape.num_elements()) * array.dtype.size
    to_dlpack = sys.modules["tensorflow"].experimental.dlpack.to_dlpack
    return dlpack.data_address(to_dlpack(array)) if nbytes else 0, nbytes


SPAN: dict[str, Callable[[Any], Span]] = {
    "numpy": _numpy,
    "torch": lambda array: (array.data_ptr(), array.nbytes),
    "jax": lambda array: (array.unsafe_buffer_pointer(), array.nbytes),
    "tensorflow": _tensorflow,
    "paddle": _paddle,
    "cupy": lambda array: (array.data.ptr, array.nbytes),
}
"""How to find an array's memory, by framework."""
