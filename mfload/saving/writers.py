"""Threads that write blocks to drafts while the calling thread gathers the next ones."""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.saving.drafts import Draft

_TICK = 0.1
# How long a cancelled save waits for writes in hand; a hung disk may hold them for ever.
_GRACE = 5.0
_AHEAD = 2


class BlockWrite(NamedTuple):
    """Arrays that lie together in a file; errors name the tensor whose bytes come first."""

    draft: Draft
    offset: int
    pieces: Sequence[Any]
    nbytes: int
    tensor: str | None

    def run(self) -> None:
        """Writes the block."""
        try:
            self.draft.gather(self.offset, self.pieces)
        except errors.MfloadError as error:
            error.tensor = error.tensor or self.tensor
            raise


class Writers:
    """Takes writes, from one thread, and holds few of them at a time.

    Without threads `put` writes itself, for saves too small to share out. `advance` is called
    with the bytes that were written, in the thread that calls `put`.
    """

    def __init__(self, threads: int, advance: Callable[[int], None] | None = None) -> None:
        self._count = threads
        self._advance = advance or (lambda nbytes: None)
        self._changed = threading.Condition()
        self._waiting: collections.deque[BlockWrite] = collections.deque()
        self._open = self._written = 0
        self._error: BaseException | None = None
        self._stop = False
        self._threads: list[threading.Thread] = []

    def put(self, write: BlockWrite) -> None:
        """Takes a write, once there is room for it."""
        if self._count:
            self._wait(self._count * _AHEAD)
            if len(self._threads) < min(self._count, self._open + 1):
                self._start()
        if not self._count:
            write.run()
            self._advance(write.nbytes)
            return
        with self._changed:
            self._waiting.append(write)
            self._open += 1
            self._changed.notify()

    def drain(self) -> None:
        """Returns when every write is done."""
        self._wait(1)

    def close(self) -> None:
        """Stops the threads; writes that have not begun are dropped."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        end = time.monotonic() + _GRACE
        for thread in self._threads:
            # Ctrl-C may have come before the start.
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        self._error = None

    def _start(self) -> None:
        # Daemons: one that hangs in the kernel must not hold up the exit.
        thread = threading.Thread(target=self._work, name="mfload-writer", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            # The system gives no more threads: those there are, or this one, do the work.
            self._threads.pop()
            self._count = len(self._threads)

    def _wait(self, room: int) -> None:
        """Waits until fewer than so many writes are open."""
        while True:
            with self._changed:
                if self._open >= room and self._error is None:
                    self._changed.wait(_TICK)
                written, self._written = self._written, 0
                error, full = self._error, self._open >= room
            if error is not None:
                raise error
            if written:
                self._advance(written)
            if not full:
                return

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stop:
                    self._changed.wait()
                if self._stop:
                    return
                write = self._waiting.popleft()
            error: BaseException | None = None
            try:
                write.run()
            except BaseException as caught:  # noqa: BLE001 - raised again in the saving thread
                error = caught
            nbytes = write.nbytes
            # Or the bytes would be held until the next write comes.
            del write
            with self._changed:
                self._open -= 1
                self._written += nbytes
                if error is not None and self._error is None:
                    # Its frames hold the slots, which would live as long as the error.
                    traceback.clear_frames(error.__traceback__)
                    self._error = error
                self._changed.notify_all()
            error = None
