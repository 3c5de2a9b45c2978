"""What a call shares with the interpreter and the machine.

Threads are started here and nowhere else, with what bounds a wait for them and what becomes of them
in a fork; and there are the garbage collector and cores.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import sys
import time
import weakref
from _thread import TIMEOUT_MAX, allocate_lock
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from numbers import Real
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mfload import errors

if sys.platform != "linux":
    raise ImportError(f"mfload runs on Linux alone, not on {sys.platform}")

T = TypeVar("T")

if TYPE_CHECKING:
    import threading
    from queue import SimpleQueue


class Forked:
    """True in a fork of the process that made it, else False: for what a child must not use."""

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self._process != os.getpid()


class Task(Generic[T]):
    """A call in a thread.

    It is waited for by a lock: an interrupted `Thread.join` takes a thread that runs for one that
    ended (Python 3.9 to 3.12), and an interrupted wait for an event can leave that locked.

    Attributes:
        ended: Whether the call is over.
    """

    def __init__(self, call: Callable[[], T], service: bool = False) -> None:
        self._call = [call]  # Popped: it is in no frame of an error, nor kept after the call.
        self._service = service
        self._outcome: tuple[Any, BaseException | None] = None, None
        self._over, self.ended, self._forked = allocate_lock(), False, Forked()
        self._over.acquire()
        self.thread: threading.Thread | None = None

    def start(self, name: str, daemon: bool = True) -> Task[T]:
        """Starts its thread; raises RuntimeError if the system gives no more of them.

        The exit of the interpreter waits for the thread unless it is a `daemon`, as all are that
        may hang in the kernel.
        """
        import threading  # Late: a small load has no other thread.

        thread = threading.Thread(target=self.run, name=name, daemon=daemon)
        self.thread = thread
        try:
            thread.start()
        except RuntimeError:
            self.thread = None
            raise
        return self

    def run(self, last: Callable[[], object] | None = None) -> None:
        """Makes the call, and lets those go on that wait for it, after `last`."""
        try:
            self._outcome = self._call.pop()(), None
        except BaseException as error:
            if self._service:
                raise
            self._outcome = None, error
        finally:
            if last is not None:
                last()
            self.ended = True
            self._over.release()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for its end, for so many seconds at most; whether it has ended.

        In a fork it has not, and is not waited for, if its thread goes on in the parent.
        """
        seconds = -1 if timeout is None else min(max(0.0, timeout), TIMEOUT_MAX)
        thread = self.thread  # Others that wait may forget it meanwhile.
        begun = thread is None or thread.ident is not None  # Else it was interrupted.
        there = begun and not self.ended and not self._forked
        if there and self._over.acquire(timeout=seconds):
            self._over.release()
        if self.ended and thread is not None:
            thread.join()  # It has nothing left to do.
            self.thread = None
        return self.ended

    def result(self) -> T:
        """Waits for its end, and returns or raises what the call did; an error a single time."""
        self.join()
        value, error = self._outcome
        if error is None:
            return value
        try:
            raise error
        finally:
            self._outcome, error = (None, None), None  # It refers to this frame: no cycle is left.


def start(
    call: Callable[[], T],
    name: str = "mfload-reader",
    *,
    daemon: bool = True,
    service: bool = False,
) -> Task[T]:
    """Makes a call in a new thread (see `Task.start`).

    What it raises is raised by `Task.result`; of a `service`, whose result is not asked for, it
    goes to `threading.excepthook`.
    """
    return Task(call, service).start(name, daemon)


Start = Callable[[Callable[[], object]], Task[Any]]
"""Has something called in a thread (see `start`)."""


