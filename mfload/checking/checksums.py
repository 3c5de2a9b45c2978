"""Hashes bytes while they arrive, so that verifying costs no second read.

A hash is a stream: the ranges of one tensor must be taken in file order, whichever thread read
them. A thread whose range comes later waits for its turn. That ends, because blocks are begun in
file order: the range before is with another thread, and the first waits for none.
Tensors are hashed side by side; both hashes release the interpreter lock.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import operator
import os
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mfload import errors
from mfload.checking import manifest as manifests, scan as scanning
from mfload.checking.manifest import Manifest
from mfload.formats.base import Checksum
from mfload.formats.strict_json import brief
from mfload.index import Index, Piece, TensorInfo
from mfload.options import LoadOptions
from mfload.planning import lots
from mfload.planning.blocks import Lot
from mfload.planning.memory import Ledger
from mfload.planning.request import Request
from mfload.planning.slicing import intersection
from mfload.report import Report
from mfload.runtime import Deadline
from mfload.sources import shown
from mfload.sources.base import Source

_PART = 256 << 10  # Bytes that are inflated at once, and made at once.
# How often a thread that waits for its turn looks whether the load was given up, in seconds.
_TICK = 0.05
_PAGE = 4096
_VERIFIED = " verified against the manifest"
_MOST_BOXES = 64  # Of a tensor, among which two that overlap are sought.

Stopped = Callable[[], bool]
Offender = tuple[TensorInfo, str, str]
"""A tensor that differs from a manifest, what the manifest has, and what was found."""

OTHER_DATA = "the manifest is of other data"


def tensor_hash() -> Callable[..., Any]:
    """The hash of tensors, as `hashlib` has them; raises FrameworkMissingError without xxhash."""
    try:
        import xxhash
    except ImportError:
        what = "checksums of tensors need the package xxhash"
        raise errors.missing(what, "verify") from None
    return xxhash.xxh3_128


class _Stream:
    """A hash that takes the bytes of a source from `at` to `stop`, in order."""

    __slots__ = ("at", "hash", "key", "new", "source", "start", "stop")

    def __init__(
        self, source: int, start: int, nbytes: int, key: Any, new: Callable[..., Any]
    ) -> None:
        self.source, self.key, self.new = source, key, new
        self.start = self.at = start
        self.stop = start + nbytes
        self.hash: Any = None


_START = operator.attrgetter("start")


class _Crc32:
    """The CRC-32 of bytes, or of what deflated ones make, in the form of a hash of `hashlib`.

    Deflated bytes that don't end where their stream does, or make another number of bytes than
    `inflated`, have none.
    """

    def __init__(self, data: Any = b"", *, inflated: int | None) -> None:
        self._inflate = None if inflated is None else zlib.decompressobj(-zlib.MAX_WBITS)
        self._crc, self._damage, self._left = 0, "", inflated or 0
        self.update(data)

    def update(self, data: Any) -> None:
        inflate = self._inflate
        if inflate is None:
            self._crc = zlib.crc32(data, self._crc)
            return
        data = memoryview(data)
        try:
            for at in range(0, len(data), _PART):
                given: Any = data[at : at + _PART]
                if inflate.eof:
                    self._damage = "bytes after the end of the deflate stream"
                while not self._damage and not inflate.eof:
                    made = inflate.decompress(given, _PART)
                    self._crc = zlib.crc32(made, self._crc)
                    self._left -= len(made)
                    if self._left < 0:
                        self._damage = "more bytes than declared"
                    given = inflate.unconsumed_tail
                    if not given and len(made) < _PART:
                        break
        except zlib.error as error:
            self._damage = str(error)
        if inflate.unused_data:
            self._damage = "bytes after the end of the deflate stream"

    def hexdigest(self) -> str:
        if self._inflate is not None and not self._inflate.eof:
            return self._damage or "deflate data without an end"
        if self._left > 0:
            return "fewer bytes than declared"
        return self._damage or f"{self._crc:08x}"


class Hasher:
    """Hashes what a transfer reads (an `io.engine.Observer`).

    Of the tensors all bytes must be shown, and so of the ranges of `sums`, which come with the
    number of their file; of the files (number: size) every byte in order.

    Raises UsageError if tensors share bytes.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo] = (),
        files: Mapping[int, int] | None = None,
        sums: Iterable[tuple[int, Checksum]] = (),
    ) -> None:
        self.tensors = tensors = list(tensors)
        self._new = new = tensor_hash() if tensors else hashlib.sha256
        self._several = {info.name: len(info.pieces) for info in tensors if len(info.pieces) > 1}
        self._digests: dict[Any, str] = {}
        streams: list[_Stream] = []
        for info in tensors:
            for n, piece in enumerate(info.pieces):
                key = (info.name, n) if info.name in self._several else info.name
                if piece.stored is None or piece.stored.inline is None:
                    streams.append(_Stream(*piece[:3], key, new))
                else:
                    self._digests[key] = new(piece.stored.inline).hexdigest()
        crcs = [
            _Stream(key[0], each.offset, each.nbytes, key, partial(_Crc32, inflated=each.inflated))
            for key in sums
            for each in key[1:]
        ]
        whole = [_Stream(n, 0, size, n, hashlib.sha256) for n, size in (files or {}).items()]
        self._turn = threading.Condition()
        # Streams of one list don't overlap.
        self._streams: list[dict[int, list[_Stream]]] = []
        for group in (streams, crcs, whole):
            held: dict[int, list[_Stream]] = {}
            for each in sorted(group, key=_START):
                mine = held.setdefault(each.source, [])
                if mine and mine[-1].stop > each.start and each.start < each.stop:
                    raise errors.UsageError(
                        "tensors that share bytes have no checksums of their own",
                        tensor=str(each.key),
                        expected="checksums='sha256', or checksums=False",
                    )
                if each.start < each.stop:
                    mine.append(each)
                else:
                    self._digests[each.key] = each.new(b"").hexdigest()
            if held:
                self._streams.append(held)
        self._wanted = sum(len(info.pieces) for info in tensors) + len(crcs) + len(whole)

    def take(self, lot: Lot, number: int, data: Any, stopped: Stopped) -> None:
        """Takes the next bytes, as a place of lots (see `io.engine.Place`)."""
        block = lot.blocks[number]
        self.saw(block.source, block.offset, data, stopped)

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next bytes."""
        stop = offset + data.size
        for held in self._streams:
            streams = held.get(source, ())
            number = max(0, bisect.bisect_right(streams, offset, key=_START) - 1)
            while number < len(streams) and (stream := streams[number]).start < stop:
                number += 1
                first, last = max(stream.start, offset), min(stream.stop, stop)
                part = data[first - offset : last - offset]
                if first == stream.start and last == stream.stop:
                    self._digests[stream.key] = stream.new(part).hexdigest()
                elif first < last:
                    self._take(stream, first, part, stopped)

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
        for name, count in self._several.items():
            parts = [self._digests[name, n] for n in range(count)]
            self._digests[name] = self._new("".join(parts).encode()).hexdigest()
        return self._digests


class ManifestCheck:
    """`verify=`: compares what the loads of a call read with a manifest.

    A tensor that a load reads whole is hashed while it arrives. One of which it reads parts, or
    parts at different times, is read whole before, once.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str] | Manifest,
        index: Index,
        sources: Sequence[Source],
        deadline: Deadline,
    ) -> None:
        self._index, self._sources, self._deadline = index, sources, deadline
        if not isinstance(manifest, Manifest):
            read = partial(Manifest.read, manifest)
            manifest = deadline.bound(read, "reading the manifest", shown(manifest))
        self._manifest = manifest
        if not self._manifest.hashed:
            raise errors.UsageError(
                "the manifest has no checksums of tensors",
                file=self._manifest.path,
                expected="checksums='xxh3' or 'both' when it is written; mfload.verify compares "
                "the SHA-256 of files",
            )
        self._verified: dict[str, bool] = {}  # Whether bytes were read for this alone.
        self._turn = threading.Lock()  # Several threads may read of an opened checkpoint.
        self._note, self._elsewhere = "", 0

    def expect(self, tensors: Sequence[TensorInfo]) -> None:
        """Raises ChecksumError if the manifest lacks a tensor, or has another dtype or shape."""
        self._refuse([*self._manifest.differences(tensors)], len(tensors))
        for info in tensors:
            if not info.simple and not all(_is_read(info, piece) for piece in info.pieces):
                raise errors.UsageError(
                    "verify= compares all stored bytes, and the load skips some",
                    tensor=info.name,
                    expected="mfload.verify, which reads whole files",
                )

    def watch(
        self, requests: Sequence[Request], batches: Sequence[Sequence[int]], options: LoadOptions
    ) -> Hasher:
        """What sees the bytes of a load, of requests that are read in batches."""
        parts: dict[str, tuple[TensorInfo, set[int], set[Any]]] = {}
        for number, batch in enumerate(batches):
            for at in batch:
                info, _, selection, *_ = requests[at]
                if info.name not in self._index:
                    continue  # A number of the tree, which no file has as a tensor.
                _, seen, selections = parts.setdefault(info.name, (info, set(), set()))
                seen.add(number)
                selections.add(selection)
        self.expect([info for info, *_ in parts.values() if info.name not in self._verified])
        whole: list[TensorInfo] = []
        others: list[TensorInfo] = []
        for info, seen, selections in parts.values():
            if len(seen) == 1 and (selections == {None} or _tile(info, selections)):
                whole.append(info)
            elif not self._verified.get(info.name):
                others.append(info)
        if others:
            self._scan(others, options)
        return Hasher(whole)

    def _scan(self, tensors: Sequence[TensorInfo], options: LoadOptions) -> None:
        """Reads tensors whole, and compares them."""
        hasher, sources = Hasher(tensors), self._sources
        pieces = [piece for info in tensors for piece in info.pieces]
        stored = [piece for piece in pieces if piece.stored is None or piece.stored.inline is None]
        # Two blocks for each thread, as `lots.raw` counts.
        most = Ledger(options).slot(2 * (options.threads or 1))
        size = max(_PAGE, min(scanning.BLOCK, most))
        rows = lots.joined(stored, scanning.gap(sources), size)
        blocks = (part for block, _ in rows for part in lots.cut(block, size))
        scanning.scan(sources, list(map(lots.raw, blocks)), hasher, options)
        self.settle(hasher, None)
        with self._turn:
            self._verified |= dict.fromkeys((info.name for info in tensors), True)

    def settle(self, hasher: Hasher, report: Report | None) -> None:
        """Compares what was seen of a load; raises ChecksumError, and empties the report."""
        offenders = list(self._manifest.differences(hasher.tensors, hasher.digests()))
        if offenders and report is not None:
            report.leave_read()
        self._refuse(offenders, len(hasher.tensors))
        with self._turn:
            for info in hasher.tensors:
                self._verified.setdefault(info.name, False)

    def tell(self, report: Report | None) -> None:
        """Notes how many tensors were compared so far, in place of an earlier note."""
        if report is None:
            return
        if not self._note:  # Another place of the same load may have failed after some of them.
            for note in report.notes:
                if found := re.fullmatch(rf"(\d+) tensors?{_VERIFIED}", note):
                    self._note, self._elsewhere = note, int(found[1])
        before, count = self._note, len(self._verified) + self._elsewhere
        self._note = f"{errors.counted(count, 'tensor')}{_VERIFIED}"
        report.notes = (*(note for note in report.notes if note != before), self._note)

    def _refuse(self, offenders: Sequence[Offender], total: int) -> None:
        # That of the headers may have passed long ago, of what was opened or is streamed.
        deadline = Deadline(self._deadline.seconds)
        given = self._manifest, self._index, self._sources, deadline
        refuse(offenders, total, *given)


