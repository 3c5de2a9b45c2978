"""A board in memory, and processes that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


class Memory:
    """What all boards of a test share."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.lock = threading.Lock()


class MemoryBoard:
    """See `board.Board`.

    Args:
        memory: Shared with the other processes.
        before: Called before each look: it may wait, or raise.
    """

    def __init__(self, memory: Memory, before: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self.before = before
        self.place: Any = None
        self.kept: dict[str, int] = {}

    def post(self, key: str, text: str) -> None:
        with self._memory.lock:
            self._memory.texts[key] = text

    def look(self, prefix: str) -> dict[str, str]:
        self.before()
        with self._memory.lock:
            return {k: v for k, v in self._memory.texts.items() if k.startswith(prefix)}

    def decide(self, key: str, text: str) -> str:
        with self._memory.lock:
            return self._memory.texts.setdefault(key, text)

    def forget(self, prefix: str) -> None:
        with self._memory.lock:
            for key in [k for k in self._memory.texts if k.startswith(prefix)]:
                del self._memory.texts[key]


def all_at_once(acts: Sequence[Callable[[], Any]], seconds: float = 20.0) -> list[Any]:
    """Runs each in a thread; what each returned or raised.

    Raises:
        AssertionError: One hung.
    """
    outcomes: list[Any] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            outcomes[number] = acts[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "a process hangs"
    return outcomes
