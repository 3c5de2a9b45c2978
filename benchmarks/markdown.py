"""Tables as Markdown, to be included in a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def seconds(value: float | None) -> str:
    """Seconds to the millisecond, a dash where there are none."""
    return "–" if value is None else f"{value:.3f}"


def times(value: float | None) -> str:
    """A ratio, a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"
