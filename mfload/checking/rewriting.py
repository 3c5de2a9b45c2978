"""Tensors from old files to new ones: streamed, hashed on the way, and read back.

Parts are cut where the new files' blocks end, so that writes go to disk past the page cache. What
is held is a part a reader, however large the checkpoint is, and a table of the parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.checking import streaming
from mfload.checking.checksums import Observer
from mfload.checking.streaming import Range
from mfload.formats import safetensors
from mfload.index import TensorInfo
from mfload.runtime import Deadline
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.layout import Layout
from mfload.sources.local import LocalFile

Advance = Callable[[int], None] | None


def copy(
    sources: Sequence[LocalFile],
    tensors: Mapping[str, TensorInfo],
    drafts: Sequence[Draft],
    layouts: Sequence[Layout],
    *,
    threads: int | None,
    deadline: Deadline,
    advance: Advance,
) -> dict[str, str]:
    """Writes files with tensors of others.

    Args:
        sources: The old files, by number.
        tensors: Their tensors by name: all that the layouts have.
        drafts: The new files.
        layouts: What is to lie where in each.
        threads: Readers at once; chosen where None.
        deadline: When to give up.
        advance: Told of the bytes that came.

    Returns:
        The digest of each tensor, of the bytes that were written.

    Raises:
        SourceError: Bytes could not be had, or a source changed.
        WriteError: The disk is full, or failed.
    """
    places: dict[Range, tuple[Draft, int]] = {}
    for draft, made in zip(drafts, layouts, strict=True):
        draft.write(0, np.frombuffer(made.header, np.uint8))
        places.update((part, (draft, at)) for part, at in _parts(made, tensors))
    copying = _Copying(Observer(tensors.values()), places)
    streaming.look(
        sources,
        sorted(places),
        copying,
        threads=threads,
        deadline=deadline,
        advance=advance,
        block=None,
    )
    for draft in drafts:
        deadline.bound(draft.sync, "writing to the disk", draft.shown)
    return {name: copying.hashes.tensor(name) for name in tensors}


def read_back(
    drafts: Sequence[Draft],
    layouts: Sequence[Layout],
    digests: Mapping[str, str],
    *,
    sums: bool,
    threads: int | None,
    deadline: Deadline,
    advance: Advance,
) -> list[str]:
    """Reads what was written, past the page cache where that can be, and compares.

    Args:
        drafts: The new files, synced.
        layouts: What should lie where.
        digests: Of the tensors.
        sums: Whether the SHA-256 of each file is wanted.
        threads: Readers at once; chosen where None.
        deadline: When to give up.
        advance: Told of the bytes that came.

    Returns:
        The SHA-256 of each file; none where they were not wanted.

    Raises:
        WriteError: The disk gave back other bytes than it was given.
    """
    files = [LocalFile(draft.path) for draft in drafts]
    rows: list[TensorInfo] = []
    for number, (file, draft, made) in enumerate(zip(files, drafts, layouts, strict=True)):
        _forget(draft)
        found, _ = safetensors.read(file, number)
        if [row[:3] for row in found] != [row[:3] for row in made.tensors]:
            raise errors.WriteError("the header read back is another one", file=draft.shown)
        rows += found
    observer = Observer(rows, {n: file.size for n, file in enumerate(files)} if sums else None)
    streaming.look(
        files,
        [Range(number, 0, file.size) for number, file in enumerate(files)],
        observer,
        threads=threads,
        engine="direct",
        lanes=sums,
        deadline=deadline,
        advance=advance,
    )
    for row in rows:
        if observer.tensor(row.name) != digests[row.name]:
            raise errors.WriteError(
                "the disk gave back other bytes than were written",
                file=drafts[row.pieces[0].source].shown,
                tensor=row.name,
                expected=digests[row.name],
                found=observer.tensor(row.name),
            )
    return [observer.file(number) for number in range(len(files))] if sums else []


class _Copying:
    """Writes what it is shown, and hashes it."""

    def __init__(self, hashes: Observer, places: Mapping[Range, tuple[Draft, int]]) -> None:
        self.hashes = hashes
        self._places = places

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Takes the next part (see `io.blocks.Witness`)."""
        draft, at = self._places[Range(source, offset, data.size)]
        self.hashes.saw(source, offset, data, stopped)
        draft.write(at, data)


def _parts(made: Layout, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[Range, int]]:
    """Ranges of the old files, and where each goes: tensors that stay neighbours go together."""
    run = [-1, 0, 0, 0]  # Source, offset there, bytes, offset here.
    for row in made.tensors:
        old, at = tensors[row.name].pieces[0], row.pieces[0].offset
        # They follow each other in the new file anyway.
        if (old.source, old.offset) == (run[0], run[1] + run[2]):
            run[2] += old.nbytes
            continue
        yield from _cut(run)
        run = [old.source, old.offset, old.nbytes, at]
    yield from _cut(run)


def _cut(run: list[int]) -> Iterator[tuple[Range, int]]:
    source, offset, nbytes, at = run
    end = at + nbytes
    while at < end:
        stop = min(end, (at // BLOCK + 1) * BLOCK)
        yield Range(source, offset, stop - at), at
        offset, at = offset + stop - at, stop


def _forget(draft: Draft) -> None:
    """Has the kernel drop what it holds of a file, so that it is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(draft.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
