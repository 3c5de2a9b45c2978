"""Agreement: several processes load together, and end together: all well, or all with an error.

Each step of a load is settled by one verdict that can be written once. Whoever sees that all
processes have come proposes to go on; whoever fails, gives up, or misses a process proposes to
stop. The first proposal counts, for everybody: a process that gives up and a process that goes on
can't both be right. Nothing here moves weights: a few short texts pass over the board.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Generator, Sequence
from typing import Protocol

from mfload import errors
from mfload.io.deadline import Deadline
from mfload.sharding import liveness, verdicts
from mfload.sharding.verdicts import Verdict

log = logging.getLogger("mfload")

# Seconds between looks at the board: short for those who come together, easy on it for the rest.
_FIRST, _GROWTH, _LONGEST = 0.002, 1.3, 0.05
# After so many seconds the log says what is waited for.
_PATIENCE = 30.0
_READABLE = 16 << 10


class Board(Protocol):
    """A place where all processes can put short texts, and read those of the others.

    Attributes:
        turns: The loads that each group of processes has begun, as far as this process knows.
        kept: The oldest of them whose texts may still be there.
    """

    turns: dict[str, int]
    kept: dict[str, int]

    def post(self, key: str, text: str) -> None:
        """Puts a text there, in place of an older one."""
        ...

    def look(self, prefix: str) -> dict[str, str]:
        """All texts whose keys lie under a prefix that ends with a slash."""
        ...

    def decide(self, key: str, text: str) -> str:
        """Puts a text where there is none; the one that was first, on every process."""
        ...

    def forget(self, prefix: str) -> None:
        """Takes away all texts under a prefix that ends with a slash."""
        ...


class Party:
    """One load of several processes, as one of them sees it.

    Args:
        processes: Numbers of those that take part.
        rank: This one.
        board: Where they meet; None where this process loads alone.
        deadline: When to give up.
    """

    def __init__(
        self, processes: Sequence[int], rank: int, board: Board | None, deadline: Deadline
    ) -> None:
        self.ranks = tuple(sorted(set(processes)))
        self.rank = rank
        self._board = board if len(self.ranks) > 1 else None
        self._deadline = deadline
        self._step = 0
        self._stopped = False
        self._who: dict[int, str] = {}
        if self._board is None:
            return
        group = ",".join(map(str, self.ranks))
        if len(group) > 40:
            group = hashlib.sha256(group.encode()).hexdigest()[:32]
        self._root = f"mfload/{group}/"
        turns = self._board.turns
        self.number = turns[self._root] = turns.get(self._root, 0) + 1
        self._here = f"{self._root}{self.number}/"
        if self.number == 1:
            self._board.post(f"mfload/who/{rank}", liveness.identity())

    def agree(self, what: str, fingerprint: str) -> None:
        """Waits until all processes have come to this step.

        Args:
            what: What has to be the same everywhere, as in "the processes do not see the same …".
            fingerprint: It, as text; lines make the message say which of them differs.

        Raises:
            ProcessError: They differ, or a process failed or is gone.
            LoadTimeoutError: The deadline passed first.
        """
        if self._board is None:
            return
        self._board.post(self._key(self.rank), json.dumps([what, fingerprint]))
        verdict = self._wait(self._board, what)
        if verdict.kind != "go":
            self._stopped = True
            if verdict.kind == "late" and verdict.rank == self.rank:
                raise self._deadline.error(verdict.found)
            raise verdict.error(what)
        if not self._step and self.rank == self.ranks[0]:
            # All are here, so nobody looks at earlier loads any more.
            for old in range(self._board.kept.get(self._root, 1), self.number):
                self._board.forget(f"{self._root}{old}/")
            self._board.kept[self._root] = self.number
        self._step += 1

    def settle(self) -> None:
        """The last step: all processes have what they came for."""
        self.agree("end", "well")

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error here; does nothing where all know already."""
        if self._board is None or self._stopped:
            return
        self._stopped = True
        text = verdicts.of_error(self.rank, error).text()
        try:
            self._board.post(f"{self._here}error/{self.rank}", text)
            self._board.decide(f"{self._here}verdict/{self._step}", text)
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise.
            log.warning("the other processes could not be told of an error here: %s", second)

    def watch(self, what: str) -> None:
        """Looks whether another process failed or is gone.

        Raises:
            ProcessError: One did, or is.
        """
        if self._board is None:
            return
        texts = self._board.look(self._here)
        verdict = self._known(texts) or self._dead(self._board, texts, self._missing(texts))
        if verdict is not None:
            self._stopped = True
            self._board.decide(f"{self._here}verdict/{self._step}", verdict.text())
            raise verdict.error(what)

    def leave(self, turn: int) -> None:
        """Says that this process waits no longer for a turn that all take, and takes no later."""
        if self._board is not None:
            with contextlib.suppress(errors.ProcessError):
                self._board.post(f"{self._here}left/{self.rank}", str(turn))

    def left(self) -> int | None:
        """The last turn that all processes take, None while nobody has left."""
        texts = {} if self._board is None else self._board.look(f"{self._here}left/")
        return min(map(int, texts.values()), default=None)

    def failure(self, what: str, seconds: float = 10.0) -> errors.MfloadError:
        """The error of a process that is known to have failed, once it has said why."""
        end = time.monotonic() + min(seconds, max(0.0, self._deadline.left()))
        while time.monotonic() < end:
            try:
                self.watch(what)
            except errors.ProcessError as error:
                return error
            time.sleep(_LONGEST)
        return errors.ProcessError(f"another process failed, and did not say why ({what})")

    def _wait(self, board: Board, what: str) -> Verdict:
        """The verdict on this step: the first that anybody proposed."""
        key = f"{self._here}verdict/{self._step}"
        pause, began, told = _FIRST, time.monotonic(), False
        while True:
            texts = self._look(board)
            if key in texts:
                return verdicts.read(texts[key])
            proposed = self._proposal(board, texts, what)
            if proposed is not None:
                return verdicts.read(board.decide(key, proposed.text()))
            if not told and time.monotonic() - began > _PATIENCE:
                told = True
                missing = ", ".join(map(str, self._missing(texts)))
                log.warning("mfload waits for processes %s to load the same (%s)", missing, what)
            time.sleep(max(0.0, min(pause, self._deadline.left())))
            pause = min(pause * _GROWTH, _LONGEST)

    def _look(self, board: Board) -> dict[str, str]:
        """The texts of this load; a board that hangs does not outlast the deadline by much."""
        left = self._deadline.left()
        bound = Deadline(None if left == float("inf") else max(1.0, left))
        return bound.bound(lambda: board.look(self._here), "asking for the other processes")

    def _proposal(self, board: Board, texts: dict[str, str], what: str) -> Verdict | None:
        known = self._known(texts)
        if known is not None:
            return known
        missing = self._missing(texts)
        if not missing:
            return verdicts.compare({r: self._posted(texts[self._key(r)]) for r in self.ranks})
        if self._deadline.left() <= 0:
            waited = f"waiting for process {', '.join(map(str, missing))} ({what})"
            return Verdict("late", self.rank, waited)
        return self._dead(board, texts, missing)

    def _key(self, rank: int) -> str:
        return f"{self._here}post/{self._step}/{rank}"

    @staticmethod
    def _posted(text: str) -> tuple[str, str]:
        what, fingerprint = json.loads(text)
        return what, fingerprint

    def _missing(self, texts: dict[str, str]) -> list[int]:
        return [rank for rank in self.ranks if self._key(rank) not in texts]

    def _known(self, texts: dict[str, str]) -> Verdict | None:
        """What another process, the lowest first, has said went wrong."""
        for rank in self.ranks:
            text = texts.get(f"{self._here}error/{rank}")
            if text is not None:
                return verdicts.read(text)
        verdict = texts.get(f"{self._here}verdict/{self._step}")
        stop = None if verdict is None else verdicts.read(verdict)
        return None if stop is None or stop.kind == "go" else stop

    def _dead(self, board: Board, texts: dict[str, str], missing: list[int]) -> Verdict | None:
        """Whether one of those that have not come to this step has ended."""
        for rank in missing:
            if rank not in self._who:
                found = board.look("mfload/who/").get(f"mfload/who/{rank}")
                if found is None:
                    continue
                self._who[rank] = found
            if liveness.alive(self._who[rank]) is not False:
                continue
            texts |= board.look(self._here)  # It may have come, or failed, just before.
            if self._key(rank) not in texts:
                return self._known(texts) or Verdict("dead", rank)
        return None


