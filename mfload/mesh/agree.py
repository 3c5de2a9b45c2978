"""Agreement: the processes of a load all go on, or all raise.

A load has a few steps: the same files, the same arguments, an exchange, the end. At each step every
process writes what it sees into a key-value store and waits for the others. The first outcome
written for a step counts for all of them: that everybody is there, or that a process failed, is
gone, or gave up waiting. So a process that gives up and one that goes on can't both be right.

Without a store, the same rows travel by collectives, and a process that is killed is noticed when
the collective breaks or at the deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from mfload import errors
from mfload.mesh import heartbeat
from mfload.runtime import Deadline

if TYPE_CHECKING:  # They import JAX.
    from mfload.mesh.jax_backend import JaxBackend
    from mfload.mesh.jax_processes import JaxStore

log = logging.getLogger("mfload")

_ALIVE = "mfload/alive/"
# Seconds between looks at the store: short at first, gentle on it later.
_FIRST, _GROWTH, _LONGEST = 0.002, 1.3, 0.05
# Seconds between looks whether the others run, and until the log says who is waited for.
_BEAT, _PATIENCE = 0.25, 30.0
_SHOWN = 300  # Characters of an error or a value shown to other processes.
_READABLE = 8 << 10  # Characters of text compared line by line; longer text as digests of parts.
_WIDTH = 64 << 10  # Bytes of a row where there is no store.

# Loads of this process with others, in the order in which threads began them; the first runs.
_queue: list[ProcessGroup] = []
_turns = threading.Condition()


class Outcome(NamedTuple):
    """How a step ended, the same for all processes.

    If they did not agree: what happened to process `rank`, and its error or what it waited for.
    """

    kind: Literal["agreed", "failed", "gone", "late"]
    rank: int = -1
    text: str = ""

    def error(self, what: str) -> errors.ProcessError:
        """The error of the other processes."""
        if self.kind == "gone":
            head = f"process {self.rank} is gone: it ended, or was killed"
            return errors.ProcessError(head, expected=f"process {self.rank} to agree on: {what}")
        if self.kind == "late":
            head = f"process {self.rank} gave up waiting for the others"
        else:
            head = f"process {self.rank} failed, and this load with it"
        return errors.ProcessError(head, found=self.text)


def failure(rank: int, error: BaseException) -> Outcome:
    """The outcome where a process failed."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return Outcome("failed", rank, text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class ProcessGroup:
    """One load of several processes, as one of them sees it.

    It is `over` once all processes know how it ended.
    """

    def __init__(self, backend: JaxBackend, ranks: Sequence[int], deadline: Deadline) -> None:
        self.ranks = tuple(sorted(set(ranks)))
        self.rank = backend.rank
        self.deadline = deadline
        self.thread = threading.get_ident()
        self.over = False

    def agree(self, what: str, lines: Sequence[str] = (), aside: str = "") -> dict[int, str]:
        """Waits until all processes have come to a step, with the same lines of `what`.

        `aside` is a short text for the others, which may differ. Returns that of each process.

        Raises:
            ProcessError: The lines differ (the first that does is shown), or a process failed.
            LoadTimeoutError: The deadline passed first.
        """
        text = _readable(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        said = {r: json.loads(row) for r, row in self._gather(what, [what, digest, aside]).items()}
        steps = {rank: step for rank, (step, _, _) in said.items()}
        if len(set(steps.values())) > 1:
            self.over = True
            head = "the processes are not at the same call: each must load the same, in order"
            raise errors.ProcessError(head, problems=_sides(steps))
        if len({digest for _, digest, _ in said.values()}) > 1:
            texts = {r: json.loads(row) for r, row in self._gather(what, text).items()}
            self.over = True
            head = f"the processes do not see the same {what}"
            raise errors.ProcessError(head, problems=_sides(_first_difference(texts)))
        return {rank: aside for rank, (_, _, aside) in said.items()}

    def stop(self, outcome: Outcome, what: str) -> errors.MfloadError:
        """The error to raise for an outcome that all processes know."""
        self.over = True
        if outcome.kind == "late" and outcome.rank == self.rank:
            return self.deadline.error(outcome.text)
        return outcome.error(what)

    def _gather(self, what: str, row: object) -> dict[int, str]:
        """The rows of all processes, which are JSON."""
        raise NotImplementedError

    def check(self, what: str) -> None:
        """Raises ProcessError if another process failed or is gone."""

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error, unless all know."""
        raise NotImplementedError

    def wait_for_threads(self) -> None:
        """Waits for the loads that other threads of this process began before."""
        with _turns:
            while _queue[0] is not self:
                if self.deadline.left() <= 0:
                    raise self.deadline.error("waiting for a load of another thread")
                _turns.wait(min(1.0, max(0.0, self.deadline.left())))


class StoreGroup(ProcessGroup):
    """A process group that meets in a key-value store (see `ProcessGroup`)."""

    def __init__(
        self, backend: JaxBackend, ranks: Sequence[int], deadline: Deadline, store: JaxStore
    ) -> None:
        super().__init__(backend, ranks, deadline)
        self._store = store
        name = ",".join(map(str, self.ranks))
        if len(name) > 40:
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
        if not store.counts:
            # From now on the others can see whether this process runs. JAX has a process wait for
            # the others at its exit, so that one that waits there counts as gone.
            store.put(f"{_ALIVE}{self.rank}", heartbeat.identity())
            atexit.register(_ended, store, self.rank)
        number = store.counts[name] = store.counts.get(name, 0) + 1
        self._before, self._load = f"mfload/{name}/{number - 1}/", f"mfload/{name}/{number}/"
        self._step = 0
        self._looked = 0.0

    def _gather(self, what: str, row: object) -> dict[int, str]:
        self._store.put(f"{self._load}{self._step}/{self.rank}", json.dumps(row))
        pause, began, told = _FIRST, time.monotonic(), False
        while True:
            rows, missing, outcome = self._look()
            if outcome is None and not missing:
                outcome = self._propose(Outcome("agreed"))
            elif outcome is None and self.deadline.left() <= 0:
                whom = ", ".join(map(str, missing[:16]))
                outcome = self._propose(Outcome("late", self.rank, f"process {whom} ({what})"))
            outcome = outcome or self._gone(missing)
            if outcome is not None:
                break
            if not told and time.monotonic() - began > _PATIENCE:
                told = True
                log.warning("mfload waits for processes %s to load the same (%s)", missing, what)
            time.sleep(max(0.0, min(pause, self.deadline.left())))
            # A thousand processes look a thousand times a second together, fewer no more often.
            pause = min(pause * _GROWTH, max(_LONGEST, len(self.ranks) / 1000))
        if outcome.kind != "agreed":
            raise self.stop(outcome, what)
        if missing:
            rows, *_ = self._look()
        if not self._step and self.rank == self.ranks[0]:
            self._store.drop(self._before)  # All are here, so none looks at it any more.
        self._step += 1
        return rows

    def check(self, what: str) -> None:
        """See `ProcessGroup`."""
        _, missing, outcome = self._look()
        outcome = outcome or self._gone(missing)
        if outcome is not None and outcome.kind != "agreed":
            raise self.stop(outcome, what)

    def fail(self, error: BaseException) -> None:
        """See `ProcessGroup`."""
        if self.over:
            return
        self.over = True
        try:
            # A step on which all agreed stands; then the next is the one that fails.
            while self._propose(failure(self.rank, error)).kind == "agreed":
                self._step += 1
        except Exception as problem:  # noqa: BLE001 - the error that is being raised counts
            log.warning("the other processes could not be told of an error here: %s", problem)

    def _look(self) -> tuple[dict[int, str], list[int], Outcome | None]:
        """Rows of this step, processes without one, and the outcome if there is one."""
        prefix, left = f"{self._load}{self._step}/", self.deadline.left()
        # A store that hangs does not outlast the deadline by much.
        bound = Deadline(None if left == float("inf") else max(1.0, left))
        texts = bound.bound(lambda: self._store.under(prefix), "asking for the other processes")
        rows = {key.removeprefix(prefix): text for key, text in texts.items()}
        outcome = rows.pop("outcome", None)
        found = {int(rank): row for rank, row in rows.items()}
        missing = [rank for rank in self.ranks if rank not in found]
        return found, missing, None if outcome is None else Outcome(*json.loads(outcome))

    def _propose(self, outcome: Outcome) -> Outcome:
        key = f"{self._load}{self._step}/outcome"
        return Outcome(*json.loads(self._store.first(key, json.dumps(outcome))))

    def _gone(self, missing: Sequence[int]) -> Outcome | None:
        """The outcome if one of the missing processes runs no more."""
        if time.monotonic() - self._looked < _BEAT:
            return None
        self._looked = time.monotonic()
        seen = self._store.under(_ALIVE)
        for rank in missing:
            identity = seen.get(f"{_ALIVE}{rank}", "")
            if identity == "ended" or heartbeat.alive(identity) is False:
                _, still, outcome = self._look()  # It may have come just before.
                if outcome is not None or rank not in still:
                    return outcome
                return self._propose(Outcome("gone", rank))
        return None


class CollectiveGroup(ProcessGroup):
    """A process group without a key-value store: rows travel by collectives."""

    def __init__(self, backend: JaxBackend, ranks: Sequence[int], deadline: Deadline) -> None:
        super().__init__(backend, ranks, deadline)
        self._link = backend.link(self.ranks, _WIDTH, deadline)

    def _gather(self, what: str, row: object) -> dict[int, str]:
        if self._link.broken:
            self.over = True
            raise errors.ProcessError("an earlier load was given up: start the processes anew")
        rows = self._link.buffer()
        data = np.frombuffer(json.dumps(row).encode(), np.uint8)
        rows[:, : data.size], rows[:, data.size :] = data, 0
        came, interrupted = self._link.swap(rows, lambda: None)
        self._link.close()
        if interrupted is not None:
            raise interrupted
        texts = [bytes(each).rstrip(b"\0").decode() for each in came]
        found = dict(zip(self._link.ranks, texts, strict=True))
        for rank, text in found.items():
            said = json.loads(text)
            if isinstance(said, dict) and rank != self.rank:
                raise self.stop(Outcome("failed", rank, said["failed"]), what)
        return found

    def fail(self, error: BaseException) -> None:
        """See `ProcessGroup`."""
        if not self.over and not self._link.broken:
            self.over = True
            with contextlib.suppress(errors.MfloadError):
                self._gather("error", {"failed": failure(self.rank, error).text})

    def wait_for_threads(self) -> None:
        """See `ProcessGroup`; a thread that gave up before its turn could not tell the others."""
        with _turns:
            while _queue[0] is not self:
                _turns.wait(1.0)


@contextlib.contextmanager
def joined(
    backend: JaxBackend, ranks: Sequence[int], deadline: Deadline
) -> Generator[ProcessGroup]:
    """A load of several processes: an error in one of them is raised in all.

    Every process of the group enters once a load, in the same order, and leaving waits for the
    others. Loads of several threads of a process take turns in the order in which they enter, which
    must be the same in all processes.
    """
    if backend.rank not in ranks:
        raise errors.UsageError(
            "this process takes no part in the load: none of its devices is in the mesh",
            expected=f"process {', '.join(map(str, ranks[:16]))}",
            found=f"process {backend.rank}",
        )
    store = backend.store()
    with _turns:
        if any(each.thread == threading.get_ident() for each in _queue):
            raise errors.UsageError(
                "a load with other processes can't be part of another",
                expected="one after the other",
            )
        if store is None:
            group: ProcessGroup = CollectiveGroup(backend, ranks, deadline)
        else:
            group = StoreGroup(backend, ranks, deadline, store)
        _queue.append(group)
    try:
        group.wait_for_threads()
        yield group
        group.agree("end")
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        with _turns:
            _queue.remove(group)
            _turns.notify_all()


def _ended(store: JaxStore, rank: int) -> None:
    with contextlib.suppress(Exception):
        store.put(f"{_ALIVE}{rank}", "ended")


def _readable(lines: Sequence[str]) -> str:
    """Lines as one text: all of them if they are few, else digests of parts."""
    text = "\n".join(lines)
    if len(text) <= _READABLE:
        return text
    count = -(-len(lines) // 32)
    parts = (lines[n : n + count] for n in range(0, len(lines), count))
    return "\n".join(
        f"{part[0][:80]} … {part[-1][:80]}: {hashlib.sha256(repr(part).encode()).hexdigest()[:16]}"
        for part in parts
    )


def _first_difference(texts: Mapping[int, str]) -> dict[int, str]:
    """For each process the first line that is not the same on all."""
    lines = {rank: text.splitlines() for rank, text in texts.items()}
    for n in range(max(map(len, lines.values()))):
        row = {rank: each[n] if n < len(each) else "nothing" for rank, each in lines.items()}
        if len(set(row.values())) > 1:
            return row
    return dict.fromkeys(texts, "other")


def _sides(values: Mapping[int, str]) -> tuple[str, ...]:
    """A line for each value, with the processes that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return tuple(
        f"process{'es' if len(who) > 1 else ''} {', '.join(map(str, who[:16]))}: {value[:_SHOWN]}"
        for value, who in list(ranks.items())[:20]
    )
