"""Engines move blocks: submit a batch, take completions, close.

Engines are threads, each with a worker that fills one block after another; every blocking call
in them gives up the interpreter lock, and blocks are large, so Python threads are enough. A
thread that hangs in the kernel keeps its own reference to the buffers it writes to, so nothing
it may still write to is ever freed.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from mfload.io.buffers import WorkerSlot
from mfload.planning.blocks import Block, Observer, Reader, stored

# Small blocks are reported together: a queue costs more than a small read.
_WORTH_A_WORD = 1 << 20


class Done(NamedTuple):
    """What an engine reports: blocks that are in place, or what went wrong.

    Attributes:
        blocks: How many blocks this stands for.
        nbytes: Bytes read.
        block: The block that failed.
        error: Why, None where all is well.
    """

    blocks: int
    nbytes: int
    block: Block | None = None
    error: BaseException | None = None


class Engine(Protocol):
    """Fills blocks in any order, several at once.

    A completion says that blocks are in place and that their slots are free again: whoever
    runs a plan never sees a slot, so slots may be host memory, pinned memory or a device's.
    """

    def submit(self, blocks: Sequence[Block]) -> None:
        """Takes blocks to be filled; returns at once."""
        ...

    def complete(self, timeout: float) -> Done | None:
        """The next completion; None after `timeout` seconds without one."""
        ...

    def close(self, grace: float) -> bool:
        """Stops after the blocks in hand, within `grace` seconds.

        Returns:
            Whether nothing writes to the buffers any more.
        """
        ...


class Worker(Protocol):
    """What one thread of an engine does; made and used in that thread."""

    @property
    def block(self) -> Block | None:
        """The block that it is concerned with, for the error that names it."""
        ...

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block, and at least begins to put it in its places.

        Args:
            block: The block.
            stopped: Whether the work was given up meanwhile.
        """
        ...

    def finished(self) -> tuple[int, int]:
        """Blocks that came to be in place since the last question, and their bytes."""
        ...

    def drain(self) -> None:
        """Returns when all that was begun is in place."""
        ...

    def close(self) -> None:
        """Gives back what it holds, once nothing writes to the buffers; never raises."""
        ...


class Crew(NamedTuple):
    """Threads that share blocks.

    Attributes:
        make: Makes the worker of a thread.
        threads: How many.
        bound: A context for each thread, such as the processor cores it is to run on.
    """

    make: Callable[[], Worker]
    threads: int
    bound: Callable[[], AbstractContextManager[object]] = nullcontext


class ThreadEngine:
    """Fills blocks in threads.

    Args:
        crews: Who shares the work. Without threads, blocks are filled where they are submitted,
            for loads that are too small to share out.
        crew_of: Which crew fills a block. Each crew begins its blocks in the order of their
            submission.
    """

    def __init__(
        self, crews: Sequence[Crew], crew_of: Callable[[Block], int] = lambda _: 0
    ) -> None:
        self._crews = crews
        self._crew_of = crew_of
        self._waiting = [collections.deque[Block]() for _ in crews]
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, blocks: Sequence[Block]) -> None:
        """Takes blocks to be filled, and starts threads for them (see `Engine`)."""
        for block in blocks:
            self._waiting[self._crew_of(block)].append(block)
        for crew, waiting in zip(self._crews, self._waiting, strict=True):
            self._start(crew, waiting)

    def _start(self, crew: Crew, waiting: collections.deque[Block]) -> None:
        if not crew.threads:
            self._work(crew, waiting)
        for number in range(min(crew.threads, len(waiting))):
            # Daemons: a thread that hangs in the kernel must not hold up the exit.
            thread = threading.Thread(
                target=self._work, args=(crew, waiting), name="mfload-reader", daemon=True
            )
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:
                # No more threads to be had: those there are, or this one, do the work.
                self._threads.pop()
                if not number:
                    self._work(crew, waiting)
                return

    def complete(self, timeout: float) -> Done | None:
        """The next completion (see `Engine`)."""
        try:
            return self._done.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self, grace: float) -> bool:
        """Stops the threads (see `Engine`)."""
        self._stop.set()
        end = time.monotonic() + grace
        for thread in self._threads:
            # Ctrl-C may have come before the start.
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        while self.complete(0) is not None:
            pass
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, crew: Crew, waiting: collections.deque[Block]) -> None:
        worker: Worker | None = None
        try:
            with crew.bound():
                worker = crew.make()
                self._fill(worker, waiting)
        except BaseException as error:  # noqa: BLE001 - raised again in the loading thread
            # Nobody waits for what fails after the first, and an error that nobody takes
            # would keep itself alive by way of this frame, and the buffers with it.
            if not self._stop.is_set():
                self._stop.set()
                self._done.put(Done(0, 0, None if worker is None else worker.block, error))
        finally:
            if worker is not None:
                worker.close()

    def _fill(self, worker: Worker, waiting: collections.deque[Block]) -> None:
        blocks = nbytes = 0
        while not self._stop.is_set():
            try:
                block = waiting.popleft()
            except IndexError:
                worker.drain()
                block = None
            else:
                worker.fill(block, self._stop.is_set)
            more = worker.finished()
            blocks, nbytes = blocks + more[0], nbytes + more[1]
            if blocks and (block is None or nbytes >= _WORTH_A_WORD):
                self._done.put(Done(blocks, nbytes))
                blocks = nbytes = 0
            if block is None:
                return


