"""A save in the background: the call copies or holds the arrays, and a thread writes them.

Arrays that can change are copied into one buffer, with the alignment that they have in the file, so
that O_DIRECT writes from there. The buffer is kept for the next save and marked as free meanwhile:
the system takes it back when it runs short. Arrays that can't change are held by a reference.

The threads are not daemons: Python waits for them before it exits.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mfload import errors
from mfload.io import buffers
from mfload.runtime import Deadline, Task, in_forks
from mfload.saving import targets
from mfload.saving.layout import FileLayout
from mfload.saving.save import Saved, fetched, threads_for
from mfload.saving.writers import Writers

if TYPE_CHECKING:
    from mfload.io.buffers import Bytes
    from mfload.saving.export import TensorToSave

log = logging.getLogger("mfload")

_PART = 32 << 20  # Bytes of a tensor that a thread copies at once.
_SHARED_FROM = 64 << 10  # Smaller tensors are copied at once: sooner than a thread takes them.
_KEPT_FROM = 32 << 20  # Bytes from which on a buffer is kept for the next save.
_FREE = 8  # Linux: MADV_FREE.

_pending: dict[str, Work] = {}
"""By the path of the target."""
_untold: dict[PendingSave, None] = {}
"""Failed saves whose error was not retrieved yet."""
_spare: list[Bytes] = []
"""The buffer of an earlier save, at most one."""


class PendingSave(concurrent.futures.Future[Saved]):
    """A save in the background, as returned by `mfload.save(..., background=True)`.

    It is a `concurrent.futures.Future` of a `Saved`, with `result()`, `exception()`, `done()` and
    `add_done_callback()`; `concurrent.futures.wait` and `asyncio.wrap_future` take it. It can't be
    cancelled. An error that neither `result()` nor `exception()` has returned is raised by the next
    save of the process, or printed at exit.

    Attributes:
        path: Path of the file that is written. Shards and index have names derived from it.
    """

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.path = path

    def result(self, timeout: float | None = None) -> Saved:
        """Waits for the end of the save and returns what it did.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The save is still pending.
            MfloadError: The error of the save.
        """
        try:
            return super().result(timeout)
        finally:
            self._tell()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the save and returns its error, or None.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The save is still pending.
        """
        try:
            return super().exception(timeout)
        finally:
            self._tell()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the save, and raises no error of it.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            Whether the save has ended.
        """
        return bool(concurrent.futures.wait([self], timeout).done)

    def _tell(self) -> None:
        if self.done():
            _untold.pop(self, None)


class Work:
    """A save in the background, from the call to its end."""

    def __init__(self) -> None:
        self.future = PendingSave()
        self._called = time.perf_counter()
        self._thread = 0  # The one that saves.
        self._taken = threading.Lock()  # Held by the thread that settles the future.

    def claim(self, path: str | os.PathLike[str], timeout: float | None) -> None:
        """Waits for a pending save at the path, then becomes the pending one (see `take_turn`)."""
        deadline = Deadline(timeout)
        self.future.path = path = targets.key_of(path)
        while (other := _pending.setdefault(path, self)) is not self:
            other.wait(deadline)
        _raise_untold()

    def wait(self, deadline: Deadline) -> None:
        """Returns when the save has ended, also with an error."""
        path = self.future.path
        if self._thread == threading.get_ident():  # In a function for progress, say.
            raise errors.TargetError("this thread is already saving there", file=path)
        left = None if deadline.seconds is None else max(0.0, deadline.left())
        if not self.future.wait(left):
            raise errors.TargetError(
                "a save in the background of this process is writing the target",
                file=path,
                expected=f"its end within {deadline.seconds} s",
            )

    def start(self, begin: Callable[..., Callable[[], Saved]]) -> PendingSave:
        """Calls `begin`, which keeps the arrays in a snapshot; starts the thread that writes."""
        snapshot, future = Snapshot(), self.future
        # Popped by the thread: frames of an error must not keep the arrays alive.
        work: list[Callable[[], Saved]] = []
        try:
            work.append(begin(keep=snapshot.keep))
            name = f"mfload save {os.path.basename(future.path)}"
            task = Task(partial(self._finish, work, snapshot))
            # While Python exits it waits for no new threads, or can't start any: then save here.
            if threading.main_thread().is_alive():
                with contextlib.suppress(RuntimeError):
                    task.start(name, daemon=False)
            if task.thread is None:
                self._finish(work, snapshot)
        except BaseException:
            # Ctrl-C may come before the thread has begun, or after.
            if self._taken.acquire(blocking=False):
                work.clear()
                self._end(
                    snapshot, partial(future.set_exception, concurrent.futures.CancelledError())
                )
            raise
        return future

    def _finish(self, work: list[Callable[[], Saved]], snapshot: Snapshot) -> None:
        if not self._taken.acquire(blocking=False):
            return
        self._thread = threading.get_ident()
        blocked, future = time.perf_counter() - self._called, self.future
        try:
            saved = work.pop()()
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            traceback.clear_frames(error.__traceback__)
            log.error("%s: a save in the background failed: %s", future.path, error)
            _untold[future] = None
            self._end(snapshot, partial(future.set_exception, error))
        else:
            more: dict[str, Any] = {"copied": snapshot.copied, "held": snapshot.held}
            saved = dataclasses.replace(saved, blocked=blocked, **more)
            self._end(snapshot, partial(future.set_result, saved))

    def _end(self, snapshot: Snapshot, settle: Callable[[], None]) -> None:
        snapshot.release()
        # Before the future is settled: a callback of it may save to the same target.
        if _pending.get(self.future.path) is self:
            del _pending[self.future.path]
        settle()


def take_turn(path: str | os.PathLike[str], timeout: float | None) -> None:
    """Waits for a pending save at a path, before a save in the foreground.

    Raises:
        TargetError: It was not over in time.
        MfloadError: The error of an earlier save in the background that was not retrieved.
    """
    if other := _pending.get(targets.key_of(path)):
        other.wait(Deadline(timeout))
    _raise_untold()


def _raise_untold() -> None:
    for each in list(_untold):
        if (error := each.exception()) is not None:  # This marks it as retrieved.
            error.add_note(f"an earlier save in the background failed: that to {each.path}")
            raise error


@atexit.register
def _at_exit() -> None:
    try:
        _raise_untold()  # Python shows it, and exits as it would have.
    finally:
        if _untold:
            _at_exit()


@in_forks
def _after_fork() -> None:
    """Ends pending saves in a child, which has none of the parent's threads."""
    for path, each in _pending.items():
        each.future.__init__(path)
        message = "the parent process goes on with the save; this one can't wait for it"
        each.future.set_exception(errors.ProcessError(message, found="a forked child"))
    _pending.clear()
    _untold.clear()
    _spare.clear()


