"""Batches: which parts of leaves are made together, so that what waits fits the overhead. Pure.

The same on every process, as all must load the same parts together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.index import Box, TensorInfo
from mfload.mesh.base import DeviceShare, TensorShares
from mfload.planning.memory import grouped
from mfload.planning.slicing import shape_of
from mfload.trees.recipe import Recipe
from mfload.trees.transforms import Transform

_STRETCHES = 1 << 14  # Of a leaf; each is a call of a compiled function.


class LeafPart(NamedTuple):
    """A box of a leaf: what it is made of, and the shares of it, of all processes."""

    recipe: Recipe
    box: Box
    holders: tuple[DeviceShare, ...]
    sources: tuple[tuple[TensorInfo, Box], ...]
    transform: Transform
    nbytes: int  # Of the sources when they have landed.

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return shape_of(self.box)


class BatchItem(NamedTuple):
    """Parts of one leaf that are made at once: whole boxes of devices, or a stretch of each."""

    owner: int  # Number of the leaf.
    parts: Sequence[LeafPart]
    start: tuple[int, ...] | None = None  # Of the stretch in each device's box; None: all of it.
    last: bool = True  # Of the leaf.


def parts(recipe: Recipe, held: Iterable[DeviceShare]) -> list[LeafPart]:
    """The boxes of a leaf, each once, from the shares of all devices."""
    holders: dict[Box, list[DeviceShare]] = {}
    for share in held:
        holders.setdefault(share.box, []).append(share)
    return [_part(recipe, box, tuple(found)) for box, found in holders.items()]


def _part(recipe: Recipe, box: Box, holders: tuple[DeviceShare, ...]) -> LeafPart:
    transform, reads = recipe.transform.part(box)
    sources = tuple((recipe.tensors[number], read) for number, read in reads)
    nbytes = sum(recipe.landed.size_of(shape_of(read)) or 0 for _, read in sources)
    return LeafPart(recipe, box, holders, sources, transform, nbytes)


def sources(parts: Iterable[LeafPart]) -> Iterator[tuple[int, TensorShares]]:
    """What parts are made of, in order, with the number of the part."""
    for number, part in enumerate(parts):
        recipe = part.recipe
        for info, box in part.sources:
            held = tuple([share._replace(box=box) for share in part.holders])
            yield number, TensorShares(info, recipe.landed, recipe.checked, held)


def batches(
    leaves: Iterable[tuple[int, Sequence[LeafPart]]], limit: int
) -> Iterator[list[BatchItem]]:
    """Batches of parts; what waits for the transforms of one stays within `limit` bytes a process.

    A part that can't be cut finely enough makes a batch of its own, beyond the limit.
    """
    items = (item for owner, whole in leaves for item in _items(owner, whole, limit))
    return grouped(items, defaultdict(lambda: limit), lambda item: _cost(item.parts))


def most(parts: Iterable[LeafPart]) -> int:
    """The most bytes that parts make wait on any process."""
    return max(_cost(parts).values(), default=0)


def _cost(parts: Iterable[LeafPart]) -> Counter[int]:
    """Bytes beside the result that parts take on each process, until they are made.

    What has landed, and as much again for what XLA keeps meanwhile.
    """
    held: Counter[int] = Counter()
    for part in parts:
        for process in {share.process for share in part.holders}:
            held[process] += 2 * part.nbytes
    return held


def _items(owner: int, whole: Sequence[LeafPart], limit: int) -> Iterator[BatchItem]:
    """A leaf as a whole; or in stretches, which fit if any do.

    These lie in the longest runs of the files, for the least over-read.
    """
    shape: tuple[int, ...] = ()
    if most(whole) > limit:  # Parts of uneven shards end before the largest does.
        shape = tuple(map(max, zip(*(part.shape for part in whole), strict=True)))
    found: list[tuple[bool, int, int, int]] = []
    for axis, length in enumerate(shape):
        if length > 1:
            size, fit = _largest_stretch(whole, axis, length, limit)
            run = min(map(_run, _stretch(whole[:1], axis, 0, size)))
            found.append((fit, run, size, axis))
    if not found:
        yield BatchItem(owner, whole)
        return
    *_, size, axis = max(found)
    for at in range(0, shape[axis], size):
        start = tuple(at if dim == axis else 0 for dim in range(len(shape)))
        yield BatchItem(owner, _stretch(whole, axis, at, size), start, at + size >= shape[axis])


def _largest_stretch(
    whole: Sequence[LeafPart], axis: int, length: int, limit: int
) -> tuple[int, bool]:
    """The size of the largest stretches along a dim that fit; of the smallest if none do."""
    count = math.ceil(most(whole) / limit) if limit > 0 else length
    size = max(1, -(-length // max(2, count)), length // _STRETCHES)
    # Where a reshape splits dims, stretches of one size take different boxes.
    while any(most(_stretch(whole, axis, at, size)) > limit for at in range(0, length, size)):
        if size == 1 or length // size >= _STRETCHES:
            return size, False
        # Of powers of two few cross an edge between the dims that a reshape has joined.
        size = 1 << ((size - 1).bit_length() - 1)
    return size, True


def _stretch(whole: Sequence[LeafPart], axis: int, at: int, size: int) -> list[LeafPart]:
    """A stretch of each part along one dim, counted from the part's own start, if it has one."""
    found: list[LeafPart] = []
    for part in whole:
        first, end = part.box[axis]
        if first + at >= end:
            continue
        dim = (first + at, min(first + at + size, end))
        box = (*part.box[:axis], dim, *part.box[axis + 1 :])
        found.append(_part(part.recipe, box, part.holders))
    return found


def _run(part: LeafPart) -> int:
    """The least number of elements that a part takes in a row from a file."""
    runs: list[int] = []
    for info, box in part.sources:
        run = 1
        for whole, size in zip(reversed(info.shape), reversed(shape_of(box)), strict=True):
            run *= size
            if size < whole:
                break
        runs.append(run)
    return min(runs)
