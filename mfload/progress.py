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

    Yields:
        What a transfer calls with the bytes that came, None where nobody looks.
    """
    if callable(progress):
        with _counted(progress, total) as advance:
            yield advance
    elif progress:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            log.warning("no progress bar: pip install 'mfload[progress]'")
            yield None
            return
        with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def draw(done: int, _: int) -> None:
                bar.update(done - bar.n)

            with _counted(draw, total) as advance:
                yield advance
    else:
        yield None


@contextmanager
def _counted(progress: Callable[[int, int], None], total: int) -> Generator[Callable[[int], None]]:
    """Adds up what came; the last call says the total, unless the context ends in an error.

    Bytes read over for no tensor count towards no total, and bytes of maps are never read.
    """
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done = min(total, done + nbytes)
        progress(done, total)

    yield advance
    if done < total or not total:
        progress(total, total)
