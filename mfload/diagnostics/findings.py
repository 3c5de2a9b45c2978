"""Findings about a machine, the machine's files that they come from, and the diagnosis of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mfload.io.route import Leg
from mfload.report import Printable

_MARKS = {"ok": "", "note": "note: ", "trouble": "TROUBLE: "}


class Finding(NamedTuple):
    """What was found.

    Attributes:
        topic: Part of the machine: "host", "disk", "gpu", "cufile" or "frameworks".
        level: "ok"; "note" for what costs speed or is missing; "trouble" for what makes loads
            fail or crawl.
        advice: What to do about it, if anything.
    """

    topic: str
    what: str
    found: str
    level: Literal["ok", "note", "trouble"] = "ok"
    advice: str = ""
    data: Any = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data: the attributes by name, without empty ones."""
        return {key: value for key, value in self._asdict().items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Diagnosis(Printable):
    """What this machine can do, and what stands in the way. It prints well, and has `as_dict()`.

    Attributes:
        findings: In the order of topics.
        route: Engine and reason for each file of the given path, for a load into host memory.
        onto_device: The same for a load onto the first GPU; empty if there is none.
    """

    findings: tuple[Finding, ...]
    route: tuple[Leg, ...] = ()
    onto_device: tuple[Leg, ...] = ()

    @property
    def well(self) -> bool:
        """Whether nothing was found that makes loads fail or crawl."""
        return all(each.level != "trouble" for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As plain data: "well", "findings", "route" and "onto_device".

        Findings have "topic", "what", "found", "level", and if there are any "advice" and "data".
        The last two lists have "file", "engine", "why", "cached" and "direct" for each file.
        """
        return {
            "well": self.well,
            "findings": [each.as_dict() for each in self.findings],
            "route": [leg._asdict() for leg in self.route],
            "onto_device": [leg._asdict() for leg in self.onto_device],
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """As it is printed: topic, what was looked at, and what was found or what to do."""
        rows: list[tuple[str, str, str]] = []
        before = ""
        for each in self.findings:
            topic = "" if each.topic == before else each.topic
            before = each.topic
            rows.append((topic, each.what, _MARKS[each.level] + each.found))
            if each.advice:
                rows.append(("", "", f"→ {each.advice}"))
        for topic, legs in (("route", self.route), ("to cuda:0", self.onto_device)):
            for n, leg in enumerate(legs):
                rows.append(("" if n else topic, leg.engine, f"{leg.file} ({leg.why})"))
        return rows


class Machine:
    """Files by which the kernel describes the machine, below a root that tests can make up."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """A file's text without blanks around it; None if it can't be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The number that a file holds, if it holds one."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        try:
            return (self.root / path).exists()
        except (OSError, ValueError):
            return False

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if it can't be listed."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except (OSError, ValueError):
            return []
