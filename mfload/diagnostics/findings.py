"""Findings: what a look at one thing told, and what to do about it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Level = Literal["ok", "note", "trouble"]


class Finding(NamedTuple):
    """What was found.

    Attributes:
        topic: Which part of the machine, such as "cpu" or "disk".
        what: What was looked at.
        found: What was found, for people.
        level: "ok"; "note" for what costs speed or is missing; "trouble" for what makes loads
            fail or crawl.
        advice: What to do about it; empty where nothing is to be done.
        data: The same for programs.
    """

    topic: str
    what: str
    found: str
    level: Level = "ok"
    advice: str = ""
    data: Any = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data, without what is empty."""
        plain = self._asdict()
        return {key: value for key, value in plain.items() if value not in ("", None)}
