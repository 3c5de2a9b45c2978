"""Runs a plan: memory, engines, progress, cancel, and the last look at the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from mfload import errors
from mfload.io import buffers
from mfload.io.buffers import ForkProtection
from mfload.io.engine import Engine, on_host
from mfload.io.pread import PreadReader
from mfload.io.route import Leg
from mfload.planning.blocks import Block, Observer, Reader, Segment, Slot, stored
from mfload.planning.planner import Plan
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

if TYPE_CHECKING:
    from mfload.cuda.staging import Staging

log = logging.getLogger("mfload")

Advance = Callable[[int], None]
"""Called in the loading thread with the bytes that came since the last call."""

# How often the loading thread looks up to notice Ctrl-C and the deadline, in seconds.
_TICK = 0.1
# How long a cancelled load waits for reads in hand; a hung disk may hold them for ever.
_GRACE = 5.0
# A load up to this many bytes is over before a second thread has started.
_INLINE = 1 << 20
_MAPPED_BLOCK = 8 << 20
_DIRECT, _NBYTES = attrgetter("direct"), attrgetter("nbytes")


def run(
    plan: Plan,
    memory: list[Any],
    sources: Sequence[LocalFile],
    route: Sequence[Leg | None],
    *,
    threads: int,
    deadline: Deadline,
    advance: Advance | None = None,
    observer: Observer | None = None,
    staging: Staging | None = None,
) -> tuple[str, ...]:
    """Fills the buffers: `memory` has a uint8 array or a `DeviceBuffer` for each.

    `observer` sees every wanted byte as the files hold it, those of maps too. `staging` is None if
    all lands on the host. Raises SourceError if bytes could not be had, or the files changed
    meanwhile; readers are joined first, and one that hangs in the kernel is left behind with its
    buffers. Returns what was decided on the way, such as a fall-back.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            log.warning(text)

    def open_reader(number: int) -> PreadReader:
        source = sources[number]
        leg = route[number]
        if leg is None or not leg.direct:
            return PreadReader(source)
        from mfload.io.direct import DirectReader

        return DirectReader(source, note)

    # Onto devices, a disk writes to slots alone.
    straight = staging is None and any(map(_DIRECT, filter(None, route)))
    own = list(filter(buffers.is_own, memory)) if straight else ()
    rounds: list[tuple[Sequence[Block], Callable[[int], Reader]]] = [(plan.blocks, open_reader)]
    if observer is not None:
        rounds.append((_mapped_blocks(plan), lambda _: _AlreadyThere()))
    for todo, opened in rounds:
        if not todo:
            continue
        nbytes = sum(map(_NBYTES, todo))
        small = nbytes <= _INLINE or (threads == 1 and advance is None)
        inline = small and deadline.seconds is None
        engine: Engine
        read = opened is open_reader
        if read and staging is not None and any(map(staging.methods.devices, todo)):
            from mfload.cuda.engine import Gds, onto_devices

            numbers = frozenset(n for n, leg in enumerate(route) if leg and leg.engine == "gds")
            gds = Gds(sources, numbers, note) if numbers else None
            count = 0 if inline else threads
            engine = onto_devices(
                todo, memory, staging, open_reader, threads=count, gds=gds, observer=observer
            )
        elif inline:
            with ForkProtection(own) if own else nullcontext():
                _fill(plan, todo, opened, memory, sources, observer)
            if advance is not None:
                advance(nbytes)
            continue
        else:
            engine = on_host(opened, memory, threads, observer, own)
        try:
            engine.submit(todo)
            _wait(plan, todo, engine, sources, deadline, advance)
        finally:
            engine.close(min(_GRACE, max(0.0, deadline.left())))
    deadline.bound(partial(_check, plan, sources), "looking at the files again")
    return tuple(notes)


def _fill(
    plan: Plan,
    todo: Sequence[Block],
    open_reader: Callable[[int], Reader],
    memory: list[Any],
    sources: Sequence[LocalFile],
    observer: Observer | None,
) -> None:
    """Fills blocks of host memory in this thread, where others would start too late to help."""
    slot, reader, source = buffers.WorkerSlot(), None, -1
    block = todo[0]
    try:
        for block in todo:
            if reader is None or block.source != source:
                if reader is not None:
                    reader.close()
                    reader = None
                reader, source = open_reader(block.source), block.source
            landed = reader.fill(block, memory, slot)
            if observer is not None:
                for offset, data in stored(block, memory, landed):
                    observer.saw(source, offset, data, bool)  # bool(): never stopped.
    except (OSError, errors.MfloadError) as error:
        _name(plan, block, error, sources)
    finally:
        if reader is not None:
            reader.close()


class _AlreadyThere:
    """The reader of maps, whose pages came when the file was mapped."""

    def fill(self, block: Block, memory: list[Any], slot: Slot) -> None:
        """Does nothing (see `blocks.Reader`)."""

    def close(self) -> None:
        """Does nothing."""


def _mapped_blocks(plan: Plan) -> list[Block]:
    """The parts of maps that were asked for, cut small enough to share out."""
    found: list[Block] = []
    for request, buffer, at in plan.places:
        source = plan.buffers[buffer].source
        if source is None:
            continue
        for start in range(at, at + request.nbytes, _MAPPED_BLOCK):
            nbytes = min(_MAPPED_BLOCK, at + request.nbytes - start)
            found.append(Block(source, start, nbytes, (Segment(start, nbytes, buffer, start),)))
    return found


def _check(plan: Plan, sources: Sequence[LocalFile]) -> None:
    seen: set[int] = set()
    for place in plan.places:
        for piece in place.request.info.pieces:
            seen.add(piece.source)
    for number in seen:
        sources[number].check()


def _wait(
    plan: Plan,
    todo: Sequence[Block],
    engine: Engine,
    sources: Sequence[LocalFile],
    deadline: Deadline,
    advance: Advance | None,
) -> None:
    left = len(todo)
    last = time.monotonic()
    while left:
        done = engine.complete(max(0.0, min(_TICK, deadline.left())))
        if done is not None and done.error is not None:
            _name(plan, done.block, done.error, sources)
        if deadline.left() <= 0:
            waiting = sources[todo[-left].source].path
            raise deadline.error(f"reading; {time.monotonic() - last:.1f} s without data", waiting)
        if done is not None:
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
