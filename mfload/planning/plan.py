"""The plan of a load: buffers, blocks and segments, from requests and costs. Pure.

Two processes that see the same headers make the same plan. Nothing here opens a file or looks
at the machine; what depends on those (engine, page cache) is the route.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, overload

import numpy as np

from mfload.planning.blocks import Block, Costs
from mfload.planning.layout import FEW, BufferSpec, Layout, Packed, evenly
from mfload.planning.reads import NoReads, Reads
from mfload.planning.request import HOST, Allocation, Request, WholeTensors, sizes

_NBYTES, _NEAR = map(attrgetter, ("nbytes", "near"))
_PLACE = itemgetter(0, 1)  # Source and first byte.
_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.


class Position(NamedTuple):
    """Where the result of a request lies."""

    request: Request
    buffer: int
    at: int


class Places(Sequence[Position]):
    """The places of whole tensors, in columns; one is made when it is asked for."""

    def __init__(self, requests: WholeTensors, buffers: Any, at: Any) -> None:
        self.requests, self.buffers, self.at = requests, buffers, at

    @overload
    def __getitem__(self, number: int) -> Position: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Position]: ...
    def __getitem__(self, number: int | slice) -> Position | Sequence[Position]:
        if isinstance(number, slice):
            return list(self)[number]
        return Position(self.requests[number], int(self.buffers[number]), int(self.at[number]))

    def __iter__(self) -> Iterator[Position]:
        return map(Position, self.requests, self.buffers.tolist(), self.at.tolist())

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

    places: Sequence[Position]
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
        if isinstance(self.places, Places):  # All are allocated alike.
            alike = self.allocations[0]
            if counts(alike):
                held[alike.device] = self.result_bytes
            return held
        for place, allocation in zip(self.places, self.allocations, strict=True):
            if counts(allocation):
                held[allocation.device] += place.request.nbytes
        return held

    def tensors_of(self, block: Block) -> list[str]:
        """Names of the tensors that a block holds bytes of."""
        end = block.offset + block.span
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
    alone: int | None = None,
    cut: bool = True,
) -> Plan:
    """Plans a load; bytes that several requests want of a tensor are read once.

    Args:
        requests: What is wanted; a request may come twice, and then has two places.
        alignment: Bytes on which every tensor must lie; None for its element's size.
        allocations: Where each request lands. Default: in mfload's memory on the host. Of
            `WholeTensors` all are alike, in buffers that tensors share, and nothing is copied.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes. Only
            what is contiguous, unconverted and aligned in the file is; the rest is read.
        given: Buffer and first byte of each request in buffers of `specs`. Default: laid out by
            `alignment`, `allocations` and `mapped`.
        alone: Bytes from which on a tensor that lands on a device has a buffer of its own, where
            there are more than `layout.FEW`; if there are not, each has one. Default: none has.
        cut: Whether reads are planned. Without them the plan has its buffers alone, and takes no
            longer for large tensors than for small ones.
    """
    alone = 0 if alone and len(requests) <= FEW else alone
    layout = Layout(alignment, mapped or {}, alone)
    reads = (Reads if cut else NoReads)(costs or Costs())
    if isinstance(requests, WholeTensors) and requests and given is None:
        return _in_columns(requests, alignment, layout, reads, tuple(allocations))
    near = set(itertools.compress(itertools.count(), map(_NEAR, allocations)))
    rows = _Rows(requests, allocations, given, layout, reads, near, mapped=bool(mapped))
    tensors: dict[tuple[int, int, str], list[int]] = {}
    last, numbers = None, list[int]()
    for number, request in enumerate(requests):
        info = request[0]
        if info is not last:
            source, start, *_ = info.pieces[0]
            numbers, last = tensors.setdefault((source, start, info.name), []), info
        numbers.append(number)
    for tensor in sorted(tensors, key=_PLACE):
        rows.add(tensor[0], tensor[1], tensors[tensor])
    blocks = reads.end()
    buffers = layout.end() if given is None else tuple(specs)
    places = tuple(rows.places)
    return Plan(places, buffers, blocks, reads.staged, tuple(allocations), reads.decoding)


class _Rows:
    """Places and reads of requests that are looked at one by one, tensor by tensor."""

    def __init__(
        self,
        requests: Sequence[Request],
        allocations: Sequence[Allocation],
        given: Sequence[tuple[int, int]] | None,
        layout: Layout,
        reads: Reads,
        near: set[int],
        *,
        mapped: bool,
    ) -> None:
        self._requests, self._allocations, self._given = requests, allocations, given
        self._layout, self._reads, self._near, self._mapped = layout, reads, near, mapped
        self.places: list[Any] = [None] * len(requests)
        self._kinds: dict[Any, _PartKind] = {}
        # Where all results land, if they do so in one way.
        self._alike = HOST
        if allocations:
            self._alike = allocations[0] if len(set(allocations)) == 1 else None

    def add(self, source: int, start: int, numbers: Sequence[int]) -> None:
        """Takes what is wanted of the tensor that begins there, by the numbers of the requests."""
        wanted = list(map(self._requests.__getitem__, numbers))
        info, dtype, selection, *_ = wanted[0]
        _, _, nbytes, stored = info.pieces[0]
        plain = selection is None and dtype is info.dtype
        plain = plain and stored is None and len(info.pieces) == len(wanted) == 1
        if plain:
            number, request = numbers[0], wanted[0]
            if self._given is not None:
                buffer, at = self._given[number]
            else:
                where = self._allocations[number] if self._allocations else HOST
                buffer, at = self._layout.place(request, nbytes, start, where)
            self.places[number] = _new(Position, (request, buffer, at))
            if nbytes and number not in self._near and self._is_read(buffer):
                self._reads.run(source, start, nbytes, buffer, at)
            return
        kind = _kind(wanted, self._layout, self._kinds)
        numbers = [numbers[n] for n in kind.order]
        wanted = [self._requests[number] for number in numbers]
        offsets = [None if ahead is None else start + ahead for ahead in kind.ahead]
        spots, starts = list[tuple[int, int]](), None
        if self._given is None and kind.packed is not None and self._alike is not None:
            spots = self._layout.place_packed(kind.packed, source, start, self._alike)
            starts = kind.packed.starts if spots else None
        spots = self._place(wanted, numbers, kind.lengths, offsets, spots)
        number = kind.number
        if self._mapped or self._near or 0 in kind.lengths:
            # Maps and devices bring some of them, and of others there is nothing to read.
            read = [
                n
                for n, (buffer, _) in enumerate(spots)
                if kind.lengths[n] and self._is_read(buffer) and numbers[n] not in self._near
            ]
            wanted, spots = [wanted[n] for n in read], [spots[n] for n in read]
            offsets, number = [offsets[n] for n in read], None
        if wanted:
            self._reads.parts(wanted, offsets, spots, number, starts)

    def _place(
        self,
        wanted: Sequence[Request],
        numbers: Sequence[int],
        lengths: Sequence[int],
        offsets: Sequence[int | None],
        spots: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[int, int]]:
        """Where results go: buffer and first byte. Default: laid out one by one."""
        if self._given is not None:
            spots = [self._given[number] for number in numbers]
        elif not spots:
            each = zip(numbers, wanted, lengths, offsets, strict=True)
            where = self._allocations
            spots = [
                self._layout.place(request, nbytes, offset, where[number] if where else HOST)
                for number, request, nbytes, offset in each
            ]
        for number, request, (buffer, at) in zip(numbers, wanted, spots, strict=True):
            self.places[number] = _new(Position, (request, buffer, at))
        return list(spots)

    def _is_read(self, buffer: int) -> bool:
        return self._given is not None or self._layout.specs[buffer].source is None


class _PartKind(NamedTuple):
    """What the parts of a tensor have in common with those of tensors that are cut alike.

    Attributes:
        number: Tells it from other kinds; None if nothing is kept of its reads.
        order: Positions of the parts in the order of the file.
        ahead: Bytes from the tensor's first to a part that lies there as it is wanted, else None.
        lengths: Bytes of each result.
        packed: Where the results lie behind the first, if they are placed together.
    """

    number: int | None
    order: Sequence[int]
    ahead: Sequence[int | None]
    lengths: Sequence[int]
    packed: Packed | None


def _kind(wanted: Sequence[Request], layout: Layout, known: dict[Any, _PartKind]) -> _PartKind:
    """The kind of a tensor's parts; layers of a model are alike, and share it."""
    from mfload.planning import extents  # Whole tensors do without it.

    info = wanted[0].info
    # Selections live as long as the requests, and tensors that are alike share them.
    cut = [(id(selected), dtype.name, checked) for _, dtype, selected, checked, _ in wanted]
    key = info.dtype.name, info.shape, info.simple, *cut
    if key not in known:
        start, count = info.pieces[0].offset, len(wanted)
        found = [extents.contiguous(request) for request in wanted]
        keys = [start if at is None else at for at in found]
        order = sorted(range(count), key=keys.__getitem__)
        ahead = [None if (at := found[n]) is None else at - start for n in order]
        lengths = [wanted[n].nbytes for n in order]
        # An error about a value names the tensor, so the copies of these are its own.
        number = None if any(request.checked for request in wanted) else len(known)
        same = len({request.dtype for request in wanted}) == 1
        packed = layout.packed(wanted[0].dtype, lengths) if same else None
        known[key] = _PartKind(number, order, ahead, lengths, packed)
    return known[key]


