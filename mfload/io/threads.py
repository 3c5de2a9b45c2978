"""Threads for work in the background: new ones, or a crew that stays for the next work."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol


class Running(Protocol):
    """Work under way."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, for so many seconds at most."""
        ...


Start = Callable[[Callable[[], object]], Running]
"""Has something called in a thread; raises RuntimeError if the system gives no more of them.

The threads are daemons: one that hangs in the kernel does not hold up the exit.
"""


def new(call: Callable[[], object]) -> Running:
    """Starts a thread for it."""
    thread = threading.Thread(target=call, name="mfload-reader", daemon=True)
    thread.start()
    return thread


class _Task:
    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call
        # An interrupt of who waits for an event can leave that locked.
        self._under_way, self._process = threading.Lock(), os.getpid()
        self._under_way.acquire()

    def run(self) -> None:
        if self.call is not None:
            self.call()

    def end(self) -> None:
        self.call = None  # What it refers to goes, though the thread stays.
        self._under_way.release()

    def join(self, timeout: float | None = None) -> None:
        if self._process != os.getpid():  # Its thread is in the parent.
            return
        if timeout is None:
            with self._under_way:
                pass
        elif self._under_way.acquire(timeout=max(0.0, timeout)):
            self._under_way.release()


class _Queues:
    """Of the threads that wait; threads refer to these, and not to their crew."""

    def __init__(self) -> None:
        self.idle: deque[queue.SimpleQueue[_Task | None]] = deque()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        while self.idle:
            self.idle.pop().put(None)


class Crew:
    """Threads that do one thing after another until it is closed; a fork gets others.

    A new thread begins where the system puts it, mostly beside its parent on one core: for work of
    a few milliseconds it is late. Those of a crew have found their places.
    """

    def __init__(self) -> None:
        self._queues, self._process = _Queues(), os.getpid()

    def start(self, call: Callable[[], object]) -> Running:
        """Has a thread that waits call it, or a new one (see `Start`)."""
        if self._process != os.getpid():
            self._queues, self._process = _Queues(), os.getpid()
        task, queues = _Task(call), self._queues
        try:
            mine = queues.idle.pop()
        except IndexError:
            mine = queue.SimpleQueue()
            threading.Thread(
                target=_work, args=(mine, queues), name="mfload-reader", daemon=True
            ).start()
        mine.put(task)
        return task

    def share(self, work: Callable[[int], object], count: int, threads: int) -> None:
        """Calls `work` with the numbers from 0 to `count`, in this thread and some of the crew.

        Returns when all has ended, even if it is interrupted: threads may write to memory that the
        caller lets go of. After an error no more is begun. Raises the first error.
        """
        numbers, failed, under_way = itertools.count(), list[Any](), set[int]()

        def take() -> None:
            while (number := next(numbers)) < count:
                try:
                    under_way.add(number)
                    if failed:
                        break
                    work(number)
                except BaseException as error:  # noqa: BLE001 - raised by the caller
                    failed.append(error)
                finally:
                    under_way.discard(number)

        running: list[Running] = []
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    with suppress(RuntimeError):  # The system gives no more threads.
                        for _ in range(min(count, threads) - 1):
                            running.append(self.start(take))
                    take()
                for each in running:
                    each.join()
                while under_way:  # Of a thread whose start was interrupted.
                    time.sleep(0.001)
                break
            except BaseException as error:  # noqa: BLE001 - such as KeyboardInterrupt
                failed.append(error)
        if failed:
            try:
                raise failed[0]
            finally:
                failed[:] = [None]  # Its frames refer to it; a thread that is late still stops.

    def close(self) -> None:
        """Ends the threads, each when its work is done; waits for none."""
        self._queues.close()

    def __del__(self) -> None:
        self.close()


def _work(mine: queue.SimpleQueue[_Task | None], queues: _Queues) -> None:
    while (task := mine.get()) is not None:
        try:
            task.run()
        finally:
            queues.idle.append(mine)  # Before its end is told: who waits for it has more.
            task.end()
            task = None
        if queues.closed:
            queues.close()
