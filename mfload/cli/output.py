"""What goes to stdout: results and nothing else, as a table for people or JSON for machines."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mfload.cli import streams
from mfload.cli.text import cells, clean

_PRETTY_ROWS = 200
"""Longest table that is drawn with lines; drawing takes rich about a millisecond a row."""

_NARROW = 8
"""Columns of a terminal that a cell gets at least before it goes on in the next line."""

_PART = 16 << 10


def fancy(stream: Any) -> bool:
    """Whether somebody looks at a stream on a terminal that can more than print."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


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
    """Prints a table: drawn on a terminal, aligned columns elsewhere.

    Long tables are aligned columns everywhere, as all are on a terminal too narrow to draw them.
    Cells are made harmless here; nothing is cut short. What may be long, such as names, belongs
    in the last column.

    Args:
        headers: Names of the columns, None for a table without a head.
        rows: Cells; any object, shown by `str`.
        right: Numbers of the columns that are aligned to the right.
    """
    texts = [[clean(cell) for cell in row] for row in rows]
    if fancy(sys.stdout) and len(texts) <= _PRETTY_ROWS and _fits(headers, texts):
        _draw(headers, texts, right)
    else:
        write(aligned([list(headers), *texts] if headers else texts, right))


def print_pairs(rows: Iterable[Sequence[object]]) -> None:
    """Prints names and values, such as a report's, without a head."""
    texts = [[clean(cell) for cell in row] for row in rows]
    if fancy(sys.stdout) and _fits(None, texts):
        _draw(None, texts, ())
    else:
        write(aligned(texts, ()))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterable[str]:
    """Lines of columns two spaces apart; the last column is not padded."""
    if not rows:
        return
    last = len(rows[0]) - 1
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        parts: list[str] = []
        for n, cell in enumerate(row):
            gap = "" if n == last and n not in right else " " * (widths[n] - cells(cell))
            parts.append(gap + cell if n in right else cell + gap)
        yield "  ".join(parts).rstrip()


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
            raise streams.named(error) from None


def _fits(headers: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> bool:
    """Whether a drawn table has room for its heads and for some of each cell."""
    heads = map(cells, headers or ())
    columns = zip(*rows, strict=True)
    pairs = itertools.zip_longest(heads, (max(map(cells, column)) for column in columns))
    widths = [max(head or 0, min(cell or 0, _NARROW)) for head, cell in pairs]
    # A blank on either side of each column, and one between two.
    return sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns


def _draw(headers: Sequence[str] | None, rows: list[list[str]], right: Sequence[int]) -> None:
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
