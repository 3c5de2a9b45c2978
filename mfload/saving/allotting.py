"""Room on the disk, asked for before a byte is written: a full disk is told at once."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from typing import Any

# What file systems say that can't promise room.
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


@functools.cache
def _fallocate() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


def allot(fd: int, nbytes: int) -> None:
    """Gives an empty file its size, and the room for it where the file system can promise that.

    The system call itself: the C library's posix_fallocate writes to every block where a file
    system can't, which takes as long as the data will.

    Args:
        fd: The file, open for writing.
        nbytes: Its size.

    Raises:
        OSError: There is no room (ENOSPC, EDQUOT), or the process may write no file that large.
    """
    if nbytes == 0:
        return
    call = _fallocate()
    while call is not None:
        if call(fd, 0, 0, nbytes) == 0:
            return
        code = ctypes.get_errno()
        if code in _NOT_HERE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, nbytes)


def free_bytes(directory: str) -> int | None:
    """Bytes that this user may still write in a directory's file system; None where unknown."""
    try:
        found = os.statvfs(directory)
    except (OSError, AttributeError):
        return None
    return found.f_bavail * found.f_frsize
