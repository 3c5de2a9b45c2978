"""`diff`: what differs between two checkpoints: names, dtypes, shapes, values."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import errors, trees
from mfload.checking import gaps, pairing
from mfload.checking.difference import Change, Difference
from mfload.checking.gaps import Gap
from mfload.checking.pairing import Pair
from mfload.formats import checkpoint
from mfload.formats.discovery import Path
from mfload.index import Index, TensorInfo
from mfload.options import Options, started
from mfload.progress import Progress, shown
from mfload.trees import Names


def diff(
    a: Path | Sequence[Path],
    b: Path | Sequence[Path],
    *,
    names: Names = None,
    progress: Progress = False,
    options: Options | None = None,
) -> Difference:
    """Compares two checkpoints by value.

    Values are compared as numbers, whatever dtypes they are stored in: a float32 checkpoint and
    its bfloat16 copy differ by their rounding. Both are read once, in parts: about 16 MiB of
    memory a reader, and some hundred bytes for each of the parts.

    Args:
        a: The one, as for `load`.
        b: The other; it may be sharded and ordered in another way.
        names: Which tensors, as for `load`; what either of them has.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        options: `threads` and `timeout` of an `mfload.Options`.

    Returns:
        What differs.

    Raises:
        MfloadError: As `load` does.
    """
    start = time.perf_counter()
    how = started(options)
    threads, deadline = how.threads, how.deadline
    (left, ours), (right, theirs) = (
        deadline.bound(lambda path=path: checkpoint.read(path), "reading headers")
        for path in (a, b)
    )
    here, there = _selected(left, right, names)
    common = [Pair(info, there[name]) for name, info in here.items() if name in there]
    pairs = [pair for pair in common if _has_values(pair)]
    values = _Values()
    total = sum(pair.left.nbytes for pair in pairs)
    with shown(progress, total) as advance:
        notes = pairing.walk(
            ours, theirs, pairs, values.visit, threads=threads, deadline=deadline, advance=advance
        )
    compared = {pair.left.name for pair in pairs}
    changes = [_change(pair, values, pair.left.name in compared) for pair in common]
    return Difference(
        tuple(name for name in here if name not in there),
        tuple(name for name in there if name not in here),
        tuple(sorted(changes, key=Change.order)),
        sum(pair.left.nbytes + pair.right.nbytes for pair in pairs),
        time.perf_counter() - start,
        tuple(dict.fromkeys((*left.notes, *right.notes, *notes))),
    )


def _selected(
    left: Index, right: Index, names: Names
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The rows of each that are wanted; a name that neither has is an error."""
    if names is None or callable(names):
        chosen = [trees.select(index, names) for index in (left, right)]
    elif isinstance(names, str | re.Pattern):
        chosen = [_matching(index, names) for index in (left, right)]
        if not any(chosen):
            trees.select(left, names)
    else:
        wanted = list(names)
        for name in wanted:
            if name not in right.tensors:
                left[name]
        chosen = [
            [index.tensors[name] for name in dict.fromkeys(wanted) if name in index.tensors]
            for index in (left, right)
        ]
    ours, theirs = ({info.name: info for info in rows} for rows in chosen)
    return ours, theirs


def _matching(index: Index, names: str | re.Pattern[str]) -> list[TensorInfo]:
    try:
        return trees.select(index, names)
    except errors.TensorNotFoundError:
        return []


def _has_values(pair: Pair) -> bool:
    left, right = pair
    if left.shape != right.shape:
        return False
    if gaps.comparable(left.dtype, right.dtype):
        return True
    return left.dtype.name == right.dtype.name and left.nbytes == right.nbytes


class _Values:
    """What is known of each pair so far, from parts that come in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.gaps: dict[str, Gap] = {}
        self.unequal: set[str] = set()

    def visit(self, pair: Pair, first: int, left: Any, right: Any) -> None:
        """Takes a part (see `pairing.Visit`)."""
        name, (ours, theirs) = pair.left.name, (pair.left.dtype, pair.right.dtype)
        same = ours.name == theirs.name
        if same and np.array_equal(left, right):
            return
        if ours.known:
            gap = gaps.between(ours, left, theirs, right, first)
        else:
            differ = left != right
            gap = Gap(int(differ.sum()), at=first + int(differ.argmax()))
        with self._lock:
            self.gaps[name] = self.gaps.get(name, Gap()).joined(gap)
            if same:
                self.unequal.add(name)


def _change(pair: Pair, values: _Values, compared: bool) -> Change:
    left, right = pair
    gap = values.gaps.get(left.name, Gap())
    place = None
    if gap.at is not None:
        known = left.dtype.known
        place = tuple(int(n) for n in np.unravel_index(gap.at, left.shape)) if known else (gap.at,)
    numbers = compared and left.dtype.known
    return Change(
        left.name,
        left.dtype.name,
        right.dtype.name,
        left.shape,
        right.shape,
        compared and left.dtype.name == right.dtype.name and left.name not in values.unequal,
        gap.differing if compared else None,
        gap.nans if numbers else None,
        gap.max_abs if numbers else None,
        gap.max_rel if numbers else None,
        place,
    )
