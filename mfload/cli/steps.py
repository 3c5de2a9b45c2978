"""Progress of work that is counted in steps: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from mfload.cli import streams
from mfload.cli.output import fancy

Watch = Callable[[int, int, str], None]
"""Told of steps done, steps in all (0 where not known yet), and what is being done."""


@contextmanager
def steps() -> Generator[Watch]:
    """Shows progress on stderr: a bar on a terminal, a line whenever the work changes elsewhere."""
    if not fancy(sys.stderr):
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as drawn:
        task = drawn.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=what)

        yield watch


class _Lines:
    def __init__(self) -> None:
        self._last = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self._last:
            self._last = what
            count = f" ({done} of {total} done)" if total else ""
            streams.say(f"mfload: {what}{count}")
