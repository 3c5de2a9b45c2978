"""Meeting: the processes of a load come together, and tell each other what they see."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from mfload import frameworks
from mfload.index import Index
from mfload.io.deadline import Deadline
from mfload.io.source import LocalFile
from mfload.sharding.agreement import Party, together


@contextmanager
def meeting(ranks: tuple[int, ...], deadline: Deadline) -> Generator[Party]:
    """The party of a load: an error inside reaches all who take part.

    Args:
        ranks: The processes that take part.
        deadline: When to give up waiting for them.
    """
    rank: int = frameworks.module("jax", "sharding").rank()
    board = frameworks.module("jax", "processes").board() if len(ranks) > 1 else None
    with together(ranks, rank, board, deadline) as party:
        yield party


def seen(index: Index, sources: Sequence[LocalFile]) -> list[str]:
    """Files and headers, the same where processes see the same; wherever the files lie."""
    lines = [f"{os.path.basename(source.path)}: {source.size} bytes" for source in sources]
    for info in index.tensors.values():
        at = ", ".join(f"{piece.offset} in file {piece.source}" for piece in info.pieces)
        lines.append(f"{info.name}: {info.dtype} {list(info.shape)} at {at}")
    return lines
