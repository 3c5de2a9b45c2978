"""A directory that files are published in: locked while names change, and synced after."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from mfload import errors

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger("mfload")

_TICK = 0.01
"""Seconds between two tries for a lock that somebody else has."""

_held: set[tuple[int, int, int, int]] = set()
"""Whose locks are held: process, thread, device and inode of the directory."""


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

        Raises:
            TargetError: This very thread has it: a signal handler that saves would wait for ever.
        """
        owner = self._owner()
        if owner in _held:
            raise errors.TargetError(
                "a save into this directory is under way in this thread", file=self.path
            )
        locked = False
        try:
            if owner is not None:
                _held.add(owner)
            locked = self._wait()
            yield
        finally:
            if locked:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            if owner is not None:
                _held.discard(owner)

    def _owner(self) -> tuple[int, int, int, int] | None:
        if self._fd < 0:
            return None
        status = os.fstat(self._fd)
        # A fork copies the record, but the child is somebody else.
        return os.getpid(), threading.get_ident(), status.st_dev, status.st_ino

    def _wait(self) -> bool:
        """Waits in ticks, so that Ctrl-C gets through; whether there is a lock."""
        had = lock(self._fd)
        if had is False:
            log.info("%s: waiting for another save into this directory", self.path)
        while had is False:
            time.sleep(_TICK)
            had = lock(self._fd)
        return had is True

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


def lock(fd: int) -> bool | None:
    """Takes the lock of an open file where nobody has it.

    It goes with the descriptor, or with the process.

    Returns:
        Whether it was had; None where locks are not known.
    """
    if fcntl is None or fd < 0:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
