"""Slabs: which parts are loaded together, so that what waits stays within the overhead. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.trees import Recipe, Source, pulling
from mfload.trees.pulling import Part

_STRETCHES = 1 << 14  # Of a goal; each is a call of a compiled function.


class Piece(NamedTuple):
    """Parts of one goal that are made at once.

    Attributes:
        owner: Number of the goal.
        parts: The parts: the boxes that devices hold, or a stretch of each of these.
        start: Where in each device's box the stretch begins, None where it is all of the box.
        last: Whether it is the goal's last.
    """

    owner: int
    parts: tuple[Part, ...]
    start: tuple[int, ...] | None = None
    last: bool = True


class Cut(NamedTuple):
    """How the boxes of a goal are cut: along which dim, and in stretches of which size."""

    axis: int
    size: int


def batches(
    goals: Iterable[tuple[int, Recipe, Sequence[Part]]], limit: int
) -> Iterator[list[Piece]]:
    """Pieces in groups; what waits for a group's programs stays within the limit, if it can.

    Args:
        goals: Number, recipe and parts of each, in order.
        limit: Bytes, on any process.
    """
    batch: list[Piece] = []
    held: dict[int, int] = {}
    for piece in _pieces(goals, limit):
        more = cost(piece.parts)
        together = {n: held.get(n, 0) + more.get(n, 0) for n in {*held, *more}}
        if batch and max(together.values(), default=0) > limit:
            yield batch
            batch, together = [], more
        batch.append(piece)
        held = together
    if batch:
        yield batch


def _pieces(goals: Iterable[tuple[int, Recipe, Sequence[Part]]], limit: int) -> Iterator[Piece]:
    for owner, recipe, parts in goals:
        cut = None if most(parts) <= limit else choose(recipe, parts, limit)
        if cut is None:
            yield Piece(owner, tuple(parts))
            continue
        axis, size = cut
        length = _length(parts, axis)
        for at in range(0, length, size):
            stop = min(at + size, length)
            start = tuple(at if dim == axis else 0 for dim in range(len(parts[0].box)))
            some = tuple(pulling.sub_part(recipe, part, axis, at, stop) for part in parts)
            yield Piece(owner, some, start, stop == length)


def choose(recipe: Recipe, parts: Sequence[Part], limit: int) -> Cut | None:
    """The cut whose stretches fit the limit and lie in the longest runs of the files.

    Long runs make for the least over-read. Boxes of different sizes are not cut: no sharding of
    JAX has such.

    Args:
        recipe: The goal's.
        parts: Its parts.
        limit: Bytes that a stretch may make wait, on any process.

    Returns:
        The best there is, also where it does not fit; None where nothing can be cut.
    """
    found: list[tuple[bool, int, int, Cut]] = []
    for axis in range(len(parts[0].box)):
        length = _length(parts, axis)
        if length < 2 or any(part.box[axis][1] - part.box[axis][0] != length for part in parts):
            continue
        cut, needed = _fit(recipe, parts, axis, limit)
        first = pulling.sub_part(recipe, parts[0], axis, 0, cut.size)
        run = min((_run(source) for source in first.pull.sources), default=0)
        # Where nothing fits, what needs least.
        found.append((needed <= limit, run if needed <= limit else -needed, cut.size, cut))
    return max(found)[-1] if found else None


def _fit(recipe: Recipe, parts: Sequence[Part], axis: int, limit: int) -> tuple[Cut, int]:
    """The largest stretches along a dim that fit, and what they need."""
    length = _length(parts, axis)
    count = max(2, math.ceil(most(parts) / limit)) if limit > 0 else length
    size = max(1, -(-length // count), length // _STRETCHES)
    while True:
        # Where a reshape splits dims, stretches of one size take different boxes.
        needed = 0
        for at in range(0, length, size):
            stop = min(at + size, length)
            stretch = [pulling.sub_part(recipe, part, axis, at, stop) for part in parts]
            needed = max(needed, most(stretch))
            if needed > limit:
                break
        if needed <= limit or size == 1 or length // size >= _STRETCHES:
            return Cut(axis, size), needed
        # Of the next, few cross an edge between the dims that a reshape has joined.
        size = 1 << ((size - 1).bit_length() - 1)


def most(parts: Sequence[Part]) -> int:
    """The most bytes that parts make wait on any process."""
    return max(cost(parts).values(), default=0)


def cost(parts: Iterable[Part]) -> dict[int, int]:
    """Bytes beside the result that parts take on each process, until they are made.

    What has landed, and as much again for what XLA keeps meanwhile.
    """
    held: dict[int, int] = {}
    for part in parts:
        nbytes = 2 * pulling.landed(part)
        for process in {share.process for share in part.holders}:
            held[process] = held.get(process, 0) + nbytes
    return held


def _length(parts: Sequence[Part], axis: int) -> int:
    start, stop = parts[0].box[axis]
    return stop - start


def _run(source: Source) -> int:
    """Elements of a box that lie in a row in the file."""
    run = 1
    for size, (start, stop) in zip(reversed(source.info.shape), reversed(source.box), strict=True):
        run *= stop - start
        if stop - start < size:
            break
    return run
