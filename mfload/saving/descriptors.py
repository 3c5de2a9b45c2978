"""Files that are open for writing: an interrupt loses none, and a forked child holds none."""

from __future__ import annotations

import contextlib
import os
import weakref
from io import FileIO

_opened: set[weakref.ref[FileIO]] = set()


def opened(path: str, flags: int, mode: int = 0o777) -> FileIO:
    """Opens a file, to be closed with the last reference to it; a forked child closes its copy.

    Locks last as long as any process has the file open.
    """
    flags |= getattr(os, "O_CLOEXEC", 0)
    # In C, as its end is: an interrupt between two lines of Python would lose the number, and one
    # in a `__del__` is lost itself.
    file = next(map(FileIO, map(os.open, (path,), (flags,), (mode,)), ("r+",)))
    _opened.add(weakref.ref(file, _opened.discard))
    return file


def closed(file: FileIO | None) -> None:
    """Closes it. An error says nothing new of a file that was synced, or is given up."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


def number(file: FileIO | None) -> int:
    """The number of its descriptor; -1 if it is closed."""
    return -1 if file is None or file.closed else file.fileno()


def is_at(file: FileIO | None, path: str) -> bool:
    """Whether an open file is what has that name."""
    try:
        fd = number(file)
        return fd >= 0 and os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _after_fork() -> None:
    for each in list(_opened):
        closed(each())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
