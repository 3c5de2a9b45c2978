"""The fastest ways to read a checkpoint's bytes into memory, without regard for tensors.

A loader's time is divided by theirs: the copy out of a warm page cache into fresh 2 MiB pages, and
the disk's best pattern when the cache is cold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from queue import SimpleQueue
from typing import NamedTuple

from mfload.index import Index, TensorInfo

MIB = 1 << 20
_HUGE = 2 * MIB
_ALIGN = 4096  # The strictest that O_DIRECT asks of offsets, lengths and addresses.
_GAP = 64 << 10  # Bytes between two tensors that are read over rather than left out.


class Extent(NamedTuple):
    """Bytes `start` to `stop` of one file."""

    path: str
    start: int
    stop: int


def extents_of(index: Index, rows: Sequence[TensorInfo]) -> list[Extent]:
    """The extents that hold these tensors, in file order; those that nearly touch are joined."""
    joined: list[Extent] = []
    pieces = [piece for row in rows for piece in row.pieces if piece.nbytes]
    for piece in sorted(pieces, key=lambda piece: (piece.source, piece.offset)):
        path, stop = index.files[piece.source], piece.offset + piece.nbytes
        if joined and joined[-1].path == path and piece.offset - joined[-1].stop <= _GAP:
            joined[-1] = joined[-1]._replace(stop=max(stop, joined[-1].stop))
        else:
            joined.append(Extent(path, piece.offset, stop))
    return joined


def paths_of(extents: Iterable[Extent]) -> list[str]:
    """The files, each once."""
    return list(dict.fromkeys(extent.path for extent in extents))


@dataclass(frozen=True, slots=True)
class Pattern:
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
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{how}, {threads}, {self.block // MIB} MiB, {into}"


WARM = Pattern(2, 16 * MIB)
COLD = (
    *(
        Pattern(threads, block * MIB, direct=True, reuse=reuse)
        for threads in (1, 2, 4, 8)
        for block in (4, 16)
        for reuse in (False, True)
    ),
    WARM,
    Pattern(4, 16 * MIB),
)
_MORE = (Pattern(threads, 16 * MIB) for threads in (1, 8, 16))
PATTERNS = {pattern.name: pattern for pattern in (WARM, *COLD, *_MORE)}


def trial(cores: int, *, cold: bool, quick: bool) -> list[Pattern]:
    """The patterns to try on a machine of so many cores."""
    if not cold:
        threads = (2, 4) if quick else (1, 2, 4, 8, 16)
        return [Pattern(n, 16 * MIB) for n in threads if n <= max(2, cores)]
    if quick:
        direct = (Pattern(1, 4 * MIB, direct=True, reuse=True), Pattern(4, 4 * MIB, direct=True))
        return [*direct, WARM]
    return [pattern for pattern in COLD if pattern.block == 4 * MIB or not pattern.reuse]


class Bytes(NamedTuple):
    """Memory that was read into: (address, bytes) of each extent, or of the reused slots."""

    spans: list[tuple[int, int]]
    memory: mmap.mmap


def fresh_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private memory on 2 MiB pages, not yet faulted in, and the offset of the first such page."""
    size = -(-nbytes // _HUGE) * _HUGE + _HUGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -_address(memory) % _HUGE


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def read(extents: Sequence[Extent], pattern: Pattern) -> Bytes:
    """Reads extents into memory: whole pages, side by side."""
    pages = [(start // _ALIGN * _ALIGN, -(-stop // _ALIGN) * _ALIGN) for _, start, stop in extents]
    *places, end = accumulate((stop - start for start, stop in pages), initial=0)
    total = pattern.threads * pattern.block if pattern.reuse else end
    memory, first = fresh_pages(total)
    view = memoryview(memory)[first : first + total]
    slots: SimpleQueue[int] = SimpleQueue()
    for number in range(pattern.threads):
        slots.put(number * pattern.block)

    def fill(block: tuple[int, int, int, int]) -> None:
        fd, offset, wanted, place = block
        at = slots.get() if pattern.reuse else place
        # A direct read takes whole sectors: the last one asks for more than the file has.
        into = view[at : at - (-wanted // _ALIGN) * _ALIGN]
        got = 0
        while got < wanted:
            done = os.preadv(fd, [into[got:]], offset + got)
            if done == 0:
                raise OSError("the file ended early")
            got += done
        if pattern.reuse:
            slots.put(at)

    flags = os.O_RDONLY | (os.O_DIRECT if pattern.direct else 0)
    fds = {path: os.open(path, flags) for path in paths_of(extents)}
    try:
        blocks = [
            (fds[path], offset, min(pattern.block, stop - offset), place + offset - page)
            for (path, _, stop), (page, _), place in zip(extents, pages, places, strict=True)
            for offset in range(page, stop, pattern.block)
        ]
        with ThreadPoolExecutor(pattern.threads) as pool:
            list(pool.map(fill, blocks))
    finally:
        for fd in fds.values():
            os.close(fd)
    address = _address(memory) + first
    if pattern.reuse:
        return Bytes([(address, total)], memory)
    spans = [
        (address + place + start % _ALIGN, stop - start)
        for (_, start, stop), place in zip(extents, places, strict=True)
    ]
    return Bytes(spans, memory)
