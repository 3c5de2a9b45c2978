"""A file being written: nobody sees it under its final name before it is whole and on disk.

Where the system can, a draft has no name at all (O_TMPFILE): a process that is killed leaves
nothing behind. Elsewhere it has a hidden name, and holds a lock by which the next writer tells it
from the leftovers of one that died.

Bytes go past the page cache (O_DIRECT) where the file takes that: straight from the caller's memory
where that has the disk's alignment, through a reused slot where it has not. Bytes at ragged ends
go through the page cache, on pages of their own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import traceback
from collections.abc import Sequence

import numpy as np

from mfload import errors
from mfload.io import probes
from mfload.io.buffers import PAGE, Bytes, WorkerSlot
from mfload.saving import allotting, folders
from mfload.saving.pwrite import write_all

BLOCK = 4 << 20
"""Bytes of one write: a slot that stays in the processor's cache until the disk has it."""

# Smaller files and pieces are over sooner than O_DIRECT pays.
_DIRECT_FROM = 1 << 20
_PIECE_FROM = 64 << 10
# What open(2) says of O_TMPFILE where the file system, or an old kernel, does not know it.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class Draft:
    """A file of known size, made room for at once.

    Args:
        hidden: Path for a name where it must have one, in the directory where it will lie.
        size: Bytes.
        shown: What errors call it: its final path.
        mode: Permissions; those of any new file where None.

    Raises:
        WriteError: The disk has no room for it.
        TargetError: The directory can't be written to.
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
            allotting.allot(self._fd, size)
        except OSError as error:
            self.discard()
            raise self._failed(error, "make room for the file") from error
        except BaseException:
            self.discard()
            raise

    def _create(self, mode: int | None) -> None:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        wanted = 0o666 if mode is None else mode & 0o666
        if hasattr(os, "O_TMPFILE"):
            try:
                directory = os.path.dirname(self.hidden)
                self._fd = os.open(directory, flags | os.O_TMPFILE, wanted)
                # It gets its name by way of /proc, which need not be there.
                os.stat(self._own_path)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._close()
        if self._fd < 0:
            self._fd = os.open(self.hidden, flags | os.O_CREAT | os.O_EXCL, wanted)
            self.named = True
            folders.lock(self._fd)
        if mode is not None and hasattr(os, "fchmod"):
            try:
                os.fchmod(self._fd, mode)
            except OSError as error:
                # All files have the same permissions there.
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
        """Opens it a second time, past the page cache, where that is possible and pays."""
        self._looked = True
        units = probes.direct_alignment(self._fd) if self.size >= _DIRECT_FROM else None
        if units is None or PAGE % max(units):
            return
        with contextlib.suppress(OSError):  # Slower, not wrong.
            flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(self._own_path, flags)
            self._unit, self._takes_direct = units[0], True

    def write(self, offset: int, data: Bytes) -> None:
        """Writes bytes to their place; several threads may, to places of their own.

        Args:
            offset: First byte in the file; multiples of a page are fastest.
            data: uint8, 1-D, contiguous.

        Raises:
            WriteError: The disk is full, or failed.
        """
        done = 0
        while done < data.nbytes:
            # Cut where the file's blocks end, so that all but the first begin on a page.
            part = min(BLOCK - (offset + done) % BLOCK, data.nbytes - done)
            self.gather(offset + done, (data[done : done + part],))
            done += part

    def gather(self, offset: int, pieces: Sequence[Bytes]) -> None:
        """Writes bytes that lie apart in memory and together in the file, up to `BLOCK` of them.

        Args:
            offset: First byte in the file.
            pieces: uint8 arrays, 1-D, contiguous.

        Raises:
            WriteError: The disk is full, or failed.
        """
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
            # Its frames hold slots, and whoever keeps the error would keep them.
            traceback.clear_frames(error.__traceback__)
            raise self._failed(error, "write") from error
        finally:
            with self._lock:
                self._busy -= 1

    def _gather(self, offset: int, pieces: Sequence[Bytes], nbytes: int) -> None:
        head = -offset % PAGE
        inner = (nbytes - head) // PAGE * PAGE
        if not self._takes_direct or inner < _PIECE_FROM:
            write_all(self._fd, pieces, offset)
            return
        if len(pieces) == 1 and (pieces[0].ctypes.data + head) % self._unit == 0:
            whole = pieces[0]
            if not self._write_direct(whole[head : head + inner], offset + head):
                write_all(self._fd, (whole,), offset)
                return
            self._ends(whole, offset, head, inner)
            return
        with self._lock:
            slot = self._slots.pop() if self._slots else WorkerSlot()
        try:
            lead = offset % PAGE
            landed = slot.bytes(BLOCK + PAGE if nbytes <= BLOCK else nbytes + PAGE)
            whole = landed[lead : lead + nbytes]
            np.concatenate(pieces, out=whole)
            if self._write_direct(whole[head : head + inner], offset + head):
                self._ends(whole, offset, head, inner)
            else:
                write_all(self._fd, (whole,), offset)
        finally:
            landed = whole = None
            self._slots.append(slot)
            del slot

    def _ends(self, whole: Bytes, offset: int, head: int, inner: int) -> None:
        for start, stop in ((0, head), (head + inner, whole.nbytes)):
            if stop > start:
                write_all(self._fd, (whole[start:stop],), offset + start)

    def _write_direct(self, data: Bytes, offset: int) -> bool:
        """Writes past the page cache; False where the kernel won't, and all must go through it."""
        try:
            write_all(self._direct, (data,), offset)
        except OSError as error:
            # EFAULT: memory that the kernel copies from and no disk reads from (a device's).
            if error.errno == errno.EFAULT:
                return False
            if error.errno not in _NO_DIRECT:
                raise
            # Left open: other threads may be writing to it.
            self._takes_direct = False
            return False
        return True

    def sync(self) -> None:
        """Returns when all of it is on disk; nothing is written after.

        Raises:
            WriteError: The disk failed, or not every byte was written.
        """
        if self._written != self.size:
            raise errors.WriteError(
                "the file is not whole",
                file=self.shown,
                expected=f"{self.size} bytes",
                found=f"{self._written} bytes",
            )
        self._slots.clear()
        try:
            folders.fsync(self._fd)
        except OSError as error:
            raise self._failed(error, "write to the disk") from error
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)

    def link(self, path: str) -> None:
        """Gives the file a name, or one more, where there is none yet.

        Raises:
            OSError: EEXIST, or whatever else the system says.
        """
        if self.named:
            os.link(self.hidden, path)
            return
        # By way of a descriptor of its directory, or Python would name the link in /proc itself.
        proc = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(self._fd), path, src_dir_fd=proc, follow_symlinks=True)
        finally:
            os.close(proc)

    def appear(self) -> str:
        """Makes sure that it has its hidden name; returns its path."""
        if not self.named:
            # Before others can see it: who cleans up must find it locked.
            folders.lock(self._fd)
            self.link(self.hidden)
            self.named = True
        return self.hidden

    def is_at(self, path: str) -> bool:
        """Whether it is what has that name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(path))
        except OSError:
            return False

    def published(self) -> None:
        """The hidden name is gone or serves somebody else: it is not to be removed any more."""
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
                # be given to other files under its hands.
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
            free = allotting.free_bytes(os.path.dirname(self.hidden))
            found += "" if free is None else f", {free} bytes free"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            found += "; each shard needs an open file: raise `ulimit -n`, or max_shard_size"
        expected = f"{self.size} bytes"
        return errors.from_target(error, self.shown, action, expected=expected, found=found)
