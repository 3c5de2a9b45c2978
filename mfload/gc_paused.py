"""Work that makes many objects at once, with the garbage collector told to wait.

Making a hundred thousand small objects has the collector walk everything that the process
holds, several times over: with a large framework imported that doubles the cost of reading a
header. Nothing made here is part of a cycle.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.RLock()  # A signal's handler may load, too.
_inside = 0
_stopped = False


def _after_fork() -> None:
    # Threads that were inside are not in the child, and the lock may have been theirs.
    global _lock, _inside, _stopped
    _lock = threading.RLock()
    _inside = 0
    if _stopped:
        gc.enable()
        _stopped = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def collector_paused() -> Generator[None]:
    """Keeps the collector off while any thread is inside; one that was off stays off."""
    global _inside, _stopped
    entered = False
    try:
        with _lock:
            _inside += 1
            entered = True
            if gc.isenabled():
                gc.disable()
                _stopped = True
        yield
    finally:
        with _lock:
            # A child forked inside began to count at zero.
            _inside = max(0, _inside - entered)
            if _inside == 0 and _stopped:
                gc.enable()
                _stopped = False
