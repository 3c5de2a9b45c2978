"""A cache on the local disk of files behind URLs, for the next load and for other processes.

A file is a directory with three files: `data`, as long as the file and sparse; `sums`, with a hash
of 8 bytes for each piece of `data`, zero where there is none; and `about`, what it is. A piece
counts if its hash is right whenever it is read, so a write that was cut short, by a kill or a full
disk, is as if it had never been, and two writers do no harm. The name of the directory is a hash of
the URL and of the version of the file, so versions never mix.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import weakref
import zlib
from _thread import allocate_lock, get_ident
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.options import LoadOptions
from mfload.report import human
from mfload.runtime import forget_in_forks
from mfload.sources.base import ClosedAtEnd, Source, shrunk
from mfload.sources.directories import Directory

PIECE = 1 << 20
"""Bytes that have a hash. A read that begins within one reads all of it, and a header no more."""

SHARE = 10
"""By default a cache keeps so much of its file system, as one part of this number."""

_RUN = 8  # Pieces of one request.
_SUM = 8
_SLACK = 64 << 20  # Bytes after which the cache is looked through for what it holds.
_PATIENCE = 60.0  # Seconds for another thread that fetches the same piece.
_DATA, _SUMS, _ABOUT = "data", "sums", "about"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def cached(found: Any, options: LoadOptions | None) -> Any:
    """A source or directory that reads through the cache of the options, if it is not local."""
    if options is None or options.cache is None:
        return found
    keep = _caches.setdefault(
        (options.cache, options.cache_size), Cache(options.cache, options.cache_size)
    )
    if hasattr(found, "below"):
        return CachedDirectory(found, keep)
    return _kept(found, keep)


def _kept(source: Any, keep: Cache) -> Any:
    remote = getattr(source, "file", "") is None and source.costs.concurrency is not None
    return CachedSource(source, keep) if remote else source


class CachedFile(NamedTuple):
    """A file in a cache, as `mfload cache ls` shows it.

    Attributes:
        name: Its URL, without secrets.
        version: What its server said that tells it from other versions.
        size: In bytes.
        held: Bytes of it that the cache takes on the disk.
        used: When it was read last, in seconds since 1970.
        path: Its directory.
    """

    name: str
    version: str
    size: int
    held: int
    used: float
    path: str


class Cache:
    """The directory of a cache.

    Args:
        limit: Bytes that it may keep. Default: a tenth of its file system. Each process may
            exceed it by 64 MiB until it looks again.

    Raises:
        UsageError: It belongs to another user, or others can write to it.
    """

    def __init__(self, directory: str, limit: int | None = None) -> None:
        self.directory, self._limit = directory, limit
        self._left = 0
        self.forget()
        forget_in_forks(self)

    def forget(self) -> None:
        """Makes a new lock: a fork may have copied one that is locked."""
        self._lock = allocate_lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.directory, self._limit)

    @property
    def limit(self) -> int:
        """Bytes that it may keep."""
        if self._limit is None:
            system = os.statvfs(self.directory)
            self._limit = system.f_blocks * system.f_frsize // SHARE
        return self._limit

    def check(self) -> None:
        """Makes the directory; raises UsageError if another user could write to it."""
        with contextlib.suppress(OSError):
            os.makedirs(self.directory, 0o700, exist_ok=True)
        try:
            found = os.stat(self.directory)
        except OSError as error:
            raise errors.from_os(error, self.directory, "use the cache") from error
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise errors.UsageError(
                "other users can write to the cache",
                file=self.directory,
                expected="a directory of this user with the mode 0700",
                found=f"user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            )

    def files(self) -> list[CachedFile]:
        """What it holds, what was used last at the end."""
        found = [_about(each.path) for each in self._entries()]
        return sorted(filter(None, found), key=lambda each: each.used)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for each in entries:
                if len(each.name) == 64 and each.is_dir(follow_symlinks=False):
                    yield each

    def clear(self, chosen: Callable[[CachedFile], bool] = bool) -> list[CachedFile]:
        """Removes the files that are chosen, by default all; returns them."""
        gone = list(filter(chosen, self.files()))
        for each in gone:
            shutil.rmtree(each.path, ignore_errors=True)
        return gone

    @staticmethod
    def matching(names: str | None) -> Callable[[CachedFile], bool]:
        """Chooses files by a regular expression that is searched in their URLs; all for None.

        Raises UsageError if it is malformed.
        """
        try:
            pattern = re.compile(names or "")
        except re.error as error:
            what = "names is not a regular expression"
            raise errors.UsageError(what, expected=str(error), found=names) from None
        return lambda each: pattern.search(each.name) is not None

    def takes(self, nbytes: int, own: str) -> bool:
        """Whether there is room for so many bytes of a file; those used longest ago make it."""
        with self._lock:
            if self._left < nbytes:
                files, slack = self.files(), min(_SLACK, self.limit // 8)
                held = sum(each.held for each in files)
                for each in files:
                    if held + slack <= self.limit:
                        break
                    if each.path != own:
                        shutil.rmtree(each.path, ignore_errors=True)
                        held -= each.held
                self._left = min(slack, self.limit - held)
            if self._left < nbytes:
                return False
            self._left -= nbytes
            return True


def _make(path: str, about: dict[str, str], size: int) -> None:
    """Makes the directory of a file; what it is comes last."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    for name in (_DATA, _SUMS):
        os.close(os.open(f"{path}/{name}", _WRITE | os.O_CREAT, 0o600))
    os.truncate(f"{path}/{_DATA}", size)
    draft = f"{path}/{_ABOUT}.{os.getpid()}.{get_ident()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(about, file)
    os.replace(draft, f"{path}/{_ABOUT}")


