"""A save from arrays to files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mfload import errors, sources
from mfload.dtypes import DType
from mfload.errors import counted
from mfload.options import Options
from mfload.progress import Progress, shown
from mfload.report import Printable, human
from mfload.runtime import Deadline, cores, gc_paused
from mfload.saving import layout
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.export import TensorToSave, export
from mfload.saving.layout import FileLayout
from mfload.saving.publishing import SaveTarget, some_of
from mfload.saving.writers import Write, Writers

# Writes past the page cache wait for the disk, not for a core.
_THREADS = 4
# A save up to this many bytes is over before a thread has started.
_INLINE = 1 << 20
# A small save makes all its objects in a moment; a long one must not hold up others' garbage.
_SOON = 256 << 20
_SHOWN = 8

Prepare = Callable[[], "tuple[Mapping[str, Any], Mapping[str, str] | None, Sealing | None]"]
Keep = Callable[[Sequence[FileLayout], Collection[str]], Sequence[FileLayout]]
"""Copies or holds the arrays of layouts, but for some names; returns layouts of what was kept."""


@dataclass(frozen=True, slots=True)
class Saved(Printable):
    """What `mfload.save` did; prints well.

    Attributes:
        files: Paths of the files of the checkpoint; the index last, if there is one.
        tensors: How many were written.
        bytes: Of all files, headers and their padding counted.
        seconds: From the call to the last name on disk.
        notes: What was decided without being asked for, and which tensors shared memory.
        blocked: Seconds until the call of a save in the background returned; None for other saves.
        copied: Bytes of arrays that were copied in memory, or from devices, before it returned.
        held: Bytes of arrays that can't change, of which a reference was kept instead.
    """

    DERIVED = ("gib_per_s",)

    files: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    blocked: float | None = None
    copied: int = 0
    held: int = 0

    @property
    def gib_per_s(self) -> float:
        """GiB a second, from the call to the last name on disk."""
        return self.bytes / self.seconds / 2**30 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, by name; the last three for a save in the background alone."""
        data = Printable.as_dict(self)
        if self.blocked is None:
            del data["blocked"], data["copied"], data["held"]
        return data

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        rows = [
            ("saved", f"{counted(self.tensors, 'tensor')}, {human(self.bytes)}"),
            ("time", f"{self.seconds:.4f} s, {self.gib_per_s:.2f} GiB/s, on disk"),
        ]
        if self.blocked is not None:
            kept = f"{human(self.copied)} copied, {human(self.held)} held"
            rows.append(("blocked", f"{self.blocked:.4f} s: {kept}"))
        rows += [("file", file) for file in self.files[:_SHOWN]]
        if len(self.files) > _SHOWN:
            rows.append(("file", f"… and {len(self.files) - _SHOWN} more"))
        return rows + [("note", note) for note in self.notes]


class Sealing(Protocol):
    """Makes the manifest of a save (see `checking.sealing`)."""

    def write(
        self, number: int, draft: Draft, offset: int, pieces: Sequence[Any], *tensor: Any
    ) -> int:
        """Writes to a draft, as `Draft.write`, and remembers the hash."""
        ...

    def manifest(self, drafts: Sequence[Draft], layouts: Sequence[FileLayout]) -> bytes | None:
        """Reads synced drafts back; returns their manifest, raises WriteError if they differ."""
        ...


def open_target(
    path: str | os.PathLike[str],
    overwrite: bool,
    stem: str | None = None,
    *,
    sealed: bool,
    options: Options | None = None,
) -> SaveTarget:
    """Where a checkpoint is to be written: on a disk, or in an object store."""
    if sources.is_store(path):
        from mfload.saving.uploads import UploadedTarget

        return UploadedTarget(path, overwrite, stem, sealed=sealed, options=options)
    return SaveTarget(path, overwrite, stem, sealed=sealed)


class SaveWishes(NamedTuple):
    """How arrays are saved: arguments of `mfload.save`, not checked yet."""

    path: str | os.PathLike[str]
    align: int | str
    max_shard_size: int | str | None
    overwrite: bool
    progress: Progress
    timeout: float | None
    options: Options | None = None


def begin(prepare: Prepare, wishes: SaveWishes, keep: Keep | None = None) -> Callable[[], Saved]:
    """The first part of `mfload.save`; the function that it returns writes, in any thread.

    `prepare` checks arguments and returns arrays, metadata, and a seal if a manifest is wanted.
    With `keep`, the arrays may change as soon as this returns.
    """
    start, timeout = time.perf_counter(), wishes.timeout
    deadline = None if timeout is None else Deadline(timeout)
    arrays, metadata, seal = prepare()
    limit, align = layout.shard_limit(wishes.max_shard_size), layout.checked_align(wishes.align)
    sealed = seal is not None
    target = open_target(wishes.path, wishes.overwrite, sealed=sealed, options=wishes.options)
    with gc_paused():
        given = export(arrays)
        layouts = [layout.lay_out(each, metadata, align) for each in layout.split(given, limit)]
        notes = widened(given) + _shared(given)
    if keep is not None:
        target.place.names(len(layouts))  # Raises if they have none.
        layouts = keep(layouts, ())
    # Not a closure, which the frames of an error would keep alive, with the arrays.
    return partial(_write, start, target, layouts, notes, wishes.progress, deadline, seal)


