"""`mfload ls`: what a checkpoint holds, as rows, totals and a tree.

Nothing here needs typer, whose start takes longer than listing 20,000 tensors.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mfload import dtypes, errors
from mfload.cli.output import print_json, print_table, tell, write
from mfload.errors import counted, printable
from mfload.formats import checkpoint
from mfload.index import Index, TensorInfo
from mfload.options import started
from mfload.planning.selection import select
from mfload.report import human
from mfload.runtime import gc_paused

if TYPE_CHECKING:
    from mfload.cli import options

_FEW_FILES = 16
_DTYPE: Callable[[TensorInfo], str] = attrgetter("dtype.name")
_DIGITS = re.compile(r"(\d+)")
_DEEPEST = 64
"""Levels of a tree; a name made of a million dots has no more."""


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.2 before layers.10."""
    # Numbers are compared by length, then by digits: int() refuses very long ones.
    parts = enumerate(_DIGITS.split(name))
    return [(len(x.lstrip("0")), x.lstrip("0")) if n % 2 else (0, x) for n, x in parts]


SORTS: dict[str, Callable[[TensorInfo], Any]] = {
    "offset": lambda row: 0,  # An index is in this order.
    "name": lambda row: natural(row.name),
    "size": lambda row: -row.nbytes,
}
_FLAGS = {"--tree": "tree", "--summary": "summary", "--metadata": "metadata", "--json": "as_json",
          "--quiet": "quiet", "-q": "quiet", "--bytes": "exact", "-b": "exact"}  # fmt: skip
_VALUES = ("--names", "--sort")


