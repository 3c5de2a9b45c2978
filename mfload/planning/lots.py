"""Lots: what a reader takes at one go for a place that hashes, compares or writes it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mfload.dtypes import DType
from mfload.index import Piece, TensorInfo
from mfload.planning.blocks import Block, Costs, Lot
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed, boxes_between

_SLOT, _LEAST = 2 << 20, 4096
"""Bytes that are read at once where they don't stay as they are stored, at most and at least."""


def raw(*blocks: Block, key: Any = None) -> Lot:
    """A lot of bytes as they are stored, for which a place may have a slot of its own."""
    held = 2 * max(block.nbytes for block in blocks)
    return Lot(blocks, sum(block.nbytes for block in blocks), held, key=key)


def landed(
    requests: Sequence[Request], nbytes: int, costs: Costs, *, at: int = 0, key: Any = None
) -> Lot:
    """A lot of parts of tensors that follow each other in memory, from `at` on.

    Its progress counts `nbytes`.
    """
    starts = [*itertools.accumulate((each.nbytes for each in requests), initial=at)]
    size = starts.pop()
    slot = max(_LEAST, min(_SLOT, costs.span))  # The callers' span is a part of the limit.
    costs = costs._replace(block=slot, staged=slot)
    plan = make_plan(requests, alignment=1, costs=costs, given=[(0, start) for start in starts])
    held, tensor = size + plan.staged + plan.decoding, requests[0].info.name
    return Lot(plan.blocks, nbytes, held, size, tensor=tensor, key=key)


def ranges(rows: Sequence[Any], most: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cuts tensors of one shape, or forms of one tensor, into ranges of elements in C order.

    The form whose elements take most has up to `most` bytes of a range. Compressed chunks are
    decoded once if they can be: ranges hold whole rows of these, if such a row has up to `limit`
    bytes, and are as long as that if it has more.
    """
    shape, count = rows[0].shape, math.prod(rows[0].shape)
    bits, block = (max(getattr(each.dtype, name) for each in rows) for name in ("bits", "elements"))
    step, chunk = most * 8 // bits, max(map(_chunk_row, rows))
    if count <= step or (block > 1 and (not shape or shape[-1] % block)):
        step = count
    else:
        step = step if chunk <= step else min(chunk, limit * 8 // bits)
        # Whole rows of the first dim of which some fit.
        lengths = (chunk, *(math.prod(shape[dim:]) for dim in range(1, len(shape))))
        length = next((each for each in lengths if block <= each <= step), 1)
        step = max(block, step // length * length // block * block)
    return ((first, min(count, first + step)) for first in range(0, count, step))


def _chunk_row(row: Any) -> int:
    """Elements of a tensor that lie in compressed chunks side by side; 0 without any."""
    stored = row.pieces[0].stored
    if stored is None or not stored.encodings or not row.shape:
        return 0
    length = stored.box[0][1] - stored.box[0][0] if stored.box else row.shape[0]
    return length * math.prod(row.shape[1:])


def parts(
    info: TensorInfo, dtype: DType, first: int, stop: int, *, checked: bool = False
) -> list[Request]:
    """Requests for a range of the elements of a tensor in C order."""
    boxes = [*boxes_between(first, stop, info.shape)]
    if len(info.pieces) > 1 and info.shape:  # A plan looks at each of them.
        low, high = boxes[0][0][0], boxes[-1][0][1]
        near = tuple(each for each in info.pieces if _meets(each, low, high))
        info = info._replace(pieces=near)
    return [Request(info, dtype, boxed(info, box), checked) for box in boxes]


def _meets(piece: Piece, low: int, high: int) -> bool:
    """Whether a piece may hold some of these rows of the first dim."""
    if piece.stored is None or not piece.stored.box:
        return True
    start, stop = piece.stored.box[0]
    return start < high and low < stop


def joined(
    ranges: Sequence[Piece | Block], gap: int, most: int
) -> Iterator[tuple[Block, list[int]]]:
    """Joins ranges that lie next to each other, in file order, to blocks of up to `most` bytes.

    Each block comes with the numbers of its ranges. Gaps of up to `gap` bytes are read over, and a
    longer range is a block of its own.
    """
    numbers: list[int] = []
    source = start = end = -1
    places = [piece.source << 64 | piece.offset for piece in ranges]
    for number in sorted(range(len(ranges)), key=places.__getitem__):
        piece = ranges[number]
        stop = piece.offset + piece.nbytes
        if piece.source == source and piece.offset - end <= gap and stop - start <= most:
            end = max(end, stop)
        else:
            if numbers:
                yield Block(source, start, end - start, ()), numbers
            numbers, source, start, end = [], piece.source, piece.offset, stop
        numbers.append(number)
    if numbers:
        yield Block(source, start, end - start, ()), numbers


def cut(part: Block | Piece, size: int) -> list[Block]:
    """A range cut at offsets that are multiples of a size."""
    start, end = part.offset, part.offset + part.nbytes
    inner = range((start // size + 1) * size, end, size)
    edges = [start, *inner, end] if part.nbytes else []
    return [Block(part.source, a, b - a, ()) for a, b in itertools.pairwise(edges)]