class _Queues:
    """Of the threads that wait; threads refer to these, and not to their crew."""

    def __init__(self) -> None:
        self.idle: deque[SimpleQueue[Task[Any] | None]] = deque()
        self.closed = False

    def hand(self, task: Task[Any] | None) -> None:
        """Gives one that waits a task, or None to end it; raises IndexError if none waits.

        Without a line in between, where an interrupt would leave a thread that no one knows.
        """
        next(map(operator.methodcaller("put", task), map(deque.pop, [self.idle])))

    def close(self) -> None:
        self.closed = True
        with suppress(IndexError):
            while True:
                self.hand(None)

    def work(self, mine: SimpleQueue[Task[Any] | None]) -> None:
        while (task := mine.get()) is not None:
            # Before its end is told: who waits for it has more.
            task.run(functools.partial(self.idle.append, mine))
            task = None
            if self.closed:
                self.close()


class Crew:
    """Threads that do one thing after another until it is closed; a fork gets others.

    A new thread begins where the system puts it, mostly beside its parent on one core: for work of
    a few milliseconds it is late. Those of a crew have found their places.
    """

    def __init__(self) -> None:
        self._queues, self._forked = _Queues(), Forked()

    def start(self, call: Callable[[], T]) -> Task[T]:
        """Has a thread that waits call it, or a new one (see `start`)."""
        if self._forked:
            self._queues, self._forked = _Queues(), Forked()
        task, queues = Task(call), self._queues
        try:
            queues.hand(task)
        except IndexError:
            from queue import SimpleQueue

            mine: SimpleQueue[Task[Any] | None] = SimpleQueue()
            mine.put(task)  # First: an interrupt may come when the thread has begun.
            start(functools.partial(queues.work, mine))
        return task

    def share(self, work: Callable[[int], object], count: int, threads: int) -> None:
        """Calls `work` with the numbers from 0 to `count`, in this thread and some of the crew.

        Returns when all has ended, even if it is interrupted: threads may write to memory that the
        caller lets go of. After an error no more is begun. Raises the first error.
        """
        numbers, failed, under_way = itertools.count(), list[Any](), set[int]()

        def take(mine: set[int] = under_way) -> None:
            while (number := next(numbers)) < count:
                try:
                    mine.add(number)
                    if failed:
                        break
                    work(number)
                except BaseException as error:  # noqa: BLE001 - raised by the caller
                    failed.append(error)
                finally:
                    mine.discard(number)

        running: list[Task[None]] = []
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    with suppress(RuntimeError):  # The system gives no more threads.
                        for _ in range(min(count, threads) - 1):
                            running.append(self.start(take))
                    take(set())  # An interrupt, even of the last line, ends what is begun here.
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


def close_all(some: list[Any]) -> None:
    """Closes and takes out each, the last first; all of them, if it is interrupted."""
    try:
        while some:
            some[-1].close()
            some.pop()
    except BaseException:  # Ctrl-C: what it cut short is closed again, and then the rest.
        close_all(some)
        raise


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_forks(owner: Any) -> None:
    """Has `owner.forget()` close descriptors in each fork of this process, while there is an owner.

    A connection that a fork held too would stay open after a kill of its parent.
    """
    _owners.add(owner)


def in_forks(call: Callable[[], object]) -> Callable[[], object]:
    """Has a function called in each fork of this process; a decorator."""
    os.register_at_fork(after_in_child=call)
    return call


@in_forks
def _forget() -> None:
    for each in list(_owners):
        each.forget()


