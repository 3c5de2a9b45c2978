"""Pulling: what is read for each part of each goal, and who holds it. Pure.

The same on every process: what all must decide alike (which parts are loaded together) follows
from here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from mfload.index import Box
from mfload.mesh import shares
from mfload.mesh.shares import Wanted
from mfload.planning.requests import Request, Share
from mfload.trees import Pull, Recipe
from mfload.trees.programs import Take

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
        """Whether it is one box of a stored tensor, as it lands."""
        return self.pull.program == _AS_IT_IS

    @property
    def alike(self) -> Hashable:
        """The same for parts that one compiled function makes: program, and shapes of all."""
        return (
            self.pull.program,
            sizes(self.box),
            *((dtype.name, sizes(box)) for _, box, dtype in self.pull.sources),
        )


def sizes(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box)


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
    for _, box, dtype in part.pull.sources:
        total += dtype.size_of(sizes(box)) or 0
    return total


class Requests(NamedTuple):
    """Needs of all processes, and what those of each become.

    Attributes:
        requests: By process.
        owners: For each need of each process the number of what it is for.
    """

    requests: Mapping[int, list[Request]]
    owners: Mapping[int, list[int]]


def as_it_lands(part: Part, *, apart: bool) -> Wanted:
    """What a plain part takes: the same devices, the box of the stored tensor."""
    (source,) = part.pull.sources
    held = tuple(share._replace(box=source.box) for share in part.holders)
    return Wanted(source.info, source.dtype, False, held, apart)


def sources(parts_: Iterable[Part]) -> Iterator[tuple[int, Wanted]]:
    """What parts are made of, with the number of the part: sources in their order."""
    for number, part in enumerate(parts_):
        for info, box, dtype in part.pull.sources:
            held = tuple(share._replace(box=box) for share in part.holders)
            yield number, Wanted(info, dtype, False, held)


def requests(wanted: Iterable[tuple[int, Wanted]]) -> Requests:
    """What has to be read.

    Args:
        wanted: Tensors and who holds what of them, with the number of what they are for.
    """
    requests: dict[int, list[Request]] = {}
    owners: dict[int, list[int]] = {}
    for owner, one in wanted:
        for process, found in shares.requests([one]).items():
            requests.setdefault(process, []).extend(found)
            owners.setdefault(process, []).extend([owner] * len(found))
    return Requests(requests, owners)
