"""Redistribution: every wanted byte is read by one process and sent to those that want it.

Tensors are cut into slabs, runs of rows that one process reads: as a rule one that wants them. A
slab's parts travel as bytes, in rounds of rows of one size, one row to each process. All of it
follows from the requests of all processes, so each makes the same schedule.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mfload import errors
from mfload.index import Box, TensorInfo
from mfload.mesh.agree import Outcome, ProcessGroup, failure
from mfload.options import OVERHEAD
from mfload.planning.planner import Place
from mfload.planning.requests import Request, boxed
from mfload.report import human

if TYPE_CHECKING:  # Imports JAX.
    from mfload.mesh.jax_processes import JaxLink

# What a byte from another process costs on accelerators, in bytes read: assumed, since their links
# are faster than disks. On CPUs 17 to 23 were measured (docs/design/decisions.md).
_PRICE = 0.2
_WORTH = 1.1  # An exchange must save a tenth of what is read.

_HEADER = struct.Struct("<QQ")  # Round, and bytes of the outcome that follows if the sender failed.
_ALIGNMENT = 64
# Large enough that a round's fixed costs don't count, small enough for the processor's cache.
_WIDEST, _ROUND, _NARROWEST = 2 << 20, 4 << 20, 4096
_HELD = 4  # Times a round's rows: to send, their copy in the framework, those that came, theirs.
# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages.
_EVEN, _LEAST = 32, 8192


class Target(NamedTuple):
    """A box of a tensor that a process wants, for one or several of its requests."""

    rank: int
    request: Request
    box: Box
    numbers: list[int]


class Parcel(NamedTuple):
    """A box of a target that one process reads."""

    reader: int
    target: Target
    box: Box
    at: int  # First byte in the result.
    nbytes: int  # Bytes as delivered.
    wire: int = -1  # First byte in the row that travels, -1 if it stays with its reader.


class Schedule(NamedTuple):
    """What each process reads, and what travels when."""

    ranks: tuple[int, ...]
    width: int  # Bytes from each process to each in a round.
    local: list[Parcel]  # Those that stay with their readers, read before the first round.
    rounds: list[list[Parcel]]
    read: Mapping[int, int]  # Bytes that each process reads.

    @property
    def overhead(self) -> int:
        """Bytes that a process holds for rows that travel."""
        return _HELD * len(self.ranks) * self.width if self.rounds else 0

    def received(self, rank: int) -> int:
        """Bytes that a process gets from others."""
        every = itertools.chain.from_iterable(self.rounds)
        return sum(p.nbytes for p in every if p.target.rank == rank != p.reader)


def choose(
    requests: Mapping[int, Sequence[Request]],
    wished: str,
    platform: str,
    overhead: int | None,
    least: int,
) -> tuple[Schedule | None, str]:
    """Whether processes read for each other: the schedule, or None; and why. Alike on all.

    `wished` is `Options.exchange`, and `overhead` is `Options.max_host_overhead`, of which readers
    need `least` bytes in any case. Raises MemoryLimitError if "once" is asked for and a round
    needs more.
    """
    own = "each process reads its own"
    if wished == "never":
        return None, ""
    if wished == "auto" and platform == "cpu":
        return None, f"{own}: a byte from another process costs as much as reading 20 (measured)"
    if any(_box(request) is None for each in requests.values() for request in each):
        return None, f"{own}: a part has steps"
    why = "exchange='once'"
    if wished == "auto":
        tensors, count = _tensors(requests), len(requests)
        share = sum(_size(each[0].request.info, _hull(each)) for each in tensors) / count
        apart, wanted = Counter(dict.fromkeys(requests, 0)), Counter(dict.fromkeys(requests, 0))
        for each in tensors:
            for rank, mine in _by_rank(each).items():
                apart[rank] += _rows(mine)
                wanted[rank] += sum(_size(one.request.info, one.box) for one in mine)
        came = max(0.0, max(wanted.values()) - share)
        why = (
            f"{human(max(apart.values()))} at most a process, or {human(share)} and {human(came)} "
            f"exchanged, of which a byte costs as much as reading {_PRICE} (assumed)"
        )
        if max(apart.values()) <= _WORTH * (share + _PRICE * came):
            return None, f"{own}: {why}"
    limit = (OVERHEAD if overhead is None else overhead) // 2  # The other half is for readers.
    held = _HELD * len(requests)
    width = min(_WIDEST, _ROUND // len(requests), limit // held)
    width = max(_NARROWEST, 1 << max(0, width.bit_length() - 1))
    if held * width > limit:
        message = "max_host_overhead is too small for an exchange"
        if wished == "auto":
            return None, f"{own}: {message}"
        enough = f"{max(least, 2 * held * _NARROWEST)} bytes or more, or exchange='never'"
        raise errors.MemoryLimitError(message, expected=enough, found=overhead)
    return schedule(requests, width), f"every byte is read by one process: {why}"


def schedule(requests: Mapping[int, Sequence[Request]], width: int) -> Schedule:
    """The schedule for the requests of each process; the same on every process."""
    ranks, tensors = tuple(sorted(requests)), _tensors(requests)
    total = sum(_size(each[0].request.info, _hull(each)) for each in tensors)
    grain = max(_LEAST, total // (_EVEN * len(ranks)))
    read, due, last = dict.fromkeys(ranks, 0), 0, ranks[0]
    local: list[Parcel] = []
    rounds: list[list[Parcel]] = []
    number = dict.fromkeys(ranks, 0)  # The round that each reader fills,
    full: Counter[tuple[int, int]] = Counter()  # and how full its row to each process is.

    def next_round(reader: int) -> None:
        number[reader] += 1
        full.update({(reader, to): -full[reader, to] for to in ranks})

    for each in tensors:
        info = each[0].request.info
        due += _size(info, _hull(each))
        grown = max(-(-target.request.dtype.nbytes // info.dtype.nbytes) for target in each)
        for slab in _slabs(each, min(grain, (width - 2 * _ALIGNMENT) // grown)):
            found = ((target, _within(slab, target.box)) for target in each)
            parts = [(target, box) for target, box in found if box is not None]
            if not parts:
                continue
            nbytes = _size(info, slab)
            taken: Counter[int] = Counter()
            for target, box in parts:
                taken[target.rank] += _size(info, box)
            # One that wants most of it, while all read about as much; then the one that read what
            # lies before; then the one that has read least.
            most = due / len(ranks) + grain - nbytes
            order = {rank: (taken[rank], rank == last, -read[rank], -rank) for rank in ranks}
            ready = [rank for rank in ranks if read[rank] <= most] or ranks
            reader = last = max(ready, key=order.__getitem__)
            read[reader] += nbytes
            parcels = [_parcel(reader, *part) for part in parts]
            if taken.keys() == {reader}:
                local += parcels
                continue
            sent: Counter[int] = Counter()
            for parcel in parcels:
                sent[parcel.target.rank] += _padded(parcel.nbytes)
            del sent[reader]
            if any(_ALIGNMENT + full[reader, to] + n > width for to, n in sent.items()):
                next_round(reader)
            for parcel in parcels:
                to, padded = parcel.target.rank, _padded(parcel.nbytes)
                if to != reader:
                    # Boxes of one process that overlap may be more than a row holds.
                    if _ALIGNMENT + full[reader, to] + padded > width:
                        next_round(reader)
                    parcel = parcel._replace(wire=_ALIGNMENT + full[reader, to])
                    full[reader, to] += padded
                rounds += [[] for _ in range(number[reader] + 1 - len(rounds))]
                rounds[number[reader]].append(parcel)
    return Schedule(ranks, width, local, rounds, read)


def parts(requests: Mapping[int, Sequence[Request]], limit: int) -> list[dict[int, list[int]]]:
    """Numbers of the requests that are loaded together, so that no process gets more than a limit.

    One tensor alone may exceed it.
    """
    made: list[dict[int, list[int]]] = [{rank: [] for rank in requests}]
    used: Counter[int] = Counter()
    for each in _tensors(requests):
        more: Counter[int] = Counter()
        for target in each:
            more[target.rank] += target.request.nbytes * len(target.numbers)
        if any(used[rank] and used[rank] + nbytes > limit for rank, nbytes in more.items()):
            made.append({rank: [] for rank in requests})
            used.clear()
        used.update(more)
        for target in each:
            made[-1][target.rank] += target.numbers
    for rank, every in requests.items():
        made[-1][rank] += [n for n, request in enumerate(every) if not request.nbytes]
    return made


Read = Callable[[Sequence[Request], Sequence[tuple[int, int]], list[Any]], None]
"""Reads requests to given places: (buffer, first byte) of each in a list of buffers."""


class Exchange(NamedTuple):
    """One exchange, as one process runs it; the link is None if nothing travels."""

    schedule: Schedule
    group: ProcessGroup
    link: JaxLink | None
    read: Read
    advance: Callable[[int], None] | None

    def run(self, places: Sequence[Place], memory: list[Any]) -> None:
        """Fills the results of this process.

        A process that fails keeps taking part until it has said so in the header of its rows. Then
        all of them stop after the same round, and their collectives stay in step.
        """
        group, link = self.group, self.link
        failed = _attempt(lambda: self._local(places, memory))
        if link is None:
            if failed is not None:
                raise failed
            return
        rows = link.buffer()
        for number, parcels in enumerate(self.schedule.rounds):
            if failed is None:
                failed = _attempt(lambda: self._read(parcels, places, memory, rows))  # noqa: B023
            outcome = None if failed is None else failure(group.rank, failed)
            text = b"" if outcome is None else json.dumps(outcome).encode()
            for row in rows:
                row[: _HEADER.size + len(text)] = memoryview(_HEADER.pack(number, len(text)) + text)
            came, interrupted = link.swap(rows, lambda: group.check("exchange"))
            for row in came:
                said, length = _HEADER.unpack(row[: _HEADER.size].tobytes())
                if said != number:
                    found = f"round {said}, not {number}"
                    raise errors.ProcessError("the processes are out of step", found=found)
                if length:
                    text = row[_HEADER.size : _HEADER.size + length].tobytes()
                    error = group.stop(Outcome(*json.loads(text)), "exchange")
                    raise failed or error
            failed = interrupted or _attempt(
                lambda: self._take(parcels, places, memory, came)  # noqa: B023
            )
        if failed is not None:
            raise failed

    def _read(
        self, parcels: Sequence[Parcel], places: Sequence[Place], memory: list[Any], rows: Any
    ) -> None:
        """Reads parcels of this process to their places here, or in the rows that travel."""
        requests: list[Request] = []
        given: list[tuple[int, int]] = []
        for parcel in parcels:
            if parcel.reader != self.group.rank:
                continue
            whole = parcel.target.request
            request = whole._replace(selection=boxed(whole.info, parcel.box), devices=())
            spots = self._spots(parcel, places)
            if parcel.wire >= 0:
                row = self.schedule.ranks.index(parcel.target.rank)
                spots = [(len(memory), row * self.schedule.width + parcel.wire)]
            requests += [request] * len(spots)
            given += spots
        if requests:
            self.read(requests, given, memory if rows is None else [*memory, rows.reshape(-1)])

    def _local(self, places: Sequence[Place], memory: list[Any]) -> None:
        self._read(self.schedule.local, places, memory, None)
        self._take(self.schedule.local, places, memory, None)

    def _take(
        self, parcels: Sequence[Parcel], places: Sequence[Place], memory: list[Any], came: Any
    ) -> None:
        """Copies parcels that came to their places: each is one stretch, there and here."""
        nbytes = 0
        for parcel in parcels:
            request = parcel.target.request
            if parcel.target.rank != self.group.rank:
                continue
            nbytes += parcel.nbytes // request.dtype.nbytes * request.info.dtype.nbytes
            if parcel.wire >= 0:
                row = came[self.schedule.ranks.index(parcel.reader)]
                data = row[parcel.wire : parcel.wire + parcel.nbytes]
                for buffer, at in self._spots(parcel, places):
                    memory[buffer][at : at + parcel.nbytes] = data
        if self.advance is not None:
            self.advance(nbytes)

    def _spots(self, parcel: Parcel, places: Sequence[Place]) -> list[tuple[int, int]]:
        if parcel.target.rank != self.group.rank:
            return []
        return [(places[n].buffer, places[n].at + parcel.at) for n in parcel.target.numbers]


def _attempt(act: Callable[[], None]) -> BaseException | None:
    """The error of a step, to be raised once the other processes know of it."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _tensors(requests: Mapping[int, Sequence[Request]]) -> list[list[Target]]:
    """What all processes want of each tensor, in file order; requests of the same part are one."""
    made: dict[str, dict[Any, Target]] = {}
    for rank in sorted(requests):
        for number, request in enumerate(requests[rank]):
            box = _box(request)
            if request.nbytes and box is not None:
                key = rank, request.dtype.name, request.checked, box
                held = made.setdefault(request.info.name, {})
                held.setdefault(key, Target(rank, request, box, [])).numbers.append(number)
    tensors = [list(each.values()) for each in made.values()]
    return sorted(tensors, key=lambda each: each[0].request.info.pieces[0][:2])