def refuse(
    offenders: Sequence[Offender],
    total: int,
    manifest: Manifest,
    index: Index,
    sources: Sequence[Source],
    deadline: Deadline,
) -> None:
    """Raises ChecksumError if any of `total` tensors differs from its manifest.

    Raises SourceChangedError instead if their files were replaced meanwhile.
    """
    if not offenders:
        return
    numbers = sorted({info.pieces[0].source for info, *_ in offenders})

    def others() -> dict[str, tuple[str, str]]:
        for number in numbers:
            sources[number].check()
        return manifests.others(manifest, numbers, sources, index)

    for file, (expected, found) in deadline.bound(others, "reading headers").items():
        raise errors.ChecksumError(OTHER_DATA, file=file, expected=expected, found=found)
    named = [index.files[info.pieces[0].source] for info, *_ in offenders]
    first, expected, found = offenders[0]
    raise errors.ChecksumError(
        f"{len(offenders)} of {errors.counted(total, 'tensor')} not as the manifest says",
        file=named[0],
        tensor=first.name,
        expected=expected,
        found=found,
        problems=tuple(
            f"{brief(info.name)} in {file}: expected {expected}, found {found}"
            for file, (info, expected, found) in zip(named, offenders, strict=True)
        ),
    )


def _is_read(info: TensorInfo, piece: Piece) -> bool:
    """Whether a load of the whole tensor reads the whole piece."""
    stored = piece.stored
    if stored is None or stored.encodings or stored.inline is not None:
        return True
    box = stored.box or tuple((0, length) for length in info.shape)
    shape = [high - low for low, high in box]
    if stored.flat is not None:
        shape = [stored.flat[1] - stored.flat[0]]
    return info.dtype.size_of(shape) == piece.nbytes


def _tile(info: TensorInfo, selections: Collection[Any]) -> bool:
    """Whether parts of a tensor are boxes that make it up, each element in one of them."""
    # Encoded pieces that several parts want may be read for each.
    if None in selections or (len(selections) > 1 and not info.simple):
        return False
    axes = [axis for each in selections for axis in each]
    if len(selections) > _MOST_BOXES or any(a.step != 1 or a.picks is not None for a in axes):
        return False
    if sum(each.size for each in selections) != math.prod(info.shape):
        return False
    boxes = [tuple((axis.start, axis.start + axis.size) for axis in each) for each in selections]
    return not any(intersection(*pair) for pair in itertools.combinations(boxes, 2))
