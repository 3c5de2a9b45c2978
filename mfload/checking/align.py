"""`align`: rewrites a checkpoint so that it suits zero-copy and direct reads.

Bytes are streamed from the old files, in their order, to drafts of the new ones: parts that stay
together, cut where a draft's blocks end so that writes go past the page cache. Each write is
hashed, and compared when the drafts are read back. Memory held is a block a reader, and a table of
the parts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mfload import errors, sources
from mfload.checking import manifest, published
from mfload.checking.checksums import Hasher, Stopped, refuse, tensor_hash
from mfload.checking.manifest import FileEntry, Manifest
from mfload.checking.scan import Advance, cut, gap, in_turns, joined, scan
from mfload.checking.verify import verify
from mfload.formats import base, checkpoint, discovery, safetensors
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.index import Index, Piece
from mfload.load_options import LoadOptions, started
from mfload.options import Options
from mfload.planning.blocks import Block
from mfload.progress import Progress, shown
from mfload.saving import layout
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.layout import Layout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import Saved
from mfload.sources.base import Source


@dataclass(frozen=True, slots=True)
class Aligned(Saved):
    """What `mfload.align` did. It prints well, and has the attributes of `Saved`."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        (_, written), *rows = Saved.rows(self)
        return [("aligned", f"{written}, read back and compared"), *rows]


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
    """Rewrites a checkpoint so that it suits zero-copy and direct reads.

    The data of each file begins on a multiple of `align`, and tensors lie on multiples of 64
    bytes where their sizes allow it. The new files are read back from the disk and compared
    before they get their names. Metadata is kept, and so are tensors of unknown dtypes. If a
    manifest lies beside the source, the source is compared with it, and one is written for the
    new files.

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
    start = time.perf_counter()
    how = started(options)
    limit, begin = layout.shard_limit(max_shard_size), layout.checked_align(align)
    index, sources = checkpoint.read(source, how)
    found = discovery.find(source, how)
    for each in sources:
        if found.directory is not None or base.find(each) is not safetensors:
            raise errors.UsageError(
                "align rewrites safetensors files; load this one, and save it as safetensors",
                file=each.name,
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
    layouts = _layouts(index, sources, limit, begin)
    old = manifest.beside(index.files, found.index_file)
    new = manifest.beside([place.path])
    same = os.path.realpath(new) == os.path.realpath(old)
    known = Manifest.read(old) if os.path.exists(old) else None
    if known is not None:
        manifest.check_target(new, overwrite=overwrite or same)
    if known is not None and not known.hashed:
        for problem in verify(source, manifest=known, options=options).problems:
            given = problem._asdict()
            raise errors.ChecksumError(given.pop("what"), **given)
    size = sum(made.size for made in layouts)
    hasher = Hasher(rows.values() if known is not None and known.hashed else ())
    with place.drafts(layouts) as drafts:
        # Both passes tell of the same bytes, but for the headers.
        with shown(progress, size + sum(index.columns.nbytes)) as advance:
            copier = _Copier(drafts, layouts, sources, hasher)
            scan(sources, [*copier.parts], copier, how, advance)
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
        elif known is not None and os.path.lexists(new):
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
    notes = [*index.notes, *more]
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
    return Aligned(tuple(there), len(index), size, took, tuple(dict.fromkeys(notes)))


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
    index: Index, sources: Sequence[Source], limit: int | None, align: int
) -> list[Layout]:
    if limit is not None or len(sources) == 1:
        parts = layout.split(index.tensors.values(), limit)
        return [layout.lay_out(rows, index.metadata, align) for rows in parts]
    # Each file keeps metadata of its own.
    headers = [safetensors.read(file, number) for number, file in enumerate(sources)]
    return [layout.lay_out(rows, metadata, align) for rows, metadata in headers]


class _Copier:
    """Observer that writes what it is shown to drafts, and hashes each write.

    Attributes:
        parts: What it is to be shown, and where each part of that goes.
        written: The hash of each range of a draft; `source` is the number of the draft.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        layouts: Sequence[Layout],
        sources: Sequence[Source],
        hasher: Hasher,
    ) -> None:
        self.drafts, self.layouts = drafts, layouts
        self.written: dict[Block, str] = {}
        self._hasher, self._hash = hasher, tensor_hash()
        for number, made in enumerate(layouts):
            header = np.frombuffer(made.header, np.uint8)
            for block in cut(Block(number, 0, header.size, ())):
                self._write(block, [header[block.offset :][: block.nbytes]])
        parts = [part for number, made in enumerate(layouts) for part in _parts(number, made)]
        self.parts = {
            block: [parts[n] for n in numbers]
            for block, numbers in joined([old for old, _ in parts], gap(sources), BLOCK)
        }

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next block; parts that become neighbours are written together."""
        self._hasher.saw(source, offset, data, stopped)
        parts = self.parts[Block(source, offset, data.size, ())]
        pieces = [data[old.offset - offset :][: old.nbytes] for old, _ in parts]
        for block, numbers in joined([new for _, new in parts], 0, BLOCK):
            self._write(block, [pieces[n] for n in numbers])

    def _write(self, block: Block, pieces: list[Any]) -> None:
        hashed = self._hash()
        for piece in pieces:
            hashed.update(piece)
        self.drafts[block.source].write(block.offset, pieces)
        self.written[block] = hashed.hexdigest()


def _parts(number: int, made: Layout) -> Iterator[tuple[Piece, Piece]]:
    """Parts of the old files, and where each goes: cut where the blocks of the new file end.

    Tensors that stay neighbours go together.
    """
    at = len(made.header)
    runs: list[tuple[int, int, int, int]] = []  # Source, offset, bytes, and where they go.
    for row in made.entries:
        piece: Piece = row.pieces[0]
        source, offset, nbytes, start = runs[-1] if runs else (-1, 0, 0, 0)
        if (source, offset + nbytes) == (piece.source, piece.offset):
            runs[-1] = source, offset, nbytes + piece.nbytes, start
        else:
            runs.append((piece.source, piece.offset, piece.nbytes, at))
        at += piece.nbytes
    for source, offset, nbytes, at in runs:
        end = at + nbytes
        while at < end:
            stop = min(end, (at // BLOCK + 1) * BLOCK)
            yield Piece(source, offset, stop - at), Piece(number, at, stop - at)
            offset, at = offset + stop - at, stop


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
