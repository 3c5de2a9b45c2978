"""What a source is: bytes by offset, with an identity and with what it costs to read them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol, Self

from mfload import errors

_ONE_HOST = r"(\[[0-9a-fA-F:.]*\]|[^:,\[\]]*)(:\d*)?"
_HOST = rf"{_ONE_HOST}(,{_ONE_HOST})*"


class Source(Protocol):
    """Bytes by offset; many threads may use it at once, and it can be pickled."""

    @property
    def name(self) -> str:
        """Its path or URL, for messages; it holds no secrets."""
        ...

    @property
    def file(self) -> str | None:
        """Path of the local file that engines may map or read with O_DIRECT; None for others."""
        ...

    @property
    def size(self) -> int:
        """In bytes."""
        ...

    @property
    def identity(self) -> object:
        """What tells this version of the bytes from the next, with a readable `str`."""
        ...

    @property
    def costs(self) -> Costs:
        """What reading it costs; the same for all files of a checkpoint."""
        ...

    @property
    def engine(self) -> str:
        """Name of what reads it by default, as a report shows it."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range, such as a header.

        Raises:
            SourceChangedError: The source is no longer the same, or ends before.
            ReadError: The read failed.
        """
        ...

    def open(self, flags: int = 0) -> Handle:
        """Opens it for one thread; `flags` such as `os.O_DIRECT` are for a local file alone.

        Raises:
            SourceError: It can't be opened.
            SourceChangedError: It is no longer the same.
        """
        ...

    def keep(self, keeps: bool) -> None:
        """Says whether what `open` opens without flags may stay open for the next time.

        A checkpoint that was opened asks for it until it is closed; a source may do nothing.
        """
        ...

    def check(self) -> None:
        """Raises SourceChangedError if the source is no longer the version that was read."""
        ...

    def beside(self, name: str) -> Source:
        """The source that a relative name in this one, an index, stands for.

        Raises UsageError if the name leads elsewhere. Names of local files are resolved without it.
        """
        ...


class Handle(Protocol):
    """An open source, used by one thread at a time; a context manager."""

    @property
    def fd(self) -> int:
        """Descriptor of a local file; -1 for all other sources."""
        ...

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector; returns the bytes read.

        Args:
            vector: Buffers of bytes that have `nbytes`: uint8 arrays or memoryviews.
            least: Bytes that will do if the source ends early. Default: all.

        Raises:
            SourceChangedError: The source ended before, or is no longer the same.
            OSError: The read failed; the caller adds the source's name.
        """
        ...

    def close(self) -> None:
        """Closes it; more than once does nothing."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class ClosedAtEnd:
    """A context manager whose end calls `close`."""

    def close(self) -> None:
        """Closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Costs(NamedTuple):
    """What reading a source costs; the plan takes these as plain numbers.

    Attributes:
        merge_gap: Unwanted bytes that are cheaper read over than skipped; exclusive.
        staged: Bytes a read, at most, that is picked apart in a slot.
        span: Bytes that a block of rows reaches over, at most; it is cut to slots.
        row_gap: The same as `merge_gap` for what lies between rows of a tensor, of which many are
            read by one call. Default: `merge_gap`.
        concurrency: Reads that are worth having under way at once, for a source that is waited
            for, such as a server. Default: as many as suit the cores and the engine.
    """

    block: int = 16 << 20
    # A call takes about as long as to read so much from the page cache, or from a fast disk.
    merge_gap: int = 64 << 10
    # Copied out while it is in the processor's cache.
    staged: int = 2 << 20
    span: int = 64 << 20
    concurrency: int | None = None
    row_gap: int | None = None

    @property
    def slot(self) -> int:
        """Bytes a slot has to hold, at most."""
        return min(self.block, self.staged)


CACHED = Costs(row_gap=4 << 10)
"""What reading a file costs whose bytes lie in the page cache, or on a disk of this machine."""


class Identity(NamedTuple):
    """What tells one version of a file from the next."""

    inode: int
    size: int
    mtime_ns: int
    device: int | None

    def matches(self, other: Identity) -> bool:
        """Whether both are the same version; a device number counts only where both have one."""
        return self[:3] == other[:3] and (None in (self[3], other[3]) or self[3] == other[3])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another machine, or this one after a reboot, numbers its devices differently.
        return Identity, (*self[:3], None)

    def __str__(self) -> str:
        return f"{errors.amount(self.size)}, inode {self.inode}, mtime {self.mtime_ns} ns"


def shrunk(name: str, expected: int, found: int) -> errors.SourceChangedError:
    """The error for a source that ends before the header said it would."""
    return errors.SourceChangedError(
        "the file ended before its data: it shrank under the read",
        file=name,
        expected=f"at least {errors.amount(expected)}",
        found=errors.amount(found),
    )


def read_whole(source: Source, most: int, what: str) -> bytes:
    """All bytes of a source; raises HeaderError, which says `what`, if there are more than `most`.

    For files that are read at once: what they say of their size is hostile input.
    """
    if source.size > most:
        found, limit = errors.amount(source.size), f"at most {errors.amount(most)}"
        raise errors.HeaderError(what, file=source.name, expected=limit, found=found)
    return source.read(0, source.size)


def redacted(url: str) -> str:
    """A URL without what may be secret in it: user, password, query."""
    scheme, mark, whole = url.partition("://") if "://" in url else ("", "", url)
    rest, query, _ = whole.partition("#")[0].partition("?")
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2]
    # A password with a slash in it looks like a port; one with `?` or `#` ends the host.
    if not re.fullmatch(_HOST, host) or (not slash and "@" in whole[len(rest) :]):
        host, slash, path = "…", "", ""
    return f"{scheme}{mark}{host}{slash}{path}{'?…' if query else ''}"
