"""`align`: rewrites a checkpoint so that it suits zero-copy and direct reads.

Bytes are streamed from the old files to drafts of the new ones, cut where a draft's blocks end so
that writes go past the page cache. Memory held is a part a reader, and a table of the parts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mfload import errors, sources
from mfload.checking import manifest, published
from mfload.checking.checksums import Hasher, Stopped
from mfload.checking.manifest import FileEntry, Manifest
from mfload.checking.scan import Advance, in_turns, scan
from mfload.formats import base, checkpoint, discovery, safetensors
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.index import Index, TensorInfo
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
    for each in sources:
        if base.find(each) is not safetensors:
            raise errors.UsageError(
                "align rewrites safetensors files; load this one, and save it as safetensors",
                file=each.name,
            )
    rows = index.tensors
    found = discovery.find(source, how)
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
    size = sum(made.size for made in layouts)
    with place.drafts(layouts) as drafts:
        # Both passes tell of the same bytes, but for the headers.
        with shown(progress, size + sum(row.nbytes for row in rows.values())) as advance:
            copier = _Copier(rows, drafts, layouts)
            for draft, made in zip(drafts, layouts, strict=True):
                draft.write(0, [np.frombuffer(made.header, np.uint8)])
            scan(sources, sorted(copier.places), copier, how, advance)
            for draft in drafts:
                how.deadline.bound(draft.sync, "writing to the disk", draft.shown)
            digests = copier.digests()
            for info, expected, got in known.differences(rows.values(), digests) if known else ():
                raise errors.ChecksumError(
                    "the tensor differs from the manifest",
                    file=index.files[info.pieces[0].source],
                    tensor=info.name,
                    expected=f"{expected} ({old})",
                    found=got,
                )
            sums = _read_back(drafts, layouts, digests, how, advance, sums=known is not None)
        if known is not None and same:
            # Files change when the drafts get their names; tensors are the same before and after.
            Manifest.of(rows, digests).write(new, overwrite=True)
        elif known is not None and os.path.lexists(new):
            os.unlink(new)
        there, more = place.publish(drafts, layouts)
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
    if limit is not None:
        parts = layout.split(index.tensors.values(), limit)
        return [layout.lay_out(rows, index.metadata, align) for rows in parts]
    # Each file keeps metadata of its own.
    headers = [safetensors.read(file, number) for number, file in enumerate(sources)]
    return [layout.lay_out(rows, metadata, align) for rows, metadata in headers]


class _Copier(Hasher):
    """Observer that writes the tensors that it is shown to drafts, and hashes them."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], drafts: Sequence[Draft], layouts: Sequence[Layout]
    ) -> None:
        super().__init__(tensors.values())
        self.places = {
            block: (draft, at)
            for draft, made in zip(drafts, layouts, strict=True)
            for block, at in _parts(made, tensors)
        }

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next part."""
        super().saw(source, offset, data, stopped)
        draft, at = self.places[Block(source, offset, data.size, ())]
        draft.write(at, [data])


def _parts(made: Layout, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[Block, int]]:
    """Parts of the old files, and where each goes: cut where the blocks of the new file end.

    Tensors that stay neighbours go together.
    """
    runs: list[tuple[int, int, int, int]] = []  # Source, offset, bytes, and where they go.
    for row in made.tensors:
        piece = tensors[row.name].pieces[0]
        source, offset, nbytes, at = runs[-1] if runs else (-1, 0, 0, 0)
        if (source, offset + nbytes) == (piece.source, piece.offset):
            runs[-1] = source, offset, nbytes + piece.nbytes, at
        else:
            runs.append((piece.source, piece.offset, piece.nbytes, row.pieces[0].offset))
    for source, offset, nbytes, at in runs:
        end = at + nbytes
        while at < end:
            stop = min(end, (at // BLOCK + 1) * BLOCK)
            yield Block(source, offset, stop - at, ()), at
            offset, at = offset + stop - at, stop


def _read_back(
    drafts: Sequence[Draft],
    layouts: Sequence[Layout],
    digests: Mapping[str, str],
    how: LoadOptions,
    advance: Advance,
    *,
    sums: bool,
) -> list[str]:
    """Compares what was written, read past the page cache; returns the SHA-256 of each file."""
    files = [sources.find(draft.path) for draft in drafts]
    rows: list[TensorInfo] = []
    for number, (file, draft, made) in enumerate(zip(files, drafts, layouts, strict=True)):
        if hasattr(os, "posix_fadvise"):
            with open(draft.path, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file.read(0, len(made.header)) != made.header:
            what = "the header read back differs from the one written"
            raise errors.WriteError(what, file=draft.shown)
        for row in made.tensors:
            rows.append(row._replace(pieces=(row.pieces[0]._replace(source=number),)))
    hasher = Hasher(rows, {number: file.size for number, file in enumerate(files)} if sums else {})
    ranges = [Block(number, 0, file.size, ()) for number, file in enumerate(files)]
    scan(files, in_turns(ranges, how), hasher, how.replace(engine="direct"), advance)
    back = hasher.digests()
    for row in rows:
        if back[row.name] != digests[row.name]:
            raise errors.WriteError(
                "the disk gave back other bytes than were written",
                file=drafts[row.pieces[0].source].shown,
                tensor=row.name,
                expected=digests[row.name],
                found=back[row.name],
            )
    return [back[number] for number in range(len(files))] if sums else []
