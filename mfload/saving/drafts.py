"""A file being written: it gets its final name once it is whole and on disk.

Where the system can, a draft has no name at all (O_TMPFILE): a process that is killed leaves
nothing behind. Elsewhere it has a hidden name. It holds a lock by which the next writer tells it
from the leftovers of one that died.

Bytes go past the page cache (O_DIRECT) where the file takes that: straight from the caller's memory
where that has the disk's alignment, through a reused slot where it has not. Bytes at unaligned ends
go through the page cache, on pages of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
import traceback
from collections.abc import Generator, Sequence
from io import FileIO
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import errors
from mfload.io import probes
from mfload.io.buffers import PAGE, WorkerSlot, libc
from mfload.io.pread import IOV_MAX
from mfload.saving.attributes import Attributes
from mfload.saving.descriptors import closed, is_at, number, opened
from mfload.sources.local import LocalFile, OpenFile

if TYPE_CHECKING:
    from mfload.io.buffers import Bytes

BLOCK = 4 << 20
"""Bytes of a good write: a slot that stays in the processor's cache until the disk has it."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Smaller files and pieces are over sooner than O_DIRECT pays.
_DIRECT_FROM = 1 << 20
_PIECE_FROM = 64 << 10
# 524 is Linux's own ENOTSUPP, which some network file systems let out.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, 524)
# What open(2) says of O_TMPFILE if the file system, or an old kernel, does not know it.
_NO_TMPFILE = (*_UNSUPPORTED, errno.EISDIR, errno.ENOENT)


