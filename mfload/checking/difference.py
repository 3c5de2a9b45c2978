"""What differs between two checkpoints, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mfload.report import html_table, human, table

_SHOWN = 40


class Change(NamedTuple):
    """A tensor that both have.

    The absolute difference of a and b is |a - b|, the relative one |a - b| / max(|a|, |b|). NaN
    against NaN is no difference; NaN against a number is counted in `nans` and `differing` and
    enters no maximum.

    Attributes:
        name: Its name.
        dtype_a: Stored dtype in the one.
        dtype_b: Stored dtype in the other.
        shape_a: Shape in the one.
        shape_b: Shape in the other.
        equal: Whether dtype, shape and every bit are the same.
        differing: Elements that differ in value (bytes, of a dtype that is not known); None
            where they can't be compared.
        nans: Elements that are NaN on one side alone.
        max_abs: Largest absolute difference; an exact int between integers.
        max_rel: Largest relative difference.
        at: Where the largest absolute difference is.
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
        """Sorts the largest change first.

        What can't be compared comes before, then NaN on one side alone, then the absolute
        difference counts.
        """
        compared = self.differing is not None
        most, count = self.max_abs or 0, self.differing or 0
        return compared, -(self.nans or 0), -most, -count, self.equal, self.name

    def row(self) -> list[str]:
        """Cells of a table."""
        dtype = self.dtype_a if self.dtype_a == self.dtype_b else f"{self.dtype_a} → {self.dtype_b}"
        shape = str(list(self.shape_a))
        if self.shape_a != self.shape_b:
            shape = f"{shape} → {list(self.shape_b)}"
        return [
            _shown(self.max_abs),
            _shown(self.max_rel),
            "-" if self.differing is None else str(self.differing),
            "-" if self.nans is None else str(self.nans),
            dtype,
            shape,
            self.name,
        ]


@dataclass(frozen=True, slots=True)
class Difference:
    """What `mfload.diff` found; prints well, and has `as_dict()`.

    Attributes:
        only_a: Names that the first alone has.
        only_b: Names that the second alone has.
        tensors: What both have, the largest change first.
        read_bytes: Bytes read of both.
        seconds: How long it took.
        notes: What else was decided or seen.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[Change, ...]
    read_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[Change, ...]:
        """The tensors of both that are not the same in every bit."""
        return tuple(each for each in self.tensors if not each.equal)

    @property
    def same(self) -> bool:
        """Whether there is no difference at all."""
        return not (self.only_a or self.only_b or self.changed)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "same": self.same,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "tensors": [each._asdict() for each in self.tensors],
            "read_bytes": self.read_bytes,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The totals it prints: names and values."""
        changed = len(self.changed)
        rows = [
            ("compared", "no difference" if self.same else "they differ"),
            ("tensors", f"{len(self.tensors)} in both, {changed} of them changed"),
        ]
        for what, names in (("only in a", self.only_a), ("only in b", self.only_b)):
            if names:
                some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                rows.append((what, f"{len(names)}: {some}"))
        speed = self.read_bytes / self.seconds / 2**30 if self.seconds else 0.0
        rows.append(
            ("read", f"{human(self.read_bytes)} in {self.seconds:.3g} s, {speed:.2f} GiB/s")
        )
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        shown = self.changed[:_SHOWN]
        text = table(self.rows())
        if shown:
            text += "\n\n" + table([HEADS, *(each.row() for each in shown)])
        if len(self.changed) > len(shown):
            text += f"\n… and {len(self.changed) - len(shown)} more"
        return text

    def _repr_html_(self) -> str:
        page = html_table(self.rows())
        if self.changed:
            page += html_table([HEADS, *(each.row() for each in self.changed[:_SHOWN])])
        return page


HEADS = ["max abs", "max rel", "differing", "nan", "dtype", "shape", "name"]


def _shown(number: float | None) -> str:
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"
