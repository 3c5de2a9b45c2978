"""The plan: from needs and declared costs to buffers, blocks and segments. Pure.

Two processes that see the same headers make the same plan. Nothing here opens a file or looks
at the machine; what depends on those (engine, page cache) is the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfload.planning import ranges
from mfload.planning.blocks import Block, Costs
from mfload.planning.gathering import Gathering, Wanted
from mfload.planning.layout import Arrangement, BufferSpec
from mfload.planning.requests import Request

MESH_GAP = 64 << 10
"""The `Costs.merge_gap` of loads onto a mesh. A row's part that is read by a call of its own costs
as much as reading some 100 KiB over (2 cores, page cache), and columns are thousands of rows; a
disk or a network that is slower than that is why the gap is shorter."""


class Place(NamedTuple):
    """Where a need's result lies.

    Attributes:
        request: What was asked for.
        buffer: Number of the buffer.
        at: First byte in the buffer.
    """

    request: Request
    buffer: int
    at: int


class Plan(NamedTuple):
    """What a load reads and where it lands.

    Attributes:
        places: A place for each need, in the order of the needs.
        buffers: The buffers to be had.
        blocks: The reads, in file order.
        staged: Bytes of the longest block that must pass through a slot, 0 for none.
    """

    places: tuple[Place, ...]
    buffers: tuple[BufferSpec, ...]
    blocks: tuple[Block, ...]
    staged: int

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays asked for."""
        return sum(place.request.nbytes for place in self.places)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the sources."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def wanted_bytes(self) -> int:
        """Bytes read that were asked for, each counted once."""
        return sum(block.wanted for block in self.blocks)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the result that lie in maps of the files."""
        mapped = {n for n, spec in enumerate(self.buffers) if spec.source is not None}
        return sum(place.request.nbytes for place in self.places if place.buffer in mapped)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory held for the result, padding counted in."""
        memory = (spec for spec in self.buffers if spec.source is None and spec.device is None)
        return sum(spec.nbytes for spec in memory)

    @property
    def device_bytes(self) -> dict[int, int]:
        """Bytes of memory held for the result by the number of the device, padding counted in."""
        held: dict[int, int] = {}
        for spec in self.buffers:
            if spec.device is not None:
                held[spec.device] = held.get(spec.device, 0) + spec.nbytes
        return held

    def tensors_of(self, block: Block) -> list[str]:
        """Names of the tensors that a block holds bytes of."""
        end = block.offset + block.nbytes
        names = (
            place.request.info.name
            for place in self.places
            for piece in place.request.info.pieces
            if piece.source == block.source
            and piece.offset < end
            and piece.offset + piece.nbytes > block.offset
        )
        return list(dict.fromkeys(names))


def make(
    requests: Sequence[Request],
    *,
    alignment: int | None = None,
    costs: Costs | None = None,
    separate: frozenset[int] = frozenset(),
    mapped: dict[int, int] | None = None,
    devices: Sequence[int | None] | None = None,
    passing: frozenset[int] = frozenset(),
    given: Sequence[tuple[int, int]] | None = None,
    specs: Sequence[BufferSpec] = (),
) -> Plan:
    """Plans a load.

    Needs of one tensor are planned together: a byte that several of them want is read once.

    Args:
        requests: What is wanted; a need may come twice, and then has two places.
        alignment: Bytes on which every tensor must lie; None for its element's size.
        costs: What the sources declare.
        separate: Positions of the needs that get a buffer each, beginning with the tensor: for
            memory that is not ours.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes. Only
            what is contiguous, unconverted and aligned in the file is; the rest is read.
        devices: Number of the device in whose memory each need lands, None for the host's; None
            where all land there.
        passing: Positions of the needs that are copied out of their buffers, which go before those
            of the others.
        given: Buffer and first byte for each need, for callers who know where all goes; then
            `alignment`, `separate` and `mapped` say nothing.
        specs: The buffers that `given` names.

    Returns:
        The plan.
    """
    costs = costs or Costs()
    layout = Arrangement(alignment, mapped or {})
    gathering = Gathering(costs)
    places: list[Place | None] = [None] * len(requests)
    offsets = [ranges.contiguous(request) for request in requests]
    keys = [_file_order(request, offset) for request, offset in zip(requests, offsets, strict=True)]
    once = len({key[:2] for key in keys}) == len(keys)
    for number in sorted(range(len(requests)), key=keys.__getitem__):
        request, contiguous = requests[number], offsets[number]
        nbytes = request.nbytes
        if given is None:
            buffer, at = layout.place(
                request,
                nbytes,
                contiguous,
                alone=number in separate,
                device=None if devices is None else devices[number],
                passing=number in passing,
            )
            read = nbytes and not layout.is_map(buffer)
        else:
            buffer, at = given[number]
            read = nbytes
        places[number] = Place(request, buffer, at)
        if read and once:
            gathering.alone(request, nbytes, contiguous, buffer, at)
        elif read:
            gathering.add(Wanted(request, nbytes, contiguous, buffer, at))
    reads = gathering.end()
    return Plan(
        tuple(place for place in places if place is not None),
        layout.end() if given is None else tuple(specs),
        reads,
        max((block.nbytes for block in reads if block.staged), default=0),
    )


def _file_order(request: Request, contiguous: int | None) -> tuple[int, int, int]:
    piece = request.info.pieces[0]
    return piece.source, piece.offset, piece.offset if contiguous is None else contiguous
