"""A directory that files are published in: locked while names change, and synced after."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from mfload import errors

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Folder:
    """An open directory.

    Args:
        path: Where it lies.

    Raises:
        TargetError: It can't be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        try:
            if hasattr(os, "O_DIRECTORY"):
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise errors.from_target(error, path, "open the directory") from error

    def at(self, name: str) -> str:
        """The path of a name in it."""
        return os.path.join(self.path, name)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Has the directory to oneself, among those who ask for it by this.

        Names change in several steps, and two writers must not take them in turns. The kernel
        drops the lock of a process that dies. Where a file system knows no such locks, there are
        none.
        """
        held = lock(self._fd, wait=True) is True
        try:
            yield
        finally:
            if held:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Returns when the names it holds are on disk.

        Raises:
            OSError: The disk failed.
        """
        if self._fd >= 0:
            fsync(self._fd)

    def close(self) -> None:
        """Closes it; more than once does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lock(fd: int, *, wait: bool = False) -> bool | None:
    """Takes the lock of an open file; it goes with the descriptor, or with the process.

    Returns:
        Whether it was had; None where locks are not known.
    """
    if fcntl is None or fd < 0:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def fsync(fd: int) -> None:
    """Returns when a file is on disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        # What can't be synced (directories of some file systems) says so.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
