"""`mfload ls`: what a checkpoint holds, as rows, totals and a tree.

Nothing here needs typer, whose start takes longer than listing 20,000 tensors.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mfload import errors
from mfload.cli.output import print_json, print_table, write
from mfload.cli.terminal import clean
from mfload.formats import checkpoint
from mfload.index import Index, TensorInfo
from mfload.planning.selection import select
from mfload.report import human
from mfload.runtime import gc_paused

_FEW_FILES = 16
_DIGITS = re.compile(r"(\d+)")
_DEEPEST = 64
"""Levels of a tree; a name made of a million dots has no more."""


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.2 before layers.10."""
    # Numbers are compared by length, then by digits: int() refuses very long ones.
    parts = enumerate(_DIGITS.split(name))
    return [(len(x.lstrip("0")), x.lstrip("0")) if n % 2 else (0, x) for n, x in parts]


SORTS: dict[str, Callable[[TensorInfo], Any] | None] = {
    "offset": None,
    "name": lambda row: natural(row.name),
    "size": lambda row: -row.nbytes,
}
"""Keys by what can be sorted by; file order, then offset, is the order of an index."""


_FLAGS = {
    "--tree": "tree",
    "--summary": "summary",
    "--metadata": "metadata",
    "--quiet": "quiet",
    "-q": "quiet",
    "--bytes": "exact",
    "-b": "exact",
    "--json": "as_json",
}
_VALUES = {"--names": "names", "--shard": "shard", "--sort": "sort"}


def simple_arguments(words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `ls` in a command line of plain words.

    Returns:
        None for all that typer must read: other options, other spellings, help and mistakes.
    """
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word in _FLAGS:
            given[_FLAGS[word]] = True
            continue
        key, value = (_VALUES[word], next(rest, "-")) if word in _VALUES else ("path", word)
        if value.startswith("-") or (key == "path" and key in given):
            return None
        given[key] = value
    return given if "path" in given else None


def ls(
    path: str,
    names: str | None = None,
    dtype: Sequence[str] | None = None,
    shard: str | None = None,
    larger_than: int | None = None,
    smaller_than: int | None = None,
    sort: str = "offset",
    limit: int | None = None,
    tree: bool = False,
    depth: int | None = None,
    summary: bool = False,
    metadata: bool = False,
    quiet: bool = False,
    exact: bool = False,
    as_json: bool = False,
) -> None:
    """Prints a listing; the options are those of the command."""
    if sort not in SORTS:
        raise errors.UsageError("unknown order", expected=" | ".join(SORTS), found=sort)
    with gc_paused():
        index, sources = checkpoint.read(path)
        rows = list(select(index, names))
        if dtype:
            wanted = {_dtype_name(each, index) for each in dtype}
            rows = [row for row in rows if row.dtype.name in wanted]
        if shard is not None:
            files = _files(shard, index)
            rows = [row for row in rows if row.pieces[0].source in files]
        if larger_than is not None:
            rows = [row for row in rows if row.nbytes > larger_than]
        if smaller_than is not None:
            rows = [row for row in rows if row.nbytes < smaller_than]
        key = SORTS[sort]
        if key is not None:
            rows.sort(key=key)
        if as_json:
            print_json(_data(index, rows, limit, [source.size for source in sources], summary))
            return
        shown = functools.cache(str if exact else human)
        if tree or depth is not None:
            _print_tree(rows, depth, limit, shown, quiet)
        elif not summary:
            _print_rows(index, rows, limit, shown, quiet)
    if metadata:
        print_table(None if quiet else ["metadata", "value"], (index.metadata or {}).items())
    if not quiet:
        _print_totals(index, rows, summary, shown, gap=not summary or metadata)


def _dtype_name(name: str, index: Index) -> str:
    # A dtype that mfload does not know can be asked for as the file spells it.
    if any(row.dtype.name == name for row in index.tensors.values()):
        return name
    from mfload import dtypes

    return dtypes.resolve(name).name


def _files(shard: str, index: Index) -> set[int]:
    names = [os.path.basename(file) for file in index.files]
    found = {n for n, name in enumerate(names) if name == shard or index.files[n] == shard}
    found = found or {n for n, name in enumerate(names) if fnmatch.fnmatchcase(name, shard)}
    if not found:
        there = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
        raise errors.UsageError("no such shard", expected=there, found=shard)
    return found


@dataclass(slots=True)
class Sum:
    """Tensors and bytes of some rows."""

    tensors: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Counts one more tensor."""
        self.tensors += 1
        self.bytes += nbytes

    def as_dict(self) -> dict[str, int]:
        """The same as plain data."""
        return {"tensors": self.tensors, "bytes": self.bytes}


def totals(rows: Iterable[TensorInfo], key: Callable[[TensorInfo], Any]) -> dict[Any, Sum]:
    """Sums by a key, the largest first."""
    sums: dict[Any, Sum] = {}
    for row in rows:
        of = key(row)
        if of not in sums:
            sums[of] = Sum()
        sums[of].tensors += 1
        sums[of].bytes += row.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1].bytes))


def _source(row: TensorInfo) -> int:
    return row.pieces[0].source


def _dtype(row: TensorInfo) -> str:
    return row.dtype.name


