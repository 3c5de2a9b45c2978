"""Slots in memory that is allocated once, and which key lies in which slot.

Pins are lifetimes. A request gets a `Lease`, and the arrays over its slots keep that alive, through
views, DLPack capsules and running computations. When the last of them is gone, the slots may be
overwritten, and not before. So there is nothing to be handed back, and no fence to wait for.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import errors
from mfload.dlpack import array_at
from mfload.errors import counted
from mfload.ondemand.background import Background
from mfload.ondemand.policies import Lru
from mfload.ondemand.report import OndemandReport
from mfload.runtime import Crew, Deadline, Forked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mfload.io.buffers import Bytes

    Numbers = NDArray[np.int64]

    Fill = Callable[[Numbers, NDArray[np.uint64]], tuple[int, int]]
    """Reads keys to addresses, uint64[keys, arenas]; returns how many reads and wanted bytes."""

# The first `Crew.start` of a process imports `queue`, and an interrupt of an import may leave the
# lock of all imports held: no thread would read again. So it is imported here, with the module.
importlib.import_module("queue")

_TICK = 0.001  # Seconds between looks at pins; what ends one may run in any thread.
_GRACE = 5.0  # As long as a load waits for reads that it breaks off.
_COLLECTED = 20  # Ticks after which the garbage collector has a look for views in cycles.


class Lease:
    """Slots that stay as they are as long as it lives, with the arrays that keep it alive.

    Attributes:
        keys: The keys, int64[n].
        slots: The slot of each.
    """

    __slots__ = ("__weakref__", "_arenas", "_ended", "keys", "slots")

    def __init__(
        self, keys: Numbers, slots: Numbers, arenas: Sequence[Bytes], ended: deque[Numbers]
    ) -> None:
        self.keys, self.slots, self._arenas, self._ended = keys, slots, arenas, ended

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return len(self._arenas[0])

    def memory(self, number: int, arena: int = 0) -> Bytes:
        """The bytes of the slot of the key with that number in `keys`: uint8[bytes of a slot]."""
        whole, slot = self._arenas[arena], int(self.slots[number])
        return array_at(self, _address(whole) + slot * whole.shape[1], whole.shape[1:])

    def whole(self, arena: int = 0) -> Bytes:
        """All slots: uint8[capacity, bytes of a slot]; those that are not leased may change."""
        whole = self._arenas[arena]
        return array_at(self, _address(whole), whole.shape)

    def split(self) -> list[Lease]:
        """A lease for each key, which take over from this one."""
        made = [
            Lease(self.keys[n : n + 1], self.slots[:0], self._arenas, self._ended)
            for n in range(len(self.slots))
        ]
        for each in made:  # An interrupt loses no slot.
            each.slots, self.slots = self.slots[:1], self.slots[1:]
        return made

    def __del__(self) -> None:
        # Whatever thread drops the last reference, in the middle of whatever it does: appending
        # takes no lock.
        self._ended.append(self.slots)


def _address(arena: Bytes) -> int:
    return arena.__array_interface__["data"][0]


def layer_in(layers: Mapping[int, Any], layer: Any, what: str) -> Any:
    """What there is of a layer; raises UsageError if there is no such layer."""
    number = whole(layer)
    if number is None or number not in layers:
        known = ", ".join(map(str, layers))
        raise errors.UsageError(f"no such layer of {what}", expected=known, found=repr(layer))
    return layers[number]


def whole(given: Any) -> int | None:
    """A whole number, also one of a framework; None if it is anything else."""
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def numbers(given: Iterable[int] | Numbers, what: str) -> Numbers:
    """Whole numbers as an array, each once, in the order in which they come first.

    Raises UsageError if they are anything else; `what` is what they count.
    """
    try:
        found = np.asarray(given if hasattr(given, "__array__") else list(given)).reshape(-1)
    except (TypeError, ValueError, RuntimeError):  # PyTorch raises the last.
        found = np.empty(1, object)
    if found.size and found.dtype.kind not in "iu":
        raise errors.UsageError(f"not numbers of {what}s", expected="[3, 17]", found=repr(given))
    found = found.astype(np.int64)
    if (found[1:] > found[:-1]).all():  # As those of a predictor, which may be thousands.
        return found
    return np.fromiter(dict.fromkeys(found.tolist()), np.int64)


def checked_wait(wait: object) -> float:
    """Seconds to wait; raises UsageError unless it is a time."""
    return errors.number("wait", wait, "seconds, 0 or more", lambda seconds: seconds >= 0)


def patience(timeout: float | None) -> float:
    """Seconds for which a close waits for reads under way."""
    return min(_GRACE, _GRACE if timeout is None else timeout)


class _Reading:
    """Keys on their way into slots."""

    def __init__(self, keys: Numbers, slots: Numbers) -> None:
        self.keys, self.slots, self.thread = keys, slots, threading.get_ident()
        self.done = False
        self.error: BaseException | None = None


class SlotCache:
    """Equal slots for some of the keys 0, 1, …, such as the experts of one layer; thread-safe.

    Args:
        fill: Reads keys into slots; it may be called by several threads at once.
        keys: How many there are.
        arenas: uint8[capacity, bytes of a slot], one for each part of what a key stands for.
        policy: Which keys leave; it is called under the lock.
        wait: Seconds to wait for slots that are pinned.
        timeout: Seconds that a request has in all. Default: no limit.
        what: What a key is, for messages.
        file: Where keys are read from, for messages.
        background: The thread that reads ahead.

    Attributes:
        slot_of: By key, its slot; -1 for none.
        key_of: By slot, its key; -1 for none.
        pins: By slot, the leases that hold it.
        counts: What happened so far.
    """

    def __init__(
        self,
        fill: Fill,
        keys: int,
        arenas: Sequence[Bytes],
        policy: Lru,
        *,
        wait: float = 2.0,
        timeout: float | None = None,
        what: str = "key",
        file: str | None = None,
        background: Background | None = None,
    ) -> None:
        self.capacity = len(arenas[0])
        self.slot_of = np.full(keys, -1, np.int64)
        self.key_of = np.full(self.capacity, -1, np.int64)
        self.pins = np.zeros(self.capacity, np.int64)
        self.counts = OndemandReport()
        self.wait, self.timeout, self.policy = wait, timeout, policy
        self._fill, self._arenas = fill, tuple(arenas)
        self._what, self._file = what, file
        self._background = background
        self._busy = np.zeros(self.capacity, bool)  # A read is under way.
        self._under_way: list[_Reading] = []
        self._ended: deque[Numbers] = deque()
        # An interrupt can leave a condition that is entered itself locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._crew = Crew()
        self._forked, self._closed = Forked(), False

    def use(self, keys: Iterable[int] | Numbers, counted: Numbers | None = None) -> Lease:
        """A lease for keys, which are read if they are not there.

        A thread reads them, since a read that hangs in the kernel can't be broken off: at a timeout
        or an interrupt it is left behind, and its slots with it until it returns.

        `counted` are those of them that the policy is told of. Default: all.

        Raises:
            UsageError: There is no such key; or the cache was closed, or made before a fork.
            MemoryLimitError: There are fewer slots than keys, or none became free in time.
            SourceError: The read failed; what it was for is not there.
            LoadTimeoutError: The timeout passed.
        """
        self._check()
        deadline = Deadline(self.timeout)
        asked = np.sort(self._known(keys))
        if asked.size > self.capacity:
            raise errors.MemoryLimitError(
                f"more {self._what}s at once than there are slots; a larger budget has more",
                expected=f"at most {self.capacity}",
                found=asked.size,
            )
        start, ticks, lease = time.perf_counter(), 0, None
        try:
            with self._lock:
                self.policy.use(asked if counted is None else counted)
            while (taken := self._take(asked)) is None:
                ticks += 1
                if deadline.left() <= 0:
                    what = "waiting for slots that are pinned by arrays that still live"
                    raise deadline.error(what, self._file)
                if time.perf_counter() - start > self.wait:
                    raise self._pinned(asked)
                if ticks == _COLLECTED:
                    gc.collect()
                with self._lock:
                    self._changed.wait(_TICK)
            lease, own, others = taken
            del taken
            if own is not None:
                run, what = functools.partial(self._run, own), self._reading(own)
                deadline.bound(run, what, self._file, apart=True, crew=self._crew)
                self._await(own, deadline)  # It may have been broken off before it began.
            for each in others:
                self._await(each, deadline)
        except BaseException as error:
            lease = None  # The error may be kept.
            self._break_off(error)
            raise
        if ticks or own is not None or others:
            with self._lock:
                self.counts.wait_seconds += time.perf_counter() - start
        return lease

    def prefetch(self, keys: Iterable[int] | Numbers, *, patient: bool = False) -> None:
        """Has a thread read keys ahead, the first of them first, into slots that are not pinned.

        What was asked for before, and is not begun, is dropped. What fails is tried again when it
        is used, and raised then.

        Args:
            patient: Whether it waits until there are slots for all of them.
        """
        self._check()
        known = self._known(keys)
        if self._background is not None:
            self._background.ask(self, functools.partial(self.read_ahead, known, patient))

    def read_ahead(
        self, keys: Numbers, patient: bool = False, dropped: Callable[[], bool] = bool, /
    ) -> None:
        """Does so in this thread; `dropped` says whether to end waiting, and read nothing."""
        end = time.monotonic() + (self.wait if patient else 0.0)
        try:
            with self._lock:
                while True:
                    self._settle()
                    missing = keys[self.slot_of[keys] < 0]
                    room = self._available(keys)
                    if room >= missing.size or time.monotonic() >= end or dropped():
                        break
                    self._changed.wait(_TICK)
                missing = missing[:room]
                if self._closed or dropped() or not missing.size:
                    return
                slots = self._room(missing, keys)
                if slots is None:
                    return
                own = self._assign(missing, slots)
                self.policy.expect(missing)
                self.counts.prefetched += missing.size
            self._read(own)
        except BaseException as error:
            self._break_off(error)
            raise

    def close(self, end: float | None = None) -> None:
        """Ends it, once the reads under way are over; arrays of before live on.

        It waits until `end` at most, of `time.monotonic`. Default: `patience` from now on. A read
        that takes longer keeps the slots until it returns.
        """
        if self._forked:
            return
        end = time.monotonic() + patience(self.timeout) if end is None else end
        with self._lock:
            self._closed = True
            while self._under_way and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))
            if not self._under_way:
                self._arenas = ()
        self._crew.close()

    def _check(self) -> None:
        if self._closed:
            raise errors.UsageError("the cache was closed")
        if self._forked:
            raise errors.UsageError(
                "the cache was made before a fork", expected="one made in this process"
            )

    def _known(self, keys: Iterable[int] | Numbers) -> Numbers:
        """Keys as an array, each once, in the order in which they come first."""
        given = numbers(keys, self._what)
        low, high = (given.min(), given.max()) if given.size else (0, 0)
        if low < 0 or high >= self.slot_of.size > 0:
            raise errors.UsageError(
                f"no such {self._what}",
                expected=f"numbers from 0 to {self.slot_of.size - 1}",
                found=low if low < 0 else high,
            )
        return given

    def _take(self, asked: Numbers) -> tuple[Lease, _Reading | None, list[_Reading]] | None:
        """Pins the slots of keys; also returns what is to be read, and what others read already.

        None if there is no room now.
        """
        with self._lock:
            if self._closed:
                self._check()
            self._settle()
            missing = asked[self.slot_of[asked] < 0]
            slots = self._room(missing, asked)
            if slots is None:
                return None
            others: list[_Reading] = []
            counts = self.counts
            counts.requests += 1
            counts.misses += missing.size
            counts.hits += asked.size - missing.size
            own = self._assign(missing, slots) if missing.size else None
            taken = self._leased(asked)
            if self._busy[taken].any():
                others = [each for each in self._under_way if np.isin(each.slots, taken).any()]
            lease = Lease(self.key_of[taken], taken[:0], self._arenas, self._ended)
            self.pins[taken] += 1
            lease.slots = taken
        return lease, own, [each for each in others if each is not own]

    def _leased(self, asked: Numbers) -> Numbers:
        """The slots that a lease for keys, which all have one, is for."""
        return self.slot_of[asked]

    def _pinned(self, asked: Numbers) -> errors.MemoryLimitError:
        missing = int(np.count_nonzero(self.slot_of[asked] < 0))
        held = self.capacity - self._available(asked[:0])
        return errors.MemoryLimitError(
            f"no room for {counted(missing, self._what)}: slots are pinned by arrays that "
            "still live; let go of views once they are used (del), or give a larger budget",
            expected=f"slots for them within {self.wait:g} s",
            found=f"{held} of {counted(self.capacity, 'slot')} pinned",
        )

    def _settle(self) -> None:
        """Takes the pins off that leases left."""
        while self._ended:
            self.pins[self._ended.popleft()] -= 1

    def _idle(self, asked: Numbers) -> NDArray[np.bool_]:
        """Slots that may be filled: free ones, and those whose keys may leave."""
        idle = (self.pins == 0) & ~self._busy
        there = self.slot_of[asked]
        idle[there[there >= 0]] = False
        return idle

    def _available(self, asked: Numbers) -> int:
        """How many keys could be read now without those leaving that are asked for."""
        return int(np.count_nonzero(self._idle(asked)))

    def _room(self, missing: Numbers, asked: Numbers) -> Numbers | None:
        """Slots for missing keys, from which others left; None if there are not enough."""
        idle = self._idle(asked)
        # Some the policy keeps no longer, though there is room.
        self._evict(self.policy.expired(self.key_of[idle & (self.key_of >= 0)]))
        free = np.flatnonzero(idle & (self.key_of < 0))
        if free.size < missing.size:
            leaving = self.key_of[idle & (self.key_of >= 0)]
            if free.size + leaving.size < missing.size:
                return None
            victims = self.policy.victims(leaving, missing.size - free.size)
            free = np.append(free, self._evict(victims))
        return free[: missing.size]

    def _evict(self, gone: Numbers) -> Numbers:
        """Has keys leave; returns the slots that they had."""
        slots = self.slot_of[gone]
        self._forget(gone, slots)
        self.counts.evictions += gone.size
        return slots

    def _forget(self, keys: Numbers, slots: Numbers) -> None:
        self.slot_of[keys], self.key_of[slots] = -1, -1

    def _assign(self, keys: Numbers, slots: Numbers) -> _Reading:
        made = _Reading(keys, slots)
        self._under_way.append(made)  # First: what is interrupted from here on is broken off.
        self._busy[slots] = True
        self.key_of[slots], self.slot_of[keys] = keys, slots
        return made

    def _reading(self, reading: _Reading) -> str:
        return f"reading {counted(reading.keys.size, self._what)}"

    def _run(self, own: _Reading) -> None:
        """Reads what another thread assigned, and waits for."""
        with self._lock:
            if own.done:  # That was interrupted before this began.
                return
            own.thread = threading.get_ident()
        try:
            self._read(own)
        except BaseException as error:
            self._break_off(error)
            raise

    def _read(self, own: _Reading) -> None:
        """Reads what was assigned."""
        # An error that is kept keeps local variables, which are to be no arenas.
        starts = [(_address(arena), arena.shape[1]) for arena in self._arenas]
        first, width = np.array(starts, np.uint64).T
        addresses = first + own.slots[:, None].astype(np.uint64) * width
        reads, nbytes = self._fill(own.keys, addresses)
        with self._lock:
            self.counts.reads += reads
            self.counts.read_bytes += nbytes
            self._end(own)

    def _end(self, reading: _Reading) -> None:
        self._busy[reading.slots] = False
        reading.done = True
        self._changed.notify_all()
        if self._closed and self._under_way == [reading]:  # It was not waited for.
            self._arenas = ()
        self._under_way.remove(reading)  # Last: until here, who waits is told if it is interrupted.

    def _break_off(self, error: BaseException) -> None:
        """What this thread was to read, and has not, is not there, also for those that wait."""
        with self._lock:
            for each in [each for each in self._under_way if each.thread == threading.get_ident()]:
                self._forget(each.keys, each.slots)
                each.error = error
                self._end(each)

    def _await(self, reading: _Reading, deadline: Deadline) -> None:
        """Waits for what another thread reads for its own request; raises what it met."""
        with self._lock:
            while not reading.done:
                if (left := deadline.left()) <= 0:
                    raise deadline.error(self._reading(reading), self._file)
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        error = reading.error
        if error is None:
            return
        try:
            if isinstance(error, errors.MfloadError | OSError | MemoryError):
                raise copy.copy(error) from error
            what = f"the read was broken off in another thread: {type(error).__name__}"
            raise errors.ReadError(what) from error
        finally:
            del error, reading  # Its frames refer to this one.
