"""Gathering: needs with places become reads; needs of one tensor share them. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfload.index import TensorInfo
from mfload.planning import ranges, scatter
from mfload.planning.blocks import Block, Costs, Segment
from mfload.planning.reads import Joiner, blocks
from mfload.planning.requests import Request


class Wanted(NamedTuple):
    """A need and where its result goes.

    Attributes:
        request: The need.
        nbytes: Bytes of its result.
        contiguous: Where it lies in the file as it is wanted, None where it does not.
        buffer: Number of the buffer.
        at: First byte in the buffer.
    """

    request: Request
    nbytes: int
    contiguous: int | None
    buffer: int
    at: int


class Gathering:
    """Takes needs in file order, and makes blocks of them.

    Args:
        costs: What the sources declare.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._joiner = Joiner(costs)
        self._held: list[Wanted] = []
        self._known: dict[Any, list[scatter.Cell]] = {}

    def add(self, wanted: Wanted) -> None:
        """Takes a need of a tensor that others may want as well; they follow each other."""
        held = self._held
        if held and not _same(held[0].request.info, wanted.request.info):
            self._flush()
        self._held.append(wanted)

    def alone(
        self, request: Request, nbytes: int, contiguous: int | None, buffer: int, at: int
    ) -> None:
        """Takes a need that shares no byte with another."""
        if contiguous is not None:
            self._joiner.add(request.info.pieces[0].source, contiguous, nbytes, buffer, at)
        elif request.dtype is request.info.dtype and scatter.is_box(request):
            self._together([Wanted(request, nbytes, contiguous, buffer, at)])
        else:
            for source, segment in ranges.segments(request, buffer, at, self._costs):
                self._joiner.add(source, *segment)

    def end(self) -> tuple[Block, ...]:
        """The blocks."""
        self._flush()
        return tuple(blocks(self._joiner.end(), self._costs))

    def _flush(self) -> None:
        held, self._held = self._held, []
        if len(held) == 1:
            self.alone(*held[0])
            return
        boxes: list[Wanted] = []
        for wanted in held:
            if scatter.is_box(wanted.request):
                boxes.append(wanted)
            else:
                self.alone(*wanted)
        if boxes:
            self._together(boxes)

    def _together(self, boxes: list[Wanted]) -> None:
        piece = boxes[0].request.info.pieces[0]
        source, base = piece.source, piece.offset
        for offset, nbytes, wanted, parts in self._cells([box.request for box in boxes]):
            if len(parts) == 1 and parts[0].copy is None:
                box = boxes[parts[0].box]
                at = box.at + parts[0].at
                self._joiner.add(source, base + offset, nbytes, box.buffer, at)
                continue
            segments = [
                Segment(base + first, length, boxes[n].buffer, boxes[n].at + at, copy)
                for n, first, length, at, copy in parts
            ]
            self._joiner.share(source, base + offset, nbytes, wanted, segments)

    def _cells(self, requests: list[Request]) -> list[scatter.Cell]:
        """Cells of a tensor; layers of a model are alike, so they are kept."""
        info = requests[0].info
        plain = all(request.dtype is info.dtype for request in requests)
        if not plain:
            # An error about a value names the tensor, so these are its own.
            return scatter.cells(requests, self._costs)
        key = info.dtype.name, info.shape, tuple(request.selection for request in requests)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = scatter.cells(requests, self._costs)
        return known


def _same(one: TensorInfo, other: TensorInfo) -> bool:
    if one is other:
        return True
    alike = one.pieces[0] == other.pieces[0] and one.shape == other.shape
    return alike and one.dtype is other.dtype
