"""Text from a stranger's header, made harmless for a terminal; and sizes as people type them."""

from __future__ import annotations

import re
import unicodedata

from mfload import errors

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40, "pi": 1 << 50}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)


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


def size(text: str) -> int:
    """Bytes of a size: 4096, 256MiB, 1.5GB, 64k. Units with an i are binary.

    Raises:
        UsageError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() == "i":
        raise errors.UsageError(
            "not a size", expected="bytes, or a size such as 256MiB or 1.5GB", found=text
        )
    whole, _, part = match[1].partition(".")
    unit = _UNITS[match[2].lower()]
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
