"""Figures inside a page: the part between two marks is written by the benchmark."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def put(page: Path, figures: str) -> None:
    """Replace the figures of a page; the rest of it stays as it is.

    Args:
        page: The page; where there is none, one with nothing but the figures is written.
        figures: Markdown.
    """
    text = page.read_text("utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}", "utf-8")