def simple_arguments(words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `ls`, or None for what typer must read: help, mistakes, other options."""
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word in _FLAGS:
            given[_FLAGS[word]] = True
            continue
        key, value = (word[2:], next(rest, "-")) if word in _VALUES else ("path", word)
        if value.startswith("-") or (key == "path" and key in given):
            return None
        given[key] = value
    return given if "path" in given else None


def ls(
    path: options.Checkpoint,
    names: options.Names = None,
    dtype: options.Only = None,
    larger_than: options.Above = None,
    smaller_than: options.Below = None,
    sort: options.Sort = "offset",
    limit: options.Limit = None,
    tree: options.Tree = False,
    depth: options.Depth = None,
    summary: options.Summary = False,
    metadata: options.Metadata = False,
    quiet: options.Quiet = False,
    exact: options.Exact = False,
    as_json: options.Json = False,
    how: Any = None,
) -> None:
    """List the tensors of a checkpoint; reads headers only.

    Prints dtype, shape, bytes and name of each tensor, then totals by dtype and by file. Names
    come last on their lines and are never cut; what can't be printed in them is escaped.
    """
    errors.check_choice("order", sort, tuple(SORTS))
    least = -1 if larger_than is None else larger_than
    most = math.inf if smaller_than is None else smaller_than
    shown = functools.cache(str if exact else _human_like(larger_than, smaller_than))
    with gc_paused():
        index, sources = checkpoint.read(path, started(how), missing_ok=True)
        dtypes = {_dtype_name(each, index) for each in dtype or ()}
        rows = [
            row
            for row in select(index, names)
            if least < row.nbytes < most and (not dtypes or row.dtype.name in dtypes)
        ]
        rows.sort(key=SORTS[sort])
        if as_json:
            sizes = [source.size for source in sources]
            print_json(_data(index, rows, limit, sizes, summary))
            return
        tree = tree or depth is not None
        if tree or not summary:
            heads, lines, right = _tree(rows, depth, shown) if tree else _rows(index, rows, shown)
            print_table(None if quiet else heads, lines[:limit], right=right)
            if limit is not None and limit < len(lines) and not quiet:
                write([f"… and {len(lines) - limit} more"])
    if metadata:
        print_table(None if quiet else ["metadata", "value"], (index.metadata or {}).items())
    if not quiet:
        _print_totals(index, rows, summary, shown, gap=not summary or metadata)


def _human_like(*limits: int | None) -> Callable[[int], str]:
    """Writes sizes in decimal units if all limits that were given are in such."""
    units = {getattr(each, "unit", "B") for each in limits if each is not None}
    decimal = bool(units - {"B"}) and not any("i" in unit for unit in units)
    return functools.partial(human, decimal=decimal)


def _dtype_name(name: str, index: Index) -> str:
    # A dtype that mfload does not know can be asked for as the file spells it.
    if any(row.dtype.name == name for row in index.tensors.values()):
        return name
    return dtypes.resolve(name).name


def totals(rows: Iterable[TensorInfo], key: Callable[[TensorInfo], Any]) -> dict[Any, Any]:
    """Tensors and bytes by a key, the most bytes first."""
    sums: dict[Any, dict[str, int]] = {}
    for row in rows:
        total = sums.setdefault(key(row), {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += row.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]["bytes"]))


def _data(
    index: Index, rows: Sequence[TensorInfo], limit: int | None, sizes: Sequence[int], summary: bool
) -> dict[str, Any]:
    by_file = totals(rows, lambda row: row.pieces[0].source)
    tensors = [
        {
            "name": row.name,
            "dtype": row.dtype.name,
            "shape": row.shape,
            "bytes": row.nbytes,
            "file": index.files[row.pieces[0].source],
            "offset": row.pieces[0].offset,
            **({} if row.simple else {"stored": _how(row)}),
        }
        for row in rows[:limit]
    ]
    return {
        **({} if summary else {"tensors": tensors}),
        "total": {"tensors": len(rows), "bytes": sum(row.nbytes for row in rows)},
        "dtypes": totals(rows, _DTYPE),
        "files": [
            {"file": file, "size": sizes[n], **by_file.get(n, {"tensors": 0, "bytes": 0})}
            for n, file in enumerate(index.files)
        ],
        "metadata": index.metadata,
        "notes": index.notes,
    }


Listing = tuple[list[str], Sequence[Sequence[object]], list[int]]
"""Heads, lines, and the columns that are aligned to the right."""


def _rows(index: Index, rows: Sequence[TensorInfo], shown: Callable[[int], str]) -> Listing:
    shape = functools.cache(lambda shape: str(list(shape)))
    heads = ["dtype", "shape", "bytes"]
    columns = [list(map(_DTYPE, rows)), [shape(row.shape) for row in rows]]
    columns.append([shown(row.nbytes) for row in rows])
    if len(index.files) > 1:
        files = [os.path.basename(file) for file in index.files]
        heads.append("file")
        columns.append([files[row.pieces[0].source] for row in rows])
    if not all(row.simple for row in rows):
        heads.append("stored")
        columns.append(list(map(_how, rows)))
    names = [row.name for row in rows]
    return [*heads, "name"], list(zip(*columns, names, strict=True)), [2]


def _how(row: TensorInfo) -> str:
    """How a tensor is stored, in a few words."""
    words: dict[str, None] = {}
    for piece in row.pieces:
        stored = piece.stored
        if stored is None:
            continue
        words |= dict.fromkeys(encoding.codec for encoding in stored.encodings)
        also = {
            "inline": stored.inline is not None,
            "strided": stored.strides is not None,
            "big-endian": stored.big_endian,
        }
        words |= dict.fromkeys(word for word, holds in also.items() if holds)
    if len(row.pieces) > 1:
        words[counted(len(row.pieces), "piece")] = None
    return ", ".join(words) or "raw"


@dataclass(slots=True)
class _Prefix:
    """A dotted prefix of names, and the tensor of that very name if there is one."""

    tensors: int = 0
    nbytes: int = 0
    row: TensorInfo | None = None
    below: dict[str, _Prefix] = field(default_factory=dict[str, "_Prefix"])


def _tree(rows: Iterable[TensorInfo], depth: int | None, shown: Callable[[int], str]) -> Listing:
    root = _Prefix()
    for row in rows:
        node = root
        for part in row.name.split(".", _DEEPEST):
            node = node.below.setdefault(part, _Prefix())
            node.tensors += 1
            node.nbytes += row.nbytes
        node.row = row
    drawn = _branches(root, depth or _DEEPEST + 1)
    lines = [(node.tensors, shown(node.nbytes), text) for text, node in drawn]
    return ["tensors", "bytes", "name"], lines, [0, 1]


def _branches(
    node: _Prefix, depth: int, indent: str | None = None
) -> Iterator[tuple[str, _Prefix]]:
    """What lies below a node, drawn; one with a single node below and nothing else is joined."""
    items = list(node.below.items())
    for number, (name, child) in enumerate(items, 1):
        while len(child.below) == 1 and child.row is None:
            [(part, below)] = child.below.items()
            name, child = f"{name}.{part}", below
        branch, gap = ("└── ", "    ") if number == len(items) else ("├── ", "│   ")
        text = name if indent is None else indent + branch + name
        if child.row is not None:
            text += f"  {child.row.dtype} {list(child.row.shape)}"
        yield text + ("  …" if child.below and depth == 1 else ""), child
        if depth > 1:
            yield from _branches(child, depth - 1, "" if indent is None else indent + gap)


def _print_totals(
    index: Index, rows: Sequence[TensorInfo], summary: bool, shown: Any, gap: bool
) -> None:
    files = len(index.files)
    in_all = counted(files, "file")
    size = shown(sum(row.nbytes for row in rows))
    by_file = sorted(totals(rows, lambda row: row.pieces[0].source).items())
    if len(rows) == len(index):
        line = f"{counted(len(rows), 'tensor')}, {size}, in {in_all}"
    else:
        of = counted(len(index), "tensor")
        line = f"{len(rows)} of {of}, {size}, in {len(by_file)} of {in_all}"
    write([*([""] if gap else []), line])
    sums = {"dtype": list(totals(rows, _DTYPE).items())}
    if files > 1 and (summary or files <= _FEW_FILES):
        sums["file"] = [(os.path.basename(index.files[n]), total) for n, total in by_file]
    for of, found in sums.items():
        if found:
            write([""])
            lines = [(total["tensors"], shown(total["bytes"]), name) for name, total in found]
            print_table(["tensors", "bytes", of], lines, right=[0, 1])
    if index.notes:
        tell(["", *(f"note: {printable(note)}" for note in index.notes)])
