"""`convert` and `align`: rewrite a checkpoint as safetensors that suit zero-copy and direct reads.

Raw bytes are streamed from the old files, in their order, to drafts of the new ones: parts that
stay together, cut where a draft's blocks end so that writes go past the page cache. Tensors that
are stored in another way (compressed, in several pieces, in another order) are loaded in slabs.
Each write is hashed, and compared when the drafts are read back. Memory held is a block a reader,
the slabs that are read ahead, and a table of the parts.

What is written is noted in a journal beside the drafts, so that a conversion that was killed goes
on where it ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mfload import dtypes, errors, sources
from mfload.checking import manifest, published
from mfload.checking.checksums import Hasher, Stopped, refuse, tensor_hash
from mfload.checking.manifest import Algorithm, FileEntry, Manifest
from mfload.checking.scan import Advance, check_unchanged, cut, gap, in_turns, joined, scan
from mfload.checking.verify import verify, with_manifest
from mfload.formats import base, checkpoint, discovery, safetensors
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Box, Index, Piece, TensorInfo
from mfload.load_options import OVERHEAD, LoadOptions, started
from mfload.loading import stream
from mfload.options import Options
from mfload.planning.blocks import Block
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.progress import Progress, shown
from mfload.saving import layout
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.journal import Journal
from mfload.saving.layout import Layout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import Saved
from mfload.sources.base import Source

# What a second run can go on after, so that drafts and journal stay.
_CONTINUES = (KeyboardInterrupt, errors.LoadTimeoutError, errors.SourceError)


@dataclass(frozen=True, slots=True)
class Converted(Saved):
    """What `mfload.convert` did. It prints well, and has the attributes of `Saved`."""

    VERB = "converted"

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        (_, written), *rows = Saved.rows(self)
        return [(self.VERB, f"{written}, read back and compared"), *rows]


@dataclass(frozen=True, slots=True)
class Aligned(Converted):
    """What `mfload.align` did. It prints well, and has the attributes of `Saved`."""

    VERB = "aligned"


def convert(
    source: Path | Sequence[Path],
    target: str | os.PathLike[str],
    *,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: Progress = False,
    options: Options | None = None,
) -> Converted:
    """Turns a checkpoint of any format into safetensors, in bounded memory.

    Tensors keep their names, dtypes and bytes, and the metadata is kept, also the tree that
    `mfload.restore` rebuilds. The new files are read back from the disk and compared before they
    get their names, all of them at once. If a manifest lies beside the source, the source is
    compared with it, and one is written for the new files.

    After a kill, Ctrl-C, a timeout or an error of the source, hidden files stay beside the target;
    the same call goes on with them if the source is the same, and a note says so. Any other
    conversion or save to that target removes them, and so does any other error.

    Args:
        source: As for `load`.
        target: Where to, as for `save`.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: each safetensors file of
            the source becomes one; other formats become a single file.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes count twice,
            once written and once read back.
        options: Threads, timeout and `max_host_overhead`, which bounds the memory of tensors that
            are not one raw range of their file; see `mfload.Options`.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        UnsupportedDtypeError: Safetensors has no dtype for a tensor.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, is being written, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash, or decoding another one.
        LoadTimeoutError: The timeout passed.
    """
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    return Converted(*_rewrite(source, target, *made, overwrite, progress, options, resume=True))


def align(
    source: Path | Sequence[Path],
    target: str | os.PathLike[str] | None = None,
    *,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: Progress = False,
    options: Options | None = None,
) -> Aligned:
    """Rewrites a safetensors checkpoint so that it suits zero-copy and direct reads.

    The data of each file begins on a multiple of `align`, and tensors lie on multiples of 64
    bytes where their sizes allow it. The new files are read back from the disk and compared
    before they get their names. Metadata is kept, and so are tensors of unknown dtypes. If a
    manifest lies beside the source, the source is compared with it, and one is written for the
    new files.

    Unlike `convert`, it can replace the source, and leaves nothing if it is killed.

    Args:
        source: As for `load`.
        target: Where to, as for `save`. Default: the place of the source, which takes
            `overwrite=True`.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: each file of the source
            becomes one.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes are read
            twice.
        options: Threads and timeout; see `mfload.Options`.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    return Aligned(*_rewrite(source, target, *made, overwrite, progress, options, resume=False))


