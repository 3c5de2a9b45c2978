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


class Job(NamedTuple):
    """One write.

    Attributes:
        draft: Where to.
        offset: First byte.
        pieces: uint8 arrays that lie together in the file.
        nbytes: Bytes of them all.
        tensor: Whose bytes come first, for the error that says so.
    """

    draft: Draft
    offset: int
    pieces: Sequence[Any]
    nbytes: int
    tensor: str | None


class Writers:
    """Takes jobs, from one thread, and holds few of them at a time.

    Args:
        threads: How many write at once; 0 has `put` do it, for saves too small to share out.
        advance: Told of bytes that were written, in the thread that calls `put` and `drain`.
    """

    def __init__(self, threads: int, advance: Callable[[int], None] | None = None) -> None:
        self._count = threads
        self._advance = advance
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._open = self._written = 0
        self._error: BaseException | None = None
        self._stop = False
        self._threads: list[threading.Thread] = []

    def put(self, job: Job) -> None:
        """Takes a job, once there is room for it.

        Raises:
            TargetError: A write failed, this one or another.
        """
        if self._count == 0:
            _write(job)
            self._tell(job.nbytes)
            return
        self._wait(self._count * _AHEAD)
        with self._changed:
            self._waiting.append(job)
            self._open += 1
            self._changed.notify()
        if len(self._threads) < min(self._count, self._open):
            self._start()

    def drain(self) -> None:
        """Returns when every job is done.

        Raises:
            TargetError: A write failed.
        """
        self._wait(1)

    def close(self) -> None:
        """Stops the threads; jobs that none has begun are dropped."""
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
            # No more threads to be had: those there are, or this one, do the work.
            self._threads.pop()
            self._count = len(self._threads)
            while self._count == 0 and self._waiting:
                job = self._waiting.popleft()
                self._open -= 1
                _write(job)
                self._tell(job.nbytes)

    def _wait(self, room: int) -> None:
        """Waits until fewer than so many jobs are open."""
        while True:
            with self._changed:
                if self._open >= room and self._error is None:
                    self._changed.wait(_TICK)
                written, self._written = self._written, 0
                error, full = self._error, self._open >= room
            if error is not None:
                raise error
            if written:
                self._tell(written)
            if not full:
                return

    def _tell(self, nbytes: int) -> None:
        if self._advance is not None:
            self._advance(nbytes)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stop:
                    self._changed.wait()
                if self._stop:
                    return
                job = self._waiting.popleft()
            error: BaseException | None = None
            try:
                _write(job)
            except BaseException as caught:  # noqa: BLE001 - raised again in the saving thread
                error = caught
            nbytes = job.nbytes
            # Or the bytes would be held until the next job comes.
            del job
            with self._changed:
                self._open -= 1
                self._written += nbytes
                if error is not None and self._error is None:
                    # Its frames hold the slots, and whoever keeps the error keeps them.
                    traceback.clear_frames(error.__traceback__)
                    self._error = error
                self._changed.notify_all()
            error = None


def _write(job: Job) -> None:
    try:
        job.draft.gather(job.offset, job.pieces)
    except errors.MfloadError as error:
        error.tensor = error.tensor or job.tensor
        raise
