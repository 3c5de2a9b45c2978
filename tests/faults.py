"""The system calls of a save, counted: any of them can fail, or be the last before a kill."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mfload.saving import drafts

CALLS = ("open", "pwritev", "fsync", "link", "replace", "unlink", "fchmod")


class Stop(BaseException):
    """What Ctrl-C is: nothing that anybody catches."""


@contextmanager
def steps(before: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Calls `before(number, name)` before each call of a save to the system that writes.

    Yields:
        The names of the calls that were made.
    """
    made: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **options)
            made.append(name)
            before(len(made), name)
            return real(*args, **options)

        return call

    patches = [mock.patch.object(os, name, watched(name, getattr(os, name))) for name in CALLS]
    patches.append(
        mock.patch.object(drafts, "allocate_file", watched("allot", drafts.allocate_file))
    )
    for patch in patches:
        patch.start()
    try:
        yield made
    finally:
        for patch in patches:
            patch.stop()


def failing(at: int, code: int) -> Callable[[int, str], None]:
    """Fails the call of that number, and that alone."""

    def before(number: int, name: str) -> None:
        if number == at:
            raise OSError(code, os.strerror(code))

    return before


def interrupting(at: int) -> Callable[[int, str], None]:
    """Raises what Ctrl-C raises, before the call of that number."""

    def before(number: int, name: str) -> None:
        if number == at:
            raise Stop

    return before


def killing(at: int) -> Callable[[int, str], None]:
    """Kills the process before the call of that number."""

    def before(number: int, name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


@contextmanager
def no_tmpfile(code: int = errno.EOPNOTSUPP) -> Iterator[None]:
    """A file system that knows no files without names."""
    real = os.open

    def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **options)

    with mock.patch.object(os, "open", call):
        yield


@contextmanager
def no_links(code: int = errno.EPERM) -> Iterator[None]:
    """A file system without hard links, which has no files without names either."""

    def call(*args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    with no_tmpfile(), mock.patch.object(os, "link", call):
        yield
