"""One comparison: a call of mfload's beside the natural alternative to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What is compared, and what is to be reached.

    The best of `ours` may take `limit` times the best of `theirs`, and `allowance` beside it.

    Attributes:
        name: What it is, with shapes and dtypes.
        ours: The call that is timed. What it returns is dropped after the clock has stopped.
        peer: What the alternative is called.
        theirs: The alternative.
        limit: To reach.
        allowance: Seconds.
        cold: Files whose pages leave the page cache before each call.
        before: Prepares a call, before the clock starts; such as removing what it wrote.
    """

    name: str
    ours: Callable[[], Any]
    peer: str
    theirs: Callable[[], Any]
    limit: float
    allowance: float = 0.0
    cold: Sequence[Path] = ()
    before: Callable[[], Any] | None = None


def drop(paths: Iterable[Path]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