def _rewrite(
    source: Path | Sequence[Path],
    target: str | os.PathLike[str] | None,
    limit: int | None,
    begin: int,
    overwrite: bool,
    progress: Progress,
    options: Options | None,
    *,
    resume: bool,
) -> tuple[Any, ...]:
    """Rewrites a checkpoint; returns the values of `Saved`.

    Only if it may `resume` are other formats than safetensors taken, and drafts kept.
    """
    start = time.perf_counter()
    how = started(options)
    index, sources = checkpoint.read(source, how)
    found = discovery.find(source, how)
    directory = found.directory is not None
    foreign = [each for each in sources if directory or base.find(each) is not safetensors]
    if foreign and not resume:
        raise errors.UsageError(
            "align rewrites safetensors files; mfload.convert takes other formats",
            file=foreign[0].name,
        )
    rows = index.tensors
    place = SaveTarget(_own_place(index.files, found) if target is None else target, overwrite)
    in_place = [f for f in index.files if target is None or os.path.realpath(f) == place.path]
    for file, recorded in published.expected("auto", in_place).items():
        raise errors.UsageError(
            "the Hugging Face client keeps the SHA-256 of the file; name another target",
            file=file,
            found=recorded.origin,
        )
    if foreign:
        for info in rows.values():
            if not info.dtype.known:
                raise errors.UnsupportedDtypeError(
                    "safetensors has no such dtype",
                    file=index.files[info.pieces[0].source],
                    tensor=info.name,
                    expected=dtypes.INSTEAD.get(info.dtype.name),
                    found=info.dtype.name,
                )
    layouts = _layouts(index, sources, limit, begin, each_file=not foreign)
    loaded = [info for info in rows.values() if not info.simple and info.nbytes]
    old = manifest.beside(index.files, found.index_file)
    new = manifest.beside([place.path])
    same = os.path.realpath(new) == os.path.realpath(old)
    known = Manifest.read(old) if os.path.exists(old) else None
    if known is not None:
        manifest.check_target(new, overwrite=overwrite or same)
    if known is not None and (loaded or not known.hashed):
        for problem in verify(source, manifest=known, options=options).problems:
            given = problem._asdict()
            raise errors.ChecksumError(given.pop("what"), **given)
    # Bytes of tensors that are stored in another way have other sums when they are raw.
    anew, known = (known, None) if loaded else (None, known)
    size = sum(made.size for made in layouts)
    hasher = Hasher(rows.values() if known is not None and known.hashed else ())
    notes = list(index.notes)
    # Sums of the source are of all its bytes, read in one go.
    key = _key(sources, layouts, loaded) if resume and known is None else None
    with place.drafts(layouts, key) as drafts, contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(drafts, key)) if key else None
        stack.enter_context(_kept(drafts))
        # Both passes tell of the same bytes, but for the headers.
        stored = sum(info.nbytes for info in rows.values())
        with shown(progress, size + stored) as advance:
            copier = _Copier(drafts, layouts, sources, hasher, journal)
            if copier.resumed:
                notes.append(f"went on after {copier.resumed} bytes that an earlier run wrote")
            scan(sources, copier.left(advance), copier, how, advance)
            copier.load(index, sources, how, advance)
            for draft in drafts:
                how.deadline.bound(draft.sync, "writing to the disk", draft.shown)
            digests = hasher.digests() or None
            if known is not None:
                refuse([*known.differences(rows.values(), digests)], len(rows), index.files)
            wants_sums = known is not None and bool(known.files)
            sums = _read_back(copier, how, advance, sums=wants_sums)
        if same and digests is not None:
            # Files change when the drafts get their names; tensors are the same before and after.
            Manifest.of(rows, digests).write(new, overwrite=True)
        elif (known or anew) is not None and os.path.lexists(new):
            os.unlink(new)
        try:
            there, more = place.publish(drafts, layouts)
        except BaseException:
            if same and known is not None:
                with contextlib.suppress(errors.MfloadError):
                    for each in sources:
                        each.check()
                    known.write(new, overwrite=True)  # It still holds.
            raise
    notes += more
    if known is not None:
        # The index comes last, and has no sum.
        files = {
            os.path.basename(file): FileEntry(made.size, digest)
            for file, made, digest in zip(there, layouts, sums, strict=False)
        }
        try:
            Manifest.of(rows, digests, files).write(new, overwrite=True)
        except errors.TargetError as error:
            error.message += "; the checkpoint itself is whole and in its place"
            raise
        notes.append(f"checksums written to {new}")
    took = time.perf_counter() - start
    saved = Saved(tuple(there), len(index), size, took, tuple(dict.fromkeys(notes)))
    if anew is not None:
        algorithm: Algorithm = "xxh3" if not anew.files else "both" if anew.hashed else "sha256"
        saved = with_manifest(saved, write=algorithm)
    return saved.files, saved.tensors, saved.bytes, saved.seconds, saved.notes