class Deadline:
    """The moment when a timeout of `seconds` has run out; never, for None and infinity."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None:  # Asked first: an abstract class takes longer than all the rest.
            fits = isinstance(seconds, Real) and not isinstance(seconds, bool)  # pyright: ignore
            if not (fits and seconds > 0):
                raise errors.UsageError(
                    "timeout must be positive", expected="seconds above 0", found=repr(seconds)
                )
        # No clock of the system counts further than this: some 290 years.
        self.seconds = None if seconds is None or seconds > TIMEOUT_MAX else seconds
        self._end = None if self.seconds is None else time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, infinity without a bound."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def error(self, what: str, file: str | None = None) -> errors.LoadTimeoutError:
        """The error to raise when it has passed."""
        return errors.LoadTimeoutError(
            f"timed out while {what}", file=file, expected=f"an end within {self.seconds} s"
        )

    def bound(
        self,
        call: Callable[[], T],
        what: str,
        file: str | None = None,
        *,
        apart: bool = False,
        crew: Crew | None = None,
    ) -> T:
        """Runs a call, with a timeout in a thread of its own, which is left behind if it hangs.

        With `apart`, it has a thread without a timeout too, so that an interrupt ends the waiting;
        with a `crew`, it is one of that, or this one if the system gives no more.
        Raises MfloadError if the system gives no thread, without which no timeout holds.
        """
        if self._end is None and not apart:
            return call()
        try:
            task = crew.start(call) if crew else start(call, "mfload-bounded")
        except RuntimeError as error:
            if self._end is None or crew is not None:
                return call()
            what, expected = "timeout= needs a thread, and none could be started", "room for more"
            raise errors.MfloadError(what, file=file, expected=expected, found=str(error)) from None
        del call  # It is in no frame of an error, which would keep what it refers to.
        if not task.join(None if self._end is None else self.left()):
            raise self.error(what, file)
        return task.result()


def explained(function: Any, label: str) -> Any:
    """A public function or class that explains calls which do not fit its signature.

    Those in an old spelling are made in the new one, with a warning (see `mfload.deprecated`).

    A TypeError that is raised inside of it stays as it is. `label`: its public name, such as
    "mfload.load", by which the function is pickled.
    """
    if isinstance(function, type):
        made: Any = function
        if "__init__" in vars(made) and not issubclass(made, Exception):
            made.__init__ = explained(made.__init__, label)
        return made
    if not isinstance(function, FunctionType):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # It comes from a line of the function.
            from mfload import deprecated, misuse

            new = deprecated.renewed(label, kwargs)
            wrong = misuse.error(function, label, args, kwargs) if new is None else None
            if new is None and wrong is None:
                raise
        if wrong is not None:
            raise wrong
        return call(*args, **(new or {}))

    if call.__name__ != "__init__":
        call.__module__, _, call.__qualname__ = label.rpartition(".")
    return call


_threshold: tuple[int, int, int] | None = None  # What the last pause replaced.


@contextmanager
def gc_paused() -> Generator[None]:
    """Keeps the collector from running by itself.

    While a hundred thousand small objects are made, it would walk all that the process holds
    several times over: with a large framework imported, that doubles the cost of reading a header.
    The threshold is set, and not `gc.disable()` called, so that a program that switches the
    collector off or on meanwhile is heeded. Of several threads inside, the first to enter ends the
    pause.
    """
    global _threshold
    before = gc.get_threshold()
    try:
        if before[0]:
            _threshold = before
            gc.set_threshold(0)
        yield
    finally:
        if before[0] and gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)
            _threshold = None


@in_forks
def _end_pause() -> None:
    """Ends a pause of a thread that is not in the child."""
    if _threshold is not None and gc.get_threshold()[0] == 0:
        gc.set_threshold(*_threshold)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


_beside = 1
_among = 0


def set_local_processes(count: int, rank: int = 0) -> None:
    """Says how many processes of the same program run here, where no launcher does.

    `rank` is the number of this one among them.
    """
    global _beside, _among
    _beside, _among = count, rank


def local_processes() -> int:
    """Processes of the same program on this machine, with this one.

    It is what launchers such as torchrun say in LOCAL_WORLD_SIZE, or else `set_local_processes`.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said) if said.isdecimal() else _beside)


def local_rank() -> int:
    """The number of this process among those (see `local_processes`): LOCAL_RANK, if it is set."""
    said = os.environ.get("LOCAL_RANK", "")
    return (int(said) if said.isdecimal() else _among) % local_processes()


def share_of_cores() -> int:
    """Cores for this process, at least one, if others of the same program run beside it."""
    return max(1, cores() // local_processes())


Usage = tuple[float, float, int]
"""User and system seconds of CPU time, and page faults."""


def usage(*, thread: bool = False) -> Usage:
    """What this process used so far.

    `thread`: of this thread alone.
    """
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD if thread else resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime, used.ru_minflt + used.ru_majflt
