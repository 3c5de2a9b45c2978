"""A save by several processes of a mesh: each writes what it holds, and one publishes.

The first process makes the drafts, under hidden names of a file system that all share. Every part
of a global array is written by one process, at its place in the drafts; what each process made for
itself is written by the first. When all have written and synced, the first gives the drafts their
names. An error in one process is raised in all, and the drafts go.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mfload import errors
from mfload.dtypes import NARROW
from mfload.mesh import agree, base
from mfload.progress import Progress, shown
from mfload.runtime import Deadline
from mfload.saving import layout
from mfload.saving.descriptors import closed, opened
from mfload.saving.drafts import BLOCK, Draft, fsync, write_all
from mfload.saving.export import TensorToSave, export, unboxed
from mfload.saving.layout import FileLayout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import Keep, Prepare, Saved, SaveWishes, Sealing, fetched, widened

_LOOK = 0.25  # Seconds between looks at the other processes, while writing.
_ARRIVAL = 600.0  # Seconds until the other processes must have made the call.
_Range = tuple[int, Any]  # An offset in a draft, and the bytes that lie there.
_ABSENT = "each process must make the call; to save from one, give it jax.device_get(arrays)"


def _is_global(array: Any) -> bool:
    """Whether several processes hold an array, whole or in parts."""
    return not getattr(array, "is_fully_addressable", True)


def begin(
    prepare: Prepare, wishes: SaveWishes, ranks: Sequence[int], keep: Keep | None = None
) -> Callable[[], Saved]:
    """The first part of a save of global arrays of JAX (see `save.begin`), in all processes.

    `ranks` are the processes. An error of `prepare` is raised in all of them. The first process
    makes the manifest. Loads and saves of several processes that are called later wait for the end
    of the function that this returns, also if a thread runs it.

    Raises:
        ProcessError: Another process failed or is gone, or saves something else.
        LoadTimeoutError: The others did not come in time.
    """
    start = time.perf_counter()
    path, timeout, overwrite = wishes.path, wishes.timeout, wishes.overwrite
    deadline, wrong = Deadline(None), None
    try:
        deadline = Deadline(timeout)
    except errors.UsageError as error:
        wrong = error
    backend: Any = base.backend("jax")
    backend.arrival, backend.absent = _ARRIVAL, _ABSENT
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(agree.joined(backend, ranks, deadline))
        if wrong is not None:
            raise wrong
        first = group.rank == group.ranks[0]
        arrays, metadata, seal = prepare()
        held = {name: unboxed(each) for name, each in arrays.items()}
        spread = {n: each for n, each in held.items() if _is_global(each)}
        local = export({n: each for n, each in held.items() if n not in spread})
        rows = {each.name: each for each in local}
        given = [_global(n, each) if n in spread else rows[n] for n, each in held.items()]
        limit, align = layout.shard_limit(wishes.max_shard_size), layout.checked_align(wishes.align)
        layouts = [layout.lay_out(each, metadata, align) for each in layout.split(given, limit)]
        lines = [f"{os.fspath(path)!r}, overwrite={overwrite}, checksums={seal}"]
        lines += [f"{n}: {each.shape} {each.dtype}" for n, each in spread.items()]
        # Global arrays are one array; what each process made for itself may differ.
        lines += [f"{each.name}: values {_digest(fetched(each))}" for each in local]
        lines += [hashlib.sha256(made.header).hexdigest() for made in layouts]
        group.agree("arrays to save and arguments", lines)
        prefix, target, drafts = "", None, list[Draft]()
        if first:
            target, key = SaveTarget(path, overwrite, sealed=seal is not None), secrets.token_hex(8)
            drafts = stack.enter_context(target.drafts(layouts, key, deadline if timeout else None))
            for draft in drafts:
                draft.lasting = False
            prefix = drafts[0].hidden.rpartition("-")[0]
        prefix = group.gather("making the files", prefix)[group.ranks[0]]
        work: list[Iterable[_Range]] = [_ranges(made, spread, first) for made in layouts]
        if keep is not None:
            # Parts of global arrays can't change, and are held by `work`.
            layouts = keep(layouts, spread if first else held)
            work = [[*_ranges(made, spread, first)] for made in layouts]
            group.thread = 0  # Another thread goes on: this one may begin another group.
        size = sum(made.size for made in layouts)
        saved = Saved((), len(given), size, 0.0, tuple(widened(given)))
        write = partial(_write_all, group, path, prefix, work, size, wishes.progress)
        publish = None
        if target is not None:
            publish = partial(_publish, target, drafts, layouts, saved, start, seal)
        return partial(_finish, stack.pop_all(), group, saved, write, publish)


def _finish(
    stack: contextlib.ExitStack,
    group: agree.ProcessGroup,
    saved: Saved,
    write: Callable[[], None],
    publish: Callable[[], Saved] | None,
) -> Saved:
    with stack:
        write()
        done = None
        if publish is not None:
            saved = publish()
            done = saved.files, saved.seconds, saved.notes
        said = group.gather("publishing", json.dumps(done))[group.ranks[0]]
    files, took, notes = json.loads(said)
    return replace(saved, files=tuple(files), seconds=took, notes=tuple(notes))


def _publish(
    target: SaveTarget,
    drafts: Sequence[Draft],
    layouts: Sequence[FileLayout],
    saved: Saved,
    start: float,
    seal: Sealing | None,
) -> Saved:
    for draft in drafts:
        draft.count(draft.size)
        draft.sync()
    sums = None if seal is None else seal.manifest(drafts, layouts)
    files, more = target.publish(drafts, layouts, sums)
    took, notes = time.perf_counter() - start, (*saved.notes, *more)
    return replace(saved, files=tuple(files), seconds=took, notes=notes)


def _write_all(
    group: agree.ProcessGroup,
    path: str | os.PathLike[str],
    prefix: str,
    work: Sequence[Iterable[_Range]],
    size: int,
    progress: Progress,
) -> None:
    """Writes this process's part of all drafts; returns when all processes have written."""
    written = 0
    with shown(progress, size) as advance:
        for number, ranges in enumerate(work, 1):
            written += _write(f"{prefix}-{number:05}", ranges, group, advance)
        counts = group.gather("writing", str(written))
        if advance is not None:
            advance(size - written)  # What the others wrote.
    if sum(map(int, counts.values())) != size:
        raise errors.WriteError(
            "the processes did not write the whole of the files",
            file=os.fspath(path),
            expected=errors.amount(size),
            found=str(counts),
        )


