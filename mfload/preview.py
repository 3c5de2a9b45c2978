"""What a load would do, for people and programs to look at before it does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfload.io.route import Leg
from mfload.planning import Plan
from mfload.report import html_table, human, table


@dataclass(frozen=True, slots=True)
class Preview:
    """What a load would do: the plan, which is pure, and beside it this machine's route.

    Attributes:
        plan: Buffers, blocks and places.
        route: Engine and reason for each file.
        framework: Whose arrays it would make.
        overhead_bytes: The most it would hold beside the result.
        threads: Readers at once.
        notes: What else was decided without being asked for.
    """

    plan: Plan
    route: tuple[Leg, ...]
    framework: str
    overhead_bytes: int
    threads: int
    notes: tuple[str, ...] = ()

    @property
    def over_read_bytes(self) -> int:
        """Bytes read that no tensor wants."""
        return self.plan.read_bytes - self.plan.wanted_bytes

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "framework": self.framework,
            "tensors": len(self.plan.places),
            "result_bytes": self.plan.result_bytes,
            "read_bytes": self.plan.read_bytes,
            "over_read_bytes": self.over_read_bytes,
            "mapped_bytes": self.plan.mapped_bytes,
            "buffers": len(self.plan.buffers),
            "buffer_bytes": self.plan.buffer_bytes,
            "blocks": len(self.plan.blocks),
            "overhead_bytes": self.overhead_bytes,
            "threads": self.threads,
            "route": [leg._asdict() for leg in self.route],
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        made = self.plan
        tensors = f"{len(made.places)} {self.framework} tensors, {human(made.result_bytes)}"
        over = human(self.over_read_bytes)
        rows = [
            ("result", tensors),
            ("read", f"{human(made.read_bytes)} in {len(made.blocks)} blocks, {over} unwanted"),
            ("mapped", human(made.mapped_bytes)),
            ("buffers", f"{len(made.buffers)}, {human(made.buffer_bytes)} of memory"),
            ("overhead", f"at most {human(self.overhead_bytes)} beyond the buffers"),
            ("threads", str(self.threads)),
        ]
        rows += [("route", f"{leg.file}: {leg.engine} ({leg.why})") for leg in self.route[:16]]
        if len(self.route) > 16:
            rows.append(("route", f"… and {len(self.route) - 16} more files"))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())
