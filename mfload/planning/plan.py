"""The plan of a load: buffers, blocks and segments, from requests and costs. Pure.

Two processes that see the same headers make the same plan. Nothing here opens a file or looks
at the machine; what depends on those (engine, page cache) is the route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, overload

import numpy as np

from mfload.planning.blocks import Block, Costs
from mfload.planning.layout import BufferSpec, Layout
from mfload.planning.reads import Reads, Wanted
from mfload.planning.request import HOST, Allocation, Request, WholeTensors, sizes

_NBYTES = attrgetter("nbytes")
_TENSOR = itemgetter(0, 1)  # Of a key of the file's order: source and first byte.


class Place(NamedTuple):
    """Where the result of a request lies."""

    request: Request
    buffer: int
    at: int


class Places(Sequence[Place]):
    """The places of whole tensors, in columns; one is made when it is asked for."""

    def __init__(self, requests: WholeTensors, buffers: Any, at: Any) -> None:
        self.requests, self.buffers, self.at = requests, buffers, at

    @overload
    def __getitem__(self, number: int) -> Place: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Place]: ...
    def __getitem__(self, number: int | slice) -> Place | Sequence[Place]:
        if isinstance(number, slice):
            return list(self)[number]
        return Place(self.requests[number], int(self.buffers[number]), int(self.at[number]))

    def __iter__(self) -> Iterator[Place]:
        return map(Place, self.requests, self.buffers.tolist(), self.at.tolist())

    def __len__(self) -> int:
        return len(self.requests)


class Plan(NamedTuple):
    """What a load reads and where it lands.

    Attributes:
        places: A place for each request, in their order.
        staged: Bytes of the longest block that must pass through a slot, 0 for none.
        decoding: Bytes that a reader holds, at most, to decode a block, 0 for none.
        allocations: Where each request lands, in the order of the requests; may be empty, if all
            land in mfload's memory on the host.
    """

    places: Sequence[Place]
    buffers: tuple[BufferSpec, ...]
    blocks: tuple[Block, ...]
    staged: int
    allocations: tuple[Allocation, ...] = ()
    decoding: int = 0

    @property
    def requests(self) -> Sequence[Request]:
        """What is wanted."""
        places = self.places
        return places.requests if isinstance(places, Places) else [each.request for each in places]

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays asked for."""
        return sum(sizes(self.requests))

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
        if not mapped:
            return 0
        return sum(place.request.nbytes for place in self.places if place.buffer in mapped)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory held for the result, padding counted in."""
        return sum(
            nbytes for nbytes, source, device in self.buffers if source is None and device is None
        )

    @property
    def device_bytes(self) -> Counter[int]:
        """Bytes of memory held for the result by the number of the device, padding counted in."""
        held: Counter[int] = Counter()
        for spec in self.buffers:
            if spec.device is not None:
                held[spec.device] += spec.nbytes
        return held

    @property
    def copied_bytes(self) -> Counter[int | None]:
        """Bytes that the framework copies once they have landed, by device; None is the host."""
        return self._sum(lambda each: each.copied)

    @property
    def lent_bytes(self) -> Counter[int | None]:
        """Bytes that lie in arrays of the framework, by device; None is the host."""
        return self._sum(lambda each: each.owner == "framework")

    def _sum(self, counts: Callable[[Allocation], bool]) -> Counter[int | None]:
        held: Counter[int | None] = Counter()
        if not self.allocations:
            return held
        for place, allocation in zip(self.places, self.allocations, strict=True):
            if counts(allocation):
                held[allocation.device] += place.request.nbytes
        return held

    def tensors_of(self, block: Block) -> list[str]:
        """Names of the tensors that a block holds bytes of."""
        end = block.offset + block.nbytes
        names: dict[str, None] = {}
        for place in self.places:
            for source, offset, nbytes, *_ in place.request.info.pieces:
                if source == block.source and offset < end and offset + nbytes > block.offset:
                    names[place.request.info.name] = None
        return list(names)


def make_plan(
    requests: Sequence[Request],
    *,
    alignment: int | None = None,
    costs: Costs | None = None,
    allocations: Sequence[Allocation] = (),
    mapped: dict[int, int] | None = None,
    given: Sequence[tuple[int, int]] | None = None,
    specs: Sequence[BufferSpec] = (),
) -> Plan:
    """Plans a load; bytes that several requests want of a tensor are read once.

    Args:
        requests: What is wanted; a request may come twice, and then has two places.
        alignment: Bytes on which every tensor must lie; None for its element's size.
        allocations: Where each request lands. Default: in mfload's memory on the host.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes. Only
            what is contiguous, unconverted and aligned in the file is; the rest is read.
        given: Buffer and first byte of each request in buffers of `specs`. Default: laid out by
            `alignment`, `allocations` and `mapped`.
    """
    layout, reads = Layout(alignment, mapped or {}), Reads(costs or Costs())
    if isinstance(requests, WholeTensors) and requests and not allocations and given is None:
        return _in_columns(requests, alignment, layout, reads)
    places: list[Any] = [None] * len(requests)
    offsets: list[int | None] = []
    lengths: list[int] = []
    keys: list[tuple[int, int, int]] = []
    for request in requests:
        info, dtype, selection, *_ = request
        source, start, nbytes, stored = info.pieces[0]
        plain = selection is None and dtype is info.dtype
        plain = plain and stored is None and len(info.pieces) == 1
        offset: int | None = start
        if not plain:
            from mfload.planning import boxes  # Whole tensors do without it.

            offset, nbytes = boxes.contiguous(request), request.nbytes
        lengths.append(nbytes)
        offsets.append(offset)
        keys.append((source, start, start if offset is None else offset))
    once = len(set(map(_TENSOR, keys))) == len(keys)
    together: list[Wanted] = []  # Parts of the current tensor.
    for number in sorted(range(len(requests)), key=keys.__getitem__):
        request, contiguous, nbytes = requests[number], offsets[number], lengths[number]
        if given is None:
            allocation = allocations[number] if allocations else HOST
            buffer, at = layout.place(request, nbytes, contiguous, allocation)
            read = nbytes and layout.specs[buffer].source is None
        else:
            buffer, at = given[number]
            read = nbytes
        places[number] = Place(request, buffer, at)
        if not read:
            continue
        if together and together[0].request.info != request.info:
            reads.parts(together)
            together = []
        if once and contiguous is not None:
            reads.run(keys[number][0], contiguous, nbytes, buffer, at)
        else:
            together.append(Wanted(request, contiguous, buffer, at))
    if together:
        reads.parts(together)
    blocks = reads.end()
    buffers = layout.end() if given is None else tuple(specs)
    return Plan(tuple(places), buffers, blocks, reads.staged, tuple(allocations), reads.decoding)


def _in_columns(
    requests: WholeTensors, alignment: int | None, layout: Layout, reads: Reads
) -> Plan:
    """The plan of whole tensors in mfload's memory on the host."""
    columns = requests.columns
    own = [alignment or max(1, dtype.nbytes // dtype.elements) for dtype, _ in columns.kinds]
    kind, *rest = map(np.asarray, (columns.kind, columns.sources, columns.offsets, columns.nbytes))
    order = np.lexsort((rest[1], rest[0]))
    source, offset, nbytes, aligns = (each[order] for each in (*rest, np.array(own)[kind]))
    buffer, at = layout.place_all(source, offset, nbytes, aligns)
    buffers = layout.end()
    mapped = np.array([spec.source is not None for spec in buffers])
    read = np.flatnonzero((nbytes > 0) & ~mapped[buffer])
    if read.size:
        # Tensors that follow each other, in the file and in memory, are one run.
        runs = [each[read] for each in (source, offset, buffer, at)]
        length = nbytes[read]
        follows = np.ones(read.size - 1, bool)
        for each, step in zip(runs, (0, length[:-1], 0, length[:-1]), strict=True):
            follows &= each[1:] == each[:-1] + step
        first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        totals = np.add.reduceat(length, first)
        (source, offset, buffer_of, start) = (each[first].tolist() for each in runs)
        for run in zip(source, offset, totals.tolist(), buffer_of, start, strict=True):
            reads.run(*run)
    there = np.empty_like(buffer), np.empty_like(at)
    there[0][order], there[1][order] = buffer, at
    return Plan(Places(requests, *there), buffers, reads.end(), reads.staged)
