"""A local file as a source.

Nothing stays open between uses. A load opens a file once a worker, an opened checkpoint once
a request; each opening checks that the file is still the one whose header was read. So forks,
pickles and thousands of shards need no care.
"""

from __future__ import annotations

import operator
import os
import stat
from typing import Any

from mfload import errors
from mfload.sources.base import Identity

# O_NONBLOCK: a FIFO put in a file's place must not hang the open.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_IDENTITY = operator.attrgetter("st_ino", "st_size", "st_mtime_ns", "st_dev")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def kind_of(mode: int) -> str:
    """What lies at a path instead of a regular file, by the mode that `stat` gives."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


class LocalFile:
    """A regular file; symbolic links are followed. Many threads may read it at once.

    Raises:
        SourceError: It can't be opened, or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        fd, self.identity = _open(self.path, 0)
        os.close(fd)
        self.size = self.identity.size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range.

        Raises:
            SourceChangedError: The file is no longer the same, or ends before.
            ReadError: The read failed.
        """
        # `pread` makes the bytes itself: no buffer is cleared first and copied after.
        parts: list[bytes] = []
        opened = OpenFile(self)
        try:
            while nbytes:
                part = _pread(opened.fd, nbytes, offset)
                if not part:
                    break
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        except OSError as error:
            raise errors.from_os(error, self.path, "read") from error
        finally:
            opened.close()
        if nbytes:
            raise shrunk(self.path, offset + nbytes, offset)
        return b"".join(parts)

    def check(self) -> None:
        """Raises SourceChangedError if what lies at the path is another version of the file."""
        try:
            found = Identity(*_IDENTITY(os.stat(self.path)))
        except OSError as error:
            raise errors.SourceChangedError(
                "the file is gone since its header was read",
                file=self.path,
                expected=self.identity,
                found=error.strerror,
            ) from error
        if found != self.identity:
            self.compare(found)

    def compare(self, found: Identity) -> None:
        """Raises SourceChangedError if `found` is not the version whose header was read."""
        if not self.identity.matches(found):
            raise errors.SourceChangedError(
                "the file changed since its header was read",
                file=self.path,
                expected=self.identity,
                found=found,
            )


class OpenFile:
    """A file while it is open; a context manager.

    Args:
        flags: Added to the flags it is opened with, such as `os.O_DIRECT`.

    Raises:
        SourceError: It can't be opened, or is not a regular file.
        SourceChangedError: It is no longer the one that `source` stands for.
    """

    def __init__(self, source: LocalFile, flags: int = 0) -> None:
        self.path = source.path
        self.fd, found = _open(source.path, flags)
        if found != source.identity:
            try:
                source.compare(found)
            except BaseException:
                self.close()
                raise

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector; short reads are continued.

        Args:
            vector: Buffers of bytes that have `nbytes`: uint8 arrays or memoryviews.
            least: Bytes that will do where the file ends early. Default: all.

        Raises:
            SourceChangedError: The file ended before.
            OSError: The system call failed; the caller knows what it means.
        """
        wanted: int = vector[0].nbytes
        if len(vector) > 1:
            wanted = sum(part.nbytes for part in vector)
        least = wanted if least is None else least
        done = 0
        while done < least:
            if hasattr(os, "preadv"):
                got = os.preadv(self.fd, vector, offset + done)
            else:
                part = _pread(self.fd, vector[0].nbytes, offset + done)
                got = len(part)
                memoryview(vector[0])[:got] = part
            done += got
            if done >= least:
                break
            if got == 0:
                raise shrunk(self.path, offset + least, offset + done)
            while got >= vector[0].nbytes:
                got -= vector[0].nbytes
                vector = vector[1:]
            vector = [vector[0][got:], *vector[1:]]
        return done

    def close(self) -> None:
        """Closes the file; more than once does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: str, flags: int) -> tuple[int, Identity]:
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | flags | _FLAGS)
        status = os.fstat(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise errors.from_os(error, path, "open") from error
    except ValueError as error:  # A null byte.
        raise errors.SourceNotFoundError(str(error), file=path) from error
    if stat.S_ISREG(status.st_mode):
        return fd, Identity(*_IDENTITY(status))
    os.close(fd)
    raise errors.SourceError(
        "not a regular file",
        file=path,
        expected="a regular file",
        found=kind_of(status.st_mode),
    )


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    # Windows. The descriptor belongs to one thread.
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, nbytes)


def shrunk(path: str, expected: int, found: int) -> errors.SourceChangedError:
    """The error for a file that ends before the header said it would."""
    return errors.SourceChangedError(
        "the file ended before its data: it shrank under the read",
        file=path,
        expected=f"at least {expected} bytes",
        found=f"{found} bytes",
    )
