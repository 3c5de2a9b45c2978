"""Tensors of a checkpoint as rows, totals and a tree; pure."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mfload import dtypes, errors
from mfload.index import Index, TensorInfo

_DIGITS = re.compile(r"(\d+)")
_DEEPEST = 64
"""Levels of a tree; a name made of a million dots has no more."""


def select(
    rows: Iterable[TensorInfo],
    index: Index,
    *,
    dtype: Sequence[str] = (),
    shard: str | None = None,
    larger_than: int | None = None,
    smaller_than: int | None = None,
) -> list[TensorInfo]:
    """The rows that pass every filter.

    Args:
        rows: Tensors of the checkpoint.
        index: The checkpoint.
        dtype: Names of dtypes, as the file spells them or as frameworks do.
        shard: A file's name, or a pattern of one with `*` and `?`.
        larger_than: Bytes that a tensor must exceed.
        smaller_than: Bytes that a tensor must not reach.

    Raises:
        UsageError: There is no such dtype or file.
    """
    chosen = list(rows)
    if dtype:
        wanted = {_dtype(each, index) for each in dtype}
        chosen = [row for row in chosen if row.dtype.name in wanted]
    if shard is not None:
        files = _files(shard, index)
        chosen = [row for row in chosen if row.pieces[0].source in files]
    if larger_than is not None:
        chosen = [row for row in chosen if row.nbytes > larger_than]
    if smaller_than is not None:
        chosen = [row for row in chosen if row.nbytes < smaller_than]
    return chosen


def _dtype(name: str, index: Index) -> str:
    # A dtype that mfload does not know can be asked for as the file spells it.
    if any(row.dtype.name == name for row in index.tensors.values()):
        return name
    return dtypes.resolve(name).name


def _files(shard: str, index: Index) -> set[int]:
    names = [os.path.basename(file) for file in index.files]
    found = {n for n, name in enumerate(names) if name == shard or index.files[n] == shard}
    found = found or {n for n, name in enumerate(names) if fnmatch.fnmatchcase(name, shard)}
    if not found:
        there = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
        raise errors.UsageError("no such shard", expected=there, found=shard)
    return found


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


@dataclass(slots=True)
class Sum:
    """Tensors and bytes of some rows."""

    tensors: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Counts one more tensor."""
        self.tensors += 1
        self.bytes += nbytes


def totals(rows: Iterable[TensorInfo], key: Callable[[TensorInfo], Any]) -> dict[Any, Sum]:
    """Sums by a key, the largest first."""
    sums: dict[Any, Sum] = {}
    for row in rows:
        sums.setdefault(key(row), Sum()).add(row.nbytes)
    return dict(sorted(sums.items(), key=lambda item: -item[1].bytes))


@dataclass(slots=True)
class Node:
    """A dotted prefix of names; a leaf where it is a tensor's whole name.

    Attributes:
        total: Tensors below, itself counted, and their bytes.
        row: The tensor of that very name.
        below: Nodes by the next part of the name.
    """

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
    """The nodes of a tree in order, for printing.

    A node with a single one below and nothing else is joined with it.

    Args:
        root: The tree; not given out itself.
        depth: Levels shown; all where None.

    Yields:
        The lines drawn before a name, the name, its node, and whether what lies below is
        left out.
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