def _in_columns(
    requests: WholeTensors,
    alignment: int | None,
    layout: Layout,
    reads: Reads,
    allocations: tuple[Allocation, ...],
) -> Plan:
    """The plan of whole tensors that are allocated alike."""
    columns = requests.columns
    own = [alignment or max(1, dtype.nbytes // dtype.elements) for dtype, _ in columns.kinds]
    kind, *rest = map(np.asarray, (columns.kind, columns.sources, columns.offsets, columns.nbytes))
    order = np.lexsort((rest[1], rest[0]))
    source, offset, nbytes, aligns = (each[order] for each in (*rest, np.array(own)[kind]))
    on_host = not allocations or allocations[0].device is None
    if not on_host:
        buffer, at = layout.place_there(nbytes, allocations[0].device or 0)
    else:
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
        source, offset, held, start = (each[first] for each in runs)
        _read(reads, source, offset, np.add.reduceat(length, first), held, start, on_host)
    there = np.empty_like(buffer), np.empty_like(at)
    there[0][order], there[1][order] = buffer, at
    return Plan(Places(requests, *there), buffers, reads.end(), reads.staged, allocations)


def _read(
    reads: Reads, source: Any, offset: Any, nbytes: Any, buffer: Any, at: Any, on_host: bool
) -> None:
    """Has runs read, in columns."""
    alike = np.logical_and.reduce([np.diff(each) == 0 for each in (source, nbytes, buffer)])
    step, pace = np.diff(offset), np.diff(at)
    ends = evenly(alike, step, pace) if on_host else range(len(offset) + 1)
    columns = [each.tolist() for each in (source, offset, nbytes, buffer, at)]
    for low, high in itertools.pairwise(ends):
        run = [column[low] for column in columns]
        if high - low == 1:
            reads.run(*run)
        else:
            reads.runs(*run, count=high - low, step=int(step[low]), pace=int(pace[low]))
