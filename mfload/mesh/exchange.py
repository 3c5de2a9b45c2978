"""Exchange: a schedule from the needs of all processes. Pure.

Every byte that anybody wants is read by one process, as a rule by one that wants it. From the needs
of all processes each makes the same schedule, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mfload import errors
from mfload.index import Box, TensorInfo
from mfload.mesh import cutting
from mfload.mesh.packing import ALIGNMENT, Packer, Readers
from mfload.mesh.schedule import HEADER, Goal, Parcel, Schedule
from mfload.planning.requests import Request

# Tensors are cut where the parts of processes end, unless the pieces are smaller than this.
_APART = 16 << 10
# A process may be ahead of its share by that part of it, or by two pages.
_EVEN, _LEAST = 32, 8192


def goals(requests: Mapping[int, Sequence[Request]]) -> dict[int, tuple[Goal, ...]]:
    """What each process wants; needs of the same part are one goal.

    Raises:
        UsageError: A need is no box.
    """
    made: dict[int, tuple[Goal, ...]] = {}
    for rank in sorted(requests):
        held: dict[tuple[str, str, bool, Box], tuple[Request, list[int]]] = {}
        for number, request in enumerate(requests[rank]):
            box = cutting.box_of(request)
            if box is None:
                raise errors.UsageError(
                    "a part with steps can't be exchanged", tensor=request.info.name
                )
            key = request.info.name, request.dtype.name, request.checked, box
            held.setdefault(key, (request, []))[1].append(number)
        made[rank] = tuple(
            Goal(request.info, request.dtype, request.checked, key[3], tuple(numbers))
            for key, (request, numbers) in held.items()
            if request.nbytes
        )
    return made


def stored_bytes(wanted: Mapping[int, Sequence[Goal]]) -> int:
    """Bytes of the files that all processes want together, as far as whole slabs go."""
    return sum(_size(each[0][2].info, _hull(each)) for each in _by_tensor(wanted))


def make(requests: Mapping[int, Sequence[Request]], width: int) -> Schedule:
    """Makes the schedule.

    Args:
        requests: What each process needs, by its number.
        width: Bytes from each process to each in a round.

    Returns:
        The same on every process.
    """
    wanted = goals(requests)
    total = stored_bytes(wanted)
    grain = max(_LEAST, total // (_EVEN * len(wanted)))
    packer = Packer(tuple(wanted), width)
    shares = Readers(tuple(wanted), grain)
    for each in _by_tensor(wanted):
        info = each[0][2].info
        shares.due += _size(info, _hull(each))
        grown = max(-(-goal.dtype.nbytes // info.dtype.nbytes) for _, _, goal in each)
        limit = min(grain, (width - HEADER - ALIGNMENT) // grown)
        for slab in _slabs(each, limit):
            parts = [
                (taker, number, goal, box)
                for taker, number, goal in each
                if (box := cutting.within(slab, goal.box)) is not None
            ]
            if parts:
                taking = {taker: 0 for taker, *_ in parts}
                for taker, _, _, box in parts:
                    taking[taker] += _size(info, box)
                reader = shares.reader(_size(info, slab), taking)
                packer.add([_parcel(reader, *part) for part in parts])
    local, rounds = packer.end()
    return Schedule(tuple(wanted), width, wanted, local, rounds)


def parts(requests: Mapping[int, Sequence[Request]], limit: int) -> list[dict[int, list[int]]]:
    """Numbers of the needs that are loaded together, so that no process gets more than a limit.

    Args:
        requests: What each process needs, by its number.
        limit: Bytes; one tensor alone may exceed it.

    Returns:
        For each part the numbers of each process's needs, tensors in file order.
    """
    held: dict[str, dict[int, list[int]]] = {}
    at: dict[str, tuple[int, int]] = {}
    for rank in sorted(requests):
        for number, request in enumerate(requests[rank]):
            at[request.info.name] = request.info.pieces[0][:2]
            held.setdefault(request.info.name, {}).setdefault(rank, []).append(number)
    made: list[dict[int, list[int]]] = [{rank: [] for rank in sorted(requests)}]
    used = dict.fromkeys(requests, 0)
    for name in sorted(held, key=lambda name: at[name]):
        each = {r: sum(requests[r][n].nbytes for n in numbers) for r, numbers in held[name].items()}
        if any(used[r] and used[r] + nbytes > limit for r, nbytes in each.items()):
            made.append({rank: [] for rank in sorted(requests)})
            used = dict.fromkeys(requests, 0)
        for rank, numbers in held[name].items():
            made[-1][rank] += numbers
            used[rank] += each[rank]
    return made


_Each = tuple[int, int, Goal]  # Process, number of the goal there, goal.


def _by_tensor(wanted: Mapping[int, Sequence[Goal]]) -> list[list[_Each]]:
    """The goals of each tensor, in file order."""
    held: dict[str, list[_Each]] = {}
    for rank, each in wanted.items():
        for number, goal in enumerate(each):
            held.setdefault(goal.info.name, []).append((rank, number, goal))
    return sorted(held.values(), key=lambda each: each[0][2].info.pieces[0][:2])


def _slabs(each: Sequence[_Each], limit: int) -> Iterator[Box]:
    """Slabs of a tensor, cut where one process wants no more and the next begins."""
    info = each[0][2].info
    by_rank: dict[int, list[Box]] = {}
    for rank, _, goal in each:
        by_rank.setdefault(rank, []).append(goal.box)
    least = _APART * info.dtype.elements // info.dtype.nbytes
    for piece in cutting.apart(_hull(each), list(map(cutting.hull, by_rank.values())), least):
        yield from cutting.slabs(info, piece, limit)


def _hull(each: Sequence[_Each]) -> Box:
    return cutting.hull([goal.box for _, _, goal in each])


def _size(info: TensorInfo, box: Box) -> int:
    return info.dtype.size_of(cutting.shape_of(box)) or 0


def _parcel(reader: int, taker: int, number: int, goal: Goal, box: Box) -> Parcel:
    at = cutting.offset_in(goal.box, box) // goal.dtype.elements * goal.dtype.nbytes
    return Parcel(reader, taker, number, box, at, goal.dtype.size_of(cutting.shape_of(box)) or 0)
