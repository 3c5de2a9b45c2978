"""Streams without a device: work waits in queues and runs in any order that streams allow.

Within a queue the order is kept, and work behind a wait runs after the mark that it waits for.
Everything else is left to the mode, since code that is right is right in every one of them:

- "lazy": work runs when somebody waits for it, and no other; a question runs one step.
- "mixed": at every call a few steps of queues that chance picks.
- "thread": a thread runs steps of queues that chance picks, at random times.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from mfload import errors

Mode = Literal["lazy", "mixed", "thread"]
MODES: tuple[Mode, ...] = ("lazy", "mixed", "thread")

# One for all: streams of one device may wait for another's.
_turn = threading.Condition(threading.RLock())


class Span:
    """Bytes that queued work touches."""

    __slots__ = ("end", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.end = start, start + nbytes

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


class Mark:
    """What an event is: a place in a queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.over = False
        self.error: errors.DeviceError | None = None

    def done(self) -> bool:
        with _turn:
            over = self.over
            self.queue.queues.asked(self.queue)
        self.check()
        return over

    def wait(self) -> None:
        self.queue.queues.reach(self)
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)  # Anew: a traceback keeps what its frames hold.


class _Work:
    __slots__ = ("last", "mark", "run", "touches", "until")

    def __init__(
        self,
        run: Callable[[], None] | None = None,
        touches: Iterable[Span] = (),
        mark: Mark | None = None,
        until: Mark | None = None,
        last: bool = False,
    ) -> None:
        self.run, self.touches, self.mark, self.until = run, tuple(touches), mark, until
        self.last = last


class Queue:
    """The work of one stream."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.work: deque[_Work] = deque()
        self.error: errors.DeviceError | None = None
        self.ended = False

    def give(self, run: Callable[[], None], touches: Iterable[Span] = ()) -> None:
        """Work for later.

        Args:
            run: What to do; its DeviceError ends all that comes after it in this queue.
            touches: Memory that it reads or writes.
        """
        self._put(_Work(run, touches))

    def mark(self) -> Mark:
        mark = Mark(self)
        self._put(_Work(mark=mark))
        return mark

    def wait(self, mark: Mark) -> None:
        self._put(_Work(until=mark))

    def synchronize(self) -> None:
        mark = Mark(self)
        with _turn:
            self.work.append(_Work(mark=mark))
        mark.wait()

    def check(self) -> None:
        """Raises what earlier work failed with."""
        if self.error is not None:
            raise copy.copy(self.error)

    def close(self) -> None:
        """Runs what is left; errors stay with the marks."""
        mark = Mark(self)
        with _turn:
            self.work.append(_Work(mark=mark))
        self.queues.reach(mark)
        self.leave()
        with _turn:
            while self.work:
                self.step()

    def leave(self) -> None:
        """Ends the queue once its work has run, and returns at once."""
        self._put(_Work(last=True))

    def _put(self, work: _Work) -> None:
        with _turn:
            self.work.append(work)
            _turn.notify_all()
            self.queues.given()

    # With the turn held:

    def ready(self) -> bool:
        return bool(self.work) and (self.work[0].until is None or self.work[0].until.over)

    def step(self) -> None:
        work = self.work[0]
        if work.until is not None and not work.until.over:
            work.until.queue.queues.reach(work.until)
        try:
            if work.until is not None and self.error is None:
                self.error = work.until.error
            if work.run is not None and self.error is None:
                work.run()
        except errors.DeviceError as error:
            self.error = error.with_traceback(None)
        finally:
            self.work.popleft()
        if work.mark is not None:
            work.mark.error, work.mark.over = self.error, True
        if work.last:
            self.ended = True
            self.queues.all.remove(self)
        _turn.notify_all()


class Queues:
    """All queues of one device.

    Args:
        mode: When work runs (see the module).
        seed: Of chance.
    """

    def __init__(self, mode: Mode = "lazy", seed: int = 0) -> None:
        self.mode = mode
        self.all: list[Queue] = []
        self._random = random.Random(seed)
        if mode == "thread":
            threading.Thread(target=_serve, args=(weakref.ref(self), seed), daemon=True).start()

    def new(self) -> Queue:
        queue = Queue(self)
        with _turn:
            self.all.append(queue)
        return queue

    def pending(self, span: Span) -> bool:
        """Whether queued work touches these bytes."""
        with _turn:
            return any(
                span.meets(touched)
                for queue in self.all
                for work in queue.work
                for touched in work.touches
            )

    def drop(self, span: Span) -> bool:
        """Has queued work leave these bytes alone, which are about to go; whether there was any."""
        with _turn:
            found = [
                work
                for queue in self.all
                for work in queue.work
                if any(span.meets(touched) for touched in work.touches)
            ]
            for work in found:
                work.run, work.touches = None, ()
        return bool(found)

    def busy(self) -> bool:
        """Whether anything has not run yet."""
        with _turn:
            return any(work.run for queue in self.all for work in queue.work)

    def reach(self, mark: Mark) -> None:
        """Runs, or waits for, all that comes before a mark."""
        with _turn:
            while not mark.over:
                if self.mode == "thread" and mark.queue in self.all:
                    _turn.wait(1)
                elif self.mode != "mixed" or not self._any():
                    mark.queue.step()

    def given(self) -> None:
        if self.mode == "mixed":
            for _ in range(self._random.randrange(3)):
                self._any()

    def asked(self, queue: Queue) -> None:
        if self.mode == "mixed":
            self._any()
        elif self.mode == "lazy" and queue.work:
            queue.step()  # Who asks again and again must get there.

    def _any(self) -> bool:
        ready = [queue for queue in self.all if queue.ready()]
        if ready:
            self._random.choice(ready).step()
        return bool(ready)


def _serve(held: weakref.ref[Queues], seed: int) -> None:
    chance = random.Random(seed)
    while (queues := held()) is not None:
        with _turn:
            ready = [queue for queue in queues.all if queue.ready()]
            if ready:
                chance.choice(ready).step()
        if ready:
            del queues
            time.sleep(chance.choice([0, 0, 0, 0.0002, 0.002]))
        else:
            del queues, ready
            with _turn:
                _turn.wait(0.01)
