"""A local file as a source.

A load opens a file once a worker. An opened checkpoint keeps its files open from their first use
on. Each opening checks that the file is still the one whose header was read; a file that is kept
can only change, and `check` sees that, and what takes its place. Pickles hold no descriptor, a
forked child opens its own, and of thousands of shards those that were opened first are closed.
"""

from __future__ import annotations

import errno
import operator
import os
import re
import stat
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.runtime import in_forks
from mfload.sources.base import CACHED, ClosedAtEnd, Costs, Identity, shrunk

if TYPE_CHECKING:  # Loads import it when they see a file that lies on no block device.
    from mfload.sources.network import Disk

# O_NONBLOCK: a FIFO put in a file's place must not hang the open.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_IDENTITY = operator.attrgetter("st_ino", "st_size", "st_mtime_ns", "st_dev")
_MOST_LINKS = 40  # Of a chain, as for Linux.
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


def place_of(path: str) -> str:
    """Where the data of a file is: symbolic links are followed, except into a cache of blobs.

    A link into such a cache (see `is_cached`) is itself the place, since other links share its
    blob. The directory is resolved in any case. A loop of links raises nothing: the place is one of
    them.
    """
    path = resolved(path)
    for _ in range(_MOST_LINKS):
        target = _target(path)
        if target is None or _is_blob(target):
            break
        path = target
    return path


def is_cached(path: str) -> bool:
    """Whether a path is a symbolic link into a cache whose files are named by their content's hash.

    That is assumed if the name of the link's target has 30 hexadecimal digits in a row (Hugging
    Face, Ollama, OCI, DVC, git-annex), or its directory is called `blobs`.
    """
    target = _target(resolved(path))
    return target is not None and _is_blob(target)


def resolved(path: str) -> str:
    """The path with its directory resolved; a symbolic link at the path is not followed."""
    directory, name = os.path.split(path)
    with suppress(ValueError, OSError):  # A null byte; a working directory that is gone.
        directory = os.path.realpath(directory)
    return os.path.join(directory, name)


def _target(path: str) -> str | None:
    """The target of a symbolic link, as an absolute path; None for anything else."""
    try:
        return resolved(os.path.join(os.path.dirname(path), os.readlink(path)))
    except (OSError, ValueError):
        return None


def _is_blob(path: str) -> bool:
    directory, name = os.path.split(path)
    named = os.path.basename(directory) == "blobs" or re.search("[0-9a-fA-F]{30}", name)
    return bool(named) and not os.path.isdir(path)


