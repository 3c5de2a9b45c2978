"""What goes to stdout: results and nothing else, as a table for people or JSON for machines."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mfload.cli import terminal
from mfload.errors import printable

_PART = 16 << 10


def print_json(data: Any) -> None:
    """Prints JSON: one line for a pipe, indented for a person.

    Numbers that JSON does not have become the strings "nan", "inf" and "-inf".
    """
    indent = 2 if sys.stdout.isatty() else None
    try:
        text = json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        named = json.loads(json.dumps(data), parse_constant=lambda word: str(float(word)))
        text = json.dumps(named, indent=indent)
    write([text])


def print_table(
    headers: Sequence[str] | None, rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()
) -> None:
    """Prints aligned columns; on a terminal the heads, or the keys where there are none, in bold.

    Cells are made harmless here; nothing is cut short. What may be long, such as names, belongs
    in the last column, which goes on below itself where a terminal is too narrow. `right` has the
    numbers of columns that are aligned to the right.
    """
    rows = [*([headers] if headers else []), *rows]
    fancy = terminal.fancy(sys.stdout)
    columns: list[list[str]] = []
    before = 0  # The last column.
    for n, column in enumerate(zip(*rows, strict=True)):
        # Most columns hold few different cells.
        texts = list(map(functools.cache(printable), map(str, column)))
        if n < len(rows[0]) - 1 or n in right:
            width = max(map(len, texts))
            before += width + 2
            texts = [each.rjust(width) if n in right else each.ljust(width) for each in texts]
        columns.append(texts)
    lines = [line.rstrip() for line in map("  ".join, zip(*columns, strict=True))]
    if fancy and headers:
        width = min(max(map(len, lines)), shutil.get_terminal_size().columns)
        write([_bold(lines[0]), "─" * width])
        del lines[0]
    tell(lines, before, len(columns[0][0]) if fancy and rows and not headers else 0)


def tell(lines: Iterable[str], indent: int = 0, bold: int = 0) -> None:
    """Writes lines of text, broken between words where a terminal is too narrow for them."""
    if terminal.fancy(sys.stdout):
        parts = (terminal.wrapped(line, sys.stdout, indent) for line in lines)
        lines = [
            _bold(part[:bold]) + part[bold:] if bold and not n else part
            for broken in parts
            for n, part in enumerate(broken)
        ]
    write(lines)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def write(lines: Iterable[str]) -> None:
    """Writes lines to stdout."""
    text = "".join(f"{line}\n" for line in lines)
    try:
        # With PYTHONUNBUFFERED a write goes to the system as it is, and what a pipe does not
        # take of a long one is lost without a word.
        for at in range(0, len(text), _PART):
            sys.stdout.write(text[at : at + _PART])
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None
