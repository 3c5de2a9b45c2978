"""File systems that lack something."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock


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


def no_locks(fd: int, how: int) -> None:
    """In the place of `fcntl.flock`: a file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain": nullcontext,
    "no-tmpfile": no_tmpfile,
    "no-links": no_links,
}
"""Kinds of file systems."""
