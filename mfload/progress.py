"""`progress=`: a bar by tqdm, or the caller's own function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

Progress = bool | Callable[[int, int], None]

log = logging.getLogger("mfload")


@contextmanager
def shown(progress: Progress, total: int) -> Generator[Callable[[int], None] | None]:
    """Shows progress while the context lasts.

    Args:
        progress: False for none, True for a bar, or a function that is called with the
            bytes done and the bytes in all.
        total: Bytes in all.

    Yields:
        What a transfer calls with the bytes that came, None where nobody looks.
    """
    if callable(progress):
        yield _counter(progress, total)
    elif progress:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            log.warning("no progress bar: pip install 'mfload[progress]'")
            yield None
            return
        with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            yield lambda nbytes: (bar.update(nbytes), None)[1]
    else:
        yield None


def _counter(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return advance