def _open(path: str) -> tuple[list[int], bool]:
    """Opens data and sums of a file, to write to them too if that is allowed."""
    files = list[int]()
    for flags in (_WRITE, _READ):
        try:
            files += (os.open(f"{path}/{name}", flags) for name in (_DATA, _SUMS))
            with contextlib.suppress(OSError):
                os.utime(f"{path}/{_SUMS}")
        except OSError as error:
            _close(files)
            if flags == _READ or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise
        else:
            return files, flags == _WRITE
    raise AssertionError


# Sources of one cache count together.
_caches: weakref.WeakValueDictionary[tuple[str, int | None], Cache] = weakref.WeakValueDictionary()


def _plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # Whatever it is by now.


def _about(path: str) -> CachedFile | None:
    """A file of the cache; None if it is being removed, or was not made to the end."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(f"{path}/{_ABOUT}", encoding="utf-8", opener=_plainly) as file:
            about = json.load(file)
        found = os.stat(f"{path}/{_DATA}")
        used = os.stat(f"{path}/{_SUMS}").st_mtime
        held = found.st_blocks * 512
        return CachedFile(
            str(about["name"]), str(about["version"]), found.st_size, held, used, path
        )
    return None


class CachedSource:
    """A source whose bytes come from the cache where it has them (see `Source`)."""

    file = None
    of_cache = True
    """Whether its engine tells after a read what a cache had of it."""

    def __init__(self, source: Source, keep: Cache) -> None:
        self.source, self.keep_in = source, keep
        self.name, self.costs = source.name, source.costs
        self._path: str | None = None
        self.off: str | None = None  # Why nothing is kept any more.
        self.came = self.fetched = self.damaged = 0  # Bytes, bytes, pieces.
        self.forget()
        forget_in_forks(self)

    def forget(self) -> None:
        """Makes new locks: a fork may have copied some that are locked."""
        self._counting, self._turns = allocate_lock(), defaultdict[int, Any](allocate_lock)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # Not made yet.
            raise AttributeError(name)
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedSource, (self.source, self.keep_in)

    @property
    def path(self) -> str:
        """The directory of this version of the file, which is made first if need be."""
        if self._path is None:
            self.keep_in.check()
            about = {"name": self.name, "version": str(self.source.identity)}
            # With its query and its server, which the name that is shown may lack.
            place = getattr(getattr(self.source, "first", None), "url", self.name)
            text = json.dumps([about, place, self.source.size, _hash()[0]])
            path = os.path.join(self.keep_in.directory, hashlib.sha256(text.encode()).hexdigest())
            if not os.path.isfile(f"{path}/{_ABOUT}"):
                _make(path, about, self.source.size)
            self._path = path
        return self._path

    def files(self) -> tuple[list[int], bool]:
        """Descriptors of data and sums, and whether they can be written to; none without a cache.

        Another process may have removed them since they were seen.
        """
        if not exact(self.source):
            self.off = "its server names no exact version, by a strong ETag"
        for again in (True, False):
            try:
                if self.off is None:
                    return _open(self.path)
            except FileNotFoundError as error:
                self.drop()  # What is left of it, if a removal was cut short.
                self.off = None if again else error.strerror
            except OSError as error:
                self.off = error.strerror or type(error).__name__
        return [], False

    def drop(self) -> None:
        """Removes this version of the file."""
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)

    def check(self) -> None:
        """Raises SourceChangedError (see `Source`); what was kept may then be of two versions."""
        try:
            self.source.check()
        except errors.SourceChangedError:
            self.drop()
            raise

    def count(self, came: int, fetched: int, damaged: int) -> None:
        """Adds what a reader did."""
        with self._counting:
            self.came += came
            self.fetched += fetched
            self.damaged += damaged

    def turn(self, piece: int) -> Any:
        """The lock of who fetches a piece."""
        return self._turns[piece]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        data = bytearray(nbytes)
        with self.open() as opened:
            opened.read([memoryview(data)], offset)
        return bytes(data)

    def open(self, flags: int = 0) -> CachedHandle:
        """Opens it for one thread (see `Source`)."""
        return CachedHandle(self, flags)

    def beside(self, name: str) -> Source:
        """The source that a relative name stands for (see `Source`)."""
        return _kept(self.source.beside(name), self.keep_in)

    @property
    def engine(self) -> str:
        """What reads it, with what the cache had."""
        return f"{self.source.engine}, {human(self.came)} from the cache"

    @property
    def failures(self) -> list[str]:
        """What the report notes."""
        notes = list[str]()
        if self.damaged:
            notes.append(f"pieces of the cache that were damaged and fetched again: {self.damaged}")
        if self.off is not None:
            notes.append(f"the cache {self.keep_in.directory} kept no more: {self.off}")
        return notes


class CachedHandle(ClosedAtEnd):
    """Reads a file of the cache, and its source for what is not there (see `Handle`)."""

    fd = -1

    def __init__(self, source: CachedSource, flags: int) -> None:
        self._source, self._flags = source, flags
        self._handle: Any = None
        self._came = self._fetched = self._damaged = 0
        self._files, self._writes = source.files()
        self._end = weakref.finalize(self, _close, self._files)

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`)."""
        source = self._source
        place = _Place(vector, offset)
        stop = min(place.stop, source.size)
        if stop - offset < (place.stop - offset if least is None else least):
            raise shrunk(source.name, place.stop, source.size)
        pieces = range(offset // PIECE, -(-stop // PIECE))
        missing = [piece for piece in pieces if not self._held(piece, place)]
        mine: list[int] = []
        try:
            mine += (piece for piece in missing if source.turn(piece).acquire(blocking=False))
            for run in _runs(mine):
                self._fetch(run, place)
        finally:
            for piece in mine:
                source.turn(piece).release()
        for piece in sorted({*missing}.difference(mine)):  # Others are at them.
            turn = source.turn(piece)
            came = turn.acquire(timeout=_PATIENCE)  # No more: an interrupt may have left it locked.
            try:
                if not self._held(piece, place):
                    self._fetch([piece], place)
            finally:
                if came:
                    turn.release()
        return stop - offset

    def _span(self, piece: int) -> tuple[int, int]:
        return piece * PIECE, min((piece + 1) * PIECE, self._source.size)

    def _held(self, piece: int, place: _Place) -> bool:
        """Takes a piece from the cache, if it has it and its hash is right."""
        if not self._files:
            return False
        low, high = self._span(piece)
        data, straight = place.whole(low, high)
        try:
            wanted = os.pread(self._files[1], _SUM, piece * _SUM)
            if len(wanted) < _SUM or not any(wanted):
                return False
            whole = os.preadv(self._files[0], [data], low) == high - low
        except OSError:  # The source has the bytes.
            whole, wanted = False, b""
        if not whole or _sum(data, self._source.path, piece) != wanted:
            self._damaged += 1
            return False
        self._came += high - low if straight else place.put(data, low)
        return True

    def _fetch(self, run: Sequence[int], place: _Place) -> None:
        """Reads pieces that follow each other from the source, and keeps them."""
        parts = [place.whole(*self._span(piece)) for piece in run]
        if self._handle is None:
            self._handle = self._source.source.open(self._flags)
        start, stop = self._span(run[0])[0], self._span(run[-1])[1]
        try:
            self._handle.read([part for part, _ in parts], start)
        except errors.SourceChangedError:
            self._source.drop()
            raise
        self._fetched += stop - start
        for piece, (part, straight) in zip(run, parts, strict=True):
            if not straight:
                place.put(part, self._span(piece)[0])
        if not self._writes or self._source.off is not None:
            return
        try:
            if not self._source.keep_in.takes(stop - start, self._source.path):
                return
            for piece, (part, _) in zip(run, parts, strict=True):
                _write(self._files[0], part, piece * PIECE)
                made = _sum(part, self._source.path, piece)
                _write(self._files[1], made, piece * _SUM)
        except OSError as error:  # The disk is full, say: the load goes on without.
            self._source.off = error.strerror or type(error).__name__

    def close(self) -> None:
        """Closes it; more than once does nothing."""
        self._end()
        self._source.count(self._came, self._fetched, self._damaged)
        self._came = self._fetched = self._damaged = 0
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class CachedDirectory:
    """A directory whose files are read through the cache (see `Directory`)."""

    def __init__(self, directory: Directory, keep: Cache) -> None:
        self._directory, self._keep = directory, keep

    def __getattr__(self, name: str) -> Any:
        if name == "_directory":  # Not made yet.
            raise AttributeError(name)
        return getattr(self._directory, name)

    def at(self, name: str) -> Any:
        """What a name stands for."""
        return _kept(self._directory.at(name), self._keep)

    def file(self, name: str) -> Source:
        """The source of a file."""
        return _kept(self._directory.file(name), self._keep)

    def below(self, name: str) -> Any:
        """The directory of a name."""
        return CachedDirectory(self._directory.below(name), self._keep)

    @property
    def above(self) -> tuple[Any, str] | None:
        """The directory that holds it, and its name there."""
        above = self._directory.above
        return above and (CachedDirectory(above[0], self._keep), above[1])


class _Place:
    """The buffers of a vector, as the range of bytes that they are to have."""

    def __init__(self, vector: Sequence[Any], offset: int) -> None:
        self._views: list[tuple[int, memoryview]] = []
        self.stop = offset
        for part in vector:
            if part.nbytes:
                self._views.append((self.stop, memoryview(part).cast("B")))
                self.stop += part.nbytes

    def whole(self, low: int, high: int) -> tuple[Any, bool]:
        """The one buffer of a range, and True; or new memory, and False."""
        for start, view in self._views:
            if start <= low and high <= start + view.nbytes:
                return view[low - start : high - start], True
        return memoryview(bytearray(high - low)), False

    def put(self, data: Any, low: int) -> int:
        """Copies what the buffers want of a range; returns how many bytes."""
        done = 0
        for start, view in self._views:
            first, last = max(start, low), min(start + view.nbytes, low + len(data))
            if first < last:
                view[first - start : last - start] = data[first - low : last - low]
                done += last - first
        return done


def _runs(pieces: Sequence[int]) -> Iterator[list[int]]:
    """Pieces that follow each other, a few at once."""
    run: list[int] = []
    for piece in pieces:
        if run and (piece != run[-1] + 1 or len(run) == _RUN):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _hash() -> tuple[str, Callable[[Any], int]]:
    """The hash of pieces, and its name: xxh3 if the package xxhash is there, else CRC-32."""
    try:
        import xxhash
    except ImportError:
        return "crc32", zlib.crc32
    return "xxh3", xxhash.xxh3_64_intdigest


def _sum(data: Any, path: str, piece: int) -> bytes:
    """The hash of a piece at its place in this file alone, which is not zero."""
    hashed = _hash()[1]
    place = hashed(f"{os.path.basename(path)}/{piece}".encode())
    return (hashed(data) ^ place or 1).to_bytes(_SUM, "little")


def exact(source: Any) -> bool:
    """Whether the version of a source tells its bytes from all others.

    A weak ETag does not, nor the second in which a file was changed last.
    """
    validator = getattr(source.identity, "validator", '"')
    return getattr(source, "fixed", False) or validator.startswith('"')


def _write(file: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