@contextlib.contextmanager
def _kept(drafts: Sequence[Draft]) -> Generator[None]:
    """Has lasting drafts stay after errors that a second run can go on after, and no others."""
    try:
        yield
    except _CONTINUES:
        raise
    except BaseException:
        for draft in drafts:
            draft.lasting = False
        raise
    for draft in drafts:
        draft.lasting = False


def _key(sources: Sequence[Source], layouts: Sequence[Layout], loaded: Sequence[TensorInfo]) -> str:
    """Tells conversions apart: what is read, and what is written where."""
    key = hashlib.sha256(f"{BLOCK} {_slab(None)}".encode())
    for each in sources:
        key.update(f"\n{each.name}\n{each.identity!r}".encode(errors="surrogatepass"))
    for info in loaded:
        key.update(repr(info.pieces).encode())
    for made in layouts:
        key.update(made.header)
    return key.hexdigest()[:32]


def _own_place(files: Sequence[str], found: CheckpointFiles) -> str:
    """The place of the source itself; a UsageError if only a part of it would be replaced."""
    directory = os.path.dirname(found.index_file or files[0])
    if found.index_file is not None:
        # The new index takes the place of this one, so the files must lie beside it.
        beside = all(os.path.dirname(file) == directory for file in files)
        if beside and found.index_file.endswith(discovery.INDEX_SUFFIX):
            return found.index_file.removesuffix(discovery.INDEX_SUFFIX) + discovery.SUFFIX
        raise errors.UsageError(
            "the files of the index can't all be replaced beside it; name a target",
            file=found.index_file,
            expected=f"NAME{discovery.INDEX_SUFFIX}, and files in its own directory",
        )
    if len(files) == 1:
        return files[0]
    stem = os.path.join(directory, discovery.stem(os.path.basename(files[0])))
    shard = re.compile(re.escape(stem) + r"-\d+-of-\d+" + re.escape(discovery.SUFFIX))
    if found.name is None or not all(map(shard.fullmatch, files)):
        raise errors.UsageError(
            "several files that are not shards of one; name a target, or align one by one",
            file=directory,
        )
    return stem + discovery.SUFFIX


def _layouts(
    index: Index, sources: Sequence[Source], limit: int | None, align: int, *, each_file: bool
) -> list[Layout]:
    if limit is not None or len(sources) == 1 or not each_file:
        parts = layout.split(index.tensors.values(), limit)
        return [layout.lay_out(rows, index.metadata, align) for rows in parts]
    # Each file keeps metadata of its own.
    headers = [safetensors.read(file, number) for number, file in enumerate(sources)]
    return [layout.lay_out(rows, metadata, align) for rows, metadata in headers]


