"""Hashes while bytes arrive: a witness of a transfer, so that verifying costs no second read.

A hash is a stream, so the ranges of one tensor must be taken in file order, whoever read them. A
worker whose range comes later waits for its turn. That ends: blocks are begun in file order, so
the range before is in the hand of another worker, and the first of all waits for nobody. Different
tensors are hashed side by side; both hashes give up the interpreter lock.
"""

from __future__ import annotations

import bisect
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from mfload import errors
from mfload.index import TensorInfo

ALGORITHM = "xxh3_128"
"""The hash of a tensor's bytes: XXH3 with 128 bits, as 32 hexadecimal digits."""

# How often a worker that waits for its turn looks up to notice that all was given up, in seconds.
_TICK = 0.05

Stopped = Callable[[], bool]


class Hash(Protocol):
    """What `hashlib` and `xxhash` give."""

    def update(self, data: Any, /) -> None:
        """Takes the next bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of all so far."""
        ...


def tensor_hash() -> Callable[..., Hash]:
    """The hash of tensors: called with the first bytes, or with none.

    Raises:
        FrameworkMissingError: The package that has it is not installed.
    """
    try:
        import xxhash
    except ImportError:
        raise errors.FrameworkMissingError(
            "checksums of tensors need the package xxhash: pip install 'mfload[verify]'"
        ) from None
    return xxhash.xxh3_128


class Observer:
    """Hashes what a transfer reads (see `io.blocks.Witness`).

    Args:
        tensors: Rows whose bytes will be shown, all of each.
        files: Sources whose bytes will be shown from the first to the last, with their sizes;
            for these the SHA-256 is made.

    Raises:
        FrameworkMissingError: There are tensors, and no package to hash them with.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo] = (), files: Mapping[int, int] | None = None
    ) -> None:
        self._turn = threading.Condition()
        self._found: dict[str, str] = {}
        by_source: dict[int, list[_Span]] = {}
        new: Callable[..., Hash] | None = None
        for info in tensors:
            new = new or tensor_hash()
            piece = info.pieces[0]
            if not piece.nbytes:
                self._found[info.name] = new(b"").hexdigest()
                continue
            span = _Span(piece.offset, piece.offset + piece.nbytes, info.name)
            by_source.setdefault(piece.source, []).append(span)
        self._new = new
        self._tables = {source: _Table(spans) for source, spans in by_source.items()}
        self._streams: dict[str, _Stream] = {}
        self._files = {
            source: _Stream(0, size, hashlib.sha256()) for source, size in (files or {}).items()
        }

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next bytes (see `io.blocks.Witness`)."""
        table = self._tables.get(source)
        if table is not None:
            for span in table.within(offset, offset + data.size):
                start, stop = max(span.start, offset), min(span.stop, offset + data.size)
                self._tensor(span, start, data[start - offset : stop - offset], stopped)
        whole = self._files.get(source)
        if whole is not None:
            whole.take(offset, data, self._turn, stopped)

    def _tensor(self, span: _Span, start: int, part: Any, stopped: Stopped) -> None:
        assert self._new is not None
        if part.size == span.stop - span.start:
            self._found[span.name] = self._new(part).hexdigest()
            return
        with self._turn:
            stream = self._streams.get(span.name)
            if stream is None:
                stream = self._streams[span.name] = _Stream(span.start, span.stop, self._new())
        if stream.take(start, part, self._turn, stopped):
            self._found[span.name] = stream.hash.hexdigest()
            del self._streams[span.name]

    def complete(self, source: int) -> bool:
        """Whether all bytes of a source that are hashed were seen."""
        spans = self._tables[source].spans if source in self._tables else []
        whole = self._files.get(source)
        seen = all(span.name in self._found for span in spans)
        return seen and (whole is None or whole.done)

    def tensor(self, name: str) -> str:
        """The digest of a tensor, once all its bytes were seen.

        Raises:
            AssertionError: They were not: there is no digest of what was not looked at.
        """
        if name not in self._found:
            raise AssertionError(f"not all bytes of {name!r} were seen")
        return self._found[name]

    def file(self, source: int) -> str:
        """The SHA-256 of a whole file, once all of it was seen.

        Raises:
            AssertionError: It was not.
        """
        stream = self._files[source]
        if not stream.done:
            raise AssertionError(f"only {stream.at} of {stream.stop} bytes were seen")
        return stream.hash.hexdigest()


class _Span(NamedTuple):
    """A tensor's range in its file."""

    start: int
    stop: int
    name: str


class _Table:
    """The spans of one file, by offset. They don't overlap: the header was checked."""

    def __init__(self, spans: list[_Span]) -> None:
        self.spans = sorted(spans)
        self._starts = [span.start for span in self.spans]

    def within(self, start: int, stop: int) -> Iterator[_Span]:
        """Those that share a byte with a range, in file order."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for number in range(first, len(self.spans)):
            span = self.spans[number]
            if span.start >= stop:
                return
            if span.stop > start:
                yield span


class _Stream:
    """A hash that takes its bytes in order, from several threads."""

    def __init__(self, start: int, stop: int, new: Hash) -> None:
        self.at = start
        self.stop = stop
        self.hash = new

    @property
    def done(self) -> bool:
        """Whether it has all its bytes."""
        return self.at == self.stop

    def take(self, offset: int, data: Any, turn: threading.Condition, stopped: Stopped) -> bool:
        """Waits for the turn of a range and takes it; without effect once all was given up.

        Returns:
            Whether that was the last.
        """
        with turn:
            while self.at != offset:
                if self.at > offset:
                    raise AssertionError(f"bytes from {offset} on were shown twice")
                if stopped():
                    return False
                turn.wait(_TICK)
        # Nobody else is here: `at` lets no other range pass.
        self.hash.update(data)
        with turn:
            self.at += data.size
            turn.notify_all()
            return self.done
