"""Pulling: what is read for each part of each goal, and who holds it. Pure.

The same on every process: what all must decide alike (which parts are loaded together) follows
from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mfload.index import Box
from mfload.mapping import Pull, Recipe
from mfload.mapping.programs import Program, Take
from mfload.placement import Need, Share
from mfload.sharding import shares
from mfload.sharding.shares import Wanted

_AS_IT_IS = Take(0)


class Part(NamedTuple):
    """A box of a goal.

    Attributes:
        box: The box.
        pull: What it is made of.
        holders: Who holds it: shares of all processes, with `box` for their box.
    """

    box: Box
    pull: Pull
    holders: tuple[Share, ...]

    @property
    def plain(self) -> bool:
        """Whether it is one box of a stored tensor, as it is."""
        return self.pull.program == _AS_IT_IS

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return any(start >= stop for start, stop in self.box)


def parts(recipe: Recipe, held: Iterable[Share]) -> list[Part]:
    """The boxes of a goal, each once.

    Args:
        recipe: The goal's.
        held: What each device of each process holds of it.
    """
    holders: dict[Box, list[Share]] = {}
    for share in held:
        holders.setdefault(share.box, []).append(share)
    return [Part(box, recipe.pull(box), tuple(found)) for box, found in holders.items()]


def sub_part(recipe: Recipe, part: Part, axis: int, start: int, stop: int) -> Part:
    """A stretch of a part along one dim, counted from the part's own start."""
    first = part.box[axis][0]
    box = (*part.box[:axis], (first + start, first + stop), *part.box[axis + 1 :])
    return Part(box, recipe.pull(box), part.holders)


def landed(part: Part) -> int:
    """Bytes that wait for a part's program on a process that holds it."""
    total = 0
    for info, box in part.pull.sources:
        sizes = (stop - start for start, stop in box)
        total += info.dtype.size_of(sizes) or 0
    return total


class Row(NamedTuple):
    """Which array a need becomes.

    Attributes:
        owner: Number of the thing it is for.
        source: Which of its sources.
    """

    owner: int
    source: int


class Requests(NamedTuple):
    """Needs of all processes, and what those of each become.

    Attributes:
        needs: By process.
        rows: For each need of each process what it is for.
    """

    needs: Mapping[int, list[Need]]
    rows: Mapping[int, list[Row]]


def requests(wanted: Sequence[tuple[int, Part]], *, apart: Iterable[int] = ()) -> Requests:
    """What has to be read for parts.

    Args:
        wanted: Parts with the number of their owner.
        apart: Owners whose devices each get memory of their own.
    """
    own = frozenset(apart)
    needs: dict[int, list[Need]] = {}
    rows: dict[int, list[Row]] = {}
    for owner, part in wanted:
        for number, (info, box) in enumerate(part.pull.sources):
            held = tuple(share._replace(box=box) for share in part.holders)
            one = Wanted(info, info.dtype, False, held, owner in own)
            for process, found in shares.needs([one]).items():
                needs.setdefault(process, []).extend(found)
                rows.setdefault(process, []).extend([Row(owner, number)] * len(found))
    return Requests(needs, rows)


def programs(parts_: Iterable[Part]) -> Iterator[Program]:
    """The programs of parts."""
    return (part.pull.program for part in parts_)
