"""Verdicts: what the processes of a load settled on at one step, as text that all of them read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mfload import errors

Kind = Literal["go", "failed", "dead", "late", "differ"]
_SHOWN = 300  # Characters of an error, or of a line that differs.
_SIDES = 20  # Ways in which processes differ that are shown.


class Verdict(NamedTuple):
    """What was settled.

    Attributes:
        kind: "go", or why not: a process failed, is dead, gave up waiting, or sees other things.
        rank: The process concerned, -1 for none.
        found: Its error, or what it waited for.
        problems: What differs, a line for each side.
        turns: Turns of groups that are settled by this, too.
    """

    kind: Kind
    rank: int = -1
    found: str = ""
    problems: tuple[str, ...] = ()
    turns: Mapping[str, int] = {}

    def text(self) -> str:
        """As it is posted."""
        return json.dumps(self)

    def error(self, what: str) -> errors.ProcessError:
        """What every process raises that has no error of its own.

        Args:
            what: The step, for the message.
        """
        head = {
            "failed": f"process {self.rank} failed, and this load with it",
            "dead": f"process {self.rank} is gone: it ended, or was killed",
            "late": f"process {self.rank} gave up waiting for the others",
            "differ": self.found,
        }[self.kind]
        found = {"failed": self.found, "late": self.found}.get(self.kind)
        where = what if self.kind == "dead" else None
        expected = None if where is None else f"a word from it about: {where}"
        return errors.ProcessError(head, expected=expected, found=found, problems=self.problems)


def read(text: str) -> Verdict:
    """A verdict from its text."""
    kind, rank, found, problems, turns = json.loads(text)
    return Verdict(kind, rank, found, tuple(problems), turns)


def of_error(rank: int, error: BaseException) -> Verdict:
    """The verdict of a process that failed."""
    return Verdict("failed", rank, of_text(error))


def of_text(error: BaseException) -> str:
    """An error for the other processes."""
    return _cut(f"{type(error).__name__}: {error}".rstrip(": "))


def apart(groups: Mapping[int, tuple[int, ...]], turns: Mapping[str, int]) -> Verdict:
    """The verdict on loads that wait for each other.

    Args:
        groups: With whom each process loads.
        turns: Those loads: group and number.
    """
    head = (
        "the processes wait for each other in loads on different meshes: each must load on the "
        "same mesh, in the same order"
    )
    lines = [f"process {rank} loads with {_named(ranks)}" for rank, ranks in groups.items()]
    return Verdict("differ", -1, head, tuple(lines[:_SIDES]), turns)


def compare(posts: Mapping[int, tuple[str, str]], text: Callable[[str], str]) -> Verdict:
    """What follows from the posts of all processes.

    Args:
        posts: What each process is about, and its fingerprint or a digest of it.
        text: The fingerprint from what was posted.
    """
    sides: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(posts):
        sides.setdefault(posts[rank], []).append(rank)
    if len(sides) == 1:
        return Verdict("go")
    steps = {what for what, _ in sides}
    if len(steps) > 1:
        head = "the processes are not at the same call: each must load the same, in the same order"
        return Verdict("differ", -1, head, tuple(_lines({k: k[0] for k in sides}, sides)))
    head = f"the processes do not see the same {next(iter(steps))}"
    return Verdict("differ", -1, head, tuple(_lines(_differences(list(sides), text), sides)))


def _differences(
    sides: list[tuple[str, str]], text: Callable[[str], str]
) -> dict[tuple[str, str], str]:
    """For each side the first line that is not the same on all."""
    sides = sides[:_SIDES]
    texts = [text(fingerprint).splitlines() for _, fingerprint in sides]
    longest = max(map(len, texts))
    lines = [each + ["nothing more"] * (longest - len(each)) for each in texts]
    rows = (list(row) for row in zip(*lines, strict=True))
    first: list[str] = next((row for row in rows if len(set(row)) > 1), ["other"] * len(sides))
    return dict(zip(sides, first, strict=True))


def _lines(shown: Mapping[Any, str], sides: Mapping[Any, list[int]]) -> list[str]:
    lines: list[str] = []
    for side, line in list(shown.items())[:_SIDES]:
        lines.append(f"{_named(sides[side])}: {_cut(line)}")
    return lines


def _named(ranks: Sequence[int]) -> str:
    who = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {who}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
