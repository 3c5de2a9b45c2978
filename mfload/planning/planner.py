"""The plan: from needs and declared costs to buffers, blocks and segments. Pure.

Two processes that see the same headers make the same plan. Nothing here opens a file or looks
at the machine; what depends on those (engine, page cache) is the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from mfload.planning import boxes
from mfload.planning.blocks import Block, Costs
from mfload.planning.layout import Arrangement, BufferSpec
from mfload.planning.reads import Gathering, Wanted
from mfload.planning.requests import HOST, Allocation, Request

MESH_GAP = 64 << 10
"""The `Costs.merge_gap` of loads onto a mesh. A row's part that is read by a call of its own costs
as much as reading some 100 KiB over (2 cores, page cache), and columns are thousands of rows; a
disk or a network that is slower than that is why the gap is shorter."""

_NBYTES = attrgetter("nbytes")
_TENSOR = itemgetter(0, 1)  # Of a key of the file's order: source and first byte.


class Place(NamedTuple):
    """Where a need's result lies."""

    request: Request
    buffer: int
    at: int


class Plan(NamedTuple):
    """What a load reads and where it lands.

    Attributes:
        places: A place for each need, in the order of the needs.
        staged: Bytes of the longest block that must pass through a slot, 0 for none.
        allocations: Where each request lands, in the order of the requests.
    """

    places: tuple[Place, ...]
    buffers: tuple[BufferSpec, ...]
    blocks: tuple[Block, ...]
    staged: int
    allocations: tuple[Allocation, ...] = ()

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays asked for."""
        return sum(place.request.nbytes for place in self.places)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the sources."""
        return sum(map(_NBYTES, self.blocks))

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
        total = 0
        for nbytes, source, device in self.buffers:
            if source is None and device is None:
                total += nbytes
        return total

    @property
    def device_bytes(self) -> dict[int, int]:
        """Bytes of memory held for the result by the number of the device, padding counted in."""
        held: dict[int, int] = {}
        for spec in self.buffers:
            if spec.device is not None:
                held[spec.device] = held.get(spec.device, 0) + spec.nbytes
        return held

    @property
    def copied_bytes(self) -> dict[int | None, int]:
        """Bytes that the framework copies once they have landed, by where they landed."""
        held: dict[int | None, int] = {}
        for place, (device, _, copied) in zip(self.places, self.allocations, strict=False):
            if copied:
                held[device] = held.get(device, 0) + place.request.nbytes
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
    allocations: Sequence[Allocation] = (),
    mapped: dict[int, int] | None = None,
    given: Sequence[tuple[int, int]] | None = None,
    specs: Sequence[BufferSpec] = (),
) -> Plan:
    """Plans a load.

    Needs of one tensor are planned together: a byte that several of them want is read once.

    Args:
        requests: What is wanted; a need may come twice, and then has two places.
        alignment: Bytes on which every tensor must lie; None for its element's size.
        allocations: Where each request lands. Default: in mfload's memory on the host.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes. Only
            what is contiguous, unconverted and aligned in the file is; the rest is read.
        given: Buffer and first byte for each need, for callers who know where all goes; then
            `alignment`, `allocations` and `mapped` say nothing.
    """
    costs = costs or Costs()
    layout = Arrangement(alignment, mapped or {})
    gathering = Gathering(costs)
    places: list[Any] = [None] * len(requests)
    offsets: list[int | None] = []
    keys: list[tuple[int, int, int]] = []
    for request in requests:
        info, dtype, selection, *_ = request
        source, start, *_ = info.pieces[0]
        plain = selection is None and dtype is info.dtype
        offset = start if plain else boxes.contiguous(request)
        offsets.append(offset)
        keys.append((source, start, start if offset is None else offset))
    once = len(set(map(_TENSOR, keys))) == len(keys)
    for number in sorted(range(len(requests)), key=keys.__getitem__):
        request, contiguous = requests[number], offsets[number]
        nbytes = request.nbytes
        if given is None:
            allocation = allocations[number] if allocations else HOST
            buffer, at = layout.place(request, nbytes, contiguous, allocation)
            read = nbytes and layout.specs[buffer].source is None
        else:
            buffer, at = given[number]
            read = nbytes
        places[number] = Place(request, buffer, at)
        if read and once and contiguous is not None:
            gathering.join(keys[number][0], contiguous, nbytes, buffer, at)
        elif read and once:
            gathering.alone(request, nbytes, contiguous, buffer, at)
        elif read:
            gathering.add(Wanted(request, nbytes, contiguous, buffer, at))
    reads = gathering.end()
    return Plan(
        tuple(places),
        layout.end() if given is None else tuple(specs),
        reads,
        max((b.nbytes for b in reads if b.staged), default=0) if gathering.staged else 0,
        tuple(allocations),
    )
