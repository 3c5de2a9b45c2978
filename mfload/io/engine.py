"""Threads that fill the blocks of a plan, and how a load waits for them.

A thread that hangs in the kernel keeps its own references to the buffers that it writes to, so
nothing that it may still write to is freed.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from mfload.errors import MfloadError, counted, let_go
from mfload.io.buffers import WorkerSlot
from mfload.planning.blocks import Block, Lot, stored
from mfload.runtime import Deadline, start as start_thread
from mfload.sources.base import ClosedAtEnd

if TYPE_CHECKING:
    import threading

    from mfload.io.decode import Unfinished
    from mfload.io.trial import Trial
    from mfload.runtime import Start, Task
    from mfload.timeline import Recorder, Track

# How often the loading thread looks what came and whether the time is up, in seconds.
_TICK = 0.02
# Blocks wake it only if progress is asked for, when so many bytes are new, and this part
# of all: a reader that does so gives up the interpreter, and waits until it has it back.
_REPORTED_BYTES, _REPORTS = 1 << 20, 256
# How long a cancelled load waits for reads under way; a hung disk may block them forever.
_GRACE = 5.0
_OPEN = 4  # Files that a reader of lots keeps open.


class Observer(Protocol):
    """Sees the stored bytes of blocks right after they came, in the thread that read them."""

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Takes the bytes from `offset` of a source on.

        Every wanted byte of a source is shown once. Blocks are begun in the order of their pool and
        end in any order, so an observer may wait for the bytes before, until `stopped` says that
        the load was given up.
        """
        ...


