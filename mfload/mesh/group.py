"""A party: one load of several processes, as one of them sees it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from mfload import errors
from mfload.mesh import outcome
from mfload.mesh.outcome import Verdict
from mfload.mesh.peers import Others
from mfload.mesh.store import Board, Turn, telling
from mfload.runtime import Deadline

log = logging.getLogger("mfload")

# Seconds between looks at the board: short for those who come together, easy on it for the rest.
_FIRST, _GROWTH, _LONGEST = 0.002, 1.3, 0.05
# After so many seconds the log says what is waited for.
_PATIENCE = 30.0
# Fingerprints that are posted as they are; of longer ones all post a digest.
_SHORT = 64


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
        self._over: Mapping[str, int] = {}
        if self._board is None:
            return
        self._turn = Turn(self._board, rank, self.ranks)
        self.number = self._turn.number
        self._here = f"{self._turn.group}{self.number}/"
        self._others = Others(self._board, rank, self._turn.load)

    def begin(self) -> None:
        """Waits for the loads that other threads of this process asked for before.

        Raises:
            LoadTimeoutError: The deadline passed first.
        """
        if self._board is not None:
            self._turn.begin(self._deadline)

    def end(self) -> None:
        """Lets other threads begin."""
        if self._board is not None:
            self._turn.end(self._over, failed=self._stopped)

    def agree(self, what: str, fingerprint: str, aside: str = "") -> dict[int, str]:
        """Waits until all processes have come to this step.

        Args:
            what: What has to be the same everywhere, as in "the processes do not see the same …".
            fingerprint: It, as text; lines make the message say which of them differs.
            aside: A short text for the others, that need not be the same.

        Returns:
            What each process said aside, where this one did.

        Raises:
            ProcessError: They differ, or a process failed or is gone.
            LoadTimeoutError: The deadline passed first.
        """
        if self._board is None:
            return {self.rank: aside}
        self._post(self._board, what, fingerprint, aside)
        verdict = self._wait(self._board, what)
        if verdict.kind != "go":
            self._stopped = True
            self._over = verdict.turns
            if verdict.kind == "late" and verdict.rank == self.rank:
                raise self._deadline.error(verdict.found)
            raise verdict.error(what)
        said = self._look(self._board) if aside else {}
        told = {rank: json.loads(said[self._key(rank)])[2] for rank in self.ranks if said}
        if not self._step and self.rank == self.ranks[0]:
            self._turn.forget_earlier()
        self._step += 1
        return told

    def _post(self, board: Board, what: str, fingerprint: str, aside: str) -> None:
        if len(fingerprint) > _SHORT:
            digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
            # Once for all processes to which it is the same, to be read where it is not.
            board.decide(f"{self._turn.texts}{digest}", fingerprint)
            fingerprint = digest
        board.post(self._key(self.rank), json.dumps([what, fingerprint, aside]))

    def settle(self) -> None:
        """The last step: all processes have what they came for."""
        self.agree("end", "well")

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error here; does nothing where all know already."""
        if self._board is None or self._stopped:
            return
        self._stopped = True
        text = outcome.of_error(self.rank, error).text()
        with telling():
            self._board.post(f"{self._here}error/{self.rank}", text)
            self._board.decide(f"{self._here}verdict/{self._step}", text)

    def watch(self, what: str) -> None:
        """Looks whether another process failed or is gone.

        Raises:
            ProcessError: One did, or is.
        """
        if self._board is None:
            return
        texts = self._board.look(self._here)
        verdict = self._known(texts) or self._gone(self._others, texts, self._missing(texts))
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
                return outcome.read(texts[key])
            proposed = self._proposal(texts, what)
            if proposed is not None:
                return outcome.read(board.decide(key, proposed.text()))
            if not told and time.monotonic() - began > _PATIENCE:
                told = True
                missing = self._others.whereabouts(self._missing(texts))
                log.warning("mfload waits for processes %s to load the same (%s)", missing, what)
            time.sleep(max(0.0, min(pause, self._deadline.left())))
            # A thousand processes ask a thousand times a second together, fewer no oftener.
            pause = min(pause * _GROWTH, max(_LONGEST, len(self.ranks) / 1000))

    def _look(self, board: Board) -> dict[str, str]:
        """The texts of this load; a board that hangs does not outlast the deadline by much."""
        left = self._deadline.left()
        bound = Deadline(None if left == float("inf") else max(1.0, left))
        return bound.bound(lambda: board.look(self._here), "asking for the other processes")

    def _proposal(self, texts: dict[str, str], what: str) -> Verdict | None:
        known = self._known(texts)
        if known is not None:
            return known
        missing = self._missing(texts)
        if not missing:
            posts = {rank: self._posted(texts[self._key(rank)]) for rank in self.ranks}
            return outcome.compare(posts, self._text)
        if self._deadline.left() <= 0:
            waited = f"waiting for process {self._others.whereabouts(missing)} ({what})"
            return Verdict("late", self.rank, waited)
        return self._gone(self._others, texts, missing)

    def _text(self, fingerprint: str) -> str:
        """A fingerprint from what was posted of it."""
        board = self._board
        if board is None or len(fingerprint) > _SHORT:
            return fingerprint
        folder = self._turn.texts
        return board.look(folder).get(f"{folder}{fingerprint}", fingerprint)

    def _key(self, rank: int) -> str:
        return f"{self._here}post/{self._step}/{rank}"

    @staticmethod
    def _posted(text: str) -> tuple[str, str]:
        what, fingerprint, _ = json.loads(text)
        return what, fingerprint

    def _missing(self, texts: dict[str, str]) -> list[int]:
        return [rank for rank in self.ranks if self._key(rank) not in texts]

    def _known(self, texts: dict[str, str]) -> Verdict | None:
        """What another process, the lowest first, has said went wrong."""
        for rank in self.ranks:
            text = texts.get(f"{self._here}error/{rank}")
            if text is not None:
                return outcome.read(text)
        verdict = texts.get(f"{self._here}verdict/{self._step}")
        stop = None if verdict is None else outcome.read(verdict)
        return None if stop is None or stop.kind == "go" else stop

    def _gone(self, others: Others, texts: dict[str, str], missing: list[int]) -> Verdict | None:
        """Whether one of those that have not come to this step never will."""
        others.look()
        found = self._sure(others.ended(missing), texts)
        if found is not None or self._step:
            return found
        return self._sure(others.astray(missing), texts) or others.circle()

    def _sure(
        self, suspects: Iterable[tuple[int, Verdict]], texts: dict[str, str]
    ) -> Verdict | None:
        for rank, verdict in suspects:
            if self._board is not None:  # It may have come, or failed, just before.
                texts |= self._board.look(self._here)
            if self._key(rank) not in texts:
                return self._known(texts) or verdict
        return None
