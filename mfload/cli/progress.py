"""Progress on stderr: GB/s and the time left, for long work that somebody watches."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

from mfload.cli.output import fancy

_PATIENCE = 0.4
"""Seconds before a bar is shown: what is over by then needs none."""

Shown = Callable[[int, int], None] | Literal[False]


@contextmanager
def bar(what: str) -> Generator[Shown]:
    """A progress bar while the context lasts, on a terminal only.

    Args:
        what: What is being done, such as "loading".

    Yields:
        What `progress=` of the library takes: a function of (bytes done, bytes in all), or
        False where nobody looks.
    """
    if not fancy(sys.stderr):
        yield False
        return
    drawn = _Bar(what)
    try:
        yield drawn
    finally:
        drawn.close()


class _Bar:
    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        # Those who read may be threads.
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            if self._bar is None:
                if done >= total or time.monotonic() - self._start < _PATIENCE:
                    return
                self._bar = self._open(total)
            self._bar.update(self._task, completed=done, total=total)

    def _open(self, total: int) -> Any:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        drawn = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = drawn.add_task(self._what, total=total)
        drawn.start()
        return drawn

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
                # Whoever still reads has no screen to draw on.
                self._start = math.inf