@contextlib.contextmanager
def together(
    processes: Sequence[int], rank: int, board: Board | None, deadline: Deadline
) -> Generator[Party]:
    """Loads with other processes: what fails in one of them fails in all.

    Every process of the group enters once a load, in the same order. Leaving waits for the others.

    Args:
        processes: Numbers of those that take part.
        rank: This one.
        board: Where they meet. One process alone needs none.
        deadline: When to give up waiting.

    Yields:
        The party, to agree by.

    Raises:
        ProcessError: Another process failed, is gone, or differs; on the process where it
            happened, its own error.
        UsageError: This process does not take part.
    """
    if rank not in processes:
        raise errors.UsageError(
            "this process takes no part in the load: none of its devices is in the mesh",
            expected=f"process {', '.join(map(str, processes[:16]))}",
            found=f"process {rank}",
        )
    party = Party(processes, rank, board, deadline)
    try:
        yield party
        party.settle()
    except BaseException as error:
        party.fail(error)
        raise


def fingerprint(lines: Sequence[str]) -> str:
    """Lines as a text to agree on: all of them where they are few, else digests of parts."""
    text = "\n".join(lines)
    if len(text) <= _READABLE:
        return text
    count = -(-len(lines) // 64)
    parts = (lines[n : n + count] for n in range(0, len(lines), count))
    return "\n".join(
        f"{part[0][:80]} … {part[-1][:80]}: {hashlib.sha256(repr(part).encode()).hexdigest()[:16]}"
        for part in parts
    )
