"""Agreement: the processes of a load all go on, or all raise.

A load has a few steps: the same files, the same arguments, an exchange, the end. At each step every
process writes a text into a key-value store and waits for those of the others. The first outcome
that is written for a step counts for all: that everyone is there, or what happened to a process. So
a process that gives up and one that goes on can't both be right.

Without a store the same texts travel by collectives, and a killed process is noticed when a
collective breaks or at the deadline.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import hashlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.mesh import heartbeat
from mfload.mesh.base import KeyValueStore, MeshBackend
from mfload.runtime import Deadline

log = logging.getLogger("mfload")

_ALIVE = "mfload/alive/"
# Seconds between looks at the store: short at first, gentle on it later.
_FIRST, _GROWTH, _LONGEST = 0.002, 1.3, 0.05
# Seconds between looks at heartbeats, and until the log says which processes are waited for.
_BEAT, _PATIENCE = 0.25, 30.0
# Seconds in a round after which a process says that it waits.
_WAITS = 1.0
_SHOWN, _LINE = 300, 4096  # Characters of an error that others show, of a line that is compared.
_WIDTH = 64 << 10  # Bytes of a row if there is no store.
_AGREED, _FAILED = "agreed", "failed, and this load with it"
_END = "end"
_HERE, _ROUND = "here", "round"
_GAVE_UP = "gave up waiting for the others"
_ABSENT = "each rank must load with exchange='once', about when the others do"

# Loads of this process with others, in the order in which threads began them; the first runs.
_queue: list[ProcessGroup] = []
_turns = threading.Condition()


class ProcessGroup:
    """One load of several processes, as one of them sees it."""

    def __init__(self, backend: MeshBackend, ranks: Sequence[int], deadline: Deadline) -> None:
        self.rank, self.ranks, self.deadline = backend.rank, tuple(sorted(set(ranks))), deadline
        self.thread = threading.get_ident()
        self._step, self._next_beat, self._over = 0, 0.0, False
        self._begun, self._looked = 0, 0.0  # Rounds of collectives, and when it asked the store.
        self._pressed: Sequence[KeyboardInterrupt] = ()
        # Seconds until the others must be there, which a given timeout says itself.
        self._comes_by: float = getattr(backend, "arrival", math.inf)
        self._arrival = self._comes_by if deadline.seconds is None else math.inf
        self._absent: str = getattr(backend, "absent", _ABSENT)
        store = self._store = backend.store()
        if store is None:
            self._link = backend.link(self.ranks, _WIDTH, deadline)
            return
        self._first = not store.counts
        name = _digest([str(each) for each in self.ranks])
        number = store.counts[name] = store.counts.get(name, 0) + 1
        self._load, self._wrote = f"mfload/{name}/{number}/", list[str]()
        self._before, store.wrote[name] = store.wrote.get(name, []), self._wrote

    def announce(self) -> None:
        """Lets the others see that this process runs, and that it came to the load."""
        if (store := self._store) is None:
            return
        if self._first:
            # A framework may have a process wait for the others at its exit: one that waits there
            # counts as gone.
            store.put(f"{_ALIVE}{self.rank}", heartbeat.identity())
            atexit.register(_ended, store, self.rank)
        if self._comes_by < math.inf:  # Headers may take longer.
            self._put(f"{_HERE}{self.rank}", "")

    def agree(self, what: str, lines: Sequence[str] = ()) -> None:
        """Waits for all processes; raises ProcessError if their lines of `what` differ."""
        arrival = math.inf if self._step else self._arrival
        said = self.gather(what, f"{len(lines)} {_digest(lines)}", arrival)
        if len(set(said.values())) == 1:
            return
        # Bisection: the first `same` lines do not differ, the first `differ` do.
        same, differ = 0, max(int(text.split()[0]) for text in said.values())
        while differ - same > 1:
            middle = (same + differ) // 2
            if len(set(self.gather(what, _digest(lines[:middle])).values())) == 1:
                same = middle
            else:
                differ = middle
        found = self.gather(what, lines[same][:_LINE] if same < len(lines) else "nothing")
        message = f"the processes do not see the same {what}"
        raise errors.ProcessError(message, problems=_by_value(found))

    def gather(self, what: str, text: str = "", arrival: float = math.inf) -> dict[int, str]:
        """The text of each process, by rank.

        Raises:
            ProcessError: A process failed, is gone, is at another step than `what`, or has not
                begun to load after so many seconds, if there is a store.
            LoadTimeoutError: The deadline passed first.
        """
        link = self._store is None
        said = self._by_link(what, text) if link else self._by_store(what, text, arrival)
        steps = {rank: step for rank, (step, _) in said.items()}
        if len(set(steps.values())) > 1:
            message = "the processes are not at the same call: each must load the same, in order"
            raise errors.ProcessError(message, problems=_by_value(steps))
        return {rank: each for rank, (_, each) in said.items()}

    def enter(
        self, what: str, same: str = "", pressed: Sequence[KeyboardInterrupt] = ()
    ) -> KeyboardInterrupt | None:
        """Waits for all before collectives, so that none waits there for one that does not come.

        Raises ProcessError if `same` differs between them, and a Ctrl-C that is in `pressed` (see
        `ctrl_c_waits`). Without a store, one that came meanwhile is returned or in `pressed`, to
        be told to the others in the collectives.
        """
        try:
            self._begun, self._pressed = 0, pressed
            said = self.gather(what, same)
            if len(set(said.values())) > 1:
                message = f"the processes do not have the same {what}"
                expected = "the same build of mfload on all of them"
                raise errors.ProcessError(message, expected=expected, problems=_by_value(said))
        except KeyboardInterrupt as error:
            if self._store is not None or self._over or self._link.broken:
                raise
            return error
        except errors.ProcessError as error:
            raise next(iter(pressed), error)  # noqa: B904 - either as it is
        return None

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error."""
        try:
            if self._store is not None:
                # A step on which all agreed stands; then the next is the one that fails.
                while self._propose(self.rank, _FAILED, described(error)) == _AGREED:
                    self._step += 1
            elif not self._over and not self._link.broken:
                self._by_link(_FAILED, described(error))
        except Exception as problem:  # noqa: BLE001 - the error that is being raised counts
            log.info("telling the other processes of an error here ended with: %s", problem)

    def check(self, what: str, ranks: Sequence[int] = ()) -> dict[str, str]:
        """The texts that ranks wrote for the current step, by rank, and "outcome" once it has one.

        Raises ProcessError if another process failed or is gone.
        """
        if self._store is None:
            return {}
        self._looked = time.monotonic()
        every, beat = [*map(str, self.ranks)], self._looked >= self._next_beat
        texts = self._texts(["outcome", *(every if beat else map(str, ranks))])
        outcome = json.loads(texts.get("outcome", "null"))
        if outcome is None and beat:
            self._next_beat = self._looked + _BEAT
            seen = self._store.texts(_ALIVE, every)
            for rank in self.ranks:
                process = seen.get(str(rank), "")
                if str(rank) not in texts and (process == "ended" or heartbeat.ended(process)):
                    message = "is gone: it ended, or was killed"
                    self._propose(rank, message, f"it did not come to: {what}")
                    return self.check(what)
        if outcome not in (None, _AGREED):
            rank, message, found, _ = outcome
            if rank == self.rank and message == _GAVE_UP:
                raise self.deadline.error(found)
            who = f"process {rank}" + (", this one," if rank == self.rank else "")
            raise errors.ProcessError(f"{who} {message}", found=found)
        return texts

    def begin(self, what: str, number: int) -> None:
        """Notes that a round of collectives begins here; asks the store only now and then.

        Raises ProcessError if another process gave up in an earlier round. A round that it began
        takes place all the same, as a collective that is under way at the exit may abort it.
        """
        self._begun = number + 1
        if self._store is not None and time.monotonic() >= self._looked + _BEAT:
            outcome = json.loads(self._texts(["outcome"]).get("outcome", "null"))
            if outcome is None:
                self._looked = time.monotonic()
            elif outcome != _AGREED and number >= outcome[3]:
                self.check(what)

    def watch(self, what: str, number: int) -> Callable[[], None]:
        """A function that `check`s, to be called often while this process waits in a round.

        After a second it tells the others that this process waits. Those that don't are late.
        """
        begun, said, warn_at = time.monotonic(), False, _PATIENCE

        def check() -> None:
            nonlocal said, warn_at
            self.check(what)
            waited, late = time.monotonic() - begun, self.deadline.left() <= 0
            if self._store is None or waited < _WAITS:
                return
            if not said:
                said = True
                self._put(f"{_ROUND}{self.rank}", str(number))
            if late or waited > warn_at:
                warn_at = math.inf
                behind = self._without(_ROUND, str(number), self.ranks)
                if late and behind:
                    waits = f"exchanging bytes; {_named(behind)} did not come to round {number}"
                    raise self.deadline.error(waits)
                log.warning("mfload waits for processes %s (%s)", behind, what)

        return check

    def _without(self, kind: str, text: str, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that have not written a text of that kind for this step."""
        found = self._texts([f"{kind}{rank}" for rank in ranks])
        return [rank for rank in ranks if found.get(f"{kind}{rank}") != text]

    def _put(self, name: str, text: str) -> None:
        assert self._store is not None
        self._wrote.append(key := f"{self._load}{self._step}/{name}")
        self._store.put(key, text)

    def _texts(self, names: Sequence[str]) -> dict[str, str]:
        """Those of the step that are there."""
        prefix, store = f"{self._load}{self._step}/", self._store
        assert store is not None
        # A store that hangs does not outlast the deadline by much.
        bound = Deadline(max(1.0, self.deadline.left())).bound
        return bound(lambda: store.texts(prefix, names), "asking for the other processes")

    def _propose(self, *outcome: Any) -> Any:
        """Writes how the step ends unless that is written; returns what is.

        It ends with all agreed, or with a process, what happened to it, details, and how many
        rounds of collectives this process has begun.
        """
        assert self._store is not None
        text = json.dumps([*outcome, self._begun] if outcome else _AGREED)
        self._wrote.append(key := f"{self._load}{self._step}/outcome")
        return json.loads(self._store.first(key, text))

    def _by_store(self, what: str, text: str, arrival: float) -> dict[int, tuple[str, str]]:
        """The step that each process is at, and its text."""
        assert self._store is not None
        self._put(str(self.rank), json.dumps([what, text]))
        pause, begun, warn_at = _FIRST, time.monotonic(), time.monotonic() + _PATIENCE
        texts: dict[str, str] = {}
        missing = [*self.ranks]
        while "outcome" not in texts or missing:
            texts |= self.check(what, missing)
            missing = [rank for rank in self.ranks if str(rank) not in texts]
            if "outcome" in texts:
                continue
            if not missing:
                self._propose()
            elif self._pressed:
                self._propose(self.rank, _FAILED, described(self._pressed[0]))
            elif self.deadline.left() <= 0:
                self._propose(self.rank, _GAVE_UP, f"waiting for {_named(missing)} ({what})")
            elif time.monotonic() > begun + arrival and (
                absent := self._without(_HERE, "", missing)
            ):
                late = f"{_named(absent)} did not come within {arrival:g} s"
                self._propose(self.rank, f"{_GAVE_UP}: {self._absent}", late)
            else:
                if time.monotonic() > warn_at:
                    warn_at = float("inf")
                    log.warning("mfload waits for processes %s (%s)", missing, what)
                time.sleep(max(0.0, min(pause, self.deadline.left())))
                # A thousand processes look a thousand times a second together, fewer no more often.
                pause = min(pause * _GROWTH, max(_LONGEST, len(self.ranks) / 1000))
        if not self._step:
            self._store.drop(self._before)  # All are here, so none looks at it any more.
        self._step += 1
        return {rank: json.loads(texts[str(rank)]) for rank in self.ranks}

    def _by_link(self, what: str, text: str) -> dict[int, tuple[str, str]]:
        """The same if there is no store."""
        if self._link.broken:
            raise errors.ProcessError("an earlier load was given up: start the processes anew")
        with ctrl_c_waits():
            rows = self._link.buffer()
            data = np.frombuffer(json.dumps([what, text]).encode(), np.uint8)
            rows[:, : data.size], rows[:, data.size :] = data, 0
            self._link.start(rows)
            came, interrupted = self._link.finish(lambda: None)
            self._link.close()
            texts = [json.loads(bytes(row).rstrip(b"\0")) for row in came]
            said = dict(zip(self.ranks, texts, strict=True))
            others = [n for n, (step, _) in said.items() if step == _FAILED and n != self.rank]
            # All know by now, or have left: an error here finds none who would listen.
            self._over = bool(others) or all(step == _END for step, _ in texts)
            if interrupted is not None:
                raise interrupted
        if others:
            raise failed(others[0], said[others[0]][1])
        return said


@contextlib.contextmanager
def joined(
    backend: MeshBackend, ranks: Sequence[int], deadline: Deadline
) -> Generator[ProcessGroup]:
    """A load of several processes: an error in one of them is raised in all.

    Every process of the group enters once a load, in the same order, and leaving waits for the
    others. Loads of several threads of a process take turns in the order in which they enter, which
    must be the same in all processes.
    """
    if backend.rank not in ranks:
        raise errors.UsageError(
            "this process takes no part in the load: none of its devices is in the mesh",
            expected=_named(ranks),
            found=f"process {backend.rank}",
        )
    if max(ranks) >= (count := backend.group()[1]):
        raise errors.UsageError(
            "processes of the mesh are not joined: the process group is another, or gone",
            expected=f"a mesh of no more processes than the group has, {count}",
            found=_named(ranks),
        )
    group: ProcessGroup | None = None
    try:
        with ctrl_c_waits(), _turns:
            if any(each.thread == threading.get_ident() for each in _queue):
                message = "a load with other processes can't be part of another"
                raise errors.UsageError(message, expected="one after the other")
            group = ProcessGroup(backend, ranks, deadline)
            _queue.append(group)
        group.announce()
        # Without a store, a thread that gave up before its turn could not tell the others.
        _wait_for_turn(group, Deadline(None) if backend.store() is None else deadline)
        yield group
        group.agree(_END)
    except BaseException as error:
        if group is not None:
            group.fail(error)
        raise
    finally:
        try:
            _leave(group)
        finally:
            _leave(group)  # Again: Ctrl-C may have come before it waits.


def _leave(group: ProcessGroup | None) -> None:
    with ctrl_c_waits(), _turns:
        if group in _queue:
            _queue.remove(group)
            _turns.notify_all()


@contextlib.contextmanager
def ctrl_c_waits() -> Generator[list[KeyboardInterrupt]]:
    """Ctrl-C is put into a list, and raised at the end of what ends well; the second at once.

    So none comes between two steps that belong together, such as a swap and a note of it. Only in
    the main thread, and where no handler of the program's own is set.
    """
    pressed: list[KeyboardInterrupt] = []

    def press(*_: object) -> None:
        pressed.append(KeyboardInterrupt())
        if len(pressed) > 1:
            raise pressed[-1]

    usual, main = signal.default_int_handler, threading.main_thread()
    if threading.current_thread() is not main or signal.getsignal(signal.SIGINT) is not usual:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise pressed[0]


def fail_next(backend: MeshBackend, ranks: Sequence[int], error: BaseException) -> None:
    """Counts a load that takes no part in the others' next one, and fails it; never waits.

    For backends with a store.
    """
    group = ProcessGroup(backend, ranks, Deadline(None))

    def tell() -> None:
        with contextlib.suppress(Exception):  # `fail` logs the same.
            group.announce()
        group.fail(error)

    # It is no load that others of this process would wait for, nor any that the exit waits for.
    with contextlib.suppress(RuntimeError):  # No more threads: the others have their deadline.
        _thread.start_new_thread(tell, ())


def described(error: BaseException) -> str:
    """An error in the words that other processes show."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def failed(rank: int, text: str) -> errors.ProcessError:
    """The error that tells of another process's (see `described`)."""
    return errors.ProcessError(f"process {rank} {_FAILED}", found=text)


def _wait_for_turn(group: ProcessGroup, deadline: Deadline) -> None:
    """Waits for the loads that other threads of this process began before."""
    # An interrupted `with` of a condition may leave it locked.
    with ctrl_c_waits() as pressed, _turns:
        while _queue[0] is not group and not pressed:
            if (left := deadline.left()) <= 0:
                raise deadline.error("waiting for a load of another thread")
            _turns.wait(min(_BEAT, left))


def _ended(store: KeyValueStore, rank: int) -> None:
    with contextlib.suppress(Exception):
        store.put(f"{_ALIVE}{rank}", "ended")


def _digest(lines: Sequence[str]) -> str:
    text = "\n".join(lines)  # Names of files may hold lone surrogates.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _by_value(values: Mapping[int, str]) -> tuple[str, ...]:
    """A line for each value, with the processes that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return tuple(f"{_named(who)}: {value}" for value, who in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))}"
