"""Engines move blocks: submit a batch, take completions, close.

The host engines are threads that fill one block after another; every blocking call in them
gives up the interpreter lock, and blocks are large, so Python threads are enough. A reader
thread that hangs in the kernel keeps its own reference to the buffers it writes to, so nothing
it may still write to is ever freed.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mfload.io.blocks import Block, Reader, Witness, stored
from mfload.io.buffers import WorkerSlot


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


class ThreadEngine:
    """The host engine.

    Args:
        open_reader: Opens the reader of a source by its number.
        memory: The destination buffers.
        threads: Workers; 0 fills the blocks where they are submitted, for loads that are too
            small to share out.
        witness: Sees what came, in the worker that read it. Blocks are taken in the order of
            their submission, so a witness may wait for the ones before.
    """

    def __init__(
        self,
        open_reader: Callable[[int], Reader],
        memory: list[Any],
        threads: int,
        witness: Witness | None = None,
    ) -> None:
        self._open = open_reader
        self._witness = witness
        self._memory = memory
        self._waiting: collections.deque[Block] = collections.deque()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._count = threads
        self._threads: list[threading.Thread] = []

    def submit(self, blocks: Sequence[Block]) -> None:
        """Takes blocks to be filled, and starts workers for them (see `Engine`)."""
        self._waiting.extend(blocks)
        if self._count == 0:
            self._work()
        while len(self._threads) < min(self._count, len(blocks)):
            # Daemons: a worker that hangs in the kernel must not hold up the exit.
            worker = threading.Thread(target=self._work, name="mfload-reader", daemon=True)
            self._threads.append(worker)
            try:
                worker.start()
            except RuntimeError:
                # No more threads to be had: those there are, or this one, do the work.
                self._threads.pop()
                if not self._threads:
                    self._work()
                return

    def complete(self, timeout: float) -> Done | None:
        """The next completion (see `Engine`)."""
        try:
            return self._done.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self, grace: float) -> bool:
        """Stops the workers (see `Engine`)."""
        self._stop.set()
        end = time.monotonic() + grace
        for worker in self._threads:
            # Ctrl-C may have come before the start.
            if worker.ident is not None:
                worker.join(max(0.0, end - time.monotonic()))
        while self.complete(0) is not None:
            pass
        return not any(worker.is_alive() for worker in self._threads)

    def _work(self) -> None:
        slot = WorkerSlot()
        reader: Reader | None = None
        source = -1
        block: Block | None = None
        # Small blocks are reported together: a queue costs more than a small read.
        blocks = nbytes = 0
        try:
            while not self._stop.is_set():
                try:
                    block = self._waiting.popleft()
                except IndexError:
                    break
                if reader is None or block.source != source:
                    if reader is not None:
                        reader.close()
                        reader = None
                    reader, source = self._open(block.source), block.source
                self._fill(reader, block, slot)
                blocks, nbytes = blocks + 1, nbytes + block.nbytes
                if nbytes >= 1 << 20:
                    self._done.put(Done(blocks, nbytes))
                    blocks = nbytes = 0
            if blocks:
                self._done.put(Done(blocks, nbytes))
        except BaseException as error:  # noqa: BLE001 - raised again in the loading thread
            # Nobody waits for what fails after the first, and an error that nobody takes
            # would keep itself alive by way of this frame, and the buffers with it.
            if not self._stop.is_set():
                self._stop.set()
                self._done.put(Done(0, 0, block, error))
        finally:
            if reader is not None:
                reader.close()

    def _fill(self, reader: Reader, block: Block, slot: WorkerSlot) -> None:
        landed = reader.fill(block, self._memory, slot)
        if self._witness is None:
            return
        for offset, data in stored(block, self._memory, landed):
            self._witness.saw(block.source, offset, data, self._stop.is_set)
