"""A diagnosis: all findings, and the route that a load would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfload.diagnostics.findings import Finding
from mfload.io.route import Leg
from mfload.report import html_table, table

_MARKS = {"ok": "", "note": "note: ", "trouble": "TROUBLE: "}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What this machine can do, and what stands in the way.

    Attributes:
        findings: In the order of topics.
        route: Engine and reason for each file of the path that was given, for a load into host
            memory.
        onto_device: The same for a load onto the first GPU; empty where there is none.
    """

    findings: tuple[Finding, ...]
    route: tuple[Leg, ...] = ()
    onto_device: tuple[Leg, ...] = ()

    @property
    def well(self) -> bool:
        """Whether nothing was found that makes loads fail or crawl."""
        return all(each.level != "trouble" for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "well": self.well,
            "findings": [each.as_dict() for each in self.findings],
            "route": [leg._asdict() for leg in self.route],
            "onto_device": [leg._asdict() for leg in self.onto_device],
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """What it prints: topic, what was looked at, what was found and what to do."""
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

    def __str__(self) -> str:
        return table([(f"{topic:<10} {what}".rstrip(), text) for topic, what, text in self.rows()])

    def _repr_html_(self) -> str:
        return html_table([(f"{topic} {what}", text) for topic, what, text in self.rows()])
