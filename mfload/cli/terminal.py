"""Standard streams, whatever they lead to; text made harmless; progress on stderr."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator
from typing import Any, Literal

_PATIENCE = 0.4
"""Seconds before a bar is shown: shorter work needs none."""

Steps = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0 if not known yet), and what is being done."""


def fancy(stream: Any) -> bool:
    """Whether a stream is a terminal that can more than print."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def clean(value: object) -> str:
    """One line that moves no cursor and colours nothing: what can't be printed is escaped."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def fill() -> None:
    """Puts the null device in the place of standard streams that the command was started without.

    Otherwise the next file that is opened would get a stream's number, and what some library
    or a child process prints would go into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  To the end.
            setattr(sys, name, null)


def flush() -> None:
    """Writes what stdout still holds; where it can't be written, stdout is mute afterwards."""
    try:
        sys.stdout.flush()
    except OSError as error:
        mute(sys.stdout)
        raise named(error) from None


def named(error: OSError) -> OSError:
    """An error of writing to stdout, with the stream in the place of a file's name."""
    return OSError(error.errno, error.strerror, "standard output")


def say(text: str) -> None:
    """Prints to stderr; where that can't be written the exit code has to do."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def mute(stream: Any) -> None:
    """Drops what a stream holds and will be given: Python flushes once more, and would complain."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


@contextlib.contextmanager
def bar(what: str) -> Generator[Callable[[int, int], None] | Literal[False]]:
    """A progress bar of bytes while the context lasts, on a terminal only.

    Yields:
        What `progress=` of the library takes: a function of (bytes done, bytes in all), or False.
    """
    if not fancy(sys.stderr):
        yield False
        return
    start = time.monotonic()
    lock = threading.Lock()  # Readers may be threads.
    drawn: Any = None

    def advance(done: int, total: int) -> None:
        nonlocal drawn
        with lock:
            if drawn is None:
                if done >= total or time.monotonic() - start < _PATIENCE:
                    return
                drawn = _progress("DownloadColumn", "TransferSpeedColumn")
                drawn.add_task(what, total=total)
                drawn.start()
            drawn.update(drawn.task_ids[0], completed=done, total=total)

    try:
        yield advance
    finally:
        with lock:
            start = math.inf  # A reader that is still at work draws nothing more.
            if drawn is not None:
                drawn.stop()
                drawn = None


@contextlib.contextmanager
def steps() -> Generator[Steps]:
    """Shows progress on stderr: a bar on a terminal, a line whenever the work changes elsewhere."""
    if not fancy(sys.stderr):
        last = ""

        def line(done: int, total: int, what: str) -> None:
            nonlocal last
            if what != last:
                last = what
                say(f"mfload: {what}{f' ({done} of {total} done)' if total else ''}")

        yield line
        return
    with _progress("MofNCompleteColumn") as drawn:
        task = drawn.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=what)

        yield watch


def _progress(*columns: str) -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *(getattr(progress, name)() for name in columns),
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
