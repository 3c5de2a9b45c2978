"""Runs a plan: engines, progress, errors with names, and the last look at the files."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload import errors
from mfload.io import buffers
from mfload.io.engine import Engine, Observer, Place, Pool, Share, fill, hand_on
from mfload.io.pread import PreadReader, read_ahead
from mfload.io.route import Leg
from mfload.planning.blocks import Block, Segment
from mfload.planning.plan import Plan
from mfload.runtime import Deadline, Start, local_processes, local_rank, share_of_cores
from mfload.sources import together
from mfload.sources.base import Source

if TYPE_CHECKING:
    from mfload.cuda.staging import Staging
    from mfload.io.decode import Unfinished
    from mfload.io.trial import Trial
    from mfload.timeline import Recorder

Advance = Callable[[int], None]
"""Called in the loading thread with the bytes that came since the last call."""

INLINE = 1 << 20
"""Bytes up to which the loading thread reads by itself."""
_MAPPED_BLOCK = 8 << 20
# As many as there are cores for this process, up to this number. Direct readers wait for the disk,
# not for a core, so they are that many. Of readers through the page cache, more only disturb its
# reading ahead.
_MOST_THREADS = 8
# What lies in the page cache is copied into slots by more of them: in slots of 8 MiB 4.3 GB came in
# 0.110 s by 16 readers, 0.117 by 8, 0.124 by 12 and 0.151 by 20 (H200, 16 cores).
_ONTO_DEVICES = 16
_A_DEVICE = 4  # Readers for each of several devices, where there are cores for them.
_WORTH_A_THREAD = 64 << 10  # Bytes a block.
_DIRECT, _COLD = map(attrgetter, ("direct", "cold"))  # Of a leg.
_NBYTES, _SOURCE = map(attrgetter, ("nbytes", "source"))


def reader_threads(
    direct: bool, devices: int = 0, *, cold: bool = True, concurrency: int | None = None
) -> int:
    """Readers at once, if no number is asked for; `direct`: some files are read past the cache.

    `cold`: some are not in the cache. `concurrency` is that of the sources' costs.
    """
    if concurrency is not None:
        return max(concurrency, _A_DEVICE * devices)
    most = _ONTO_DEVICES if devices and not cold else _MOST_THREADS
    most = max(most, _A_DEVICE * devices)
    return max(min(share_of_cores(), most), _MOST_THREADS if direct else 1)


class Transfer(NamedTuple):
    """A plan, and what it takes to run it.

    Attributes:
        memory: A uint8 array or a `DeviceBuffer` for each buffer.
        route: The leg of each source that is used.
        advance: Is told of progress.
        observer: Sees every wanted byte as the files hold it, those of maps too.
        staging: The slots of what lands on devices.
        recorder: Records what threads do.
        start: Gives threads. Default: new ones.
        allocate: Puts the buffers into `memory`, while readers fill slots.
        trial: Says how many of the threads read cold files, and by which way.
        unfinished: Encoded pieces that other plans began, or go on with.
        place: What takes the blocks of the plan, which are lots.
    """

    plan: Plan
    memory: list[Any]
    sources: Sequence[Source]
    route: dict[int, Leg]
    threads: int
    deadline: Deadline
    advance: Advance | None = None
    observer: Observer | None = None
    staging: Staging | None = None
    recorder: Recorder | None = None
    start: Start | None = None
    allocate: Callable[[], object] | None = None
    trial: Trial | None = None
    unfinished: Unfinished | None = None
    place: Place | None = None

    def run(self) -> tuple[tuple[str, ...], int]:
        """Fills the buffers; returns notes, as on a fall-back, and how many threads read.

        If bytes can't be read or the files change, the readers are stopped and SourceError is
        raised.
        """
        plan, sources, route, deadline = self.plan, self.sources, self.route, self.deadline
        notes, kept = list[str](), list[Source]()
        if self.recorder is not None:
            sources = self.recorder.watched(sources)
        mapped = [] if self.observer is None else _mapped_blocks(plan)
        concurrency = sources[plan.blocks[0].source].costs.concurrency if plan.blocks else None
        if plan.decoding and concurrency is not None:
            from mfload.sources import ahead  # Late: files do without.

            sources = ahead.joined(sources, plan.blocks)
        threads = count_readers(
            plan,
            route,
            self.threads,
            concurrency,
            mapped=mapped,
            told=self.advance is not None,
            bounded=deadline.seconds is not None,
            staged=self.staging is not None,
        )
        try:
            if any(map(_COLD, route.values())):
                cold = [sources[number] for number, leg in route.items() if leg.cold]
                kept = deadline.bound(partial(read_ahead, cold), "opening the files")
            rounds, allocate = self._rounds(sources, mapped, threads, notes)
            for pools in rounds:
                self._fill(pools, threads, allocate)
                allocate = None  # Later rounds have the memory, too.
        finally:
            for source in kept:
                source.keep(False)
        if not threads and self.advance is not None and (plan.blocks or mapped):
            self.advance(sum(map(_NBYTES, plan.blocks)) + sum(map(_NBYTES, mapped)))
        if plan.places or self.place is not None:
            some = itertools.chain(plan.buffers, *(lot.blocks for lot in self._lots), plan.blocks)
            used = {*map(_SOURCE, some)} - {None}
            notes += _look_again(used, sources, route, deadline, concurrency)
        if self.trial is not None:
            notes += [str(self.trial)] if self.trial.over else []
            threads = min(threads, self.trial.way.readers)
        return tuple(notes), threads or 1

    @property
    def _lots(self) -> Sequence[Any]:
        return () if self.place is None else self.plan.blocks

    def _rounds(
        self, sources: Sequence[Source], mapped: Sequence[Block], threads: int, notes: list[str]
    ) -> tuple[list[list[Pool]], Callable[[], object] | None]:
        """What is filled one after the other; and what the first round has to allocate."""
        memory, staging, allocate = self.memory, self.staging, self.allocate
        blocks, note, rounds = self._own_first(), partial(_note, notes), list[list[Pool]]()
        open_reader = partial(_reader, sources, self.route, self.trial, note)
        if staging is not None and any(map(staging.methods.devices, blocks)):
            from mfload.cuda.engine import onto_devices

            gds = {n: sources[n] for n, leg in self.route.items() if leg.past_host}
            how = staging, open_reader, threads, gds, note, self.observer
            raw = [block for block in blocks if block.decode is None]
            rounds.append(onto_devices(raw, memory, *how))
            blocks = tuple(block for block in blocks if block.decode is not None)
        if allocate is not None and (blocks or not rounds or not threads):
            allocate()
            allocate = None
        if blocks:
            direct = any(leg.direct or leg.either for leg in self.route.values())
            own = list(filter(buffers.is_own, memory)) if direct else ()
            protection = buffers.ForkProtection(own) if own else nullcontext()
            given = open_reader, memory, self.observer, protection
            work = partial(fill, *given, unfinished=self.unfinished)
            if self.place is not None:
                work = partial(hand_on, open_reader, self.place)
            rounds.append([(blocks, work, threads)])
        if mapped and self.observer is not None:
            rounds.append([(mapped, partial(_show, memory, self.observer), threads)])
        return rounds, allocate

    def _own_first(self) -> Sequence[Block]:
        """The blocks, of a network disk from another one on for each process of this machine.

        What the others have begun with is in the page cache by the time that this one comes to it.
        """
        blocks, count = self.plan.blocks, local_processes()
        if count == 1 or self.place is not None or not blocks:
            return blocks
        source = self.sources[blocks[0].source]
        if source.file is None or not source.costs.concurrency:
            return blocks
        start = len(blocks) * local_rank() // count
        return [*blocks[start:], *blocks[:start]]

    def _fill(
        self, pools: Sequence[Pool], threads: int, allocate: Callable[[], object] | None
    ) -> None:
        """Fills the blocks of one round, in this thread if there are no others."""
        some, work, _ = pools[0]
        here = Share(deque(some), bool)  # bool(): never stopped.
        engine = Engine(pools, self.recorder, self.start, self.trial) if threads else None
        try:
            if engine is None:
                here.track = None if self.recorder is None else self.recorder.begin("reader 1")
                work(here)
            else:
                engine.run(self.deadline, self.advance, allocate)
        except BaseException as error:
            if self.staging is None:
                self.memory.clear()  # A thread left behind keeps what it writes to, no more.
            if not isinstance(error, OSError | errors.MfloadError):
                raise
            block = here.block if engine is None else engine.block
            if block is None:
                raise
            names = (lot.tensor for lot in self._lots if block in (lot, *lot.blocks))
            tensor = next(names if self._lots else iter(self.plan.tensors_of(block)), None)
            raise named(error, self.sources[block.source].name, tensor)  # noqa: B904 - it has its cause


def _look_again(
    used: Collection[int],
    sources: Sequence[Source],
    route: dict[int, Leg],
    deadline: Deadline,
    concurrency: int | None,
) -> Iterator[str]:
    """Raises SourceChangedError if a file changed; yields notes of sources that are waited for."""
    check, some = methodcaller("check"), map(sources.__getitem__, used)
    look = partial(together, check, some) if concurrency else partial(list, map(check, some))
    deadline.bound(look, "looking at the files again")
    for number in used if concurrency else ():
        source: Any = sources[number]
        failures = getattr(source, "failures", ())  # Of seeds, whose replicas went on.
        if failures or getattr(source, "of_cache", False):
            route[number] = route[number]._replace(file=source.name, engine=source.engine)
        yield from failures


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
        import logging  # Late: it takes as long as a small load.

        logging.getLogger("mfload").warning(text)


def _reader(
    sources: Sequence[Source],
    route: Mapping[int, Leg],
    trial: Trial | None,
    note: Callable[[str], None],
    number: int,
) -> PreadReader:
    """A new reader of a source."""
    leg = route.get(number)
    tried = trial if leg is not None and leg.either else None
    if leg is None or not (leg.direct or tried):
        return PreadReader(sources[number], cold=leg is not None and leg.cold)
    from mfload.io.direct import DirectReader

    return DirectReader(sources[number], note, tried)


def count_readers(
    plan: Plan,
    route: Mapping[int, Leg],
    threads: int,
    concurrency: int | None,
    *,
    mapped: Sequence[Block] = (),
    told: bool = False,
    bounded: bool = False,
    staged: bool = False,
) -> int:
    """How many of so many threads are worth starting; 0: the loading thread reads by itself.

    `concurrency` is that of the source, `mapped` what is shown besides. Loads may be `told` of
    their progress, `bounded` by a timeout, or `staged` on their way to a device.
    """
    blocks = len(plan.blocks) + len(mapped)
    nbytes = sum(map(_NBYTES, plan.blocks)) + sum(map(_NBYTES, mapped))
    if plan.decoding:
        nbytes += sum(block.filled - block.nbytes for block in plan.blocks)
    # A small load is over before a second thread has started, and one block occupies one thread;
    # but a long one of a scan is to tell of its progress.
    alone = not told and (blocks == 1 or threads == 1)
    waits = any(map(_DIRECT, route.values())) or any(map(_COLD, route.values()))
    # Short reads that are waited for are worth their threads.
    if not bounded and (alone or (nbytes <= INLINE and concurrency is None)):
        return 0
    if nbytes < len(plan.blocks) * _WORTH_A_THREAD and not (waits or staged or concurrency):
        return 1  # Threads that share the interpreter take turns.
    return min(threads, max(1, blocks))


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
        if share.track is not None:
            share.track.mark("check", block.nbytes, block.source)
        share.done(block)


def named(error: BaseException, file: str, tensor: str | None) -> errors.MfloadError:
    """An error of a read as one of mfload's, with the file and the tensor that it concerns."""
    if isinstance(error, errors.MfloadError):
        error.file = error.file or file
        if not isinstance(error, errors.ChecksumError):  # A sum may be of several, and tells which.
            error.tensor = error.tensor or tensor
        return error
    if isinstance(error, OSError):
        made: errors.MfloadError = errors.from_os(error, file, "read")
    else:
        made = errors.MemoryLimitError("the system refused memory", found=str(error) or None)
    made.file, made.tensor, made.__cause__ = file, tensor, error
    return made
