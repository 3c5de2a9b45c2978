"""`madvise(2)` with the interpreter lock given up.

Python's own call holds it, and reading a cold file into a map would stop every thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

POPULATE_READ = 22  # Linux 5.14 and newer.
_DONT_FORK = 10
_DO_FORK = 11


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Advises the kernel of a range that begins on a page.

    Raises:
        OSError: The kernel refused, or there is no such call here (EINVAL).
    """
    libc = _libc()
    if libc is None:
        raise OSError(errno.EINVAL, "no madvise on this system")
    if libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextmanager
def not_forked(arrays: Sequence[Any]) -> Generator[None]:
    """Keeps memory that a disk writes to out of children forked meanwhile.

    open(2): O_DIRECT into private memory while the process forks can lose what the disk
    wrote, on kernels that share the page with the child before it arrives. A child has no
    use for a load that its parent has not finished.

    Args:
        arrays: uint8 arrays that have their pages to themselves.
    """
    for array in arrays:
        _try(array, _DONT_FORK)
    try:
        yield
    finally:
        for array in arrays:
            _try(array, _DO_FORK)


def never_forked(array: Any) -> None:
    """Keeps memory out of children for as long as it lives; it has its pages to itself."""
    _try(array, _DONT_FORK)


def _try(array: Any, advice: int) -> None:
    # Systems without the call have nothing to forbid.
    with suppress(OSError):
        madvise(array.ctypes.data, array.nbytes, advice)