class LocalFile:
    """A regular file as a `Source`; symbolic links are followed.

    `identity`: that of the version which was seen before. Default: of what lies at the path now,
    or, if `now` is false, when the file is opened first; from then on it stays open.

    Raises:
        SourceError: There is no file, or not a regular one.
    """

    engine = "pread"

    def __init__(
        self, path: str | os.PathLike[str], identity: Identity | None = None, now: bool = True
    ) -> None:
        self.name = self.file = os.fspath(path)
        if identity is None and now:
            _, identity = _open(self.name, None)
        if identity is not None:
            self.identity, self.size = identity, identity.size
        self.keeps = not now
        self.kept: _Kept | None = None

    @property
    def disk(self) -> Disk | None:
        """The network disk that it lies on; None for any other."""
        seen = vars(self).get("identity")
        device: int | None = None if seen is None else seen.device
        if device is not None and os.major(device):  # A block device.
            return None
        from mfload.sources import network  # Late: most files lie on one.

        return network.disk(device, self.name)

    @property
    def costs(self) -> Costs:
        """What reading it costs."""
        disk = self.disk
        return CACHED if disk is None else disk.costs

    def __getattr__(self, name: str) -> Any:
        if name not in ("identity", "size"):
            raise AttributeError(name)
        self.open().close()  # Sets the identity.
        self.size = self.identity.size
        return vars(self)[name]

    def __reduce__(self) -> tuple[Any, ...]:
        identity = vars(self).get("identity")
        return LocalFile, (self.name, identity, identity is not None)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        # `pread` makes the bytes itself: no buffer is cleared first and copied after.
        parts: list[bytes] = []
        opened = self.open()
        again = True
        try:
            while nbytes:
                try:
                    part = os.pread(opened.fd, nbytes, offset)
                except OSError as error:
                    again = opened.renew(error, again)
                    continue
                if not part:
                    break
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        except OSError as error:
            raise errors.from_os(error, self.name, "read") from error
        finally:
            opened.close()
        if nbytes:
            raise shrunk(self.name, offset + nbytes, offset)
        return b"".join(parts)

    def open(self, flags: int = 0) -> OpenFile:
        """Opens it for one thread (see `OpenFile`)."""
        if flags or not self.keeps:
            return OpenFile(self, flags)
        kept = self.kept
        if kept is None:
            kept = self.kept = _Kept(self)
            _limit_kept(self)
            if not self.keeps:  # Another thread said so meanwhile.
                self.kept = None
        return kept

    def keep(self, keeps: bool) -> None:
        """Says whether the file, once opened, stays open for the next time it is opened.

        Of all files in the process, no more are kept than `_most_kept`; a fork closes them in the
        child. What was opened before stays usable until it is closed.
        """
        self.keeps = keeps
        if not self.keeps:
            self.kept = None

    def beside(self, name: str) -> LocalFile:
        """The file of that name in the same directory."""
        return LocalFile(os.path.join(os.path.dirname(self.name), name))

    def check(self) -> None:
        """Raises SourceChangedError if what lies at the path is another version of the file."""
        try:
            if self.disk is None:
                found = _IDENTITY(os.stat(self.name))
            else:
                from mfload.sources import network

                found = network.status(self.name)
        except OSError as error:
            raise _gone(self.name, self.identity, error) from error
        if found != self.identity:
            self.compare(Identity(*found))

    def compare(self, found: Identity) -> None:
        """Raises SourceChangedError if `found` is not the version whose header was read."""
        _compare(self.name, self.identity, found)


