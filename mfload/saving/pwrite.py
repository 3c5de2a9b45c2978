"""Writes by offset, of many pieces at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

# Linux takes 1024 (UIO_MAXIOV); POSIX promises 16.
_IOV_MAX = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)


def write_all(fd: int, pieces: Sequence[Any], offset: int) -> None:
    """Writes pieces to one place of a file; short writes are taken up again.

    Args:
        fd: The file.
        pieces: uint8 arrays, 1-D, contiguous.
        offset: Where the first begins, in bytes.

    Raises:
        OSError: The system failed, or takes nothing any more (EIO).
    """
    for first in range(0, len(pieces), _IOV_MAX):
        vector = list(pieces[first : first + _IOV_MAX])
        while vector:
            done = _pwritev(fd, vector, offset)
            stuck = done == 0
            offset += done
            while vector and done >= vector[0].nbytes:
                done -= vector[0].nbytes
                vector.pop(0)
            if done:
                vector[0] = vector[0][done:]
            elif vector and stuck:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


_seek = threading.Lock()


def _pwritev(fd: int, vector: list[Any], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, vector, offset)
    with _seek:  # Windows
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, vector[0])