def _by_rank(each: Sequence[Target]) -> dict[int, list[Target]]:
    made: dict[int, list[Target]] = {}
    for target in each:
        made.setdefault(target.rank, []).append(target)
    return made


def _slabs(each: Sequence[Target], limit: int) -> Iterator[Box]:
    """Slabs of a tensor in file order, cut where one process wants no more and the next begins.

    A slab is a run of rows of one dim at one place in all dims before it, with all of the dims
    after: so the part of it that a box holds is one stretch of that box.
    """
    info, whole = each[0].request.info, _hull(each)
    pieces = [whole]
    dim = next((n for n, (start, stop) in enumerate(whole) if stop - start > 1), None)
    if dim is not None:
        hulls = (_hull(mine)[dim] for mine in _by_rank(each).values())
        ends = sorted({*itertools.chain(*hulls), *whole[dim]})
        if _size(info, whole) >= _APART * (len(ends) - 1):
            pieces = [(*whole[:dim], cut, *whole[dim + 1 :]) for cut in itertools.pairwise(ends)]
    for piece in pieces:
        yield from _cut(info, piece, limit)


def _cut(info: TensorInfo, box: Box, limit: int) -> Iterator[Box]:
    if _size(info, box) <= limit:
        yield box
        return
    dim = next(n for n, (start, stop) in enumerate(box) if stop - start > 1)
    # Elements that share a byte stay together.
    unit = info.dtype.elements if dim == len(box) - 1 else 1
    row = _size(info, (*box[:dim], (0, unit), *box[dim + 1 :]))
    start, stop = box[dim]
    # All about as long: between short ones a reader would read over those of another.
    count = -(-(stop - start) // (max(1, limit // row) * unit))
    step = -(-(stop - start) // (count * unit)) * unit
    for first in range(start, stop, step):
        part = (*box[:dim], (first, min(stop, first + step)), *box[dim + 1 :])
        if row > limit and dim < len(box) - 1:
            yield from _cut(info, part, limit)
        else:
            yield part


def _parcel(reader: int, target: Target, box: Box) -> Parcel:
    at, dtype = 0, target.request.dtype
    for (start, stop), (first, _) in zip(target.box, box, strict=True):
        at = at * (stop - start) + first - start
    nbytes = dtype.size_of(_shape(box)) or 0
    return Parcel(reader, target, box, at // dtype.elements * dtype.nbytes, nbytes)


def _rows(each: Sequence[Target]) -> int:
    """Bytes of the whole rows in which targets of a process lie: about what it reads by itself."""
    info, box = each[0].request.info, _hull(each)
    dim = next((n for n, (start, stop) in enumerate(box) if stop - start > 1), len(box))
    return _size(info, (*box[: dim + 1], *((0, length) for length in info.shape[dim + 1 :])))


def _box(request: Request) -> Box | None:
    """The part of its tensor that a request wants; None if it has steps."""
    if request.selection is None:
        return tuple((0, length) for length in request.info.shape)
    if any(axis.step != 1 and axis.size > 1 for axis in request.selection):
        return None
    return tuple((axis.start, axis.start + axis.size) for axis in request.selection)


def _within(box: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _hull(each: Sequence[Target]) -> Box:
    """The smallest box that holds all targets."""
    axes = zip(*(target.box for target in each), strict=True)
    return tuple((min(start for start, _ in axis), max(stop for _, stop in axis)) for axis in axes)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _size(info: TensorInfo, box: Box) -> int:
    return info.dtype.size_of(_shape(box)) or 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
