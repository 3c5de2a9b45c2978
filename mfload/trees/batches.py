"""Batches: which parts of leaves are made together, so that what waits fits the overhead. Pure.

The same on every process, as all must load the same parts together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.index import Box
from mfload.planning.requests import Share
from mfload.trees.recipe import Recipe, StoredBox, is_plain
from mfload.trees.transforms import Transform, sizes

_STRETCHES = 1 << 14  # Of a leaf; each is a call of a compiled function.


class LeafPart(NamedTuple):
    """A box of a leaf: what it is made of, and the shares of it, of all processes."""

    box: Box
    sources: tuple[StoredBox, ...]
    transform: Transform
    holders: tuple[Share, ...]

    @property
    def plain(self) -> bool:
        """Whether it is a box of a stored tensor, as it lands."""
        return is_plain(self.transform)

    @property
    def alike(self) -> Hashable:
        """The same for parts that one compiled function makes."""
        return self.transform, tuple(source.dtype.name for source in self.sources)


class BatchItem(NamedTuple):
    """Parts of one leaf that are made at once: whole boxes of devices, or a stretch of each."""

    owner: int  # Number of the leaf.
    parts: tuple[LeafPart, ...]
    start: tuple[int, ...] | None = None  # Of the stretch in each device's box; None: all of it.
    last: bool = True  # Of the leaf.


def parts(recipe: Recipe, held: Iterable[Share]) -> list[LeafPart]:
    """The boxes of a leaf, each once, from the shares of all devices."""
    holders: dict[Box, list[Share]] = {}
    for share in held:
        holders.setdefault(share.box, []).append(share)
    return [LeafPart(box, *recipe.part(box), tuple(found)) for box, found in holders.items()]


def batches(
    leaves: Iterable[tuple[int, Recipe, Sequence[LeafPart]]], limit: int
) -> Iterator[list[BatchItem]]:
    """Batches of parts; what waits for the transforms of one stays within `limit` bytes a process.

    A part that can't be cut finely enough makes a batch of its own, beyond the limit.
    """
    batch: list[BatchItem] = []
    held: Counter[int] = Counter()
    for item in _items(leaves, limit):
        more = _cost(item.parts)
        together = held + more
        if batch and max(together.values(), default=0) > limit:
            yield batch
            batch, together = [], more
        batch.append(item)
        held = together
    if batch:
        yield batch


def most(parts: Iterable[LeafPart]) -> int:
    """The most bytes that parts make wait on any process."""
    return max(_cost(parts).values(), default=0)


def _cost(parts: Iterable[LeafPart]) -> Counter[int]:
    """Bytes beside the result that parts take on each process, until they are made.

    What has landed, and as much again for what XLA keeps meanwhile.
    """
    held: Counter[int] = Counter()
    for part in parts:
        landed = sum(each.dtype.size_of(sizes(each.box)) or 0 for each in part.sources)
        for process in {share.process for share in part.holders}:
            held[process] += 2 * landed
    return held


def _items(
    leaves: Iterable[tuple[int, Recipe, Sequence[LeafPart]]], limit: int
) -> Iterator[BatchItem]:
    for owner, recipe, whole in leaves:
        cut = _best_cut(recipe, whole, limit) if most(whole) > limit else None
        if cut is None:
            yield BatchItem(owner, tuple(whole))
            continue
        axis, size = cut
        length = _length(whole[0], axis)
        for at in range(0, length, size):
            start = tuple(at if dim == axis else 0 for dim in range(len(whole[0].box)))
            some = _stretch(recipe, whole, axis, at, size)
            yield BatchItem(owner, tuple(some), start, at + size >= length)


def _best_cut(recipe: Recipe, whole: Sequence[LeafPart], limit: int) -> tuple[int, int] | None:
    """The dim and size of stretches that fit the limit and lie in the longest runs of the files.

    Long runs make for the least over-read. If nothing fits, what needs least; None if nothing can
    be cut.
    """
    found: list[tuple[bool, int, int, int]] = []
    for axis in range(len(whole[0].box)):
        if _length(whole[0], axis) > 1:  # All parts are of one size: JAX shards evenly.
            size, needed = _largest_stretch(recipe, whole, axis, limit)
            (first,) = _stretch(recipe, whole[:1], axis, 0, size)
            run = min(map(_run, first.sources), default=0)
            found.append((needed <= limit, run if needed <= limit else -needed, size, axis))
    *_, size, axis = max(found, default=(False, 0, 0, 0))
    return (axis, size) if found else None


def _largest_stretch(
    recipe: Recipe, whole: Sequence[LeafPart], axis: int, limit: int
) -> tuple[int, int]:
    """The size of the largest stretches along a dim that fit, and what they need."""
    length = _length(whole[0], axis)
    count = max(2, math.ceil(most(whole) / limit)) if limit > 0 else length
    size = max(1, -(-length // count), length // _STRETCHES)
    while True:
        # Where a reshape splits dims, stretches of one size take different boxes.
        needed = 0
        for at in range(0, length, size):
            needed = max(needed, most(_stretch(recipe, whole, axis, at, size)))
            if needed > limit:
                break
        if needed <= limit or size == 1 or length // size >= _STRETCHES:
            return size, needed
        # Of the next, few cross an edge between the dims that a reshape has joined.
        size = 1 << ((size - 1).bit_length() - 1)


def _stretch(
    recipe: Recipe, whole: Sequence[LeafPart], axis: int, at: int, size: int
) -> list[LeafPart]:
    """A stretch of each part along one dim, counted from the part's own start."""
    found: list[LeafPart] = []
    for part in whole:
        first, end = part.box[axis]
        dim = (first + at, min(first + at + size, end))
        box = (*part.box[:axis], dim, *part.box[axis + 1 :])
        found.append(LeafPart(box, *recipe.part(box), part.holders))
    return found


def _length(part: LeafPart, axis: int) -> int:
    start, stop = part.box[axis]
    return stop - start


def _run(source: StoredBox) -> int:
    """Elements of a box that lie in a row in the file."""
    run = 1
    for size, (start, stop) in zip(reversed(source.info.shape), reversed(source.box), strict=True):
        run *= stop - start
        if stop - start < size:
            break
    return run
