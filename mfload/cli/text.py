"""Text from a stranger's header, made harmless for a terminal."""

from __future__ import annotations

import unicodedata


def clean(value: object) -> str:
    """One line that moves no cursor and colours nothing: what can't be printed is escaped."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_cell(c) for c in text)


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
