"""A save in the background: what it saves is kept in the call, and a thread writes it.

Arrays that may change are copied into one stretch of memory, where they lie on a page as they will
in the file, so that the disk takes them from there. The memory stays for the next save, marked as
free: the system takes it back when it needs some. Arrays that can't change are held.

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
from mfload.runtime import Deadline
from mfload.saving import targets
from mfload.saving.layout import Layout
from mfload.saving.save import Saved, fetched, threads_for
from mfload.saving.writers import Writers

if TYPE_CHECKING:
    from mfload.io.buffers import Bytes
    from mfload.saving.export import TensorToSave

log = logging.getLogger("mfload")

_PART = 32 << 20  # Bytes of a tensor that a thread copies at once.
_SHARED_FROM = 64 << 10  # Smaller ones are copied before a thread has taken them.
_KEPT_FROM = 32 << 20  # Bytes of a stretch that is kept for later.
_FREE = 8  # Linux: MADV_FREE.

_pending: dict[str, Work] = {}
"""By the path of the target."""
_untold: dict[PendingSave, None] = {}
"""Those that failed, until someone is told."""
_spare: list[Bytes] = []
"""Memory of an earlier save, at most one stretch."""


class PendingSave(concurrent.futures.Future[Saved]):
    """A save in the background, which `mfload.save(..., background=True)` returns.

    It is a `concurrent.futures.Future`: `result()` waits and returns the `Saved`, or raises what
    went wrong; `done()`, `exception()` and `add_done_callback()` are there, and
    `concurrent.futures.wait` and `asyncio.wrap_future` take it. It can't be cancelled.

    Attributes:
        path: Of the file that is written, or whose name that of the shards begins with.
    """

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.path = path

    def result(self, timeout: float | None = None) -> Saved:
        """Waits; returns what was saved, or raises the error; TimeoutError after `timeout`."""
        try:
            return super().result(timeout)
        finally:
            self._tell()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; returns the error, or None; raises TimeoutError after `timeout` seconds."""
        try:
            return super().exception(timeout)
        finally:
            self._tell()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits; returns whether it is over, however it ended, within `timeout` seconds."""
        return bool(concurrent.futures.wait([self], timeout).done)

    def _tell(self) -> None:
        if self.done():
            _untold.pop(self, None)


class Work:
    """A save in the background, from the call to its end."""

    def __init__(self) -> None:
        self.future = PendingSave()
        self._called = time.perf_counter()
        self._thread: threading.Thread | None = None

    def claim(self, path: str | os.PathLike[str], timeout: float | None) -> None:
        """Waits for the save that is pending there, and takes its place (see `take_turn`)."""
        deadline = Deadline(timeout)
        self.future.path = path = targets.resolve(path).path
        while (other := _pending.setdefault(path, self)) is not self:
            other.wait(deadline)
        _raise_untold()

    def wait(self, deadline: Deadline) -> None:
        """Returns when it is over, however it ended."""
        path = self.future.path
        if self._thread is threading.current_thread():  # In a function for progress, say.
            raise errors.TargetError("this thread is already saving there", file=path)
        left = None if deadline.seconds is None else max(0.0, deadline.left())
        if not self.future.wait(left):
            raise deadline.error("waiting for the save in the background", path)

    def start(self, begin: Callable[..., Callable[[], Saved]]) -> PendingSave:
        """Calls `begin`, which has the arrays kept in a snapshot; a thread does the rest."""
        snapshot, future = Snapshot(), self.future
        try:
            rest = begin(keep=snapshot.keep)
        except BaseException:
            self._end(snapshot, partial(future.set_exception, concurrent.futures.CancelledError()))
            raise
        work = [rest]  # In no frame of an error, which would keep what it refers to.
        del rest
        name = f"mfload save {os.path.basename(future.path)}"
        thread = self._thread = threading.Thread(
            target=self._finish, name=name, args=(work, snapshot)
        )
        thread.daemon = False
        # Python no longer waits for threads when it has begun to exit, or can start none.
        if threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):
                thread.start()
        if thread.ident is None:
            self._thread = threading.current_thread()
            self._finish(work, snapshot)
        return future

    def _finish(self, work: list[Callable[[], Saved]], snapshot: Snapshot) -> None:
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
        # First: a callback, or who waits, may save there at once.
        if _pending.get(self.future.path) is self:
            del _pending[self.future.path]
        settle()


def take_turn(path: str | os.PathLike[str], timeout: float | None) -> None:
    """Waits for a save that is pending at a path, for one that is not in the background.

    Raises:
        LoadTimeoutError: It was not over in time.
        MfloadError: What an earlier save in the background failed with, unless that is known.
    """
    if other := _pending.get(targets.resolve(path).path):
        other.wait(Deadline(timeout))
    _raise_untold()


def _raise_untold() -> None:
    for each in list(_untold):
        if (error := each.exception()) is not None:  # Known from now on.
            error.add_note(f"raised by an earlier save in the background, to {each.path}")
            raise error


@atexit.register
def _at_exit() -> None:
    try:
        _raise_untold()  # Python shows it, and exits as it would have.
    finally:
        if _untold:
            _at_exit()


def _after_fork() -> None:
    """The threads that would end them are the parent's."""
    for path, each in _pending.items():
        each.future.__init__(path)
        message = "the save is the parent process's, which goes on with it"
        each.future.set_exception(errors.ProcessError(message, found="a forked child"))
    _pending.clear()
    _untold.clear()
    _spare.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Snapshot:
    """Keeps tensors as they are now, for a thread that writes them later.

    Attributes:
        copied: Bytes that were copied, or brought from devices.
        held: Bytes of arrays that can't change, in host memory.
    """

    def __init__(self) -> None:
        self.copied = self.held = 0
        self._memory: Bytes | None = None

    def keep(self, layouts: Sequence[Layout], skip: Collection[str]) -> list[Layout]:
        """The same layouts, which give the bytes of now, once; those in `skip` stay as they are."""
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
        kept: list[Layout] = []
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
        # The list gives it once: what is written goes. The array goes now.
        return row._replace(where=None, fetch=[data].pop, cut=None)

    def release(self) -> None:
        """Keeps the memory for the next save, if it is large; the system may take it back."""
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
    """Memory for a snapshot: that of an earlier one, if it is large enough."""
    if size >= _KEPT_FROM:
        with contextlib.suppress(IndexError):
            if (memory := _spare.pop()).size >= size:
                return memory
    return buffers.allocate(size) if size else None
