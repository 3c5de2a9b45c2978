"""Redistribution: every wanted byte is read by one process and sent to those that want it.

Tensors are cut into slabs, runs of rows that one process reads: as a rule one that wants them. The
parts of a slab travel as bytes, in rounds of rows of one size, one row from each process to each.
All of it follows from the requests of all processes, so each makes the same schedule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mfload import errors
from mfload.index import Box
from mfload.loading import session
from mfload.mesh import base
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.request import Request
from mfload.report import human

# What a byte from another process costs on accelerators, in bytes read: assumed, since their links
# are faster than disks. On CPUs 17 to 23 were measured (docs/design/decisions.md).
_PRICE = 0.2
_WORTH = 1.1  # An exchange must save a tenth of what is read.
_SMALL = "max_host_overhead is too small for an exchange"
ALIGNMENT = 64  # Of each parcel in its row; the first so many bytes are for a header.
# Bytes of a row and of a round: large enough that a round's fixed costs don't count, small enough
# for the processor's cache.
_WIDEST, _ROUND, _NARROWEST = 2 << 20, 4 << 20, 4096
_HELD = 4  # Times a round's rows: to send, their copy in the framework, those that came, theirs.
# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages.
_EVEN, _LEAST = 32, 8192

Requests = Mapping[int, Sequence[Request]]
"""The requests of each process, by its number."""


class Target(NamedTuple):
    """A box of a tensor that a process wants, for one or several of its requests."""

    rank: int
    request: Request
    box: Box
    numbers: list[int]


class Parcel(NamedTuple):
    """A box of a target that one process reads: one stretch of the target's bytes."""

    reader: int
    target: Target
    box: Box
    at: int  # First byte in the result.
    nbytes: int  # Bytes as delivered.
    wire: int  # First byte in the row that travels, 0 if it stays with its reader.


class Schedule(NamedTuple):
    """What each process reads, and what travels when."""

    ranks: tuple[int, ...]
    width: int  # Bytes from each process to each in a round.
    rounds: list[list[Parcel]]  # What stays with its reader is in the first.
    read: Mapping[int, int]  # Bytes that each process reads.

    @property
    def travels(self) -> bool:
        """Whether a process gets anything from another."""
        return any(parcel.wire for parcels in self.rounds for parcel in parcels)

    @property
    def overhead(self) -> int:
        """Bytes that a process holds for rows that travel."""
        return _HELD * len(self.ranks) * self.width if self.travels else 0

    def received(self, rank: int) -> int:
        """Bytes that a process gets from others."""
        every = itertools.chain.from_iterable(self.rounds)
        return sum(p.nbytes for p in every if p.target.rank == rank != p.reader)


