"""A save from arrays to files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import probes
from mfload.progress import Progress, shown
from mfload.report import Printable, human
from mfload.runtime import gc_paused
from mfload.saving import layout
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.export import TensorToSave, export
from mfload.saving.layout import Layout
from mfload.saving.publishing import SaveTarget
from mfload.saving.writers import BlockWrite, Writers

# Writes past the page cache wait for the disk, not for a core.
_THREADS = 4
# A save up to this many bytes is over before a thread has started.
_INLINE = 1 << 20
_SOON = 256 << 20
_BLOCKS = 2
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Saved(Printable):
    """What `mfload.save` did; prints well.

    Attributes:
        files: Paths of what lies there now; the index last where there is one.
        tensors: How many were written.
        bytes: Of all files, headers and their padding counted.
        seconds: From the call to the last name on disk.
        notes: What was decided without being asked for, and which tensors shared memory.
    """

    files: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def gib_per_s(self) -> float:
        """GiB a second, from the call to the last name on disk."""
        return self.bytes / self.seconds / 2**30 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self) | {"gib_per_s": self.gib_per_s}

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        rows = [
            ("saved", f"{self.tensors} tensors, {human(self.bytes)}"),
            ("time", f"{self.seconds:.4f} s, {self.gib_per_s:.2f} GiB/s, on disk"),
        ]
        rows += [("file", file) for file in self.files[:_SHOWN]]
        if len(self.files) > _SHOWN:
            rows.append(("file", f"… and {len(self.files) - _SHOWN} more"))
        return rows + [("note", note) for note in self.notes]


def save(
    arrays: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: Progress = False,
) -> Saved:
    """See `mfload.save`."""
    start = time.perf_counter()
    limit = layout.shard_limit(max_shard_size)
    begin = layout.checked_align(align)
    target = SaveTarget(path, overwrite)
    with gc_paused():
        given = export(arrays)
        wanted = {each.name: each for each in given}
        files = layout.split(given, limit)
        layouts = [layout.lay_out(entries, metadata, begin) for entries in files]
        notes = _shared(given)
    del given
    size = sum(made.size for made in layouts)
    count = len(wanted)
    # A small save makes all its objects in a moment; a long one must not hold up others' garbage.
    quiet = gc_paused() if size <= _SOON else nullcontext()
    with quiet, target.drafts([made.size for made in layouts]) as drafts:
        with shown(progress, size) as advance:
            writers = Writers(0 if size <= _INLINE else _threads(size), advance)
            try:
                for draft, made in zip(drafts, layouts, strict=True):
                    for job in _jobs(draft, made, wanted):
                        writers.put(job)
                        del job
                    # One by one: a draft that is synced has one descriptor instead of two.
                    writers.drain()
                    draft.sync()
            finally:
                writers.close()
        total = sum(nbytes for made in layouts for *_, nbytes in made.rows)
        held = [[name for name, *_ in made.rows] for made in layouts]
        published = target.publish(drafts, held, total)
    took = time.perf_counter() - start
    return Saved(published.files, count, size, took, (*notes, *published.notes))


def _threads(size: int) -> int:
    # Each needs a slot and a start: below some blocks a thread they are not worth that.
    most = max(_THREADS, min(probes.cores(), 2 * _THREADS))
    return max(1, min(most, size // (_BLOCKS * BLOCK)))


def _jobs(draft: Draft, made: Layout, wanted: dict[str, TensorToSave]) -> Iterator[BlockWrite]:
    """Cuts a file into blocks, each fetched when its turn comes.

    Bytes are fetched in the thread that saves: frameworks order their work by thread. Whatever
    was fetched is let go of once its last block is written.
    """
    header = np.frombuffer(made.header, np.uint8)
    start = len(header) // BLOCK * BLOCK
    for at in range(0, start, BLOCK):
        yield BlockWrite(draft, at, [header[at : at + BLOCK]], BLOCK, None)
    pieces: list[Any] = [header[start:]]
    filled = len(header) - start
    first: str | None = None
    for name, _, _, nbytes in made.rows:
        data = wanted.pop(name).fetch()
        if data.nbytes != nbytes:
            raise errors.UnsupportedArrayError(
                "the array gave other bytes than it said it would",
                tensor=name,
                expected=f"{nbytes} bytes",
                found=f"{data.nbytes} bytes",
            )
        first = first or name
        if filled + nbytes < BLOCK:
            pieces.append(data)
            filled += nbytes
            continue
        at = 0
        while at < nbytes:
            first = first or name
            stop = min(nbytes, at + BLOCK - filled)
            pieces.append(data if stop - at == nbytes else data[at:stop])
            filled += stop - at
            at = stop
            if filled == BLOCK:
                yield BlockWrite(draft, start, pieces, filled, first)
                start, filled, pieces, first = start + BLOCK, 0, [], None
        del data
    if pieces:
        yield BlockWrite(draft, start, pieces, filled, first)


def _shared(given: Sequence[TensorToSave]) -> list[str]:
    """Says which tensors lie in each other's memory: each is written in full."""
    owners = {each.owner for each in given}
    if len(owners) == len(given) and None not in owners:
        return []
    named = [(each.span, each.name) for each in given if each.nbytes]
    groups: list[list[str]] = []
    end = 0
    for first, past, name in sorted((*span, name) for span, name in named if span is not None):
        if first < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, past)
    return [
        f"lie in the same memory, each is written in full: {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for names in groups
        if len(names) > 1
    ]
