"""What a call shares with the interpreter: a deadline, and the garbage collector paused."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

from mfload import errors

T = TypeVar("T")


class Deadline:
    """The moment when `timeout=` has run out.

    Args:
        seconds: From now; None and infinity for never.

    Raises:
        UsageError: Not a positive number.
    """

    def __init__(self, seconds: float | None) -> None:
        number = isinstance(seconds, Real) and seconds > 0
        if seconds is not None and not number:
            raise errors.UsageError("timeout", expected="seconds above 0", found=repr(seconds))
        # No clock of the system counts further than this: some 290 years.
        self.seconds = None if seconds is None or seconds > threading.TIMEOUT_MAX else seconds
        self._end = None if self.seconds is None else time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, infinity where there is no bound."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def error(self, what: str, file: str | None = None) -> errors.LoadTimeoutError:
        """The error to raise when it has passed."""
        return errors.LoadTimeoutError(
            f"timed out while {what}", file=file, expected=f"an end within {self.seconds} s"
        )

    def bound(self, call: Callable[[], T], what: str, file: str | None = None) -> T:
        """Runs a call, in a thread of its own where there is a bound.

        Raises:
            LoadTimeoutError: It had not ended in time; its thread is left behind.
        """
        if self._end is None:
            return call()
        outcome: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="mfload-bounded", daemon=True)
        thread.start()
        thread.join(max(0.0, self.left()))
        if not outcome:
            raise self.error(what, file)
        value, error = outcome.pop()
        if error is None:
            return value
        try:
            raise error
        finally:
            # Or the error would refer to itself by way of this frame.
            del error


# Making a hundred thousand small objects has the collector walk everything that the process
# holds, several times over: with a large framework imported that doubles the cost of reading a
# header. Nothing made inside is part of a cycle. The threshold is set and not gc.disable()
# called, so that another thread that switches the collector off or on meanwhile is heeded.
_lock = threading.RLock()  # A signal's handler may load, too.
_inside = 0
_threshold: tuple[int, int, int] | None = None


def _resume() -> None:
    global _threshold
    if _threshold is not None and gc.get_threshold()[0] == 0:
        gc.set_threshold(*_threshold)
    _threshold = None


def _after_fork() -> None:
    # Threads that were inside are not in the child, and the lock may have been theirs.
    global _lock, _inside
    _lock = threading.RLock()
    _inside = 0
    _resume()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def gc_paused() -> Generator[None]:
    """Keeps the collector from running by itself while any thread is inside."""
    global _inside, _threshold
    entered = False
    try:
        with _lock:
            _inside += 1
            entered = True
            if gc.get_threshold()[0]:
                _threshold = gc.get_threshold()
                gc.set_threshold(0)
        yield
    finally:
        with _lock:
            # A child forked inside began to count at zero.
            _inside = max(0, _inside - entered)
            if _inside == 0:
                _resume()


def process_usage() -> tuple[float, float, int]:
    """User and system seconds of CPU time, and page faults, of this process so far."""
    try:
        import resource  # Not on Windows.
    except ImportError:
        times = os.times()
        return times.user, times.system, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime, usage.ru_minflt + usage.ru_majflt