def choose(requests: Requests, options: LoadOptions, platform: str) -> tuple[int | None, str]:
    """Bytes of a row if processes read for each other, else None; and why. Alike on all.

    Raises MemoryLimitError if that is asked for and a round does not fit in the overhead.
    """
    own, asked = "each process reads its own", options.exchange == "once"
    if asked and options.engine == "mmap":
        message = "engine='mmap' reads nothing that could be exchanged"
        raise errors.UsageError(message, expected="another engine, or exchange='never'")
    if options.exchange == "never" or options.engine == "mmap":
        return None, ""
    if platform == "cpu" and not asked:
        return None, f"{own}: a byte from another process costs as much as reading 20 (measured)"
    why = "exchange='once'"
    if not asked:
        tensors, apart = _tensors(requests), Counter[int]()
        share = sum(map(_stored, tensors)) / len(requests)
        for targets in tensors:
            for rank in {target.rank for target in targets}:
                apart[rank] += _bytes_of_rows([each for each in targets if each.rank == rank])
        most = max(apart.values(), default=0)
        came = max(0.0, max(map(base.stored_bytes, requests.values())) - share)
        why = (
            f"{human(most)} at most a process, or {human(share)} and {human(came)} exchanged, of "
            f"which a byte costs as much as reading {_PRICE} (assumed)"
        )
        if most <= _WORTH * (share + _PRICE * came):
            return None, f"{own}: {why}"
    limit = (options.max_host_overhead if options.max_host_overhead is not None else OVERHEAD) // 2
    held = _HELD * len(requests)  # The other half is for readers.
    width = min(_WIDEST, _ROUND // len(requests), limit // held)
    width = max(_NARROWEST, 1 << max(0, width.bit_length() - 1))
    if held * width > limit:
        if not asked:
            return None, f"{own}: {_SMALL}"
        enough = max(session.least_overhead(options), 2 * held * _NARROWEST)
        expected = f"{enough} bytes or more, or exchange='never'"
        raise errors.MemoryLimitError(_SMALL, expected=expected, found=options.max_host_overhead)
    return width, f"every byte is read by one process: {why}"


def schedule(requests: Requests, width: int) -> Schedule:
    """The schedule for the requests of each process; the same on every process."""
    ranks, tensors = tuple(sorted(requests)), _tensors(requests)
    grain = max(_LEAST, sum(map(_stored, tensors)) // (_EVEN * len(ranks)))
    room = width - ALIGNMENT
    read, due, last = dict.fromkeys(ranks, 0), 0, ranks[0]
    rounds: list[list[Parcel]] = [[]]
    current = dict.fromkeys(ranks, 0)  # The round that each reader fills,
    full = {rank: Counter[int]() for rank in ranks}  # and how full its row to each process is.
    for targets in tensors:
        due += _stored(targets)
        for nbytes, parts in _slabs(targets, grain, room):
            wanted = _wanted(parts)
            # One that wants most of it, while all read about as much; then the one that read what
            # lies before; then the one that has read least.
            ready = [rank for rank in ranks if read[rank] + nbytes <= due / len(ranks) + grain]
            reader = max(ready or ranks, key=lambda r: (wanted[r], r == last, -read[r]))
            read[reader] += nbytes
            last = reader
            row = full[reader]
            if any(row[to] + n > room for to, n in wanted.items() if to != reader):
                current[reader] += 1
                row.clear()
            rounds += [[] for _ in range(current[reader] + 1 - len(rounds))]
            number = 0 if wanted.keys() == {reader} else current[reader]
            for target, box in parts:
                wire, nbytes = 0, target.request.dtype.size_of(_shape(box)) or 0
                if target.rank != reader:
                    wire = ALIGNMENT + row[target.rank]
                    row[target.rank] += _padded(nbytes)
                at = _first_byte(target, box)
                rounds[number].append(Parcel(reader, target, box, at, nbytes, wire))
    return Schedule(ranks, width, rounds, read)


def batches(requests: Requests, limit: int) -> list[dict[int, list[int]]]:
    """Numbers of the requests that are loaded together, so that no process gets more than a limit.

    One tensor alone may exceed it.
    """
    made: list[dict[int, list[int]]] = [{rank: [] for rank in requests}]
    used = Counter[int]()
    for targets in _tensors(requests):
        more = Counter[int]()
        for target in targets:
            more[target.rank] += target.request.nbytes * len(target.numbers)
        if any(used[rank] and used[rank] + nbytes > limit for rank, nbytes in more.items()):
            made.append({rank: [] for rank in requests})
            used.clear()
        used.update(more)
        for target in targets:
            made[-1][target.rank] += target.numbers
    for rank, every in requests.items():
        made[-1][rank] += [n for n, request in enumerate(every) if not request.nbytes]
    return made


def _tensors(requests: Requests) -> list[list[Target]]:
    """What all processes want of each tensor, in file order; requests of the same part are one."""
    made: dict[str, dict[object, Target]] = {}
    for rank in sorted(requests):
        for number, request in enumerate(requests[rank]):
            if request.nbytes:
                box, held = _box(request), made.setdefault(request.info.name, {})
                key = rank, request.dtype.name, request.checked, box
                held.setdefault(key, Target(rank, request, box, [])).numbers.append(number)
    tensors = [list(each.values()) for each in made.values()]
    return sorted(tensors, key=lambda each: each[0].request.info.pieces[0][:2])


def _slabs(
    targets: Sequence[Target], grain: int, room: int
) -> Iterator[tuple[int, list[tuple[Target, Box]]]]:
    """Cuts a tensor in file order: bytes of each slab, and what each target wants of it.

    A slab has at most `grain` bytes, of which a process wants at most `room`. It is a run of rows
    of one dim at one place in all dims before it, with all of the dims after: so the part of it
    that a box holds is one stretch of that box.
    """
    info = targets[0].request.info
    whole = tuple((0, length) for length in info.shape)
    waiting = [(whole, [(target, target.box) for target in targets])]
    while waiting:
        slab, around = waiting.pop()
        found = ((target, _within(slab, box)) for target, box in around)
        parts = [(target, box) for target, box in found if box is not None]
        if not parts:
            continue
        nbytes, wanted = info.dtype.size_of(_shape(slab)) or 0, _wanted(parts)
        most = max(wanted.values())
        # Elements that share a byte stay together.
        units = [1] * (len(slab) - 1) + [info.dtype.elements]
        dim = next((n for n, (a, b) in enumerate(slab) if b - a > units[n]), None)
        pieces: list[Box] = []
        if dim is not None:
            (start, stop), unit = slab[dim], units[dim]
            ends = sorted({start, stop, *(end for _, box in parts for end in box[dim])})
            count = max(-(-nbytes // grain), -(-most // room))
            step = max(1, (stop - start) // (count * unit)) * unit
            cuts = [*range(start, stop, step), stop]
            if len(wanted) > 1 and 2 < len(ends) <= nbytes // _APART + 1:
                cuts = ends
            if len(cuts) > 2:
                pieces = [(*slab[:dim], cut, *slab[dim + 1 :]) for cut in itertools.pairwise(cuts)]
        elif most > room:
            expected = "more, or exchange='never'"
            raise errors.MemoryLimitError(_SMALL, tensor=info.name, expected=expected)
        if not pieces:
            yield nbytes, parts
        waiting += [(piece, parts) for piece in reversed(pieces)]


def _wanted(parts: Sequence[tuple[Target, Box]]) -> Counter[int]:
    """Bytes of rows that parts of targets take, by process."""
    wanted = Counter[int]()
    for target, box in parts:
        wanted[target.rank] += _padded(target.request.dtype.size_of(_shape(box)) or 0)
    return wanted


def _first_byte(target: Target, box: Box) -> int:
    """Where a box of a target begins in its bytes."""
    at, dtype = 0, target.request.dtype
    for (start, stop), (first, _) in zip(target.box, box, strict=True):
        at = at * (stop - start) + first - start
    return at // dtype.elements * dtype.nbytes


def _bytes_of_rows(targets: Sequence[Target]) -> int:
    """Bytes of the whole rows in which targets of a process lie: about what it reads by itself."""
    info = targets[0].request.info
    dim = next((n for n, length in enumerate(info.shape) if length > 1), None)
    if dim is None:
        return info.nbytes
    starts, stops = zip(*(target.box[dim] for target in targets), strict=True)
    return info.nbytes * (max(stops) - min(starts)) // info.shape[dim]


def _stored(targets: Sequence[Target]) -> int:
    return targets[0].request.info.nbytes


def _box(request: Request) -> Box:
    """The part of its tensor that a request wants."""
    if request.selection is None:
        return tuple((0, length) for length in request.info.shape)
    return tuple((axis.start, axis.start + axis.size) for axis in request.selection)


def _within(box: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
