"""Threads that write to drafts while the calling thread gathers what comes next."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable

from mfload.runtime import Task

# How long a cancelled save waits for writes under way; a hung disk may block them forever.
_GRACE = 5.0
_AHEAD = 2

Write = Callable[[], int]
"""Writes some bytes and returns how many."""


class Writers:
    """Does writes in threads, and holds few of them at a time.

    Without threads `put` writes itself, for saves too small to share out. `advance` is called
    with the bytes that were written, in the thread that calls `put`.
    """

    def __init__(self, threads: int, advance: Callable[[int], None] | None = None) -> None:
        self._count = threads
        self._advance = advance
        self._waiting: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._open = 0
        self._stop = threading.Event()
        self._threads: list[Task[None]] = []

    def put(self, write: Write) -> None:
        """Takes a write, once there is room for it; raises if an earlier one failed."""
        while not self._done.empty() or self._open >= max(1, self._count * _AHEAD):
            self._take()
        if len(self._threads) < self._count:
            self._start()
        if self._threads:
            self._waiting.put(write)
        else:
            self._done.put(write())
        self._open += 1

    def drain(self) -> None:
        """Returns when every write is done; raises if one failed."""
        while self._open:
            self._take()

    def close(self) -> None:
        """Stops the threads; writes that have not begun are dropped."""
        self._stop.set()
        end = time.monotonic() + _GRACE
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(end - time.monotonic())

    def _start(self) -> None:
        self._threads.append(Task(self._work))  # First: Ctrl-C may come while it is started.
        try:
            self._threads[-1].start("mfload-writer")
        except RuntimeError:
            # The system gives no more threads: those there are, or this one, do the work.
            self._threads.pop()
            self._count = len(self._threads)

    def _take(self) -> None:
        """Waits until one more write is done."""
        done = self._done.get()
        self._open -= 1
        if isinstance(done, BaseException):
            raise done
        if self._advance is not None:
            self._advance(done)

    def _work(self) -> None:
        while (write := self._waiting.get()) is not None and not self._stop.is_set():
            try:
                done: int | BaseException = write()
            except BaseException as error:  # noqa: BLE001 - raised again in the saving thread
                # Its frames hold the bytes, which would live as long as the error.
                traceback.clear_frames(error.__traceback__)
                done = error
            # Or the bytes would be held until the next write comes.
            del write
            self._done.put(done)
            del done
