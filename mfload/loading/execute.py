"""Runs a plan: engines, progress, errors with names, and the last look at the files."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from mfload import errors
from mfload.io import buffers, probes
from mfload.io.engine import Engine, Observer, Pool, Share, fill
from mfload.io.pread import PreadReader
from mfload.io.route import Leg
from mfload.planning.blocks import Block, Segment
from mfload.planning.plan import Plan
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

if TYPE_CHECKING:
    from mfload.cuda.staging import Staging

log = logging.getLogger("mfload")

Advance = Callable[[int], None]
"""Called in the loading thread with the bytes that came since the last call."""

# Bytes up to which the loading thread reads by itself.
_INLINE = 1 << 20
_MAPPED_BLOCK = 8 << 20
_MOST_THREADS = 8
_A_DEVICE = 4  # Readers for each of several devices, where there are cores for them.
# Reads past the page cache wait for the disk, not for a core: as many as keep it busy.
_DIRECT_THREADS = 4
_DIRECT, _NBYTES = attrgetter("direct"), attrgetter("nbytes")


def reader_threads(direct: bool, devices: int = 0) -> int:
    """Readers at once, where no number is asked for."""
    most = max(_MOST_THREADS, _A_DEVICE * devices)
    return max(min(probes.cores(), most), _DIRECT_THREADS if direct else 1)


def run(
    plan: Plan,
    memory: list[Any],
    sources: Sequence[LocalFile],
    route: Mapping[int, Leg],
    *,
    threads: int,
    deadline: Deadline,
    advance: Advance | None = None,
    observer: Observer | None = None,
    staging: Staging | None = None,
) -> tuple[str, ...]:
    """Fills the buffers of a plan, and returns notes, such as on a fall-back.

    `memory` has a uint8 array or a `DeviceBuffer` for each buffer, `route` the leg of each source
    that is used. `observer` sees every wanted byte as the files hold it, those of maps too.
    `staging` has the slots of what lands on devices. If bytes can't be read or the files change,
    the readers are stopped and SourceError is raised.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            log.warning(text)

    def open_reader(number: int) -> PreadReader:
        leg = route.get(number)
        if leg is None or not leg.direct:
            return PreadReader(sources[number])
        from mfload.io.direct import DirectReader

        return DirectReader(sources[number], note)

    mapped = _mapped_blocks(plan) if observer is not None else []
    # A small load is over before a second thread has started.
    nbytes = sum(map(_NBYTES, plan.blocks)) + sum(map(_NBYTES, mapped))
    small = nbytes <= _INLINE or (threads == 1 and advance is None)
    inline = small and deadline.seconds is None
    rounds: list[list[Pool]] = []
    if staging is not None and any(map(staging.methods.devices, plan.blocks)):
        from mfload.cuda.engine import onto_devices

        gds = {number: sources[number] for number, leg in route.items() if leg.engine == "gds"}
        how = staging, open_reader, 0 if inline else threads, gds, note, observer
        rounds.append(onto_devices(plan.blocks, memory, *how))
    elif plan.blocks:
        direct = any(map(_DIRECT, route.values()))
        own = list(filter(buffers.is_own, memory)) if direct else ()
        protection = buffers.ForkProtection(own) if own else nullcontext()
        work = partial(fill, open_reader, memory, observer, protection)
        rounds.append([Pool(plan.blocks, work, threads)])
    if observer is not None and mapped:
        rounds.append([Pool(mapped, partial(_show, memory, observer), threads)])
    for pools in rounds:
        here = Share(deque(pools[0].blocks), bool, bool)  # bool(): never stopped, reports nothing.
        engine = None if inline else Engine(pools)
        try:
            if engine is None:
                pools[0].work(here)
            else:
                engine.run(deadline, advance)
        except (OSError, errors.MfloadError) as error:
            block = here.block if engine is None else engine.block
            if block is None:
                raise
            _name(plan, block, error, sources)
    if inline and advance is not None and nbytes:
        advance(nbytes)
    deadline.bound(partial(_check, plan, sources), "looking at the files again")
    return tuple(notes)


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


def _show(memory: list[Any], observer: Observer, share: Share) -> None:
    for block in share:
        part = memory[block.segments[0].buffer][block.offset :][: block.nbytes]
        observer.saw(block.source, block.offset, part, share.stopped)
        share.done(block)


def _check(plan: Plan, sources: Sequence[LocalFile]) -> None:
    seen: set[int] = set()
    for place in plan.places:
        for piece in place.request.info.pieces:
            seen.add(piece.source)
    for number in seen:
        sources[number].check()


def _name(
    plan: Plan, block: Block, error: OSError | errors.MfloadError, sources: Sequence[LocalFile]
) -> NoReturn:
    """Raises the error of a reader with the file and the tensor that it concerns."""
    path, tensor = sources[block.source].path, next(iter(plan.tensors_of(block)), None)
    if not isinstance(error, errors.MfloadError):
        mapped = errors.from_os(error, path, "read")
        mapped.tensor = tensor
        raise mapped from error
    error.file, error.tensor = error.file or path, error.tensor or tensor
    raise error
