"""`progress=`: a bar by tqdm, or the caller's own function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

Progress = bool | Callable[[int, int], None]

log = logging.getLogger("mfload")


@contextmanager
def shown(progress: Progress, total: int) -> Generator[Callable[[int], None] | None]:
    """Yields what a transfer calls with the bytes that came, None if nothing is shown.

    Unless the context ends in an error, the last call reports the total: bytes of maps are never
    read, so that a transfer does not count them.
    """
    if not progress:
        yield None
        return
    with ExitStack() as stack:
        if callable(progress):
            report = progress
        else:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                from mfload import extras

                log.warning("no progress bar, for lack of tqdm; %s", extras.install("progress"))
                yield None
                return
            bar = stack.enter_context(
                tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024)
            )

            def report(done: int, _: int, /) -> None:
                bar.update(done - bar.n)

        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done = min(total, done + nbytes)  # Bytes read over belong to no tensor.
            report(done, total)

        yield advance
        if done < total or not total:
            report(total, total)
