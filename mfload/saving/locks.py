"""Locks of saves: on a target as long as it is written, on a directory while names change.

The kernel drops the lock of a process that dies. Some file systems have no such locks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO

from mfload import errors
from mfload.runtime import Deadline
from mfload.saving import drafts as files
from mfload.saving.descriptors import closed, is_at, number, opened
from mfload.saving.targets import Location

_TICK = 0.01  # Seconds between two tries for a lock.
_PATIENCE = 600.0  # Seconds for names to be changed by others that save into a directory.
_TRIES = 100  # On some file systems a name and a descriptor tell of different files.

_holders: set[tuple[object, ...]] = set()
"""The locks that are held: process, thread and what is locked; a fork copies it."""


@contextmanager
def _held(directory: str, name: str = "") -> Generator[None]:
    """Refuses a second lock of one thread, as of a signal handler: it would wait for itself."""
    try:
        # Not by its path: a directory may have several, through mounts or after a rename.
        found = os.stat(directory)
    except OSError as error:
        raise errors.from_target(error, directory, "look at the directory") from error
    owner = os.getpid(), threading.get_ident(), found.st_dev, found.st_ino, name
    if owner in _holders:
        what = "to this target" if name else "into this directory"
        path = os.path.join(directory, name) if name else directory
        raise errors.TargetError(f"this thread is already saving {what}", file=path)
    try:
        _holders.add(owner)
        yield
    finally:
        _holders.discard(owner)


@contextmanager
def locked(path: str) -> Generator[int]:
    """Keeps other saves out of a directory, and gives a descriptor of it to sync."""
    with files.open_directory(path) as fd, _held(path):
        try:
            end = time.monotonic() + _PATIENCE
            # In ticks, so that Ctrl-C gets through.
            while files.lock(fd) is False:
                if time.monotonic() > end:
                    what = "another process keeps the directory locked"
                    within = f"the end of a save into it within {_PATIENCE:g} s"
                    raise errors.TargetError(what, file=path, expected=within)
                time.sleep(_TICK)
            yield fd
        finally:
            files.unlock(fd)


def lock_of(place: Location) -> str:
    """The file that the writer of a target locks; a dead writer's has no lock, only the name."""
    return place.at(place.hidden + "lock")


@contextmanager
def only_writer(place: Location, deadline: Deadline | None) -> Generator[None]:
    """Keeps other writers from a target; waits for the one there is until the deadline."""
    path = lock_of(place)
    with _held(place.directory, place.name):
        while (held := _took_lock(path, place.path)) is None:
            left = 0.0 if deadline is None else deadline.left()
            if left <= 0:
                within = "" if deadline is None else f" within {deadline.seconds} s"
                raise errors.TargetError(
                    "another process is writing the target, or another thread of this one",
                    file=place.path,
                    expected=f"its end{within}",
                )
            time.sleep(min(_TICK, left))
        try:
            yield
        finally:
            try:
                # A forked child has it closed, and removes nothing.
                if is_at(held, path):
                    _remove(path)
            finally:
                files.unlock(number(held))
                closed(held)


def _took_lock(path: str, target: str) -> FileIO | None:
    """The file of that name, locked; None if another has it locked.

    On a file system that has no locks the file goes at once.
    """
    for left in reversed(range(_TRIES)):
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        # Linux may refuse O_CREAT of another user's file in a sticky directory.
        if new := not os.path.lexists(path):
            flags |= os.O_CREAT
        try:
            try:
                file = opened(path, os.O_RDWR | flags, 0o666)
            except PermissionError as error:  # One that another user left.
                try:
                    # In sticky directories Linux refuses O_CREAT for what is another's.
                    file = opened(path, os.O_RDONLY | flags & ~os.O_CREAT)
                except FileNotFoundError:
                    raise error from None
        except OSError as error:
            if left and os.path.lexists(path) == new:  # It came, or went, meanwhile.
                continue
            action = "make files in the target's directory"
            if not new:
                action = f"lock the target with {os.path.basename(path)}"
            raise errors.from_target(error, target, action) from error
        free = files.lock(file.fileno())
        there = is_at(file, path) or not left
        if free and there:
            return file
        closed(file)
        if free is False:
            break
        if there:
            _remove(path)
            return file
        # Its last owner has just removed it; on NFS its lock may fail then (ESTALE).
    return None


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # What stays has no lock.
        os.unlink(path)
