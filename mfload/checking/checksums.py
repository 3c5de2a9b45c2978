"""Hashes bytes while they arrive, so that verifying costs no second read.

A hash is a stream: the ranges of one tensor must be taken in file order, whichever thread read
them. A thread whose range comes later waits for its turn. That ends, because blocks are begun in
file order: the range before is with another thread, and the first waits for none.
Tensors are hashed side by side; both hashes release the interpreter lock.
"""

from __future__ import annotations

import bisect
import hashlib
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mfload import errors
from mfload.checking.manifest import Manifest
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


class _Stream:
    """A hash that takes the bytes of a source from `at` to `stop`, in order."""

    __slots__ = ("at", "hash", "key", "new", "source", "start", "stop")

    def __init__(
        self, source: int, start: int, nbytes: int, key: str | int, new: Callable[..., Any]
    ) -> None:
        self.source, self.key, self.new = source, key, new
        self.start = self.at = start
        self.stop = start + nbytes
        self.hash: Any = None


_START = operator.attrgetter("start")


class Hasher:
    """Hashes what a transfer reads (an `io.engine.Observer`).

    Of the tensors all bytes must be shown, and of the files (number: size) every byte in order.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo] = (), files: Mapping[int, int] | None = None
    ) -> None:
        tensors = list(tensors)
        new = tensor_hash() if tensors else hashlib.sha256
        streams = [_Stream(*info.pieces[0][:3], info.name, new) for info in tensors]
        whole = [_Stream(n, 0, size, n, hashlib.sha256) for n, size in (files or {}).items()]
        self._turn = threading.Condition()
        self._files = {each.source: each for each in whole}
        self._tensors: dict[int, list[_Stream]] = {}
        for each in sorted(streams, key=_START):
            if each.start < each.stop:
                self._tensors.setdefault(each.source, []).append(each)
        self._wanted = len(streams) + len(whole)
        self._digests: dict[str | int, str] = {
            each.key: each.new(b"").hexdigest()
            for each in (*streams, *whole)
            if each.start == each.stop
        }

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next bytes."""
        stop = offset + data.size
        for stream in self._within(source, offset, stop):
            first, last = max(stream.start, offset), min(stream.stop, stop)
            part = data[first - offset : last - offset]
            if (first, last) == (stream.start, stream.stop):
                self._digests[stream.key] = stream.new(part).hexdigest()
            else:
                self._take(stream, first, part, stopped)

    def _within(self, source: int, start: int, stop: int) -> Iterator[_Stream]:
        """The streams that share a byte with a range: tensors in file order, then the file."""
        streams = self._tensors.get(source, ())
        # They don't overlap: the header was checked.
        first = max(0, bisect.bisect_right(streams, start, key=_START) - 1)
        for number in range(first, len(streams)):
            stream = streams[number]
            if stream.start >= stop:
                break
            if stream.stop > start:
                yield stream
        if source in self._files:
            yield self._files[source]

    def _take(self, stream: _Stream, offset: int, part: Any, stopped: Stopped) -> None:
        """Waits for the turn of a part and hashes it, unless the load was given up meanwhile."""
        with self._turn:
            while stream.at != offset:
                if stream.at > offset:
                    raise AssertionError(f"bytes from {offset} on were shown twice")
                if stopped():
                    return
                self._turn.wait(_TICK)
        # No other thread is here: `at` lets no other part pass.
        stream.hash = stream.hash or stream.new()
        stream.hash.update(part)
        with self._turn:
            stream.at += part.size
            if stream.at == stream.stop:
                self._digests[stream.key] = stream.hash.hexdigest()
                stream.hash = None
            self._turn.notify_all()

    def digests(self) -> dict[Any, str]:
        """Digests by name of tensor and number of file; AssertionError if bytes were not seen."""
        missing = self._wanted - len(self._digests)
        if missing:
            raise AssertionError(f"not all bytes were seen: {missing} digests are missing")
        return self._digests


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
        self._files = index.files
        self._tensors = tensors
        self._manifest = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
        self._refuse(list(self._manifest.differences(tensors)))
        self.observer = Hasher(tensors)

    def settle(self, arrays: list[Any], report: Report | None) -> None:
        """Compares the digests of what was loaded; if any differ, clears arrays and report."""
        offenders = list(self._manifest.differences(self._tensors, self.observer.digests()))
        if offenders:
            # An error that is kept keeps this frame, and the caller's.
            arrays.clear()
            if report is not None:
                report.clear()
        self._refuse(offenders)
        if report is not None:
            report.notes += (f"{len(self._tensors)} tensors verified against the manifest",)

    def _refuse(self, offenders: list[tuple[TensorInfo, str, str]]) -> None:
        if not offenders:
            return
        files = [self._files[info.pieces[0].source] for info, *_ in offenders]
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
