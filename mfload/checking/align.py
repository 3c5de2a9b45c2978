"""`align`: rewrites a checkpoint so that it suits zero-copy and direct reads.

Bytes are streamed from the old files to drafts of the new ones, cut where a draft's blocks end so
that writes go past the page cache. Memory held is a part a reader, and a table of the parts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mfload import errors
from mfload.checking import published
from mfload.checking.checksums import Hasher, Stopped
from mfload.checking.manifest import FileEntry, Manifest, beside, check_target
from mfload.checking.scan import Advance, Range, scan, span
from mfload.formats import checkpoint, discovery, safetensors
from mfload.formats.discovery import Path
from mfload.index import Index, TensorInfo
from mfload.options import LoadOptions, Options, started
from mfload.progress import Progress, shown
from mfload.saving import layout
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.layout import Layout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import Saved
from mfload.sources.local import LocalFile


@dataclass(frozen=True, slots=True)
class Aligned(Saved):
    """What `mfload.align` did. It prints well, and has the attributes of `Saved`."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        (_, written), *rows = Saved.rows(self)
        return [("aligned", f"{written}, read back and compared"), *rows]


def align(
    source: Path | Sequence[Path],
    target: Path | None = None,
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

    Returns:
        What was done.

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
    index, sources = how.deadline.bound(lambda: checkpoint.read(source), "reading headers")
    rows = index.tensors
    place = SaveTarget(_own_place(source, index) if target is None else target, overwrite)
    layouts = _layouts(index, sources, limit, begin)
    found = discovery.find(source)
    old = beside(source, index.files, None if found.placed is None else found.name)
    known = Manifest.read(old) if os.path.exists(old) else None
    new = beside(place.path, [place.path])
    if target is not None:
        _refuse_hub([file for file in index.files if os.path.realpath(file) == place.path])
    same = os.path.realpath(new) == os.path.realpath(old)
    if known is not None:
        check_target(new, overwrite=overwrite or same)
    size = sum(made.size for made in layouts)
    with place.drafts([made.size for made in layouts]) as drafts:
        # Both passes tell of the same bytes, but for the headers.
        with shown(progress, sum(row.nbytes for row in rows.values()) + size) as advance:
            digests = _copy(sources, rows, drafts, layouts, how, advance)
            for info, expected, found in known.differences(rows.values(), digests) if known else ():
                raise errors.ChecksumError(
                    "the tensor differs from the manifest",
                    file=sources[span(info).source].path,
                    tensor=info.name,
                    expected=f"{expected} ({old})",
                    found=found,
                )
            sums = _read_back(drafts, layouts, digests, how, advance, sums=known is not None)
        if known is not None and same:
            # Files change when the drafts get their names; tensors are the same before and after.
            Manifest.of(rows, digests).write(new, overwrite=True)
        elif known is not None and os.path.lexists(new):
            os.unlink(new)
        held = [[row.name for row in made.tensors] for made in layouts]
        there = place.publish(drafts, held, sum(row.nbytes for row in rows.values()))
    notes = [*index.notes, *there.notes]
    if known is not None:
        # The index comes last, and has no sum.
        files = {
            os.path.basename(file): FileEntry(os.path.getsize(file), digest)
            for file, digest in zip(there.files, sums, strict=False)
        }
        try:
            Manifest.of(rows, digests, files).write(new, overwrite=True)
        except errors.TargetError as error:
            error.message += "; the checkpoint itself is whole and in its place"
            raise
        notes.append(f"checksums written to {new}")
    took = time.perf_counter() - start
    return Aligned(there.files, len(index), size, took, tuple(dict.fromkeys(notes)))


def _own_place(source: Path | Sequence[Path], index: Index) -> str:
    """The place of the source itself; a UsageError if only a part of it would be replaced."""
    files = index.files
    _refuse_hub(files)
    found = discovery.find(source)
    directory = os.path.dirname(files[0])
    if found.placed is not None and found.name is not None:
        # The new index takes the place of this one, so the files must lie beside it.
        directory, name = os.path.split(found.name)
        stem = name.removesuffix(discovery.INDEX_SUFFIX)
        if stem == name or any(os.path.dirname(file) != directory for file in files):
            raise errors.UsageError(
                "the files of the index can't all be replaced beside it; name a target",
                file=found.name,
                expected=f"NAME{discovery.INDEX_SUFFIX}, and files in its own directory",
            )
    elif len(files) == 1:
        return files[0]
    else:
        stem = discovery.stem(os.path.basename(files[0]))
        shard = re.compile(re.escape(stem) + r"-\d+-of-\d+" + re.escape(discovery.SUFFIX))
        names = [os.path.basename(file) for file in files if os.path.dirname(file) == directory]
        if found.name is None or not all(shard.fullmatch(name) for name in names):
            raise errors.UsageError(
                "several files that are not shards of one; name a target, or align one by one",
                file=directory,
            )
    return os.path.join(directory, stem + discovery.SUFFIX)


def _refuse_hub(files: Sequence[str]) -> None:
    """Refuses to replace files whose SHA-256 the Hugging Face client keeps on record."""
    for file, known in published.expected("auto", files).items():
        raise errors.UsageError(
            "the Hugging Face client keeps the SHA-256 of the file; name another target",
            file=file,
            found=known.origin,
        )


def _layouts(
    index: Index, sources: Sequence[LocalFile], limit: int | None, align: int
) -> list[Layout]:
    if limit is not None:
        parts = layout.split(index.tensors.values(), limit)
        return [layout.lay_out(rows, index.metadata, align) for rows in parts]
    # Each file keeps metadata of its own.
    headers = [safetensors.read(file, number) for number, file in enumerate(sources)]
    return [layout.lay_out(rows, metadata, align) for rows, metadata in headers]


def _copy(
    sources: Sequence[LocalFile],
    tensors: Mapping[str, TensorInfo],
    drafts: Sequence[Draft],
    layouts: Sequence[Layout],
    how: LoadOptions,
    advance: Advance,
) -> dict[str, str]:
    """Writes tensors to the drafts; returns the digest of each, of the bytes that were written."""
    places: dict[Range, tuple[Draft, int]] = {}
    for draft, made in zip(drafts, layouts, strict=True):
        draft.write(0, np.frombuffer(made.header, np.uint8))
        places.update((part, (draft, at)) for part, at in _parts(made, tensors))
    copier = _Copier(tensors.values(), places)
    scan(sources, sorted(places), copier, how, advance, block=None)
    for draft in drafts:
        how.deadline.bound(draft.sync, "writing to the disk", draft.shown)
    return {name: copier.tensor(name) for name in tensors}


class _Copier(Hasher):
    """Observer that writes what it is shown, and hashes it."""

    def __init__(
        self, tensors: Iterable[TensorInfo], places: Mapping[Range, tuple[Draft, int]]
    ) -> None:
        super().__init__(tensors)
        self._places = places

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next part."""
        super().saw(source, offset, data, stopped)
        draft, at = self._places[Range(source, offset, data.size)]
        draft.write(at, data)


def _parts(made: Layout, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[Range, int]]:
    """Ranges of the old files, and where each goes; tensors that stay neighbours go together."""
    run, to = Range(-1, 0, 0), 0
    for row in made.tensors:
        old = span(tensors[row.name])
        if (old.source, old.offset) == (run.source, run.offset + run.nbytes):
            run = run._replace(nbytes=run.nbytes + old.nbytes)
            continue
        yield from _cut(run, to)
        run, to = old, span(row).offset
    yield from _cut(run, to)


def _cut(run: Range, at: int) -> Iterator[tuple[Range, int]]:
    source, offset, nbytes = run
    end = at + nbytes
    while at < end:
        stop = min(end, (at // BLOCK + 1) * BLOCK)
        yield Range(source, offset, stop - at), at
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
    files = [LocalFile(draft.path) for draft in drafts]
    rows: list[TensorInfo] = []
    for number, (file, draft, made) in enumerate(zip(files, drafts, layouts, strict=True)):
        _drop_cache(draft.path)
        found, _ = safetensors.read(file, number)
        if [row[:3] for row in found] != [row[:3] for row in made.tensors]:
            what = "the header read back differs from the one written"
            raise errors.WriteError(what, file=draft.shown)
        rows += found
    hasher = Hasher(rows, {n: file.size for n, file in enumerate(files)} if sums else None)
    ranges = [Range(number, 0, file.size) for number, file in enumerate(files)]
    scan(files, ranges, hasher, replace(how, engine="direct"), advance, interleave=sums)
    for row in rows:
        if hasher.tensor(row.name) != digests[row.name]:
            raise errors.WriteError(
                "the disk gave back other bytes than were written",
                file=drafts[span(row).source].shown,
                tensor=row.name,
                expected=digests[row.name],
                found=hasher.tensor(row.name),
            )
    return [hasher.file(number) for number in range(len(files))] if sums else []


def _drop_cache(path: str) -> None:
    """Drops a file from the page cache, so that it is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