class Tally:
    """Counts what is in place, as `Worker.finished` tells it."""

    def __init__(self) -> None:
        self._blocks = self._nbytes = 0

    def add(self, block: Block) -> None:
        """Counts a block."""
        self._blocks += 1
        self._nbytes += block.nbytes

    def take(self) -> tuple[int, int]:
        """Blocks and their bytes since the last question."""
        counted = self._blocks, self._nbytes
        self._blocks = self._nbytes = 0
        return counted


class HostWorker:
    """Fills blocks of host memory (see `Worker`).

    Args:
        open_reader: Opens the reader of a source by its number.
        memory: The destination buffers.
        observer: Sees what came. Blocks are taken in the order of their submission, so a witness
            may wait for the ones before.
    """

    def __init__(
        self,
        open_reader: Callable[[int], Reader],
        memory: list[Any],
        observer: Observer | None = None,
    ) -> None:
        self.block: Block | None = None
        self._readers = Opened(open_reader)
        self._memory = memory
        self._witness = observer
        self._slot = WorkerSlot()
        self._tally = Tally()

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block into its places (see `Worker`)."""
        self.block = block
        landed = self._readers.of(block.source).fill(block, self._memory, self._slot)
        if self._witness is not None:
            for offset, data in stored(block, self._memory, landed):
                self._witness.saw(block.source, offset, data, stopped)
        self._tally.add(block)

    def finished(self) -> tuple[int, int]:
        """What is in place since the last question (see `Worker`)."""
        return self._tally.take()

    def drain(self) -> None:
        """Nothing is ever under way (see `Worker`)."""

    def close(self) -> None:
        """Closes the file (see `Worker`)."""
        self._readers.close()


def on_host(
    open_reader: Callable[[int], Reader],
    memory: list[Any],
    threads: int,
    observer: Observer | None = None,
) -> ThreadEngine:
    """The engine of buffers in host memory (see `HostWorker`)."""
    return ThreadEngine([Crew(lambda: HostWorker(open_reader, memory, observer), threads)])


class _Closable(Protocol):
    def close(self) -> None: ...


Closes = TypeVar("Closes", bound=_Closable)


class Opened(Generic[Closes]):
    """The reader of the source that a worker is at; blocks of one source mostly follow each other.

    Args:
        open_reader: Opens one by the source's number.
    """

    def __init__(self, open_reader: Callable[[int], Closes]) -> None:
        self._open = open_reader
        self._reader: Closes | None = None
        self._source = -1

    def of(self, source: int) -> Closes:
        """The reader of a source."""
        if self._reader is None or source != self._source:
            self.close()
            self._reader, self._source = self._open(source), source
        return self._reader

    def close(self) -> None:
        """Closes the one that is open."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
