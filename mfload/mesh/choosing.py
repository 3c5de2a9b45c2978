"""Choosing: whether processes read for each other, decided from the plan alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mfload import errors
from mfload.mesh import cutting, exchange, schedule as schedules
from mfload.mesh.schedule import Schedule
from mfload.options import OVERHEAD
from mfload.planning import planner
from mfload.planning.blocks import Costs
from mfload.planning.requests import Request
from mfload.report import human

# What a byte from another process costs, in bytes read. For the CPU it was measured with two
# processes, gloo over loopback and files in the page cache: 17 to 23 (docs/design/decisions.md).
# For accelerators it is assumed: their links are faster than disks and network file systems.
_COST = {"cpu": 20.0}
_COST_ELSEWHERE = 0.2
MERGE_GAP = Costs().merge_gap
"""Unwanted bytes read over in an exchange: what lies between is mostly for another to read."""

_ASKED = 16  # Processes whose plans are made to decide: evenly spaced, where there are more.


class Expected(NamedTuple):
    """What a load will do, as far as processes are concerned.

    Attributes:
        exchange: "never" or "once".
        note: Why.
        read_bytes: Bytes that this process reads.
        over_read_bytes: Bytes among them that nobody wants.
        exchanged_bytes: Bytes that come from other processes.
        overhead_bytes: Bytes beside the result held for what travels, the readers' slots left out.
        schedule: The exchange, None where there is none.
    """

    exchange: str
    note: str
    read_bytes: int
    over_read_bytes: int
    exchanged_bytes: int
    overhead_bytes: int
    schedule: Schedule | None


def expected(
    requests: Mapping[int, Sequence[Request]],
    rank: int,
    wished: str,
    *,
    platform: str = "cpu",
    overhead: int | None = None,
    merge_gap: int | None = None,
    readers: int = 0,
) -> Expected:
    """Decides, and says what follows for this process.

    Args:
        requests: What each process needs, by its number.
        rank: This process.
        wished: "auto", "never" or "once".
        platform: JAX's name of it: what a byte from another process costs depends on it.
        overhead: Bytes beside the result that may be held, 256 MiB where None.
        merge_gap: Unwanted bytes that are rather read over than skipped; the plan's where None.
        readers: The overhead that they need in any case, for errors.

    Returns:
        The same choice on every process.

    Raises:
        MemoryLimitError: "once" was asked for, and the overhead does for no round.
    """
    costs = Costs() if merge_gap is None else Costs(merge_gap=merge_gap)
    if len(requests) < 2 or wished == "never":
        return _never(requests, rank, costs, "")
    if any(cutting.box_of(request) is None for each in requests.values() for request in each):
        return _never(requests, rank, costs, "each process reads its own: a part has steps")
    try:
        width = schedules.width(len(requests), OVERHEAD if overhead is None else overhead, readers)
    except errors.MemoryLimitError as error:
        if wished == "once":
            raise
        return _never(requests, rank, costs, f"each process reads its own: {error.message}")
    if wished == "once":
        schedule = exchange.make(requests, width)
        return _once(schedule, rank, "every byte is read by one process (exchange='once')")
    apart = max(planner.make(requests[r], costs=costs).read_bytes for r in _sample(requests))
    price = _COST.get(platform, _COST_ELSEWHERE)
    share = exchange.stored_bytes(exchange.goals(requests)) / len(requests)
    least = max(_wanted(each) for each in requests.values()) - share
    if apart <= share + price * max(0.0, least):
        came, schedule = least, None  # No schedule can do with less.
    else:
        schedule = exchange.make(requests, width)
        came = max(max(schedule.came(r), schedule.went(r)) for r in requests)
    figures = (
        f"{human(apart)} at most a process, or {human(share)} and {human(max(0, came))} exchanged, "
        f"of which a byte costs as much as {price:g} read ({_basis(platform)})"
    )
    if schedule is None or apart <= share + price * came:
        return _never(requests, rank, costs, f"each process reads its own: {figures}")
    return _once(schedule, rank, f"every byte is read by one process: {figures}")


def _basis(platform: str) -> str:
    return "measured" if platform in _COST else "assumed"


def _sample(requests: Mapping[int, Sequence[Request]]) -> list[int]:
    ranks = sorted(requests)
    return ranks[:: -(-len(ranks) // _ASKED)]


def _wanted(requests: Sequence[Request]) -> int:
    """Stored bytes of the parts that a process wants, each counted once."""
    parts = {(n.info.name, n.selection): n.info.dtype.size_of(n.shape) or 0 for n in requests}
    return sum(parts.values())


def _never(
    requests: Mapping[int, Sequence[Request]], rank: int, costs: Costs, note: str
) -> Expected:
    made = planner.make(requests[rank], costs=costs)
    over = made.read_bytes - made.wanted_bytes
    return Expected("never", note, made.read_bytes, over, 0, 0, None)


def _once(schedule: Schedule, rank: int, note: str) -> Expected:
    read = over = 0
    costs = Costs(merge_gap=MERGE_GAP)
    for parcels in (schedule.local, *schedule.rounds):
        made = planner.make(schedule.requests(parcels, rank), costs=costs)
        read += made.read_bytes
        over += made.read_bytes - made.wanted_bytes
    came = schedule.came(rank)
    return Expected("once", note, read, over, came, schedule.overhead, schedule)
