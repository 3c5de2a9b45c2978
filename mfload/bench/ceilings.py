"""The fastest ways to read a checkpoint's bytes into memory, without regard for tensors.

A loader's time is divided by theirs: the copy out of a warm page cache into fresh 2 MiB pages, and
the disk's best pattern when the cache is cold.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any, NamedTuple

from mfload import errors
from mfload.index import Index, TensorInfo
from mfload.io import buffers
from mfload.planning.lots import joined
from mfload.runtime import Crew

MIB = 1 << 20
_ALIGN = 4096  # The strictest that O_DIRECT asks of offsets, lengths and addresses.
_GAP = 64 << 10  # Bytes between two tensors that are read over rather than left out.


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of one file."""

    path: str
    start: int
    stop: int


def extents_of(index: Index, rows: Sequence[TensorInfo]) -> list[ByteRange]:
    """The extents that hold these tensors, in file order; those that nearly touch are joined."""
    pieces = [piece for row in rows for piece in row.pieces if piece.nbytes]
    ranges = (block for block, _ in joined(pieces, _GAP, sys.maxsize))
    return [ByteRange(index.files[n], start, start + nbytes) for n, start, nbytes, *_ in ranges]


def paths_of(extents: Iterable[ByteRange]) -> list[str]:
    """The files, each once."""
    return list(dict.fromkeys(extent.path for extent in extents))


class Pattern(NamedTuple):
    """A way to read: how many threads, and how many bytes a call.

    `direct` bypasses the page cache. `reuse` reads into the same slots again and again and keeps
    nothing; else fresh pages end up holding the files.
    """

    threads: int
    block: int
    direct: bool = False
    reuse: bool = False

    @property
    def name(self) -> str:
        """Such as `ceiling-direct-4x16-fresh`."""
        how = "direct" if self.direct else "buffered"
        into = "reused" if self.reuse else "fresh"
        return f"ceiling-{how}-{self.threads}x{self.block // MIB}-{into}"

    @property
    def label(self) -> str:
        """The pattern in words."""
        how = "O_DIRECT" if self.direct else "preadv"
        into = "reused slots" if self.reuse else "fresh 2 MiB pages"
        threads = errors.counted(self.threads, "thread")
        return f"{how}, {threads}, {self.block // MIB} MiB, {into}"


def named(name: str) -> Pattern | None:
    """The pattern of a name; None if it is no pattern's."""
    found = re.fullmatch(r"ceiling-(direct|buffered)-(\d+)x(\d+)-(fresh|reused)", name)
    if found is None:
        return None
    how, threads, mib, into = found.groups()
    return Pattern(int(threads), int(mib) * MIB, how == "direct", into == "reused")


def trial(cores: int, *, cold: bool, quick: bool) -> list[str]:
    """The patterns to try on a machine of so many cores, by name."""
    buffered, direct = (2, 4), [Pattern(1, 4 * MIB, True, True), Pattern(4, 4 * MIB, True)]
    if not cold:
        some = buffered if quick else (1, 2, 4, 8, 16)
        buffered, direct = [n for n in some if n <= max(2, cores)], []
    elif not quick:
        kinds = (4 * MIB, False), (4 * MIB, True), (16 * MIB, False)
        direct = [Pattern(n, block, True, reuse) for n in (1, 2, 4, 8) for block, reuse in kinds]
    return [each.name for each in (*direct, *(Pattern(n, 16 * MIB) for n in buffered))]


class Bytes(NamedTuple):
    """Memory that was read into: (address, bytes) of each extent, or of the reused slots."""

    spans: list[tuple[int, int]]
    memory: Any


def read(extents: Sequence[ByteRange], pattern: Pattern) -> Bytes:
    """Reads extents into memory: whole pages, side by side."""
    blocks: list[tuple[str, int, int, int]] = []
    places: list[tuple[int, int]] = []
    end = 0
    for path, start, stop in extents:
        page = start - start % _ALIGN
        places.append((end + start - page, stop - start))
        for offset in range(page, stop, pattern.block):
            length = min(pattern.block, stop - offset)
            blocks.append((path, offset, length, end + offset - page))
        end += -(-stop // _ALIGN) * _ALIGN - page
    if pattern.reuse:
        end = pattern.threads * pattern.block
        places = [(0, end)]
    memory: Any = buffers.allocate(end)  # Fresh pages, huge ones where the system has them.
    view = memoryview(memory)
    slots: SimpleQueue[int] = SimpleQueue()
    for number in range(pattern.threads):
        slots.put(number * pattern.block)

    def fill(block: tuple[str, int, int, int]) -> None:
        path, offset, wanted, place = block
        at = slots.get() if pattern.reuse else place
        # A direct read takes whole sectors: the last one asks for more than the file has.
        into = view[at : at - (-wanted // _ALIGN) * _ALIGN]
        try:
            while wanted > 0:
                done = os.preadv(fds[path], [into], offset)
                if done == 0:
                    raise OSError("the file ended early")
                into, offset, wanted = into[done:], offset + done, wanted - done
        finally:
            if pattern.reuse:
                slots.put(at)

    flags = os.O_RDONLY | (os.O_DIRECT if pattern.direct else 0)
    fds = {path: os.open(path, flags) for path in paths_of(extents)}
    try:
        with closing(Crew()) as crew:
            crew.share(lambda number: fill(blocks[number]), len(blocks), pattern.threads)
    finally:
        for fd in fds.values():
            os.close(fd)
    return Bytes([(memory.ctypes.data + at, nbytes) for at, nbytes in places], memory)
