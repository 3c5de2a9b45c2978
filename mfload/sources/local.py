"""A local file as a source: bytes by offset, and an identity that is checked again.

Nothing stays open between uses. A load opens a file once a worker, an opened checkpoint once
a request; each opening checks that the file is still the one whose header was read. So forks,
pickles and thousands of shards need no care.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from mfload import errors


class Identity(NamedTuple):
    """What tells one version of a file from the next."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    def __str__(self) -> str:
        return f"{self.size} bytes, inode {self.inode}, mtime {self.mtime_ns} ns"


class LocalFile:
    """A regular file.

    Args:
        path: Where it lies; symbolic links are followed.

    Raises:
        SourceError: It can't be opened, or is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.identity: Identity | None = None
        with OpenFile(self) as opened:
            self.identity = opened.identity
        self.size = self.identity.size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range.

        Raises:
            SourceChangedError: The file is no longer the same, or ends before.
        """
        parts: list[bytes] = []
        with OpenFile(self) as opened:
            while nbytes:
                try:
                    part = _pread(opened.fd, nbytes, offset)
                except OSError as error:
                    raise errors.from_os(error, self.path, "read") from error
                if not part:
                    raise shrunk(self.path, offset + nbytes, offset)
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        return b"".join(parts)

    def check(self) -> None:
        """Looks again at what lies at the path.

        Raises:
            SourceChangedError: It is another file, or the same one rewritten.
        """
        try:
            found = _identity(os.stat(self.path))
        except OSError as error:
            raise errors.SourceChangedError(
                "the file is gone since its header was read",
                file=self.path,
                expected=self.identity,
                found=error.strerror,
            ) from error
        self.compare(found)

    def compare(self, found: Identity) -> None:
        """Raises SourceChangedError where `found` is not what the header was read from."""
        if self.identity is not None and found != self.identity:
            raise errors.SourceChangedError(
                "the file changed since its header was read",
                file=self.path,
                expected=self.identity,
                found=found,
            )


class OpenFile:
    """A source while it is open; a context manager.

    Args:
        source: The file.
        flags: Added to the flags it is opened with, such as `os.O_DIRECT`.

    Raises:
        SourceError: It can't be opened, or is no regular file.
        SourceChangedError: It is no longer the one that `source` stands for.
    """

    def __init__(self, source: LocalFile, flags: int = 0) -> None:
        self.fd = -1
        # O_NONBLOCK: a FIFO put in a file's place must not hang the open.
        flags |= os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        flags |= getattr(os, "O_BINARY", 0)
        try:
            self.fd = os.open(source.path, flags)
            status = os.fstat(self.fd)
        except OSError as error:
            self.close()
            raise errors.from_os(error, source.path, "open") from error
        except ValueError as error:
            raise errors.SourceNotFoundError(str(error), file=source.path) from error
        try:
            if not stat.S_ISREG(status.st_mode):
                raise errors.SourceError(
                    "not a regular file",
                    file=source.path,
                    expected="a regular file",
                    found=_KINDS.get(stat.S_IFMT(status.st_mode), "something else"),
                )
            self.identity = _identity(status)
            source.compare(self.identity)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; more than once does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    # Windows. The descriptor belongs to one reader, so that nobody sees it move.
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, nbytes)


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def _identity(status: os.stat_result) -> Identity:
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def shrunk(path: str, expected: int, found: int) -> errors.SourceChangedError:
    """The error for a file that ends before the header said it would."""
    return errors.SourceChangedError(
        "the file ended before its data: it shrank under the read",
        file=path,
        expected=f"at least {expected} bytes",
        found=f"{found} bytes",
    )