class Draft:
    """A file of known size, made room for at once.

    `hidden` is its path if it must have a name before it is published, in the final directory;
    `shown` is the final path, for errors. `like` has the attributes of the file that it replaces.
    Default: those of any new file.

    Attributes:
        lasting: Whether it has its hidden name from the start and keeps it, unless it is published,
            for a writer that goes on.
        resumed: Whether it was there already.
        changed: Modification time that the file gets, in nanoseconds. Default: that of its last
            write.
    """

    changed: int | None = None

    def __init__(
        self,
        hidden: str,
        size: int,
        shown: str,
        like: Attributes | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        self.lasting, self.resumed = lasting, False
        self.hidden = hidden
        self.size = size
        self.shown = shown
        self.named = False
        self._like = like
        self._file: FileIO | None = None
        self._past_cache: FileIO | None = None
        self._unit = PAGE  # Multiple at which memory must begin that goes past the page cache.
        self._takes_direct: bool | None = None  # None until the first write.
        self._written = 0
        self._busy: set[int] = set()  # Threads that write.
        self._over = False
        self._lock = threading.Lock()
        self._slots: list[WorkerSlot] = []
        try:
            self._create()
            allocate_file(self._fd, size)
        except BaseException as error:
            self.lasting = False
            self.discard()
            if isinstance(error, OSError):
                raise self._failed(error, "make room for the file") from error
            raise

    @property
    def _fd(self) -> int:
        return number(self._file)

    @property
    def _direct(self) -> int:
        return number(self._past_cache)

    def _create(self) -> None:
        flags = os.O_RDWR
        # 0600 until it gets the old file's permissions: a private file must not be readable before.
        wanted = 0o666 if self._like is None else 0o600
        if self.lasting:
            self._reopen(flags)
        else:
            try:
                folder = os.path.dirname(self.hidden)
                self._file = opened(folder, flags | os.O_TMPFILE, wanted)
                # It gets its name through /proc, which may not be mounted.
                os.stat(self.path)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                closed(self._file)
        if self._fd < 0:
            self._file = opened(self.hidden, flags | os.O_CREAT | os.O_EXCL, wanted)
            self.named = True
        if lock(self._fd) is False and self.lasting:
            closed(self._file)  # The other process goes on with it.
            raise errors.TargetError("another process is writing the file", file=self.shown)

    def _reopen(self, flags: int) -> None:
        """Opens what an earlier writer left, unless it has another name too, or another size."""
        try:
            self._file = opened(self.hidden, flags | os.O_NOFOLLOW)
            found = os.fstat(self._fd)
            if is_ours(found) and found.st_nlink == 1 and found.st_size == self.size:
                self.named = self.resumed = True
                return
            if lock(self._fd) is not False:
                os.unlink(self.hidden)
        except FileNotFoundError:
            pass
        except OSError as error:
            # It already had the permissions of a read-only file, or is a symbolic link or a socket.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO):
                raise
            os.unlink(self.hidden)
        closed(self._file)

    def count(self, nbytes: int) -> None:
        """Counts bytes that an earlier writer wrote."""
        self._written += nbytes

    @property
    def path(self) -> str:
        """Where it can be opened before it is published."""
        return self.hidden if self.named else f"/proc/self/fd/{self._fd}"

    def source(self) -> LocalFile:
        """The draft as a source. Its pages are dropped from the cache, if the system allows it.

        Its lock ends, which keeps other descriptors out on SMB; that of the target is held.
        """
        unlock(self._fd)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _DraftSource(self.path)

    def _open_direct(self) -> bool:
        """Opens it a second time, past the page cache, if that is possible and pays."""
        units = probes.direct_alignment(self._fd) if self.size >= _DIRECT_FROM else None
        if units is None or PAGE % max(units):
            return False
        try:
            path = f"/proc/self/fd/{self._fd}"
            self._past_cache = opened(path, os.O_WRONLY | os.O_DIRECT)
        except OSError:  # Slower, not wrong.
            return False
        self._unit = units[0]
        return True

    def write(self, offset: int, pieces: Sequence[Bytes], tensor: str | None = None) -> int:
        """Writes pieces of memory one after the other into the file; returns how many.

        Several threads may, to places of their own. An error names the tensor.
        """
        nbytes = sum(map(len, pieces))
        this = threading.get_ident()
        try:
            with self._lock:
                self._busy.add(this)
                if self._takes_direct is None:
                    self._takes_direct = self._open_direct()
            if not self._takes_direct or nbytes - -offset % PAGE < _PIECE_FROM:
                write_all(self._fd, pieces, offset)
            elif len(pieces) == 1 and (pieces[0].ctypes.data + -offset % PAGE) % self._unit == 0:
                self._write_direct(offset, pieces[0])
            else:
                self._write_copy(offset, pieces, nbytes)
            with self._lock:
                self._written += nbytes
            return nbytes
        except OSError as error:
            # Its frames hold slots, which live as long as the error does.
            traceback.clear_frames(error.__traceback__)
            told = self._failed(error, "write")
            told.tensor = tensor
            raise told from error
        finally:
            self._busy.discard(this)
            if self._over and not self._busy:
                self._close()

    def _write_copy(self, offset: int, pieces: Sequence[Bytes], nbytes: int) -> None:
        with self._lock:
            slot = self._slots.pop() if self._slots else WorkerSlot()
        try:
            lead = offset % PAGE
            whole = slot.bytes(max(BLOCK, nbytes) + PAGE)[lead : lead + nbytes]
            np.concatenate(pieces, out=whole)
            self._write_direct(offset, whole)
        finally:
            self._slots.append(slot)

    def _write_direct(self, offset: int, whole: Bytes) -> None:
        """Writes whole pages past the page cache, the rest through it; all if that is refused."""
        head = -offset % PAGE
        tail = head + (whole.nbytes - head) // PAGE * PAGE
        try:
            write_all(self._direct, (whole[head:tail],), offset + head)
        except OSError as error:
            # EFAULT: memory that the kernel copies from and no disk reads from (a device's).
            # EACCES: SMB's locks keep all other descriptors out, this one too.
            if error.errno not in (*_UNSUPPORTED, errno.EFAULT, errno.EACCES):
                raise
            if error.errno != errno.EFAULT:
                # Left open: other threads may be writing to it.
                self._takes_direct = False
            write_all(self._fd, (whole,), offset)
            return
        for start, stop in ((0, head), (tail, whole.nbytes)):
            if stop > start:
                write_all(self._fd, (whole[start:stop],), offset + start)

    def sync(self) -> None:
        """Returns when all of it is on disk; nothing is written after."""
        if self._written != self.size:
            raise errors.WriteError(
                "the file is not whole",
                file=self.shown,
                expected=errors.amount(self.size),
                found=errors.amount(self._written),
            )
        self._slots.clear()
        if self.changed is not None:
            with contextlib.suppress(OSError):  # A resumed draft may have another owner.
                os.utime(self.path, ns=(self.changed, self.changed))
        try:
            if self._like is not None:
                self._like.give(self._fd)
            fsync(self._fd)
        except OSError as error:
            raise self._failed(error, "write to the disk") from error
        closed(self._past_cache)

    def link(self, path: str) -> None:
        """Gives the file a name, or one more, if nothing has that name."""
        if self.named:
            os.link(self.hidden, path)
            return
        # Relative to a descriptor of its directory: a plain path would link the link in /proc.
        with open_directory("/proc/self/fd") as proc:
            os.link(str(self._fd), path, src_dir_fd=proc, follow_symlinks=True)

    def publish(self, path: str, *, replace: bool) -> None:
        """Gives it its final name atomically; FileExistsError if that would replace a file."""
        if not (replace and os.path.lexists(path)):
            try:
                self.link(path)
                return
            except FileExistsError:
                if not replace:
                    raise
            except OSError:
                if not self.named:
                    raise
                # Without links. File systems say so in many ways, also EIO, EPERM and EXDEV.
                # Renames replace silently. The directory's lock keeps other saves out meanwhile.
                if not replace and os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        if not self.named:
            self.link(self.hidden)
            self.named = True
        try:
            os.replace(self.hidden, path)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._replace_closed(path)
        self.named = False

    def _replace_closed(self, path: str) -> None:
        """Renames it once it is closed: mounts of object stores may refuse that of an open file."""
        self._close()
        try:
            os.replace(self.hidden, path)
        except OSError:
            os.unlink(self.hidden)  # `discard` leaves alone what is closed.
            raise

    def is_at(self, path: str) -> bool:
        """Whether a path names this file."""
        return is_at(self._file, path)

    def discard(self) -> None:
        """Lets go of it; unless it was published, the file is gone. Twice does nothing."""
        try:
            # Also without `named`: an interrupt may have come before that was set.
            if self._fd >= 0 and not self.lasting:
                with contextlib.suppress(OSError):
                    os.unlink(self.hidden)
        finally:
            self._slots.clear()
            with self._lock:
                self._over = True
                # A thread that hangs in the kernel keeps its descriptors: their numbers must not
                # be given to other files meanwhile. It closes them itself.
                if self._busy <= {threading.get_ident()}:
                    self._close()

    def _close(self) -> None:
        closed(self._past_cache)
        closed(self._file)

    def _failed(self, error: OSError, action: str) -> errors.TargetError:
        found = f"{errors.amount(self._written)} written"
        if error.errno == errno.ENOSPC:  # A quota leaves less than that.
            with contextlib.suppress(OSError):
                disk = os.statvfs(os.path.dirname(self.hidden))
                found += f", {errors.amount(disk.f_bavail * disk.f_frsize)} free"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            found += "; each shard needs an open file: raise `ulimit -n`, or max_shard_size"
        expected = errors.amount(self.size)
        return errors.from_target(error, self.shown, action, expected=expected, found=found)


@contextlib.contextmanager
def written(
    raw: bytes,
    hidden: str,
    shown: str,
    like: Attributes | None,
    *,
    named: bool = False,
    changed: int | None = None,
) -> Generator[Draft]:
    """A synced draft of these bytes (see `Draft`), gone at the end unless it was published.

    `named`: it has its hidden name from the start, by which others recognise it.
    """
    draft = Draft(hidden, len(raw), shown, like, lasting=named)
    draft.lasting, draft.changed = False, changed
    try:
        draft.write(0, [np.frombuffer(raw, np.uint8)])
        draft.sync()
        yield draft
    finally:
        draft.discard()


def is_ours(found: os.stat_result) -> bool:
    """Whether it is a regular file of this user; another's may hold anything, and still change."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


class _DraftSource(LocalFile):
    """A draft as a source, whose open files are closed with the last reference (see `opened`)."""

    def open(self, flags: int = 0) -> OpenFile:
        return _OpenDraft(self, flags)


class _OpenDraft(OpenFile):
    def __init__(self, source: LocalFile, flags: int) -> None:
        self.name = source.name
        try:
            self._file = opened(source.name, os.O_RDONLY | flags)
        except OSError as error:
            raise errors.from_os(error, source.name, "open") from error
        self.fd = self._file.fileno()

    def close(self) -> None:
        closed(self._file)


def allocate_file(fd: int, nbytes: int) -> None:
    """Gives an empty file its size, and the room for it if the file system can promise that."""
    # The system call itself: the C library's posix_fallocate writes to every block where a file
    # system can't, which takes as long as the data will.
    while (code := _fallocate(fd, nbytes) if nbytes else 0) == errno.EINTR:
        pass
    if code in (*_UNSUPPORTED, errno.ENODEV):
        os.ftruncate(fd, nbytes)
    elif code:
        raise OSError(code, os.strerror(code))


def _fallocate(fd: int, nbytes: int) -> int:
    """Linux's fallocate(2); returns the number of its error, or 0."""
    failed = libc().fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
    return ctypes.get_errno() if failed else 0


def lock(fd: int) -> bool | None:
    """Takes the lock of an open file; it goes with the descriptor, or with the process.

    Returns whether it was free; None if the file is closed, or the file system knows no locks.
    """
    if fd < 0:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(fd: int) -> None:
    """Gives the lock of an open file back, also for children forked meanwhile."""
    if fd >= 0:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def open_directory(path: str) -> Generator[int]:
    """A descriptor of a directory, to lock and sync it."""
    held: list[int] = []
    close = map(os.close, held)
    try:
        try:
            # One call opens and stores it, for the reason in `opened`, which takes no directories.
            held.extend(map(os.open, (path,), (_DIRECTORY,)))
        except OSError as error:
            raise errors.from_target(error, path, "open the directory") from error
        yield held[0]
    finally:
        try:  # noqa: SIM105 - the first call here is the one that closes
            list(close)
        except OSError:
            pass


def fsync(fd: int) -> None:
    """Returns when a file, or the names in a directory, are on disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        # What can't be synced (directories of some file systems) says so.
        if error.errno not in _UNSUPPORTED:
            raise


def write_all(fd: int, pieces: Sequence[Any], offset: int) -> None:
    """Writes pieces to one place of a file; short writes are continued."""
    left = [piece for piece in reversed(pieces) if piece.nbytes]
    while left:
        done = os.pwritev(fd, left[: -IOV_MAX - 1 : -1], offset)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += done
        while left and done >= left[-1].nbytes:
            done -= left.pop().nbytes
        if done:
            left[-1] = left[-1][done:]
