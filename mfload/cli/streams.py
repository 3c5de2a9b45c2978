"""Standard streams that are closed, full, or that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


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
    """Writes what stdout still holds.

    Raises:
        OSError: It can't be written; stdout is mute from here on.
    """
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
