"""What goes to stdout: results and nothing else, as a table for people or JSON for machines."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from mfload.cli import terminal
from mfload.cli.terminal import cells, clean

_PRETTY_ROWS = 200
"""Longest table that is drawn with lines; drawing takes rich about a millisecond a row."""

_NARROW = 8
"""Columns of a terminal that a cell gets at least before it goes on in the next line."""

_PART = 16 << 10


def print_json(data: Any) -> None:
    """Prints JSON: one line for a pipe, indented for a person.

    Numbers that JSON has no word for (nan, inf) become strings.
    """
    indent = 2 if sys.stdout.isatty() else None
    try:
        text = json.dumps(data, indent=indent, default=_plain, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), indent=indent, allow_nan=False)
    write([text])


def print_table(
    headers: Sequence[str] | None,
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[int] = (),
) -> None:
    """Prints a table: drawn on a terminal, aligned columns elsewhere and where it is long or wide.

    Cells are made harmless here; nothing is cut short. What may be long, such as names, belongs
    in the last column.
    """
    # By columns, since most of them hold few different cells.
    columns = [
        list(map(functools.cache(clean), map(str, each))) for each in zip(*rows, strict=True)
    ]
    texts = list(zip(*columns, strict=True))
    if terminal.fancy(sys.stdout) and len(texts) <= _PRETTY_ROWS and _fits(headers, texts):
        _draw(headers, texts, right)
    else:
        write(aligned([list(headers), *texts] if headers else texts, right))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterable[str]:
    """Lines of columns two spaces apart; the last column is not padded."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    for n, column in enumerate(columns):
        if n < len(columns) - 1 or n in right:
            width = max(map(functools.cache(cells), column))
            columns[n] = list(map(functools.cache(partial(_padded, width, n in right)), column))
    return (line.rstrip() for line in map("  ".join, zip(*columns, strict=True)))


def _padded(width: int, right: bool, text: str) -> str:
    # Format codes pad by characters, and a wide character takes two columns.
    gap = " " * (width - cells(text))
    return gap + text if right else text + gap


def write(lines: Iterable[str]) -> None:
    """Writes lines to stdout, many at a time."""
    lines = iter(lines)
    while chunk := list(itertools.islice(lines, 1000)):
        text = "\n".join(chunk) + "\n"
        # With PYTHONUNBUFFERED a write goes to the system as it is, and what a pipe does not
        # take of a long one is lost without a word.
        try:
            for at in range(0, len(text), _PART):
                sys.stdout.write(text[at : at + _PART])
        except OSError as error:
            raise terminal.named(error) from None


def _fits(headers: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> bool:
    """Whether a drawn table has room for its heads and for some of each cell."""
    heads = map(cells, headers or ())
    columns = zip(*rows, strict=True)
    pairs = itertools.zip_longest(heads, (max(map(cells, column)) for column in columns))
    widths = [max(head or 0, min(cell or 0, _NARROW)) for head, cell in pairs]
    # A blank on either side of each column, and one between two.
    return sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns


def _draw(
    headers: Sequence[str] | None, rows: Sequence[Sequence[str]], right: Sequence[int]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if headers else None, show_header=bool(headers))
    for n in range(len(headers or rows[0] if headers or rows else ())):
        justify = "right" if n in right else "left"
        style = "bold cyan" if headers is None and n == 0 else None
        head = headers[n] if headers else ""
        width = cells(head) or None
        table.add_column(Text(head), justify=justify, overflow="fold", style=style, min_width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, markup=False, highlight=False, emoji=False).print(table)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for method in ("as_dict", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _finite(value: Any) -> Any:
    """A copy in which infinite numbers and nan are strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value if isinstance(value, str | int | None) else _finite(_plain(value))