def _write(
    start: float,
    target: SaveTarget,
    layouts: Sequence[FileLayout],
    notes: Sequence[str],
    progress: Progress,
    deadline: Deadline | None,
    seal: Sealing | None,
) -> Saved:
    size, count = sum(made.size for made in layouts), sum(len(made.entries) for made in layouts)
    quiet = gc_paused() if size <= _SOON else nullcontext()
    with target.drafts(layouts, deadline=deadline) as drafts, quiet:
        with shown(progress, size) as advance:
            writers = Writers(threads_for(size), advance)
            try:
                for number, (draft, made) in enumerate(zip(drafts, layouts, strict=True)):
                    way = draft.write if seal is None else partial(seal.write, number, draft)
                    for write in _writes(way, made):
                        writers.put(write)
                        del write
                    # One by one: a draft that is synced has one descriptor instead of two.
                    writers.drain()
                    draft.sync()
            finally:
                writers.close()
        sums = None if seal is None else seal.manifest(drafts, layouts)
        files, more = target.publish(drafts, layouts, sums)
    took = time.perf_counter() - start
    return Saved(tuple(files), count, size, took, (*notes, *more))


def threads_for(size: int) -> int:
    """Threads that write so many bytes at best, or copy them; none if that is soon over."""
    if size <= _INLINE:
        return 0
    # Each needs a slot and a start: below two blocks a thread they are not worth that.
    most = max(_THREADS, min(cores(), 2 * _THREADS))
    return max(1, min(most, size // (2 * BLOCK)))


def _writes(way: Callable[..., int], made: FileLayout) -> Iterator[Write]:
    """Cuts a file into blocks, each fetched when its turn comes, and written the way given.

    Bytes are fetched in the thread that saves: frameworks order their work by thread. Whatever
    was fetched is released once its last block is written.
    """
    data: Any = np.frombuffer(made.header, np.uint8)
    start = filled = 0
    pieces: list[Any] = []
    first: str | None = None  # The tensor whose bytes come first in the block.
    for tensor in (None, *made.entries):
        if tensor is not None:
            first = first or tensor.name
            data = fetched(tensor)
        at, nbytes = 0, data.nbytes
        while at < nbytes:
            stop = min(nbytes, at + BLOCK - filled)
            pieces.append(data if stop - at == nbytes else data[at:stop])
            filled += stop - at
            at = stop
            if filled == BLOCK:
                yield partial(way, start, pieces, first)
                start, filled, pieces = start + BLOCK, 0, []
                first = tensor.name if tensor is not None and at < nbytes else None
        data = None
    if pieces:
        yield partial(way, start, pieces, first)


def fetched(tensor: TensorToSave) -> Any:
    """The bytes of a tensor, as many as it said."""
    data = (tensor.cut or tensor.fetch)()
    if data.nbytes != tensor.nbytes:
        raise errors.UnsupportedArrayError(
            "the array gave other bytes than it said it would",
            tensor=tensor.name,
            expected=errors.amount(tensor.nbytes),
            found=errors.amount(data.nbytes),
        )
    return data


def widened(given: Sequence[TensorToSave]) -> list[str]:
    """Says which tensors are of a dtype that safetensors lacks."""
    kinds: dict[DType, list[str]] = {}
    for each in given:
        if each.given is not None:
            kinds.setdefault(each.given, []).append(each.name)
    return [
        f"{kind} as {kind.wide}: safetensors has no {kind}; dtype={{name: {kind.name!r}}}, or a "
        f"target of that dtype, brings it back: {some_of(names)}"
        for kind, names in kinds.items()
    ]


def _shared(given: Sequence[TensorToSave]) -> list[str]:
    """Says which tensors lie in each other's memory: each is written in full."""
    owners = {each.owner for each in given}
    if len(owners) == len(given) and None not in owners:
        return []
    spans = [(each.span, each.name) for each in given if each.nbytes]
    groups: list[list[str]] = []
    end = 0
    for first, past, name in sorted((*span, name) for span, name in spans if span is not None):
        if first < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, past)
    return [
        f"lie in the same memory, each is written in full: {some_of(names)}"
        for names in groups
        if len(names) > 1
    ]
