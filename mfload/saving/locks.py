"""Locks of saves: on a target while it is written, on a directory while names in it change.

They are `flock`s, which the kernel releases when a process dies. On a file system without `flock`
nothing is locked.
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
_PATIENCE = 600.0  # Seconds to wait while other saves change names in a directory.
_TRIES = 100  # On some file systems stat and fstat of one file always differ.

_holders: set[tuple[object, ...]] = set()
"""Locks that are held: process (a fork copies the set), thread, and what is locked."""


@contextmanager
def _held(directory: str, name: str = "") -> Generator[None]:
    """Refuses a second lock by one thread, in a signal handler: it would wait for itself."""
    with errors.AsTarget(directory, "look at the directory"):
        # Not by its path: a directory may have several, through mounts or after a rename.
        found = os.stat(directory)
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
    """Locks a directory against other saves; yields its descriptor, to sync it."""
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
    """The path of a target's lock file, which may be left behind unlocked by a killed writer."""
    return place.at(place.hidden + "lock")


@contextmanager
def only_writer(place: Location, deadline: Deadline | None) -> Generator[None]:
    """Locks a target; waits until the deadline for another writer to finish.

    Raises TargetError if it does not, or at once without a deadline.
    """
    path = lock_of(place)
    with _held(place.directory, place.name):
        while (held := _took_lock(path, place.path)) is None:
            left = 0.0 if deadline is None else deadline.left()
            if left <= 0:
                wanted = "no other writer; a timeout= waits for it to finish"
                if deadline is not None:
                    wanted = f"its end within {deadline.seconds} s"
                raise errors.TargetError(
                    "another process is writing the target, or another thread of this one",
                    file=place.path,
                    expected=wanted,
                )
            time.sleep(min(_TICK, left))
        try:
            yield
        finally:
            try:
                # Not in a forked child, which has closed its copy.
                if is_at(held, path):
                    _remove(path)
            finally:
                files.unlock(number(held))
                closed(held)


def _took_lock(path: str, target: str) -> FileIO | None:
    """The file of that name, created if missing, and locked; None if another writer holds the lock.

    On a file system without locks it is removed again, and returned unlocked.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    for left in reversed(range(_TRIES)):
        try:
            try:
                file = opened(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
            except PermissionError as error:  # Another user created it.
                try:
                    # In sticky directories Linux refuses O_CREAT for what is another's.
                    file = opened(path, os.O_RDONLY | flags)
                except FileNotFoundError:
                    raise error from None
        except OSError as error:
            action = "make files in the target's directory"
            if os.path.lexists(path):
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
    with contextlib.suppress(OSError):  # A file that stays is not locked, and harmless.
        os.unlink(path)