def _data(
    index: Index, rows: Sequence[TensorInfo], limit: int | None, sizes: Sequence[int], summary: bool
) -> dict[str, Any]:
    by_file = totals(rows, _source)
    tensors = [
        {
            "name": row.name,
            "dtype": row.dtype.name,
            "shape": row.shape,
            "bytes": row.nbytes,
            "file": index.files[row.pieces[0].source],
            "offset": row.pieces[0].offset,
        }
        for row in rows[:limit]
    ]
    return {
        **({} if summary else {"tensors": tensors}),
        "total": {"tensors": len(rows), "bytes": sum(row.nbytes for row in rows)},
        "dtypes": {name: total.as_dict() for name, total in totals(rows, _dtype).items()},
        "files": [
            {"file": file, "size": sizes[n], **by_file.get(n, Sum()).as_dict()}
            for n, file in enumerate(index.files)
        ],
        "metadata": index.metadata,
        "notes": index.notes,
    }


def _print_rows(
    index: Index, rows: Sequence[TensorInfo], limit: int | None, shown: Any, quiet: bool
) -> None:
    several = len(index.files) > 1
    files = [os.path.basename(file) for file in index.files]
    shapes = functools.cache(lambda shape: str(list(shape)))
    lines: Iterator[Sequence[object]] = (
        (
            row.dtype.name,
            shapes(row.shape),
            shown(row.nbytes),
            *([files[row.pieces[0].source]] if several else []),
            row.name,
        )
        for row in islice(rows, limit)
    )
    head = ["dtype", "shape", "bytes", *(["file"] if several else []), "name"]
    print_table(None if quiet else head, lines, right=[2])
    _print_rest(len(rows), limit, quiet)


def _print_rest(rows: int, limit: int | None, quiet: bool) -> None:
    if limit is not None and limit < rows and not quiet:
        write([f"… and {rows - limit} more"])


@dataclass(slots=True)
class Node:
    """A dotted prefix of names: the tensor of that very name, and nodes by the next part."""

    total: Sum = field(default_factory=Sum)
    row: TensorInfo | None = None
    below: dict[str, Node] = field(default_factory=dict[str, "Node"])


def grow(rows: Iterable[TensorInfo]) -> Node:
    """The tree of dotted names."""
    root = Node()
    for row in rows:
        node = root
        nbytes = row.nbytes
        node.total.add(nbytes)
        for part in row.name.split(".", _DEEPEST):
            node = node.below.setdefault(part, Node())
            node.total.add(nbytes)
        node.row = row
    return root


def walk(root: Node, depth: int | None) -> Iterator[tuple[str, str, Node, bool]]:
    """The nodes of a tree in order; one with a single node below and nothing else is joined.

    Yields:
        The lines drawn before a name, the name, its node, and whether what lies below is left out.
    """
    deepest = _DEEPEST + 1 if depth is None else depth
    stack = [(iter(_children(root)), "")]
    while stack:
        children, indent = stack[-1]
        found = next(children, None)
        if found is None:
            stack.pop()
            continue
        name, node, last = found
        branch = "" if len(stack) == 1 else "└── " if last else "├── "
        more = bool(node.below)
        open_up = more and len(stack) < deepest
        yield indent + branch, name, node, more and not open_up
        if open_up:
            gap = "" if len(stack) == 1 else "    " if last else "│   "
            stack.append((iter(_children(node)), indent + gap))


def _children(node: Node) -> Iterator[tuple[str, Node, bool]]:
    items = list(node.below.items())
    for n, (name, child) in enumerate(items):
        while len(child.below) == 1 and child.row is None:
            [(part, below)] = child.below.items()
            name, child = f"{name}.{part}", below
        yield name, child, n == len(items) - 1


def _print_tree(
    rows: Sequence[TensorInfo], depth: int | None, limit: int | None, shown: Any, quiet: bool
) -> None:
    nodes = [
        (node.total.tensors, shown(node.total.bytes), before + clean(name) + _leaf(node, left_out))
        for before, name, node, left_out in walk(grow(rows), depth)
    ]
    head = None if quiet else ["tensors", "bytes", "name"]
    print_table(head, islice(nodes, limit), right=[0, 1])
    _print_rest(len(nodes), limit, quiet)


def _leaf(node: Node, left_out: bool) -> str:
    tensor = "" if node.row is None else f"  {clean(node.row.dtype)} {list(node.row.shape)}"
    return tensor + ("  …" if left_out else "")


def _print_totals(
    index: Index, rows: Sequence[TensorInfo], summary: bool, shown: Any, gap: bool
) -> None:
    files = len(index.files)
    size = shown(sum(row.nbytes for row in rows))
    by_file = sorted(totals(rows, _source).items())
    if len(rows) == len(index):
        line = f"{len(rows)} tensors, {size}, in {files} file{'s' if files > 1 else ''}"
    else:
        line = f"{len(rows)} of {len(index)} tensors, {size}, in {len(by_file)} of {files} files"
    write([*([""] if gap else []), line])
    _print_sums("dtype", totals(rows, _dtype).items(), shown)
    if files > 1 and (summary or files <= _FEW_FILES):
        named = [(os.path.basename(index.files[n]), total) for n, total in by_file]
        _print_sums("file", named, shown)
    if index.notes:
        write(["", *(f"note: {clean(note)}" for note in index.notes)])


def _print_sums(of: str, sums: Iterable[tuple[str, Sum]], shown: Any) -> None:
    rows = [(total.tensors, shown(total.bytes), name) for name, total in sums]
    if rows:
        write([""])
        print_table(["tensors", "bytes", of], rows, right=[0, 1])
