"""A file being written: it gets its final name once it is whole and on disk.

Where the system can, a draft has no name at all (O_TMPFILE): a process that is killed leaves
nothing behind. Elsewhere it has a hidden name, and holds a lock by which the next writer tells it
from the leftovers of one that died.

Bytes go past the page cache (O_DIRECT) where the file takes that: straight from the caller's memory
where that has the disk's alignment, through a reused slot where it has not. Bytes at ragged ends
go through the page cache, on pages of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import probes
from mfload.io.buffers import PAGE, Bytes, WorkerSlot
from mfload.io.pread import IOV_MAX

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BLOCK = 4 << 20
"""Bytes of one write: a slot that stays in the processor's cache until the disk has it."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
"""What file systems say that have no hard links."""

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# Smaller files and pieces are over sooner than O_DIRECT pays.
_DIRECT_FROM = 1 << 20
_PIECE_FROM = 64 << 10
# What open(2) says of O_TMPFILE if the file system, or an old kernel, does not know it.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class Draft:
    """A file of known size, made room for at once.

    `hidden` is its path if it must have a name before it is published, in the final directory;
    `shown` is the final path, for errors. `mode` None: permissions of any new file.
    """

    def __init__(self, hidden: str, size: int, shown: str, mode: int | None = None) -> None:
        self.hidden = hidden
        self.size = size
        self.shown = shown
        self.named = False
        self._fd = self._direct = -1
        self._unit = PAGE
        self._takes_direct = self._looked = False
        self._written = self._busy = 0
        self._lock = threading.Lock()
        self._slots: list[WorkerSlot] = []
        try:
            self._create(mode)
            allocate_file(self._fd, size)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise self._failed(error, "make room for the file") from error
            raise

    def _create(self, mode: int | None) -> None:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        wanted = 0o666 if mode is None else mode & 0o666
        if hasattr(os, "O_TMPFILE"):
            try:
                directory = os.path.dirname(self.hidden)
                self._fd = os.open(directory, flags | os.O_TMPFILE, wanted)
                # It gets its name through /proc, which may not be mounted.
                os.stat(self._own_path)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._close()
        if self._fd < 0:
            self._fd = os.open(self.hidden, flags | os.O_CREAT | os.O_EXCL, wanted)
            self.named = True
            lock(self._fd)
        if mode is not None and hasattr(os, "fchmod"):
            try:
                os.fchmod(self._fd, mode)
            except OSError as error:
                # Some file systems have the same permissions for all files.
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise

    @property
    def _own_path(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    @property
    def path(self) -> str:
        """Where it can be opened for reading before it is published."""
        return self.hidden if self.named else self._own_path

    def _open_direct(self) -> None:
        """Opens it a second time, past the page cache, if that is possible and pays."""
        self._looked = True
        units = probes.direct_alignment(self._fd) if self.size >= _DIRECT_FROM else None
        if units is None or PAGE % max(units):
            return
        with contextlib.suppress(OSError):  # Slower, not wrong.
            flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(self._own_path, flags)
            self._unit, self._takes_direct = units[0], True

    def write(self, offset: int, data: Bytes) -> None:
        """Writes bytes to their place; several threads may, to places of their own."""
        done = 0
        while done < data.nbytes:
            # Cut where the file's blocks end, so that all but the first begin on a page.
            part = data[done : done + BLOCK - (offset + done) % BLOCK]
            self.gather(offset + done, (part,))
            done += part.nbytes

    def gather(self, offset: int, pieces: Sequence[Bytes]) -> None:
        """Writes bytes that lie apart in memory and together in the file, up to `BLOCK` of them."""
        with self._lock:
            self._busy += 1
            if not self._looked:
                self._open_direct()
        try:
            nbytes = sum(map(len, pieces))
            self._gather(offset, pieces, nbytes)
            with self._lock:
                self._written += nbytes
        except OSError as error:
            # Its frames hold slots, which live as long as the error does.
            traceback.clear_frames(error.__traceback__)
            raise self._failed(error, "write") from error
        finally:
            with self._lock:
                self._busy -= 1

    def _gather(self, offset: int, pieces: Sequence[Bytes], nbytes: int) -> None:
        head = -offset % PAGE
        inner = (nbytes - head) // PAGE * PAGE
        if not self._takes_direct or inner < _PIECE_FROM:
            _write_all(self._fd, pieces, offset)
            return
        if len(pieces) == 1 and (pieces[0].ctypes.data + head) % self._unit == 0:
            self._write_aligned(pieces[0], offset, head, inner)
            return
        with self._lock:
            slot = self._slots.pop() if self._slots else WorkerSlot()
        try:
            lead = offset % PAGE
            landed = slot.bytes(BLOCK + PAGE if nbytes <= BLOCK else nbytes + PAGE)
            whole = landed[lead : lead + nbytes]
            np.concatenate(pieces, out=whole)
            self._write_aligned(whole, offset, head, inner)
        finally:
            landed = whole = None
            self._slots.append(slot)
            del slot

    def _write_aligned(self, whole: Bytes, offset: int, head: int, inner: int) -> None:
        """The inner part past the page cache, the ends through it; all through it if refused."""
        try:
            _write_all(self._direct, (whole[head : head + inner],), offset + head)
        except OSError as error:
            # EFAULT: memory that the kernel copies from and no disk reads from (a device's).
            if error.errno not in (*_NO_DIRECT, errno.EFAULT):
                raise
            if error.errno != errno.EFAULT:
                # Left open: other threads may be writing to it.
                self._takes_direct = False
            _write_all(self._fd, (whole,), offset)
            return
        for start, stop in ((0, head), (head + inner, whole.nbytes)):
            if stop > start:
                _write_all(self._fd, (whole[start:stop],), offset + start)

    def sync(self) -> None:
        """Returns when all of it is on disk; nothing is written after."""
        if self._written != self.size:
            raise errors.WriteError(
                "the file is not whole",
                file=self.shown,
                expected=f"{self.size} bytes",
                found=f"{self._written} bytes",
            )
        self._slots.clear()
        try:
            fsync(self._fd)
        except OSError as error:
            raise self._failed(error, "write to the disk") from error
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)

    def link(self, path: str) -> None:
        """Gives the file a name, or one more, if nothing has that name."""
        if self.named:
            os.link(self.hidden, path)
            return
        # Relative to a descriptor of its directory: a plain path would link the link in /proc.
        with open_directory("/proc/self/fd") as proc:
            os.link(str(self._fd), path, src_dir_fd=proc, follow_symlinks=True)

    def appear(self) -> str:
        """Makes sure that it has its hidden name; returns its path."""
        if not self.named:
            # Before others can see it, so that who cleans up finds it locked.
            lock(self._fd)
            self.link(self.hidden)
            self.named = True
        return self.hidden

    def publish(self, path: str, *, replace: bool) -> None:
        """Gives it its final name at one stroke; FileExistsError if that would replace a file."""
        if not (replace and os.path.lexists(path)):
            try:
                self.link(path)
                return
            except FileExistsError:
                if not replace:
                    raise
            except OSError as error:
                if not self.named or error.errno not in NO_LINKS:
                    raise
                # Renames replace silently. The directory's lock keeps other saves out meanwhile.
                if not replace and os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.replace(self.appear(), path)
        self.published()

    def is_at(self, path: str) -> bool:
        """Whether it is what has that name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(path))
        except OSError:
            return False

    def published(self) -> None:
        """The hidden name is gone or in use: `discard` does not remove it any more."""
        self.named = False

    def discard(self) -> None:
        """Lets go of it; unless it was published, the file is gone. Twice does nothing."""
        named, self.named = self.named, False
        try:
            if named:
                with contextlib.suppress(OSError):
                    os.unlink(self.hidden)
        finally:
            with self._lock:
                # A thread that hangs in the kernel keeps its descriptors: their numbers must not
                # be given to other files meanwhile.
                hung = self._busy > 0
            self._slots.clear()
            if not hung:
                self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _failed(self, error: OSError, action: str) -> errors.TargetError:
        found = f"{self._written} bytes written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError, AttributeError):
                disk = os.statvfs(os.path.dirname(self.hidden))
                found += f", {disk.f_bavail * disk.f_frsize} bytes free"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            found += "; each shard needs an open file: raise `ulimit -n`, or max_shard_size"
        expected = f"{self.size} bytes"
        return errors.from_target(error, self.shown, action, expected=expected, found=found)


@functools.cache
def _fallocate() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


def allocate_file(fd: int, nbytes: int) -> None:
    """Gives an empty file its size, and the room for it if the file system can promise that.

    The system call itself: the C library's posix_fallocate writes to every block where a file
    system can't, which takes as long as the data will.
    """
    if nbytes == 0:
        return
    call = _fallocate()
    while call is not None:
        if call(fd, 0, 0, nbytes) == 0:
            return
        code = ctypes.get_errno()
        if code in _NO_ALLOCATION:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, nbytes)


def lock(fd: int) -> bool | None:
    """Takes the lock of an open file; it goes with the descriptor, or with the process.

    Returns whether it was free; None if the system knows no locks.
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


@contextlib.contextmanager
def open_directory(path: str) -> Generator[int]:
    """A descriptor of a directory, to lock and sync it; -1 on Windows."""
    fd = os.open(path, _DIRECTORY) if hasattr(os, "O_DIRECTORY") else -1
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def fsync(fd: int) -> None:
    """Returns when a file, or the names in a directory, are on disk."""
    if fd < 0:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # What can't be synced (directories of some file systems) says so.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _write_all(fd: int, pieces: Sequence[Any], offset: int) -> None:
    """Writes pieces to one place of a file; short writes are taken up again."""
    for first in range(0, len(pieces), IOV_MAX):
        vector = list(pieces[first : first + IOV_MAX])
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
