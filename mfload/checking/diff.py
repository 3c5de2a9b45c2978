"""`diff`: what differs between two checkpoints: names, dtypes, shapes, values."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from mfload import errors
from mfload.checking import held
from mfload.checking.compare import Comparison, Pair, pairs, place_of
from mfload.checking.numeric_diff import SAME, Tolerance
from mfload.checking.scan import throughput
from mfload.formats import checkpoint
from mfload.index import Index, Table
from mfload.options import Options, started
from mfload.planning import selection
from mfload.planning.selection import Regex
from mfload.progress import shown
from mfload.report import Printable, html_table, table
from mfload.runtime import gc_paused
from mfload.sources import PathOrBytes

HEADS = ["max abs", "max rel", "differing", "nan", "dtype", "shape", "name"]

_SHOWN = 40


class TensorDiff(NamedTuple):
    """What differs in a tensor that both checkpoints have.

    The absolute difference of a and b is |a - b|, the relative one |a - b| / max(|a|, |b|). NaN
    against NaN is no difference; NaN against a number is counted in `nans` and `differing` and
    enters no maximum.

    Attributes:
        equal: Whether dtype, shape and every bit are the same; with `rtol` or `atol`, whether the
            shapes are the same and no element differs.
        differing: Elements that differ in value (bytes, of an unknown dtype), by more than the
            tolerance if there is one; None if the two can't be compared, as for different shapes.
        nans: Elements that are NaN on one side alone; None if there are no numbers to compare.
        max_abs: Largest absolute difference; an exact int between integers.
        at: Indices of the largest absolute difference; None if there is none.
    """

    name: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    equal: bool
    differing: int | None
    nans: int | None
    max_abs: int | float | None
    max_rel: float | None
    at: tuple[int, ...] | None

    def order(self) -> Any:
        """Sorts what can't be compared first, then by NaN on one side alone, then by max_abs."""
        compared = self.differing is not None
        most, count = self.max_abs or 0, self.differing or 0
        return compared, -(self.nans or 0), -most, -count, self.equal, self.name

    def row(self) -> list[str]:
        """Cells of a table with the columns of `HEADS`."""
        dtype, shape = self.dtype_a, str(list(self.shape_a))
        if self.dtype_a != self.dtype_b:
            dtype += f" → {self.dtype_b}"
        if self.shape_a != self.shape_b:
            shape += f" → {list(self.shape_b)}"
        cells = [self.max_abs, self.max_rel, self.differing, self.nans]
        return [*map(_cell, cells), dtype, shape, self.name]


@dataclass(frozen=True, slots=True)
class Difference(Printable):
    """What `mfload.diff` found. It prints well, is true if all is equal, and has `as_dict()`.

    Attributes:
        only_a: Names that only the first has.
        only_b: Names that only the second has.
        tensors: What both have, the largest difference first.
        read_bytes: Bytes read of both.
        seconds: How long it took.
        rtol: The relative tolerance; with `atol` None if every bit counts.
        atol: The absolute tolerance.
        notes: What else was decided or seen.
    """

    DERIVED = ("equal",)

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]
    read_bytes: int
    seconds: float
    rtol: float | None = None
    atol: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[TensorDiff, ...]:
        """The tensors of both that are not equal."""
        return tuple(each for each in self.tensors if not each.equal)

    @property
    def equal(self) -> bool:
        """Whether both hold the same names, and all tensors are equal."""
        return not (self.only_a or self.only_b or self.changed)

    def __bool__(self) -> bool:
        return self.equal

    def rows(self) -> list[tuple[str, str]]:
        """The totals, as they are printed: names and values."""
        outcome = "no difference" if self.equal else "they differ"
        if self.rtol is not None:
            outcome += f" by more than {self.atol:g} + {self.rtol:g} * |b|"
        rows = [
            ("compared", outcome),
            ("tensors", f"{len(self.tensors)} in both, {len(self.changed)} of them changed"),
        ]
        for what, names in (("only in a", self.only_a), ("only in b", self.only_b)):
            if names:
                some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                rows.append((what, f"{len(names)}: {some}"))
        rows.append(("read", throughput(self.read_bytes, self.seconds)))
        return rows + [("note", note) for note in self.notes]

    def _table(self) -> list[list[str]]:
        return [HEADS, *(each.row() for each in self.changed[:_SHOWN])]

    def __str__(self) -> str:
        text, left = table(self.rows()), len(self.changed) - _SHOWN
        if self.changed:
            text += "\n\n" + table(self._table())
        return text + (f"\n… and {left} more" if left > 0 else "")

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + (html_table(self._table()) if self.changed else "")


