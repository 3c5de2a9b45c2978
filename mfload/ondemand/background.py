"""The thread that reads ahead."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress

from mfload.runtime import Forked, Task, start

_GRACE = 5.0  # Seconds, as for loads.

Work = Callable[[Callable[[], bool]], None]
"""Reads ahead; what it is given says whether to end waiting, and read nothing."""


class Background:
    """A thread that reads ahead for the caches of a model; it starts when it is first asked."""

    def __init__(self) -> None:
        self._asked: dict[object, Work] = {}
        # An interrupt can leave a condition that is entered itself locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: Task[None] | None = None
        self._ends, self._forked = False, Forked()

    def ask(self, cache: object, work: Work) -> None:
        """Asks for work for a cache, in place of what it was asked for before."""
        with self._lock:
            if self._ends:
                return
            self._asked[cache] = work
            if self._thread is None:
                with suppress(RuntimeError):  # The system gives no more: nothing is read ahead.
                    self._thread = start(self._work, "mfload read ahead", service=True)
                    # A thread that ends while the interpreter does may abort in C++ code.
                    atexit.register(self.close)
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the thread, once what it reads has arrived; does not wait for that."""
        if self._ends or self._thread is None or self._forked:
            self._ends = True
            return
        atexit.unregister(self.close)
        with self._lock:
            self._ends = True
            self._asked.clear()
            self._changed.notify_all()

    def close(self, seconds: float = _GRACE) -> None:
        """Ends the thread, and waits for it; a read that hangs for longer is left behind."""
        self.end()
        task = self._thread
        if task is not None and task.thread is not threading.current_thread():
            task.join(seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._asked or self._ends):
                    self._changed.wait()
                if self._ends:
                    return
                cache = next(iter(self._asked))
                work = self._asked.pop(cache)
            with suppress(Exception):  # Who uses the keys meets it again.
                work(lambda cache=cache: self._ends or cache in self._asked)
            del cache, work
