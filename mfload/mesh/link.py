"""Rows of bytes between processes, by a collective that runs in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from mfload import errors
from mfload.mesh.base import Pieces
from mfload.runtime import Deadline

# Seconds between two looks at a collective that is under way, until a process that is gone is
# missed, and for a collective that others have left.
_TICK, _MISSED, _GRACE = 0.1, 0.3, 2.0

# The groups whose collectives may be out of step: one of theirs was given up, or failed.
_broken: set[Hashable] = set()


class Link:
    """Swaps rows of bytes between processes, which all call it equally often (see `base.Link`).

    A collective can't be interrupted: one that hangs is left behind, and with it the group.

    Args:
        group: What tells the processes from others that have a link.
        deadline: Of the load.
    """

    def __init__(self, group: Hashable, deadline: Deadline) -> None:
        self._group, self._deadline = group, deadline
        self._under_way: tuple[threading.Thread, list[Any]] | None = None

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width)."""
        raise NotImplementedError

    def exchange(self, rows: Any) -> Any:
        """Sends a row to each process and returns a row from each; any error means it broke off."""
        raise NotImplementedError

    def swap(self, rows: Any, pieces: Pieces) -> Any:
        """The same with pieces. Default: they travel in the rows; a link may send them directly."""
        for number, at, memory in pieces.sent:
            place = rows[number, at : at + memory.size]
            if place.ctypes.data != memory.ctypes.data:
                place[:] = memory
        came = self.exchange(rows)
        for number, at, memory in pieces.taken:
            memory[:] = came[number, at : at + memory.size]
        return came

    def close(self) -> None:
        """Lets go of the buffers."""

    @property
    def broken(self) -> bool:
        """Whether a swap was given up or failed, so that no collective is started any more."""
        return self._group in _broken

    def start(self, rows: Any, pieces: Pieces | None = None) -> None:
        """Begins to send a row to each process; `rows` and pieces stay alone until `finish`."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(self.exchange(rows) if pieces is None else self.swap(rows, pieces))
            except Exception as error:  # noqa: BLE001 - raised in the thread that loads
                outcome.append(error)

        thread = threading.Thread(target=run, name="mfload-swap", daemon=True)
        self._under_way = thread, outcome
        thread.start()

    def finish(self, check: Callable[[], object]) -> tuple[Any, KeyboardInterrupt | None]:
        """Waits for what was begun; returns a row from each process, in the order of their ranks.

        Calls `check` while waiting, which may raise. Ctrl-C is returned if it came meanwhile; a
        second one is raised.
        """
        assert self._under_way is not None
        (thread, outcome), self._under_way = self._under_way, None
        interrupted: KeyboardInterrupt | None = None
        try:
            while thread.is_alive():
                try:
                    self._wait(thread, check)
                except KeyboardInterrupt as error:
                    if interrupted is not None:
                        raise
                    interrupted = error
            if isinstance(outcome[0], Exception):
                time.sleep(_MISSED)
                check()  # It knows by now which process is gone, if one is.
                found = (str(outcome[0]).splitlines() or [""])[0][:300]
                message = "the exchange with the other processes broke off"
                raise errors.ProcessError(message, found=found) from outcome[0]
        except BaseException:
            _broken.add(self._group)
            raise
        return outcome.pop(), interrupted

    def _wait(self, thread: threading.Thread, check: Callable[[], object]) -> None:
        thread.join(max(0.0, min(_TICK, self._deadline.left())))
        if thread.is_alive():
            if self._deadline.left() <= 0:
                raise self._deadline.error("exchanging bytes with the other processes")
            try:
                check()
            except errors.ProcessError:
                # A process whose swap ended may have failed since. Then this one ends as well, and
                # the collectives stay in step.
                thread.join(max(0.0, min(_GRACE, self._deadline.left())))
                if thread.is_alive():
                    raise