class _Copier:
    """Observer that writes what it is shown to drafts, and hashes each write.

    Attributes:
        written: The hash of each range of a draft; `source` is the number of the draft.
        resumed: Bytes that were written before.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        layouts: Sequence[Layout],
        sources: Sequence[Source],
        hasher: Hasher,
        journal: Journal | None,
    ) -> None:
        self.drafts, self.layouts = drafts, layouts
        self.written: dict[Block, str] = dict(journal.found) if journal else {}
        self.resumed = sum(block.nbytes for block in self.written)
        self._hasher, self._hash, self._journal = hasher, tensor_hash(), journal
        for number, made in enumerate(layouts):
            header = np.frombuffer(made.header, np.uint8)
            for block in cut(Block(number, 0, header.size, ())):
                self._write(block, [header[block.offset :][: block.nbytes]])
        parts = [part for number, made in enumerate(layouts) for part in _parts(number, made)]
        self._parts = {
            block: [parts[n] for n in numbers]
            for block, numbers in joined([old for old, _ in parts], gap(sources), BLOCK)
        }

    def left(self, advance: Advance) -> list[Block]:
        """The blocks of the sources that are still to be read."""
        if not self.resumed:
            return [*self._parts]
        found: list[Block] = []
        for block, parts in self._parts.items():
            written = joined([new for _, new in parts], 0, BLOCK)
            if not all(new in self.written for new, _ in written):
                found.append(block)
            elif advance is not None:
                advance(block.nbytes)
        return found

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next block; parts that become neighbours are written together."""
        self._hasher.saw(source, offset, data, stopped)
        parts = self._parts[Block(source, offset, data.size, ())]
        pieces = [data[old.offset - offset :][: old.nbytes] for old, _ in parts]
        for block, numbers in joined([new for _, new in parts], 0, BLOCK):
            self._write(block, [pieces[n] for n in numbers])

    def load(
        self, index: Index, sources: Sequence[Source], how: LoadOptions, advance: Advance
    ) -> None:
        """Loads the tensors that are not one raw range each, in slabs, and writes them."""
        slabs = [s for n, made in enumerate(self.layouts) for s in _slabs(n, made, how)]
        # What a slab becomes, cut where blocks end; neighbours are written together.
        parts = [(n, part) for n, (_, new) in enumerate(slabs) for part in _cut(new)]
        blocks = [*joined([part for _, part in parts], 0, BLOCK)]
        wanted = {parts[n][0] for block, each in blocks if block not in self.written for n in each}
        if advance is not None:
            advance(sum(new.nbytes for n, (_, new) in enumerate(slabs) if n not in wanted))
        if not wanted:
            return
        if (seconds := how.deadline.seconds) is not None:
            seconds = max(0.0, min(seconds, how.deadline.left()))
        numbers = sorted(wanted)
        requests = [slabs[n][0] for n in numbers]
        given = index, sources, NumpyAdapter(), how.replace(timeout=seconds, allocator="mfload")
        sizes = [each.nbytes for each in requests]
        with stream.stream(stream.Tensors(*given, requests, sizes, None), False) as opened:
            self._take(iter(numbers), opened, slabs, parts, blocks, how, advance)
        check_unchanged(sources, {p.source for s in requests for p in s.info.pieces}, how)

    def _take(
        self,
        numbers: Iterator[int],
        opened: stream.Stream,
        slabs: Sequence[tuple[Request, Piece]],
        parts: Sequence[tuple[int, Piece]],
        blocks: Sequence[tuple[Block, list[int]]],
        how: LoadOptions,
        advance: Advance,
    ) -> None:
        """Writes slabs as they come, in the order of the drafts."""
        here, data = -1, np.empty(0, np.uint8)
        for block, each in blocks:
            if block in self.written:
                continue
            pieces: list[Any] = []
            for n in each:
                number, part = parts[n]
                while here < number:
                    how.deadline.left()
                    here = next(numbers)
                    data = np.empty(0, np.uint8)  # The slab before goes before the next one comes.
                    data = np.ascontiguousarray(next(opened)[1]).reshape(-1).view(np.uint8)
                    if advance is not None:
                        advance(data.size)
                at = part.offset - slabs[number][1].offset
                pieces.append(data[at : at + part.nbytes])
            self._write(block, pieces)
            del pieces

    def _write(self, block: Block, pieces: list[Any]) -> None:
        if block in self.written:
            return
        hashed = self._hash()
        for piece in pieces:
            hashed.update(piece)
        self.drafts[block.source].write(block.offset, pieces)
        self.written[block] = digest = hashed.hexdigest()
        if self._journal is not None:
            self._journal.add(block, digest)


def _parts(number: int, made: Layout) -> Iterator[tuple[Piece, Piece]]:
    """Raw parts of the old files, and where each goes: cut where the blocks of the new file end.

    Tensors that stay neighbours go together.
    """
    at = len(made.header)
    runs: list[tuple[int, int, int, int]] = []  # Source, offset, bytes, and where they go.
    for row in made.entries:
        if not row.simple:
            runs.append((-1, 0, 0, 0))
            at += row.nbytes
            continue
        piece: Piece = row.pieces[0]
        source, offset, nbytes, start = runs[-1] if runs else (-1, 0, 0, 0)
        if (source, offset + nbytes) == (piece.source, piece.offset):
            runs[-1] = source, offset, nbytes + piece.nbytes, start
        else:
            runs.append((piece.source, piece.offset, piece.nbytes, at))
        at += piece.nbytes
    for source, offset, nbytes, at in runs:
        for new in _cut(Piece(number, at, nbytes)):
            yield Piece(source, offset + new.offset - at, new.nbytes), new


