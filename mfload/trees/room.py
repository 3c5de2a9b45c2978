"""Room: whether an overhead is enough for transforms, and if not, which would do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mfload import errors
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.loading import preparing
from mfload.options import LoadOptions
from mfload.planning.requests import Request
from mfload.sources.local import LocalFile
from mfload.trees import slabs
from mfload.trees.slabs import Piece
from mfload.trees.targets import Goal

SLOTS = 4
"""One in so many bytes of the overhead is for the readers' slots while transforms are under way;
the rest is for what waits for them."""


def readers(
    requests: Sequence[Request],
    index: Index,
    sources: Sequence[LocalFile],
    adapter: Adapter,
    options: LoadOptions,
) -> int:
    """The least overhead that leaves the readers of what waits their slots.

    Args:
        requests: What waits on this process.
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        options: How.

    Returns:
        Bytes of host memory; where things wait on devices, of a device's.
    """
    if not requests:
        return 0
    free = replace(options, allocator="mfload", max_host_overhead=None, max_device_overhead=None)
    found = preparing.Preparation(requests, index, sources, adapter, free).overheads
    if adapter.devices:
        return found.least_on_device * SLOTS
    return found.least * (SLOTS if adapter.on_host else 1)


def check(
    name: str,
    given: int,
    limit: int,
    pieces: Iterable[Piece],
    goals: Sequence[Goal],
    moved: Callable[[int], int],
) -> None:
    """Refuses an overhead in which transforms can't be done.

    Args:
        name: What the overhead is called.
        given: The overhead.
        limit: What readers need at the least, where that is more: pieces were cut for it.
        pieces: All that is made.
        goals: What it is made for.
        moved: Bytes of host memory that a shard of a goal, by its number, takes twice for a while.

    Raises:
        MemoryLimitError: It is too small; names the least that does.
    """
    small = f"{name} is too small for readers beside transforms; or ask for fewer"
    wanted: list[tuple[int, str, str | None]] = [(limit, small, None)]
    for piece in pieces:
        tensor = goals[piece.owner].name
        made = (slabs.most(piece.parts) - 1) * SLOTS // (SLOTS - 1) + 1
        wanted.append((made, "what the tensor is made of exceeds the overhead", tensor))
        wanted.append((moved(piece.owner), "a shard that is moved exceeds the overhead", tensor))
    least, message, tensor = max(wanted, key=lambda each: each[0])
    if least > given:
        raise errors.MemoryLimitError(
            message, tensor=tensor, expected=f"{least} bytes or more", found=given
        )