def _cell(number: float | None) -> str:
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def diff(
    a: PathOrBytes | Sequence[PathOrBytes] | Any,
    b: PathOrBytes | Sequence[PathOrBytes] | Any,
    *,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Difference:
    """Compares two checkpoints, or states in memory, by value.

    Values are compared as numbers, whatever dtypes they are stored in: a float32 checkpoint and
    its bfloat16 copy differ by their rounding. Both are read once, in parts: about 2 MiB of
    memory a reader, and some hundred bytes for each of the parts. A tensor is put together from
    both in parts, within `max_host_overhead`, if either stores it in another way than as one raw
    range in C order. Arrays on a device are copied to the host one by one.

    The result is true if nothing differs. Without a tolerance that takes the same dtypes and bits:
    0.0 differs from -0.0, and NaN from NaN with other bits. With `rtol` or `atol`, values alone
    count, and two elements are equal if |a - b| <= atol + rtol * |b|, as for
    `numpy.isclose(a, b, rtol, atol, equal_nan=True)`: NaN is equal to NaN, an infinity to itself.
    Floats of any width, 8-bit ones too, are compared as float64, integers and bools exactly as
    integers, complex numbers by their distance, and elements of unknown dtypes by their bytes.

    Args:
        a: The first: a checkpoint as for `load`, or arrays as `mfload.save` takes them: a dict of
            arrays of any framework, a tree of them, or a module, named as `save` names them.
        b: The second, likewise; it may be sharded and ordered in another way.
        names: Which tensors, as for `load`; those that either of them has.
        rtol: Relative tolerance, a part of |b|. Default: 0 if `atol` is given.
        atol: Absolute tolerance. Default: 0 if `rtol` is given.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        options: Engine, threads, timeout and `max_host_overhead`; see `mfload.Options`.

    Raises:
        UsageError: An argument is invalid.
        UnsupportedArrayError: An array can't be had.
        MfloadError: As `load` does.
    """
    start = time.perf_counter()
    how = started(options)
    within = _tolerance(rtol, atol)
    (left, ours), (right, theirs) = (
        held.read(side) if held.is_held(side) else checkpoint.read_every(side, how)
        for side in (a, b)
    )
    # A name or regex that neither has is an error.
    both = Table(left.columns[:])
    more = [n for n, name in enumerate(right.columns.names) if name not in left.tensors]
    both.add(right.columns.take(more))
    chosen = selection.select(Index(left.files, both), names).names
    for side in (left, right):
        side.require(chosen)
    with gc_paused():
        wanted = set(chosen)
        common = [each for each in pairs(left.columns, right.columns) if each.left.name in wanted]
        comparison = Comparison(ours, theirs, common, values=True, tolerance=within or (0.0, 0.0))
    with shown(progress, comparison.nbytes) as advance:
        notes = comparison.run(how, advance)
    with gc_paused():
        made = (_tensor(pair, comparison, exact=within is None) for pair in common)
        tensors = sorted(made, key=TensorDiff.order)
    return Difference(
        tuple(name for name in chosen if name not in right.tensors),
        tuple(name for name in chosen if name not in left.tensors),
        tuple(tensors),
        comparison.read_bytes,
        time.perf_counter() - start,
        *(within or (None, None)),
        tuple(dict.fromkeys((*left.notes, *right.notes, *notes))),
    )


def _tolerance(rtol: Any, atol: Any) -> Tolerance | None:
    """The tolerance that was given; None if every bit counts."""
    if rtol is None and atol is None:
        return None
    found: list[float] = []
    for name, value in (("rtol", rtol), ("atol", atol)):
        value = 0.0 if value is None else value
        number = type(value) is not bool and isinstance(value, numbers.Real)
        if not number or not 0 <= float(value) < inf:
            expected = "a finite number from 0 up"
            raise errors.UsageError(f"invalid {name}", expected=expected, found=repr(value))
        found.append(float(value))
    return found[0], found[1]


def _tensor(pair: Pair, comparison: Comparison, *, exact: bool) -> TensorDiff:
    left, right = pair
    compared = pair.comparable
    found = comparison.values.get(left.name, SAME)
    known = compared and left.dtype.known
    equal = compared and not found.differing
    if exact:
        equal = compared and pair.same_dtype and left.name not in comparison.first
    return TensorDiff(
        left.name,
        left.dtype.name,
        right.dtype.name,
        left.shape,
        right.shape,
        equal,
        found.differing if compared else None,
        found.nans if known else None,
        found.max_abs if known else None,
        found.max_rel if known else None,
        None if found.at is None else place_of(left, found.at),
    )