def _cut(part: Piece) -> Iterator[Piece]:
    """A range of a draft, cut where its blocks end."""
    at, end = part.offset, part.offset + part.nbytes
    while at < end:
        stop = min(end, (at // BLOCK + 1) * BLOCK)
        yield Piece(part.source, at, stop - at)
        at = stop


def _slab(limit: int | None) -> int:
    """Bytes of a slab of a tensor that can be cut anywhere, given `max_host_overhead`."""
    return min(stream.BATCH, (OVERHEAD if limit is None else limit) // 4)


def _slabs(number: int, made: Layout, how: LoadOptions) -> Iterator[tuple[Request, Piece]]:
    """The tensors that are to be loaded, in slabs that follow each other, and where each goes."""
    at, limit = len(made.header), how.max_host_overhead
    for row in made.entries:
        if not row.simple and row.nbytes:
            boxes = [None] if row.dtype.elements > 1 else _boxes(row, _slab(limit), limit)
            start = at
            for box in boxes:
                request = Request(row, row.dtype, None if box is None else boxed(row, box))
                if limit is not None and request.nbytes > limit:
                    raise errors.MemoryLimitError(
                        "a tensor that can't be loaded in parts is larger than max_host_overhead",
                        tensor=row.name,
                        expected=f"at least {request.nbytes} bytes",
                        found=f"{limit} bytes",
                    )
                yield request, Piece(number, start, request.nbytes)
                start += request.nbytes
        at += row.nbytes


def _boxes(info: TensorInfo, most: int, limit: int | None) -> Iterator[Box | None]:
    """Boxes of up to `most` bytes that follow each other in C order.

    Compressed chunks are decoded once if they can be: boxes hold whole ones, or are larger.
    """
    step = 1
    stored = info.pieces[0].stored
    if stored is not None and stored.encodings:
        step = info.shape[0] if info.shape else 1
        if stored.box:
            step = stored.box[0][1] - stored.box[0][0]
        if info.shape and step * (info.nbytes // info.shape[0]) > most:
            step, most = 1, OVERHEAD if limit is None else limit
    most = max(most, info.dtype.nbytes)
    if info.nbytes <= most:
        yield None
        return
    # Whole rows of the first dim of which some fit, for each place in the dims before it.
    dim, row = 0, info.nbytes // info.shape[0]
    while row > most:
        dim += 1
        row //= info.shape[dim]
    step = step if dim == 0 else 1
    rows = max(step, most // row // step * step)
    before = tuple((0, 0) for _ in range(dim))
    after = tuple((0, size) for size in info.shape[dim + 1 :])
    for place in np.ndindex(*info.shape[: len(before)]):
        for first in range(0, info.shape[dim], rows):
            last = min(first + rows, info.shape[dim])
            yield (*((n, n + 1) for n in place), (first, last), *after)


class _Reader:
    """Observer of the drafts that compares each range with what was written there."""

    def __init__(self, copier: _Copier, files: Hasher) -> None:
        self._copier, self._files, self._hash = copier, files, tensor_hash()

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next range."""
        wanted = self._copier.written[Block(source, offset, data.size, ())]
        found = self._hash(data).hexdigest()
        if found != wanted:
            what, tensor = "the header read back differs from the one written", None
            made = self._copier.layouts[source]
            if offset >= len(made.header):
                what = "the disk gave back other bytes than were written"
                ends = ((row.name, row.pieces[0]) for row in made.tensors)
                tensor = next(name for name, each in ends if each.offset + each.nbytes > offset)
            where = f"in bytes {offset} to {offset + data.size}"
            raise errors.WriteError(
                what,
                file=self._copier.drafts[source].shown,
                tensor=tensor,
                expected=f"XXH3 {wanted} {where}",
                found=found,
            )
        self._files.saw(source, offset, data, stopped)


def _read_back(copier: _Copier, how: LoadOptions, advance: Advance, *, sums: bool) -> list[str]:
    """Compares what was written, read past the page cache; returns the SHA-256 of each file."""
    files = [sources.find(draft.path) for draft in copier.drafts]
    rows: list[list[Block]] = [[] for _ in files]
    for block in sorted(copier.written):
        rows[block.source].append(block)
    for draft in copier.drafts:
        if hasattr(os, "posix_fadvise"):
            with open(draft.path, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    hasher = Hasher(files={number: file.size for number, file in enumerate(files)} if sums else {})
    reader = _Reader(copier, hasher)
    scan(files, in_turns(rows, how), reader, how.replace(engine="direct"), advance)
    return [hasher.digests()[number] for number in range(len(files))] if sums else []
