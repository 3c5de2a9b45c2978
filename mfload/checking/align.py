"""`align`: a checkpoint written anew, so that it suits zero-copy and direct reads."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mfload import errors
from mfload.checking import inplace, rewriting
from mfload.checking.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    beside,
    check_target,
    sayable,
)
from mfload.formats import checkpoint, discovery, options as layout_options, safetensors
from mfload.formats.discovery import Path
from mfload.index import Index, TensorInfo
from mfload.options import Options, started
from mfload.progress import Progress, shown
from mfload.report import html_table, human, table
from mfload.saving import layout
from mfload.saving.layout import Entry, Layout
from mfload.saving.publishing import Target
from mfload.sources.local import LocalFile

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Aligned:
    """What `mfload.align` did; prints well, and has `as_dict()`.

    Attributes:
        files: Paths of what lies there now; the index last where there is one.
        tensors: How many were written.
        bytes: Of all files, headers counted.
        seconds: From the call to the last name on disk.
        notes: What was decided without being asked for.
    """

    files: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        speed = self.bytes / self.seconds / 2**30 if self.seconds else 0.0
        rows = [
            ("aligned", f"{self.tensors} tensors, {human(self.bytes)}, read back and compared"),
            ("time", f"{self.seconds:.3g} s, {speed:.2f} GiB/s"),
        ]
        rows += [("file", file) for file in self.files[:_SHOWN]]
        if len(self.files) > _SHOWN:
            rows.append(("file", f"… and {len(self.files) - _SHOWN} more"))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def align(
    source: Path | Sequence[Path],
    target: Path | None = None,
    *,
    align: int = layout_options.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: Progress = False,
    options: Options | None = None,
) -> Aligned:
    """Rewrites a checkpoint so that it suits zero-copy and direct reads.

    The data of each file begins on a multiple of `align`, and tensors lie on multiples of 64
    bytes where their sizes allow it. Bytes are streamed and hashed on the way, the new files are
    read back from the disk and compared, and only then do they get their names. Metadata is
    kept, and so are tensors of dtypes that mfload does not know. A manifest beside the source is
    compared with, and one for the new files written.

    Args:
        source: As for `load`.
        target: Where to, as for `save`; the place of the source where None, which takes
            `overwrite=True`.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`; where None, each file of the
            source becomes one.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes are read
            twice.
        options: `threads` and `timeout` of an `mfload.Options`.

    Returns:
        What was done.

    Raises:
        UsageError: An argument makes no sense, or the source can't be replaced as a whole.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        ChecksumError: A manifest lies beside the source and knows other bytes.
        TargetError: The target is there already, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash.
        LoadTimeoutError: The time ran out.
    """
    start = time.perf_counter()
    how = started(options)
    threads, deadline = how.threads, how.deadline
    limit, align = layout_options.shard_limit(max_shard_size), layout_options.check_align(align)
    index, sources = deadline.bound(lambda: checkpoint.read(source), "reading headers")
    place = Target(inplace.own_place(source, index) if target is None else target, overwrite)
    layouts = _layouts(index, sources, limit, align)
    old, known = _manifest(source, index)
    path = beside(place.path, [place.path])
    if target is not None:
        inplace.refuse_hub([file for file in index.files if os.path.realpath(file) == place.path])
    if known is not None:
        check_target(path, overwrite=overwrite or _is_same(path, old))
    size = sum(made.size for made in layouts)
    with place.drafts([made.size for made in layouts]) as drafts:
        # Both passes tell of the same bytes but for the headers.
        with shown(progress, sum(row.nbytes for row in index.tensors.values()) + size) as advance:
            running: Any = {"threads": threads, "deadline": deadline, "advance": advance}
            digests = rewriting.copy(sources, index.tensors, drafts, layouts, **running)
            _compare(index, digests, old, known)
            sums = rewriting.read_back(drafts, layouts, digests, sums=known is not None, **running)
        total = sum(row.nbytes for made in layouts for row in made.tensors)
        held = [[row.name for row in made.tensors] for made in layouts]
        if known is not None and os.path.lexists(path):
            # What is said of files ends with the stroke; of the tensors it holds before and after.
            if _is_same(path, old):
                Manifest(_entries(index.tensors, digests)).write(path, overwrite=True)
            else:
                os.unlink(path)
        there = place.publish(drafts, held, total)
    notes = [*index.notes, *there.notes]
    if known is not None:
        notes.append(_write_manifest(path, there.files, index.tensors, digests, sums))
    took = time.perf_counter() - start
    return Aligned(there.files, len(index), size, took, tuple(dict.fromkeys(notes)))


class _AsStored(Entry):
    """A tensor that takes the bytes it takes now, whatever its dtype is."""

    stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.stored


def _entry(info: TensorInfo) -> Entry:
    entry = _AsStored(info.name, info.dtype, info.shape)
    entry.stored = info.nbytes
    return entry


def _layouts(
    index: Index, sources: Sequence[LocalFile], limit: int | None, align: int
) -> list[Layout]:
    rows = index.tensors.values()
    if limit is not None:
        parts = layout.split(map(_entry, rows), limit)
        return [layout.lay_out(entries, index.metadata, align) for entries in parts]
    files: list[list[Entry]] = [[] for _ in sources]
    for info in rows:
        files[info.pieces[0].source].append(_entry(info))
    # Each file keeps metadata of its own.
    strings = [safetensors.read(file)[1] for file in sources]
    return [layout.lay_out(*each, align) for each in zip(files, strings, strict=True)]


def _manifest(source: Path | Sequence[Path], index: Index) -> tuple[str, Manifest | None]:
    found = discovery.find(source)
    path = beside(source, index.files, found.name if found.placed is not None else None)
    return path, Manifest.read(path) if os.path.exists(path) else None


def _compare(index: Index, digests: Mapping[str, str], path: str, known: Manifest | None) -> None:
    if known is None:
        return
    for info in index.tensors.values():
        entry = known.tensors.get(info.name)
        if entry != TensorEntry(info.dtype.name, info.shape, digests[info.name]):
            raise errors.ChecksumError(
                "the tensor is not the one that the manifest beside it knows",
                file=index.files[info.pieces[0].source],
                tensor=info.name,
                expected=f"{None if entry is None else entry.digest} ({path})",
                found=digests[info.name],
            )


def _entries(
    tensors: Mapping[str, TensorInfo], digests: Mapping[str, str]
) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(info.dtype.name, info.shape, digests[name])
        for name, info in tensors.items()
    }


def _is_same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _write_manifest(
    path: str,
    files: Sequence[str],
    tensors: Mapping[str, TensorInfo],
    digests: Mapping[str, str],
    sums: Sequence[str],
) -> str:
    named = {
        os.path.basename(file): FileEntry(os.path.getsize(file), digest)
        for file, digest in zip(files, sums, strict=False)
        if sayable(os.path.basename(file))
    }
    try:
        Manifest(_entries(tensors, digests), named).write(path, overwrite=True)
    except errors.TargetError as error:
        error.message += "; the checkpoint itself is whole and in its place"
        error.args = (error.message,)
        raise
    return f"checksums written to {path}"