def _digest(data: Any) -> str:
    made = hashlib.blake2b(digest_size=16)
    for at in range(0, data.size, BLOCK):
        made.update(data[at : at + BLOCK])
    return made.hexdigest()


def _global(name: str, array: Any) -> TensorToSave:
    from mfload.mesh import jax_pieces

    row = jax_pieces.dtype_of(name, array)
    nbytes = row.size_of(array.shape) or 0
    given = NARROW.get(array.dtype.name)
    return TensorToSave(name, row, array.shape, nbytes, None, lambda: None, given=given)


def _write(hidden: str, ranges: Iterable[_Range], group: agree.ProcessGroup, advance: Any) -> int:
    """Writes this process's part of a draft; returns the number of bytes."""
    written, looked = 0, time.monotonic()
    action = "open the file that another process made (all must share the file system)"
    with errors.AsTarget(hidden, action):
        file = opened(hidden, os.O_RDWR)
    try:
        with errors.AsTarget(hidden, "write"):
            for offset, data in ranges:
                for at in range(0, data.size, BLOCK):
                    write_all(file.fileno(), [data[at : at + BLOCK]], offset + at)
                    if time.monotonic() > looked + _LOOK:
                        group.check("writing")
                        looked = time.monotonic()
                written += data.size
                if advance is not None:
                    advance(data.size)
            fsync(file.fileno())
    finally:
        closed(file)
    return written


def _ranges(made: FileLayout, spread: Mapping[str, Any], first: bool) -> Iterator[_Range]:
    """Offsets in a draft, and the bytes that this process writes there."""
    from mfload.mesh import jax_pieces

    if first:
        yield 0, np.frombuffer(made.header, np.uint8)
    at = len(made.header)
    for row in made.entries:
        if row.name in spread and row.nbytes:
            for box, part in jax_pieces.pieces(spread[row.name]):
                (exported,) = export({row.name: part})
                yield from _runs(row, box, fetched(exported), at)
        elif first and row.nbytes and row.name not in spread:
            yield at, fetched(row)
        at += row.nbytes


def _runs(
    row: TensorToSave, box: Sequence[tuple[int, int]], data: Any, at: int
) -> Iterator[_Range]:
    """A box of a tensor that begins at `at`, as ranges of the file."""
    shape, item = row.shape, row.nbytes // math.prod(row.shape)
    if not data.size:
        return
    # Dims from `whole` on are the tensor's own: they, and the dim before, lie together.
    whole = len(shape)
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    outer = max(0, whole - 1)
    strides = [math.prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    nbytes = data.size // math.prod(high - low for low, high in box[:outer])
    ranges = [range(*each) for each in box[:outer]] + [[low] for low, _ in box[outer:]]
    for number, place in enumerate(itertools.product(*ranges)):
        offset = at + sum(map(operator.mul, place, strides))
        yield offset, data[number * nbytes :][:nbytes]