class OpenFile(ClosedAtEnd):
    """A file while it is open (see `Handle`); `flags` are added to those it is opened with."""

    _flags, _identity = 0, None

    def __init__(self, source: LocalFile, flags: int = 0) -> None:
        self.name = source.name
        try:
            self.fd, found = _open(source.name, flags)
        except errors.SourceError:
            if "identity" in vars(source):
                source.check()  # What was seen before and is gone has changed.
            raise
        if found != vars(source).setdefault("identity", found):
            try:
                source.compare(found)
            except BaseException:
                OpenFile.close(self)  # A `_Kept` would wait until the error is forgotten.
                raise
        self._flags, self._identity = flags, found

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`); short reads are continued."""
        wanted: int = vector[0].nbytes
        if len(vector) > 1:
            wanted = sum(part.nbytes for part in vector)
        least = wanted if least is None else least
        done, again = 0, True
        while done < least:
            try:
                got = os.preadv(self.fd, vector, offset + done)
            except OSError as error:
                again = self.renew(error, again)
                continue
            done += got
            if done >= least:
                break
            if got == 0:
                raise shrunk(self.name, offset + least, offset + done)
            while got >= vector[0].nbytes:
                got -= vector[0].nbytes
                vector = vector[1:]
            vector = [vector[0][got:], *vector[1:]]
        return done

    def renew(self, error: OSError, again: bool = True) -> bool:
        """Opens the file again by its path, once, if a server forgot it (ESTALE); returns False.

        The descriptor keeps its number, which other threads may be reading from.

        Raises:
            OSError: `error`, if it is another one, or not `again`.
            SourceChangedError: Another version lies at the path, or nothing.
        """
        seen: Identity | None = self._identity
        if error.errno != errno.ESTALE or not again or seen is None:
            raise error
        try:
            fd, found = _open(self.name, self._flags)
        except errors.SourceNotFoundError as gone:
            raise _gone(self.name, seen, error) from gone
        try:
            _compare(self.name, seen, found)
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)
        return False

    def close(self) -> None:
        """Closes the file; more than once does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:  # noqa: SIM105 - faster
                os.close(fd)
            except OSError:  # It was only read.
                pass


class _Kept(OpenFile):
    """A file that a source keeps open, for many threads; the last reference to it closes it.

    So a number that a thread reads from can't become that of another file.
    """

    fd = -1

    def close(self) -> None:
        """Does nothing: other threads may read, and references are counted."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


class AtOnce(ClosedAtEnd):
    """A file that is kept open, and a handle of it, which reads what the page cache holds.

    It never waits: for all else it raises BlockingIOError. That is a file which is not open yet,
    bytes that come from a disk, and a system or a file system that can't tell.
    """

    file = None

    def __init__(self, source: Any) -> None:
        self._kept = getattr(source, "kept", None)  # The last reference would close it.
        self.fd = getattr(self._kept, "fd", -1)

    def open(self, flags: int = 0) -> AtOnce:
        """The same."""
        return self

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`)."""
        least = sum(part.nbytes for part in vector) if least is None else least
        try:
            got = os.preadv(self.fd, vector, offset, os.RWF_NOWAIT)
        except (AttributeError, OSError):
            got = 0
        if got < least:
            raise BlockingIOError(errno.EAGAIN, "the page cache does not hold all of it")
        return got

    def close(self) -> None:
        """Does nothing, as with what is kept open."""


# Files that are kept open, the longest open first. Appending to a deque and taking from it need no
# lock, which a fork might copy while another thread holds it.
_keepers: deque[weakref.ref[LocalFile]] = deque()
_MOST_KEPT = 1024


def _most_kept() -> int:
    """The most files that are kept open: at most a quarter of the process's descriptors."""
    limit = os.sysconf("SC_OPEN_MAX")
    return _MOST_KEPT if limit < 0 else max(1, min(_MOST_KEPT, limit // 4))


def _limit_kept(newest: LocalFile) -> None:
    """Counts a file that is kept from now on, and closes the oldest of too many."""
    most = _most_kept()
    _keepers.append(weakref.ref(newest))
    while len(_keepers) > most:
        with suppress(IndexError):  # Another thread took the last.
            source = _keepers.popleft()()
            if source is not None:
                source.kept = None


@in_forks
def _close_kept() -> None:
    """Closes all files that are kept; they are opened again when they are asked for.

    A descriptor that two processes share would have one state of reading ahead for both.
    """
    for each in list(_keepers):
        source = each()
        if source is not None:
            source.kept = None
    _keepers.clear()


def _compare(name: str, expected: Identity, found: Identity) -> None:
    """Raises SourceChangedError if `found` is not the version whose header was read."""
    if not expected.matches(found):
        what = "the file changed since its header was read"
        raise errors.SourceChangedError(what, file=name, expected=expected, found=found)


def _gone(name: str, expected: Identity, error: OSError) -> errors.SourceChangedError:
    what = "the file is gone since its header was read"
    return errors.SourceChangedError(what, file=name, expected=expected, found=error.strerror)


def _open(path: str, flags: int | None) -> tuple[int, Identity]:
    """Opens a regular file; without flags it only looks at it, and the descriptor is -1."""
    fd = -1
    try:
        if flags is None:
            status = os.stat(path)
        else:
            try:
                fd = os.open(path, flags | _FLAGS)
            except OSError as error:
                if error.errno != errno.EMFILE or not _keepers:
                    raise
                _close_kept()
                fd = os.open(path, flags | _FLAGS)
            status = os.fstat(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise errors.from_os(error, path, "open") from error
    except ValueError as error:  # A null byte.
        raise errors.SourceNotFoundError(str(error), file=path) from error
    if stat.S_ISREG(status.st_mode):
        return fd, Identity(*_IDENTITY(status))
    if fd >= 0:
        os.close(fd)
    raise errors.SourceError(
        "not a regular file",
        file=path,
        expected="a regular file",
        found=kind_of(status.st_mode),
    )
