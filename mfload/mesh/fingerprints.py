"""Agreement: several processes load together, and end together: all well, or all with an error.

Each step of a load is settled by one verdict that can be written once. Whoever sees that all
processes have come proposes to go on; whoever fails, gives up, or misses a process proposes to
stop. The first proposal counts, for everybody: a process that gives up and a process that goes on
can't both be right. Nothing here moves weights: a few short texts pass over the board.

A process that has not come may be slow, or busy with others, and is waited for. Only what can't
come right is an error: it failed or ended; it failed a load of which nothing told with whom it was
meant to be; or processes wait in a circle, each for the next to begin a load.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Sequence

from mfload import errors
from mfload.mesh import outcome
from mfload.mesh.group import Party
from mfload.mesh.store import Board, move, telling
from mfload.runtime import Deadline

_READABLE = 16 << 10


@contextlib.contextmanager
def together(
    processes: Sequence[int], rank: int, board: Board | None, deadline: Deadline
) -> Generator[Party]:
    """Loads with other processes: what fails in one of them fails in all.

    Every process of the group enters once a load, in the same order. Leaving waits for the others.
    Groups may differ from load to load, and a process may be in a load with some while others
    wait for it. Those who wait are told of an error where it can't come right: where a process
    failed, or ended; where it failed a load without a group, which is told to one group; and
    where processes wait for each other in a circle.

    Several threads may enter; in each process in the same order, which counts even for those that
    fail at once. What takes turns between them is up to `Party.begin`.

    Args:
        processes: Numbers of those that take part; none where nothing tells. An error is then one
            of the next load of this process with any others.
        rank: This one.
        board: Where they meet. One process alone needs none.
        deadline: When to give up waiting.

    Yields:
        The party, to agree by.

    Raises:
        ProcessError: Another process failed, is gone, or differs; on the process where it
            happened, its own error.
        UsageError: This process does not take part.
    """
    if processes and rank not in processes:
        raise errors.UsageError(
            "this process takes no part in the load: none of its devices is in the mesh",
            expected=f"process {', '.join(map(str, processes[:16]))}",
            found=f"process {rank}",
        )
    party = Party(processes or [rank], rank, board, deadline)
    try:
        yield party
        party.settle()
    except BaseException as error:
        party.fail(error)
        if not processes and board is not None:
            text = outcome.of_text(error)
            with telling():
                move(board, rank, lambda place: place.losing(text))
        raise
    finally:
        party.end()


def fingerprint(lines: Sequence[str]) -> str:
    """Lines as a text to agree on: all of them where they are few, else digests of parts."""
    text = "\n".join(lines)
    if len(text) <= _READABLE:
        return text
    count = -(-len(lines) // 64)
    parts = (lines[n : n + count] for n in range(0, len(lines), count))
    return "\n".join(
        f"{part[0][:80]} … {part[-1][:80]}: {hashlib.sha256(repr(part).encode()).hexdigest()[:16]}"
        for part in parts
    )
