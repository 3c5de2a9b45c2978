"""Engines move blocks: submit a batch, take completions, close.

An engine is threads, each with a worker that fills one block after another; every blocking call
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

from mfload.io.buffers import ForkProtection, WorkerSlot
from mfload.planning.blocks import Block, Observer, Reader, stored

# Small blocks are reported together: a queue costs more than a small read.
_REPORTED_BYTES = 1 << 20


class Done(NamedTuple):
    """What an engine reports: blocks that are in place, or what went wrong.

    Attributes:
        error: Why it failed. Default: it did not.
    """

    blocks: int
    nbytes: int
    block: Block | None = None
    error: BaseException | None = None


class Engine(Protocol):
    """Fills blocks in any order, several at once.

    A completion says that blocks are in place and that their slots are free again. Slots are the
    engine's own: host memory, pinned memory or a device's.
    """

    def submit(self, blocks: Sequence[Block]) -> None:
        """Takes blocks to be filled; returns at once."""
        ...

    def complete(self, timeout: float) -> Done | None:
        """The next completion; None after `timeout` seconds without one."""
        ...

    def close(self, grace: float) -> bool:
        """Stops after the blocks in hand, within `grace` seconds."""
        ...


class Worker(Protocol):
    """What one thread of an engine does; made and used in that thread."""

    @property
    def block(self) -> Block | None:
        """The block at hand, for the error that names it."""
        ...

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block, and at least begins to put it in its places.

        Args:
            stopped: Whether the load was given up meanwhile.
        """
        ...

    def finished(self) -> tuple[int, int]:
        """Blocks that came to be in place since the last call, and their bytes."""
        ...

    def drain(self) -> None:
        """Returns when all that was begun is in place."""
        ...

    def close(self) -> None:
        """Gives back what it holds, once nothing writes to the buffers; never raises."""
        ...


class WorkerPool(NamedTuple):
    """Threads that share blocks.

    Attributes:
        bound: A context for each thread, such as the processor cores it is to run on.
    """

    make: Callable[[], Worker]
    threads: int
    bound: Callable[[], AbstractContextManager[object]] = nullcontext


class ThreadEngine:
    """Fills blocks in threads (see `Engine`).

    Args:
        pools: Who shares the work. Without threads, blocks are filled where they are submitted,
            for loads that are too small to share out.
        pool_of: Which pool fills a block. Each pool begins its blocks in the order of their
            submission.
        protection: Keeps the buffers out of forked children while a thread may write to them.
    """

    def __init__(
        self,
        pools: Sequence[WorkerPool],
        pool_of: Callable[[Block], int] = lambda _: 0,
        protection: AbstractContextManager[object] | None = None,
    ) -> None:
        self._pools = pools
        self._pool_of = pool_of
        self._protection = protection or nullcontext()
        self._waiting = [collections.deque[Block]() for _ in pools]
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, blocks: Sequence[Block]) -> None:
        """Takes blocks to be filled, and starts threads for them."""
        for block in blocks:
            self._waiting[self._pool_of(block)].append(block)
        for pool, waiting in zip(self._pools, self._waiting, strict=True):
            self._start(pool, waiting)

    def _start(self, pool: WorkerPool, waiting: collections.deque[Block]) -> None:
        if not pool.threads:
            self._work(pool, waiting)
        for number in range(min(pool.threads, len(waiting))):
            # Daemons: a thread that hangs in the kernel must not hold up the exit.
            thread = threading.Thread(
                target=self._work, args=(pool, waiting), name="mfload-reader", daemon=True
            )
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:
                # The system gives no more threads: those there are, or this one, do the work.
                self._threads.pop()
                if not number:
                    self._work(pool, waiting)
                return

    def complete(self, timeout: float) -> Done | None:
        """The next completion."""
        try:
            return self._done.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self, grace: float) -> bool:
        """Stops the threads."""
        self._stop.set()
        end = time.monotonic() + grace
        for thread in self._threads:
            # Ctrl-C may have come before the start.
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        while self.complete(0) is not None:
            pass
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, pool: WorkerPool, waiting: collections.deque[Block]) -> None:
        worker: Worker | None = None
        try:
            with self._protection, pool.bound():
                worker = pool.make()
                self._fill(worker, waiting)
        except BaseException as error:  # noqa: BLE001 - raised again in the loading thread
            # Only the first failure is taken, and an error that is never taken would keep itself
            # alive through this frame, and the buffers with it.
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
            if blocks and (block is None or nbytes >= _REPORTED_BYTES):
                self._done.put(Done(blocks, nbytes))
                blocks = nbytes = 0
            if block is None:
                return


class Tally:
    """Counts what is in place, as `Worker.finished` reports it."""

    def __init__(self) -> None:
        self._blocks = self._nbytes = 0

    def add(self, block: Block) -> None:
        """Counts a block."""
        self._blocks += 1
        self._nbytes += block.nbytes

    def take(self) -> tuple[int, int]:
        """Blocks and their bytes since the last call."""
        counted = self._blocks, self._nbytes
        self._blocks = self._nbytes = 0
        return counted


class HostWorker:
    """Fills blocks of host memory (see `Worker`).

    Args:
        open_reader: Opens the reader of a source by its number.
        observer: Sees what came. Blocks are taken in the order of their submission, so an
            observer may wait for the ones before.
    """

    def __init__(
        self,
        open_reader: Callable[[int], Reader],
        memory: list[Any],
        observer: Observer | None = None,
    ) -> None:
        self.block: Block | None = None
        self._reader = OpenReader(open_reader)
        self._memory = memory
        self._observer = observer
        self._slot = WorkerSlot()
        self._tally = Tally()
        self.finished = self._tally.take
        self.close = self._reader.close

    def fill(self, block: Block, stopped: Callable[[], bool]) -> None:
        """Reads a block into its places."""
        self.block = block
        landed = self._reader.of(block.source).fill(block, self._memory, self._slot)
        if self._observer is not None:
            for offset, data in stored(block, self._memory, landed):
                self._observer.saw(block.source, offset, data, stopped)
        self._tally.add(block)

    def drain(self) -> None:
        """Does nothing: a block is in place when `fill` returns."""


def on_host(
    open_reader: Callable[[int], Reader],
    memory: list[Any],
    threads: int,
    observer: Observer | None = None,
    unforked: Sequence[Any] = (),
) -> ThreadEngine:
    """The engine of buffers in host memory (see `HostWorker`).

    Args:
        open_reader: Opens the reader of a source by its number.
        unforked: Those of the buffers that a disk writes to (see `ForkProtection`).
    """
    pool = WorkerPool(lambda: HostWorker(open_reader, memory, observer), threads)
    return ThreadEngine([pool], protection=ForkProtection(unforked) if unforked else None)


class _Closing(Protocol):
    def close(self) -> None: ...


AnyReader = TypeVar("AnyReader", bound=_Closing)


class OpenReader(Generic[AnyReader]):
    """The reader of the source at hand; blocks of one source mostly follow each other."""

    def __init__(self, open_reader: Callable[[int], AnyReader]) -> None:
        self._open = open_reader
        self._reader: AnyReader | None = None
        self._source = -1

    def of(self, source: int) -> AnyReader:
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
