"""Meeting: the processes of a load come together, and tell each other what they see."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mfload import errors, frameworks
from mfload.index import Index
from mfload.mesh.fingerprints import together
from mfload.mesh.group import Party
from mfload.mesh.store import move
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

# Pages of each file that processes compare, and of all files together; two of each at least.
_SAMPLED, _IN_ALL = 16, 512
_PAGE = 4096  # The same on every host.
_thread = threading.local()


@contextmanager
def meeting(
    ranks: tuple[int, ...], deadline: Deadline, wrong: Exception | None = None
) -> Generator[Party]:
    """The party of a load: an error inside reaches all who take part.

    Loads of several threads take turns, in the order in which they came; it has to be the same in
    all processes, since nothing else says which loads belong together. One that fails before its
    turn tells so at once, and leaves the others alone.

    Args:
        ranks: The processes that take part; none where nothing tells.
        deadline: When to give up waiting for them.
        wrong: What was found wrong before it was known with whom to load; it is raised here.
    """
    rank: int = frameworks.module("jax", "sharding").rank()
    board = frameworks.module("jax", "store").board()
    if board is not None and board.place is None:
        # The others can see from now on whether this process runs; also while it waits at its end
        # for them, as JAX has it. (What is registered last is called first.)
        move(board, rank)
        atexit.register(_end, board, rank)
    with together(ranks, rank, board, deadline) as party:
        if wrong is not None:
            raise wrong
        if board is None or len(ranks) < 2:
            yield party
            return
        with _alone():
            party.begin()
            yield party


def _end(board: Any, rank: int) -> None:
    with suppress(Exception):
        move(board, rank, lambda place: place._replace(ended=True))


@contextmanager
def _alone() -> Generator[None]:
    """Refuses a load inside of another: it would wait for its own thread."""
    if getattr(_thread, "loads", False):
        raise errors.UsageError(
            "a load with other processes can't be part of another",
            expected="one after the other",
        )
    _thread.loads = True
    try:
        yield
    finally:
        _thread.loads = False


def seen(index: Index, sources: Sequence[LocalFile], deadline: Deadline) -> list[str]:
    """Files, a sample of each, and headers, alike where processes see alike; wherever they lie.

    The sample is a few pages of each file, evenly spread from the first tensor to the end. It
    tells another step of the training from this one, and misses a single number that differs.

    Args:
        index: The checkpoint's table.
        sources: Its files.
        deadline: When to give up reading.

    Raises:
        SourceError: A file can't be read, or has changed.
        LoadTimeoutError: The deadline passed first.
    """
    begin = [source.size for source in sources]
    for info in index.tensors.values():
        for piece in info.pieces:
            begin[piece.source] = min(begin[piece.source], piece.offset)
    count = max(2, min(_SAMPLED, _IN_ALL // max(1, len(sources))))
    spans = list(zip(sources, begin, strict=True))
    samples = deadline.bound(lambda: [_sample(*each, count) for each in spans], "comparing files")
    lines = [
        f"{os.path.basename(source.path)}: {source.size} bytes, sampled {sample}"
        for source, sample in zip(sources, samples, strict=True)
    ]
    for info in index.tensors.values():
        at = ", ".join(f"{piece.offset} in file {piece.source}" for piece in info.pieces)
        lines.append(f"{info.name}: {info.dtype} {list(info.shape)} at {at}")
    return lines


def _sample(source: LocalFile, begin: int, count: int) -> str:
    last = max(begin, source.size - _PAGE)
    places = {begin + (last - begin) * n // (count - 1) for n in range(count)}
    digest = hashlib.sha256()
    for at in sorted(places):
        digest.update(source.read(at, min(_PAGE, source.size - at)))
    return digest.hexdigest()[:16]
