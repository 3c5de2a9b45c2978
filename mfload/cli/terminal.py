"""Standard streams, whatever they lead to; text made harmless; progress on stderr."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
from collections.abc import Callable, Generator
from typing import Any, Literal

_PATIENCE = 0.4
"""Seconds before a bar is shown: shorter work needs none."""

_LEAST = 20
"""Columns that are worth breaking a text for."""


def fancy(stream: Any) -> bool:
    """Whether a stream is a terminal that can more than print."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def wrapped(text: str, stream: Any, indent: int = 0) -> list[str]:
    """The lines of a text: on a terminal of its width, broken between words; else one.

    Those after the first are indented.
    """
    width = shutil.get_terminal_size().columns
    fits = len(text) <= width or " " not in text[indent:]  # A name stays beside its figures.
    if fits or width - indent < _LEAST or not fancy(stream):
        return [text]
    import textwrap  # Late: most lines are short.

    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, **how)


def open_streams() -> None:
    """Opens the null device in the place of standard streams that are closed.

    Otherwise the next file that is opened would get a stream's number, and what some library
    or a child process prints would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def say(text: str) -> None:
    """Prints to stderr; where that can't be written the exit code has to do."""
    lines = [part for line in text.split("\n") for part in wrapped(line, sys.stderr, 4)]
    with contextlib.suppress(OSError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def remark(text: str) -> None:
    """As `say`, but drops the text if stderr is full: its reader may have stopped."""
    try:
        free = select.select([], [sys.stderr], [], 0)[1]
    except (OSError, ValueError):  # It is not a stream of the system.
        free = [sys.stderr]
    if free:
        say(text)


def mute(stream: Any) -> None:
    """Drops what a stream holds and will be given: Python flushes once more, and would complain."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


@contextlib.contextmanager
def bar(what: str, unit: str = "B") -> Generator[Callable[..., None] | Literal[False]]:
    """A progress bar by tqdm while the context lasts, on a terminal only.

    Yields a function of (done, total, what is being done) as `progress=` takes it, or False.
    """
    if not fancy(sys.stderr):
        yield False
        return
    from tqdm import tqdm

    how: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B", "unit_divisor": 1024}
    with tqdm(desc=what, file=sys.stderr, delay=_PATIENCE, leave=False, **how) as drawn:

        def advance(done: int, total: int, now: str = what) -> None:
            drawn.total = total
            drawn.set_description(now, refresh=False)
            drawn.update(done - drawn.n)

        yield advance
