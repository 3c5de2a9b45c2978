"""Open files of saves: Ctrl-C leaves none open, and a forked child closes its copies."""

from __future__ import annotations

import contextlib
import os
import weakref
from io import FileIO

from mfload.runtime import in_forks

_opened: set[weakref.ref[FileIO]] = set()


def opened(path: str, flags: int, mode: int = 0o777) -> FileIO:
    """Opens a file. It is closed with the last reference to it, and in forked children.

    A lock lasts as long as any process has the file open.
    """
    flags |= os.O_CLOEXEC
    # One chain of calls in C: an interrupt between two lines of Python would lose the descriptor.
    # A FileIO is also closed in C; an interrupt in a `__del__` would be ignored.
    file = next(map(FileIO, map(os.open, (path,), (flags,), (mode,)), ("r+",)))
    _opened.add(weakref.ref(file, _opened.discard))
    return file


def closed(file: FileIO | None) -> None:
    """Closes a file, without an error: it was synced before, or is given up."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


def number(file: FileIO | None) -> int:
    """The descriptor of a file; -1 if it is closed."""
    return -1 if file is None or file.closed else file.fileno()


def is_at(file: FileIO | None, path: str) -> bool:
    """Whether a path names this open file."""
    try:
        fd = number(file)
        return fd >= 0 and os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


@in_forks
def _after_fork() -> None:
    for each in list(_opened):
        closed(each())
