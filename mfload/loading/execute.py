"""Runs a plan: memory, engines, progress, cancel, and the last look at the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from mfload import errors
from mfload.cuda import past, staged
from mfload.cuda.copies import Ways
from mfload.cuda.paths import Staging
from mfload.io import advise, buffers
from mfload.io.direct import DirectReader
from mfload.io.engine import Engine, on_host
from mfload.io.pread import PreadReader
from mfload.io.route import Leg
from mfload.planning.blocks import Block, Observer, Segment, Slot
from mfload.planning.planner import Plan
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

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
    ways: Ways | None = None,
    staging: Staging | None = None,
) -> tuple[str, ...]:
    """Fills the buffers.

    Args:
        plan: The plan.
        memory: A uint8 array for each of its buffers, a `DeviceBuffer` for those on devices.
        sources: The files, by number.
        route: The leg of each, None for those the plan does not read.
        threads: Readers at once.
        deadline: When to give up.
        advance: Told of progress.
        observer: Sees every wanted byte as the files hold it, those of maps too.
        ways: How segments get to their places on devices.
        staging: The slots by way of which they do; None where all lands on the host.

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

    def open_reader(number: int) -> PreadReader:
        source = sources[number]
        leg = route[number]
        return DirectReader(source, note) if leg is not None and leg.direct else PreadReader(source)

    def engine(blocks: Sequence[Block], count: int) -> Engine:
        if staging is None or ways is None or not any(map(ways.devices, blocks)):
            return on_host(open_reader, memory, count, observer)
        numbers = frozenset(n for n, leg in enumerate(route) if leg and leg.engine == "gds")
        rest = sum(b.source in numbers and not ways.stay_on_devices(b) for b in blocks)
        if rest:
            note(f"{rest} blocks go by way of the host: devices can't put them in place")
        direct = past.direct(sources, numbers, note) if numbers else None
        return staged.engine(
            blocks, memory, ways, staging, open_reader,
            threads=count, direct=direct, observer=observer,
        )  # fmt: skip

    # Onto devices, a disk writes to slots alone.
    straight = staging is None and any(leg is not None and leg.direct for leg in route)
    own = [array for array in memory if straight and buffers.is_own(array)]
    work = _Work(plan, sources, threads, deadline, advance)
    with advise.not_forked(own):
        work.run(plan.blocks, engine)
    if observer is not None:
        mapped = _mapped_blocks(plan)
        work.run(mapped, lambda _, n: on_host(lambda _: _AlreadyThere(), memory, n, observer))
    deadline.bound(lambda: _check(plan, sources), "looking at the files again")
    return tuple(notes)


class _Work(NamedTuple):
    """What each round of blocks of one load shares."""

    plan: Plan
    sources: Sequence[LocalFile]
    threads: int
    deadline: Deadline
    advance: Advance | None

    def run(
        self, todo: Sequence[Block], make_engine: Callable[[Sequence[Block], int], Engine]
    ) -> None:
        """Has an engine fill blocks, and waits for it."""
        if not todo:
            return
        nbytes = sum(block.nbytes for block in todo)
        small = nbytes <= _INLINE or (self.threads == 1 and self.advance is None)
        inline = small and self.deadline.seconds is None
        engine = make_engine(todo, 0 if inline else self.threads)
        try:
            engine.submit(todo)
            _wait(self.plan, todo, engine, self.sources, self.deadline, self.advance)
        finally:
            engine.close(min(_GRACE, max(0.0, self.deadline.left())))


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
    for number in {piece.source for place in plan.places for piece in place.request.info.pieces}:
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