class Snapshot:
    """Copies or holds tensors as they are now, for a thread that writes them later.

    Attributes:
        copied: Bytes that were copied in memory, or from devices.
        held: Bytes of arrays that can't change and were not copied.
    """

    def __init__(self) -> None:
        self.copied = self.held = 0
        self._memory: Bytes | None = None

    def keep(self, layouts: Sequence[FileLayout], skip: Collection[str]) -> list[FileLayout]:
        """The same layouts with tensors as they are now, each to be fetched a single time.

        Tensors whose names are in `skip` are left as they are.
        """
        places: dict[str, slice] = {}
        size = 0
        for made in layouts:
            offset = len(made.header)
            for row in made.entries:
                if row.nbytes and row.where is not None and not row.frozen and row.name not in skip:
                    start = size + (offset - size) % buffers.PAGE
                    size = start + row.nbytes
                    places[row.name] = slice(start, size)
                offset += row.nbytes
        self._memory, writers = _take(size), Writers(threads_for(size))
        memory: Any = self._memory
        kept: list[FileLayout] = []
        try:
            for made in layouts:
                rows = [*made.entries]
                for n, row in enumerate(made.entries):
                    if row.name not in skip:
                        to = memory[places[row.name]] if row.name in places else None
                        rows[n] = self._kept(row, to, writers)
                kept.append(made._replace(entries=rows))
            writers.drain()
        finally:
            writers.close()
        return kept

    def _kept(self, row: TensorToSave, to: Bytes | None, writers: Writers) -> TensorToSave:
        data = fetched(row)
        if row.frozen:
            self.held += row.nbytes
        else:
            self.copied += row.nbytes
        if to is not None:
            for at in range(0, row.nbytes, _PART):
                copy = partial(_copy, to[at : at + _PART], data[at : at + _PART])
                if row.nbytes < _SHARED_FROM:
                    copy()
                else:
                    writers.put(copy)
                del copy
            data = to
        # Popped from a list, so that bytes are released when they were written; the array is now.
        return row._replace(where=None, fetch=[data].pop, cut=None)

    def release(self) -> None:
        """Keeps a large buffer for the next save, marked as free for the system."""
        memory, self._memory = self._memory, None
        if memory is None or memory.size < _KEPT_FROM:
            return
        with contextlib.suppress(OSError):
            buffers.madvise(memory.ctypes.data, memory.size, _FREE)
        # The larger of two.
        if not _spare or _spare[0].size < memory.size:
            _spare[:] = [memory]


def _copy(to: Bytes, data: Bytes) -> int:
    to[:] = data
    return to.size


def _take(size: int) -> Bytes | None:
    """A buffer for a snapshot: that of an earlier one, if it is large enough."""
    if size >= _KEPT_FROM:
        with contextlib.suppress(IndexError):
            if (memory := _spare.pop()).size >= size:
                return memory
    return buffers.allocate(size) if size else None
