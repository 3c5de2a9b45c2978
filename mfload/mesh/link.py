"""Rows of bytes between processes, by a collective that runs in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mfload import errors
from mfload.io import buffers
from mfload.runtime import Deadline, Task

# Seconds between two looks at a collective that is under way, until a process that is gone is
# missed, and for a collective that others have left.
_TICK, _MISSED, _GRACE = 0.1, 0.3, 2.0

# The groups whose collectives may be out of step: one of theirs was given up, or failed.
_broken: set[Hashable] = set()


class Pieces(NamedTuple):
    """What travels in a round beside the first bytes of each row.

    A piece is the number of the other process, its first byte in the row, and the memory that it is
    sent from or comes to. Sender and receiver list the pieces between them in the same order.

    Attributes:
        sent: Pieces for others. They need not lie in the rows.
        taken: Pieces from others.
        sizes: Bytes of the row for each process that are sent apart from pieces.
        come: The same of the row from each process.
        most: The most pieces that travel from one process to another; the same on all of them.
        front: The longest of all `sizes` of all processes; the same on all of them.
    """

    sent: list[tuple[int, int, Any]]
    taken: list[tuple[int, int, Any]]
    sizes: list[int]
    come: list[int]
    most: int
    front: int


class Link:
    """Swaps rows of bytes between processes, which all call it equally often.

    A collective can't be interrupted: one that hangs is left behind, and with it the group.

    Args:
        group: What tells the processes from others that have a link.
        deadline: Of the load.
        count: Processes.
        width: Bytes of a row.
    """

    device: Any = None  # Where results lie, and pieces that are sent. Default: in host memory.
    rooms = 2  # Times the rows of a round that it holds on the device.

    def __init__(self, group: Hashable, deadline: Deadline, count: int = 1, width: int = 0) -> None:
        self._group, self._deadline = group, deadline
        self._count, self._width = count, width
        self._under_way: Task[Any] | None = None

    def buffer(self) -> Any:
        """Memory for what is sent: uint8 (processes, width)."""
        return buffers.allocate(self._count * self._width).reshape(-1, self._width)

    def moves(self, device: Any) -> bool:
        """Whether pieces can travel from and to memory of a device."""
        return False

    def connect(self, device: Any, spots: Sequence[str], check: Callable[[], object]) -> str:
        """Connects the device with those of the others at these spots; why not, if it can't be.

        What fails once is not tried again.
        """
        return ""

    def room(self, rows: Any) -> Any:
        """Memory for pieces that are sent: of the device, or that of the rows."""
        if self.device is None:
            return rows.reshape(-1)
        allocate = partial(self.device.allocate, rows.size)
        return self._deadline.bound(allocate, "allocating on a device")

    def view(self, memory: Any) -> Any:
        """The bytes of a buffer, as `part` takes pieces from it."""
        return memory

    def part(self, view: Any, at: int, nbytes: int) -> Any:
        """A piece of a buffer's bytes."""
        return view[at : at + nbytes]

    @staticmethod
    def well(rows: Any, came: Any) -> bool:
        """Whether all processes are at the round of these rows, and none tells of an error."""
        well = [*rows[0, :8], *bytes(8)]
        return all([*row[:16]] == well for row in came)

    def copy(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Copies bytes of rows and pieces to where they belong, (target, source)."""
        for target, source in copies:
            target[:] = source

    def abandon(self) -> None:
        """Ends what is under way on devices, after a swap that was given up or failed."""

    def exchange(self, rows: Any) -> Any:
        """Sends a row to each process and returns those that came; an error means it broke off."""
        raise NotImplementedError

    def swap(self, rows: Any, pieces: Pieces) -> Any:
        """The same with pieces. Default: they travel in the rows; a link may send them directly.

        It is enough to return as much of each row as `pieces` says comes apart from them.
        """
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
        """Begins to send a row to each process; `rows` and pieces stay alone until `finish`.

        Without pieces, whole rows travel.
        """
        sizes = [len(row) for row in rows]
        pieces = pieces or Pieces([], [], sizes, sizes, 0, max(sizes, default=0))
        self._under_way = Task(partial(self.swap, rows, pieces))
        self._under_way.start("mfload-swap")

    def finish(self, check: Callable[[], object]) -> tuple[Any, KeyboardInterrupt | None]:
        """Waits for what was begun; returns a row from each process, in the order of their ranks.

        Calls `check` while waiting, which may raise. Ctrl-C is returned if it came meanwhile; a
        second one is raised.
        """
        assert self._under_way is not None
        task, self._under_way = self._under_way, None
        interrupted: KeyboardInterrupt | None = None
        try:
            while not task.ended:
                try:
                    self._wait(task, check)
                except KeyboardInterrupt as error:
                    if interrupted is not None:
                        raise
                    interrupted = error
            try:
                return task.result(), interrupted
            except Exception as error:
                time.sleep(_MISSED)
                check()  # It knows by now which process is gone, if one is.
                found = (str(error).splitlines() or [""])[0][:300]
                message = "the exchange with the other processes broke off"
                raise errors.ProcessError(message, found=found) from error
        except BaseException:
            _broken.add(self._group)
            self.abandon()
            raise

    def _wait(self, task: Task[Any], check: Callable[[], object]) -> None:
        if task.join(min(_TICK, self._deadline.left())):
            return
        try:
            check()
        except errors.ProcessError:
            # A process whose swap ended may have failed since. Then this one ends as well, and the
            # collectives stay in step.
            if not task.join(min(_GRACE, self._deadline.left())):
                raise
        if self._deadline.left() <= 0:
            raise self._deadline.error("exchanging bytes with the other processes")
