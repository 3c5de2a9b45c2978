"""Findings about a machine, the diagnosis that they make, and the kernel's files behind them."""

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
        advice: What to do about it, if anything.
        data: The same for programs, if it is more than a text.
        trouble: Whether it makes loads fail or crawl.
        topic: Part of the machine: "host", "disk", "gpu", "cufile" or "frameworks".
    """

    what: str
    found: str
    advice: str = ""
    data: Any = None
    trouble: bool = False
    topic: str = ""

    @property
    def level(self) -> Literal["ok", "note", "trouble"]:
        """Whether it is trouble, or a note: what has advice costs speed, or is missing."""
        if self.trouble:
            return "trouble"
        return "note" if self.advice else "ok"

    def as_dict(self) -> dict[str, Any]:
        """As plain data: "topic", "what", "found", "level", and "advice" and "data" if any."""
        fields = {"topic": self.topic, "what": self.what, "found": self.found, "level": self.level}
        more = {"advice": self.advice, "data": self.data}
        return fields | {key: value for key, value in more.items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Diagnosis(Printable):
    """What this machine can do, and what stands in the way.

    It prints well, is true if all is well, and has `as_dict()`.

    Attributes:
        findings: In the order of topics.
        route: Engine and reason for each file of the given path, for a load into host memory.
        onto_device: The same for a load onto the first GPU; empty if there is none.
    """

    DERIVED = ("well",)

    findings: tuple[Finding, ...]
    route: tuple[Leg, ...] = ()
    onto_device: tuple[Leg, ...] = ()

    @property
    def well(self) -> bool:
        """Whether nothing was found that makes loads fail or crawl."""
        return not any(each.trouble for each in self.findings)

    def __bool__(self) -> bool:
        return self.well

    def rows(self) -> list[tuple[str, str, str]]:
        """As it is printed: topic, what was looked at, and what was found or what to do."""
        rows: list[tuple[str, str, str]] = []
        for each in self.findings:
            rows.append((each.topic, each.what, _MARKS[each.level] + each.found))
            if each.advice:
                rows.append((each.topic, "", f"→ {each.advice}"))
        for topic, legs in (("route", self.route), ("to cuda:0", self.onto_device)):
            rows += [(topic, leg.engine, f"{leg.file} ({leg.why})") for leg in legs]
        before = ["", *(topic for topic, _, _ in rows)]
        return [
            ("" if topic == last else topic, what, found)
            for last, (topic, what, found) in zip(before, rows, strict=False)
        ]


def text(root: Path, path: str) -> str:
    """The text of a file of the kernel's below a root; empty if it can't be read."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def number(root: Path, path: str) -> int | None:
    """The number that such a file holds, if it holds one."""
    try:
        return int(text(root, path))
    except ValueError:
        return None
