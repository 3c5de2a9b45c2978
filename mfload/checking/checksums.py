"""Hashes bytes while they arrive, so that verifying costs no second read.

A hash is a stream: the ranges of one tensor must be taken in file order, whichever thread read
them. A thread whose range comes later waits for its turn. That ends, because blocks are begun in
file order: the range before is in the hand of another thread, and the first waits for none.
Tensors are hashed side by side; both hashes release the interpreter lock.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.checking.manifest import Manifest, checked_path
from mfload.formats.strict_json import brief
from mfload.index import Index, TensorInfo
from mfload.report import Report

# How often a thread that waits for its turn looks whether the load was given up, in seconds.
_TICK = 0.05

Stopped = Callable[[], bool]


def tensor_hash() -> Callable[..., Any]:
    """The hash of tensors, as `hashlib` has them; raises FrameworkMissingError without xxhash."""
    try:
        import xxhash
    except ImportError:
        raise errors.FrameworkMissingError(
            "checksums of tensors need the package xxhash: pip install 'mfload[verify]'"
        ) from None
    return xxhash.xxh3_128


class Hasher:
    """Hashes what a transfer reads (a `planning.blocks.Observer`).

    Of the tensors all bytes must be shown, and of the files (number: size) every byte in order.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo] = (), files: Mapping[int, int] | None = None
    ) -> None:
        self._turn = threading.Condition()
        self._digests: dict[str, str] = {}
        self._spans: dict[int, list[_Span]] = {}
        self._streams: dict[str, _Stream] = {}
        tensors = list(tensors)
        self._new = tensor_hash() if tensors else None
        for info in tensors:
            piece = info.pieces[0]
            if piece.nbytes:
                span = _Span(piece.offset, piece.offset + piece.nbytes, info.name)
                self._spans.setdefault(piece.source, []).append(span)
            elif self._new is not None:
                self._digests[info.name] = self._new(b"").hexdigest()
        for spans in self._spans.values():
            spans.sort()
        self._starts = {n: [span.start for span in spans] for n, spans in self._spans.items()}
        self._files = {
            source: _Stream(0, size, hashlib.sha256()) for source, size in (files or {}).items()
        }

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next bytes."""
        for span in self._within(source, offset, offset + data.size):
            start, stop = max(span.start, offset), min(span.stop, offset + data.size)
            self._take(span, start, data[start - offset : stop - offset], stopped)
        whole = self._files.get(source)
        if whole is not None:
            whole.take(offset, data, self._turn, stopped)

    def _within(self, source: int, start: int, stop: int) -> Iterator[_Span]:
        """The spans that share a byte with a range, in file order."""
        spans = self._spans.get(source)
        if spans is None:
            return
        # They don't overlap: the header was checked.
        first = max(0, bisect.bisect_right(self._starts[source], start) - 1)
        for number in range(first, len(spans)):
            span = spans[number]
            if span.start >= stop:
                return
            if span.stop > start:
                yield span

    def _take(self, span: _Span, start: int, part: Any, stopped: Stopped) -> None:
        assert self._new is not None
        if part.size == span.stop - span.start:
            self._digests[span.name] = self._new(part).hexdigest()
            return
        with self._turn:
            stream = self._streams.get(span.name)
            if stream is None:
                stream = self._streams[span.name] = _Stream(span.start, span.stop, self._new())
        if stream.take(start, part, self._turn, stopped):
            self._digests[span.name] = stream.hash.hexdigest()
            del self._streams[span.name]

    def complete(self, source: int) -> bool:
        """Whether all bytes of a source that are hashed were seen."""
        whole = self._files.get(source)
        seen = all(span.name in self._digests for span in self._spans.get(source, ()))
        return seen and (whole is None or whole.done)

    def tensor(self, name: str) -> str:
        """The digest of a tensor; an AssertionError if not all of its bytes were seen."""
        if name not in self._digests:
            raise AssertionError(f"not all bytes of {name!r} were seen")
        return self._digests[name]

    def file(self, source: int) -> str:
        """The SHA-256 of a file; an AssertionError if not all of its bytes were seen."""
        stream = self._files[source]
        if not stream.done:
            raise AssertionError(f"only {stream.at} of {stream.stop} bytes were seen")
        return stream.hash.hexdigest()


class _Span(NamedTuple):
    start: int
    stop: int
    name: str


class _Stream:
    """A hash that takes its bytes in order, from several threads."""

    def __init__(self, start: int, stop: int, new: Any) -> None:
        self.at = start
        self.stop = stop
        self.hash = new

    @property
    def done(self) -> bool:
        return self.at == self.stop

    def take(self, offset: int, data: Any, turn: threading.Condition, stopped: Stopped) -> bool:
        """Waits for the turn of a range and takes it, unless the load was given up meanwhile.

        Returns True if it was the last.
        """
        with turn:
            while self.at != offset:
                if self.at > offset:
                    raise AssertionError(f"bytes from {offset} on were shown twice")
                if stopped():
                    return False
                turn.wait(_TICK)
        # No other thread is here: `at` lets no other range pass.
        self.hash.update(data)
        with turn:
            self.at += data.size
            turn.notify_all()
            return self.done


class ManifestCheck:
    """`load(verify=)`: compares the bytes that `observer` sees in a load with a manifest.

    Raises ChecksumError at once if the manifest lacks a tensor, or has another dtype or shape.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str] | Manifest,
        index: Index,
        tensors: Sequence[TensorInfo],
    ) -> None:
        self._index = index
        self._tensors = tensors
        if not isinstance(manifest, Manifest):
            manifest = Manifest.read(checked_path("verify", manifest))
        self._manifest = manifest
        self._refuse(list(self._manifest.differences(tensors)))
        self.observer = Hasher(tensors)

    def settle(self, arrays: list[Any], report: Report | None) -> None:
        """Compares the digests of what was loaded; if any differ, clears arrays and report."""
        digests = {info.name: self.observer.tensor(info.name) for info in self._tensors}
        offenders = list(self._manifest.differences(self._tensors, digests))
        if offenders:
            # An error that is kept keeps this frame, and the caller's.
            arrays.clear()
            if report is not None:
                report.clear()
        self._refuse(offenders)
        if report is not None:
            report.notes += (f"{len(digests)} tensors verified against the manifest",)

    def _refuse(self, offenders: list[tuple[TensorInfo, str, str]]) -> None:
        if not offenders:
            return
        files = [self._index.files[info.pieces[0].source] for info, *_ in offenders]
        first, expected, found = offenders[0]
        raise errors.ChecksumError(
            f"{len(offenders)} of {len(self._tensors)} tensors differ from the manifest",
            file=files[0],
            tensor=first.name,
            expected=expected,
            found=found,
            problems=tuple(
                f"{brief(info.name)} in {file}: expected {expected}, found {found}"
                for file, (info, expected, found) in zip(files, offenders, strict=True)
            ),
        )