class Place(Protocol):
    """Takes what readers land for it, such as a hash or a file."""

    def take(self, lot: Lot, number: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Takes the bytes of a block of a lot, by its number, in the thread that read them.

        If the first block is kept, it comes with each of the others, as a pair. If the lot fills
        memory, all of that is taken, with the number of the last block. Lots are begun in their
        order and end in any, so a place may wait for the one before, until `stopped` says that the
        call was given up.
        """
        ...


class Share:
    """The blocks that one thread takes, by iteration, and how much of them is in place.

    `block` is the current one, for the error that names it; `blocks` and `nbytes` are those in
    place, for the loading thread to look at; `tell` wakes it when `step` bytes more are in place.
    `track` records the thread's spans. No block is begun after the load was `stopped`, or the
    thread `retired`. `memory` returns when the buffers of the load are there; it raises if it was
    given up.
    """

    def __init__(
        self,
        waiting: collections.deque[Any],
        stopped: Callable[[], bool],
        track: Track | None = None,
        retired: Callable[[], bool] = bool,
        memory: Callable[[], object] = bool,
        tell: Callable[[None], object] = bool,
        step: float = math.inf,
    ) -> None:
        self.block: Block | None = None
        self.track, self._retired = track, retired
        self.stopped, self.memory = stopped, memory
        self._waiting = waiting
        self.blocks = self.nbytes = 0
        self._tell, self._step = tell, step
        self._next = step

    def __iter__(self) -> Iterator[Any]:
        while not self.stopped() and not self._retired():
            try:
                self.block = self._waiting.popleft()
            except IndexError:
                break
            yield self.block
        self.block = None

    def done(self, block: Block) -> None:
        """Counts a block that is in place."""
        self.count(block.nbytes if block.decode is None else block.filled)

    def count(self, nbytes: int, blocks: int = 1) -> None:
        """Counts blocks, or lots, that are in place, and bytes."""
        self.blocks += blocks
        self.nbytes += nbytes
        if self.nbytes >= self._next:
            self._next = self.nbytes + self._step
            self._tell(None)


Pool = tuple[Sequence[Any], Callable[[Share], None], int]
"""Blocks or lots in the order in which they are begun, what a thread calls, and how many threads.

The function is no closure over buffers: an error's traceback would keep them.
"""


class _Crowd:
    """The threads of one pool, by their numbers, and the blocks that they share."""

    def __init__(self, pool: Pool) -> None:
        self.blocks, self.work, self.most = pool
        self.waiting = collections.deque(self.blocks)
        self.live: set[int] = set()


class Engine:
    """Has the threads of several pools fill their blocks; for one use.

    `start` gives the threads; default: new ones. `trial` says how many read, of those that the
    pools may have: each pool has its share of them, and one at least.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        recorder: Recorder | None = None,
        start: Start | None = None,
        trial: Trial | None = None,
    ) -> None:
        import queue
        import threading  # A small load has no other thread.

        self.block: Block | None = None
        """The block that failed, or one that is waited for when the time is up."""
        self._crowds, self._recorder, self._trial = list(map(_Crowd, pools)), recorder, trial
        self._most = sum(crowd.most for crowd in self._crowds)
        self._failed: list[tuple[Block | None, BaseException]] = []
        self._stop, self._memory = threading.Event(), threading.Event()
        self._allocate: Callable[[], object] | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._step = math.inf
        self._start_thread = start or start_thread
        self._threads: list[Task[Any]] = []
        self._shares: list[Share] = []

    def run(
        self,
        deadline: Deadline,
        advance: Callable[[int], None] | None = None,
        allocate: Callable[[], object] | None = None,
    ) -> None:
        """Returns when all blocks are in place; tells `advance` of the bytes as they come.

        `allocate` makes the memory that threads wait for by `Share.memory`, once they have begun.
        Raises the first error of a thread, or LoadTimeoutError. Threads are joined first; one that
        hangs in the kernel is left behind with its buffers.
        """
        import queue

        blocks = [block for crowd in self._crowds for block in crowd.blocks]
        left, came = len(blocks), 0
        if advance is not None or self._trial is not None:
            total = sum(map(attrgetter("nbytes"), blocks))
            self._step = max(_REPORTED_BYTES, total // _REPORTS)
        last, self._allocate = time.monotonic(), allocate
        try:
            if self._trial is not None:
                self._trial.resume(last)
            self._start()
            self._make_memory()
            while left:
                with suppress(queue.Empty):
                    self._news.get(timeout=max(0.0, min(_TICK, deadline.left())))
                if self._failed:
                    self.block, error = self._failed[0]
                    raise error
                shares = [*self._shares]
                nbytes = sum(share.nbytes for share in shares) - came
                done = len(blocks) - sum(share.blocks for share in shares)
                if nbytes or done < left:
                    left, came = done, came + nbytes
                    last = time.monotonic()
                    if advance is not None:
                        advance(nbytes)
                    if self._trial is not None:
                        self._trial.came(nbytes, last)
                        self._start()  # Those that are missing now.
                if deadline.left() <= 0:
                    at_hand = (share.block for share in shares if share.block is not None)
                    self.block = next(at_hand, blocks[-left])
                    hung = sum(share.block is not None for share in shares)
                    behind = f"; {counted(hung, 'reader')} left behind until the read returns"
                    waited = f"reading; {time.monotonic() - last:.1f} s without data"
                    raise deadline.error(waited + (behind if hung else ""))
        finally:
            self._stop.set()
            self._memory.set()  # Who waits for it sees that there is none.
            end = time.monotonic() + min(_GRACE, max(0.0, deadline.left()))
            for thread in self._threads:
                thread.join(end - time.monotonic())
            error = None  # It would keep itself alive, and the buffers in its frames.
            self._failed.clear()

    def _start(self) -> None:
        for crowd in self._crowds:
            missing = {*range(min(self._wanted(crowd), len(crowd.waiting)))} - crowd.live
            for number in sorted(missing):
                crowd.live.add(number)
                try:
                    self._threads.append(self._start_thread(partial(self._work, crowd, number)))
                except RuntimeError:
                    # The system gives no more threads: those there are do the work, or this one.
                    crowd.live.discard(number)
                    break
            if crowd.waiting and not crowd.live:
                self._make_memory()
                self._work(crowd, 0)

    def _make_memory(self) -> None:
        allocate, self._allocate = self._allocate, None
        if allocate is not None:
            allocate()
        self._memory.set()

    def _wanted(self, crowd: _Crowd) -> int:
        if self._trial is None:
            return crowd.most
        return max(1, -(-self._trial.way.readers * crowd.most // self._most))

    def _work(self, crowd: _Crowd, number: int) -> None:
        retired = bool if self._trial is None else lambda: number >= self._wanted(crowd)
        memory = partial(_wait_for_memory, self._memory, self._stop)
        news = self._news.put, self._step
        share = Share(crowd.waiting, self._stop.is_set, None, retired, memory, *news)
        self._shares.append(share)
        if self._recorder is not None:
            share.track = self._recorder.begin(f"reader {self._shares.index(share) + 1}")
        try:
            crowd.work(share)
        except BaseException as error:  # noqa: BLE001 - the first is raised in the loading thread
            if not self._stop.is_set():
                self._failed.append((share.block, error))
                self._stop.set()
            if not any(error is each for _, each in self._failed[:1]):
                let_go(error)
        finally:
            crowd.live.discard(number)
            if self._failed or not any(each.live for each in self._crowds):
                self._news.put(None)


def _wait_for_memory(there: threading.Event, stop: threading.Event) -> None:
    there.wait()
    if stop.is_set():
        raise MfloadError("the load was given up")


class OpenReaders(ClosedAtEnd):
    """The readers of one thread, by source; the `most` that were opened last stay open.

    Blocks of one source mostly follow each other.
    """

    def __init__(self, open_reader: Callable[[int], Any], most: int = 1) -> None:
        self._open_reader, self._most, self._readers = open_reader, most, dict[int, Any]()

    def of(self, source: int) -> Any:
        """The reader of a source."""
        reader = self._readers.get(source)
        if reader is None:
            if len(self._readers) == self._most:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[source] = self._open_reader(source)
        return reader

    def close(self) -> None:
        """Closes those that are open."""
        while self._readers:
            self._readers.popitem()[1].close()


def fill(
    open_reader: Callable[[int], Any],
    memory: list[Any],
    observer: Observer | None,
    protection: AbstractContextManager[object],
    share: Share,
    unfinished: Unfinished | None = None,
) -> None:
    """Reads blocks into their places in host memory, with a `PreadReader` for each source.

    `protection` is a `ForkProtection` of the buffers that a disk writes to; of encoded blocks, some
    go on with what is `unfinished`.
    """
    slot, window = WorkerSlot(), WorkerSlot()
    saw, track = None if observer is None else observer.saw, share.track
    with protection, OpenReaders(open_reader) as readers:
        for block in share:
            reader, source = readers.of(block.source), block.source
            if track is not None:
                track.begin(_work(block))
            if block.decode is not None:
                from mfload.io import decode  # Late: raw tensors do without.

                given = memory, slot, window, saw, share.stopped, unfinished
                decode.fill(block, reader, *given)
                if track is not None:
                    track.mark("decode", block.filled, source)
                share.done(block)
                continue
            landed = reader.fill(block, memory, slot)
            if track is not None and not track.reads:
                track.mark("map", block.nbytes, source)
            elif track is not None and (landed is not None or block.staged):
                track.mark("copy", block.wanted, source)
            if saw is not None:
                for offset, data in stored(block, memory, landed):
                    saw(source, offset, data, share.stopped)
                if track is not None:
                    track.mark("check", 0, source)
            landed = data = None  # A longer slot replaces this one.
            share.done(block)


def _work(block: Block) -> str:
    """What a thread does with a block beside reading it."""
    if block.decode is not None:
        return "decode"
    return "copy" if block.staged else ""


def hand_on(open_reader: Callable[[int], Any], place: Place, share: Share) -> None:
    """Reads lots, and hands them to a place."""
    slot, others, window, own = (WorkerSlot() for _ in range(4))
    with OpenReaders(open_reader, _OPEN) as readers:
        for lot in share:
            memory, first = [own.bytes(lot.size)[: lot.size]] if lot.size else [], None
            for number, block in enumerate(lot.blocks):
                share.block, reader = block, readers.of(block.source)
                if block.decode is not None:
                    from mfload.io import decode  # Late: raw tensors do without.

                    decode.fill(block, reader, memory, slot, window, None, share.stopped)
                elif block.segments:
                    reader.fill(block, memory, slot)
                else:
                    data = reader.land(block, others if lot.kept and number else slot)
                    if share.stopped():  # What the place writes to may be closed.
                        return
                    if lot.kept:
                        first, data = (data, None) if first is None else (first, (first, data))
                    if data is not None:
                        place.take(lot, number, data, share.stopped)
                    share.count(0 if lot.kept else block.nbytes, 0)
            if memory and not share.stopped():
                place.take(lot, len(lot.blocks) - 1, memory[0], share.stopped)
            share.count(lot.nbytes if lot.kept or memory else 0)
            memory = data = first = None  # Longer slots replace these.
