"""Runs a plan: memory, engines, progress, cancel, and the last look at the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mfload import errors
from mfload.io import buffers, probes
from mfload.io.blocks import Block, Reader
from mfload.io.deadline import Deadline
from mfload.io.direct import DirectReader
from mfload.io.engine import ThreadEngine
from mfload.io.mapped import map_file
from mfload.io.pread import PreadReader
from mfload.io.route import Leg
from mfload.io.source import LocalFile
from mfload.planning import BufferSpec, Plan

log = logging.getLogger("mfload")

Advance = Callable[[int], None]
"""Called in the loading thread with the bytes that came since the last call."""

# How often the loading thread looks up to notice Ctrl-C and the deadline, in seconds.
_TICK = 0.1
# How long a cancelled load waits for reads in hand; a hung disk may hold them for ever.
_GRACE = 5.0
# A load up to this many bytes is over before a second thread has started.
_INLINE = 1 << 20


def check_room(plan: Plan, overhead: int) -> None:
    """Refuses a load that would have the kernel kill the process.

    Args:
        plan: What is to be held.
        overhead: Bytes needed beside the buffers.

    Raises:
        MemoryLimitError: It does not fit in what the machine or a control group leaves.
    """
    needed = plan.buffer_bytes + overhead
    if needed < 64 << 20:
        return
    room = probes.memory_room()
    if room is not None and needed > room[0]:
        raise errors.MemoryLimitError(
            f"the load does not fit in the {room[1]}",
            expected=f"{needed} bytes",
            found=f"{room[0]} bytes free",
        )


def allocate(plan: Plan, sources: Sequence[LocalFile], lent: Mapping[int, Any]) -> list[Any]:
    """The plan's buffers as uint8 arrays: memory of ours, and maps of the files.

    Args:
        plan: The plan.
        sources: The files, by number.
        lent: Memory that is there already, by the number of its buffer.

    Raises:
        MemoryLimitError: The system refused memory.
        SourceChangedError: A file to be mapped has shrunk.
    """
    return [
        lent[number] if number in lent else _buffer(plan, number, spec, sources)
        for number, spec in enumerate(plan.buffers)
    ]


def _buffer(plan: Plan, number: int, spec: BufferSpec, sources: Sequence[LocalFile]) -> Any:
    if spec.source is None:
        return buffers.allocate(spec.nbytes)
    ranges: list[tuple[int, int]] = []
    for place in plan.places:
        if place.buffer != number or not place.need.nbytes:
            continue
        if ranges and sum(ranges[-1]) == place.at:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + place.need.nbytes
        else:
            ranges.append((place.at, place.need.nbytes))
    return map_file(sources[spec.source], ranges)


def run(
    plan: Plan,
    memory: list[Any],
    sources: Sequence[LocalFile],
    route: Sequence[Leg | None],
    *,
    threads: int,
    deadline: Deadline,
    advance: Advance | None = None,
) -> tuple[str, ...]:
    """Fills the buffers.

    Args:
        plan: The plan.
        memory: A uint8 array for each of its buffers.
        sources: The files, by number.
        route: The leg of each, None for those the plan does not read.
        threads: Readers at once.
        deadline: When to give up.
        advance: Told of progress.

    Returns:
        What was decided on the way, such as a fall-back.

    Raises:
        SourceError: Bytes could not be had, or the files changed meanwhile. Readers are
            joined first; one that hangs in the kernel is left behind with its buffers.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            log.warning(text)

    def open_reader(number: int) -> Reader:
        source = sources[number]
        leg = route[number]
        if leg is not None and leg.engine == "direct":
            return DirectReader(source, note)
        return PreadReader(source)

    engine = ThreadEngine(open_reader, memory, threads)
    alone = threads == 1 and advance is None
    if deadline.seconds is None and (alone or plan.read_bytes <= _INLINE):
        threads = 0
    try:
        engine.submit(plan.blocks, start=threads > 0)
        if threads == 0:
            engine.run_here()
        _wait(plan, engine, sources, deadline, advance)
    finally:
        engine.close(min(_GRACE, max(0.0, deadline.left())))
    deadline.bound(lambda: _check(plan, sources), "looking at the files again")
    return tuple(notes)


def _check(plan: Plan, sources: Sequence[LocalFile]) -> None:
    for number in {piece.source for place in plan.places for piece in place.need.info.pieces}:
        sources[number].check()


def _wait(
    plan: Plan,
    engine: ThreadEngine,
    sources: Sequence[LocalFile],
    deadline: Deadline,
    advance: Advance | None,
) -> None:
    left = len(plan.blocks)
    last = time.monotonic()
    while left:
        done = engine.complete(max(0.0, min(_TICK, deadline.left())))
        if deadline.left() <= 0:
            waiting = sources[plan.blocks[-left].source].path
            raise deadline.error(f"reading; {time.monotonic() - last:.1f} s without data", waiting)
        if done is None:
            continue
        if done.error is not None:
            _name(plan, done.block, done.error, sources)
        left -= done.blocks
        last = time.monotonic()
        if advance is not None:
            advance(done.nbytes)


def _name(
    plan: Plan, block: Block | None, error: BaseException, sources: Sequence[LocalFile]
) -> NoReturn:
    """Raises the error of a reader with the file and the tensor that it concerns."""
    if block is None or not isinstance(error, OSError | errors.MfloadError):
        raise error
    path, tensor = sources[block.source].path, _first_tensor(plan, block)
    if not isinstance(error, errors.MfloadError):
        mapped = errors.from_os(error, path, "read")
        mapped.tensor = tensor
        raise mapped from error
    error.file, error.tensor = error.file or path, error.tensor or tensor
    raise error


def _first_tensor(plan: Plan, block: Block) -> str | None:
    return next(iter(plan.tensors_of(block)), None)
