"""The fastest ways to get a checkpoint's bytes into memory, knowing nothing of tensors.

They are what a loader's time is divided by: the copy out of a warm page cache into fresh 2 MiB
pages, and the disk's best pattern when the cache is cold.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.memory import HUGE, fresh_pages

MIB = 1 << 20
_ALIGN = 4096  # what O_DIRECT asks of offsets, lengths and addresses, at the strictest


@dataclass(frozen=True, slots=True)
class Pattern:
    """One way to read.

    Args:
        threads: How many threads read.
        block: Bytes a call.
        direct: Whether the page cache is bypassed, by O_DIRECT.
        reuse: Whether each thread reads into one slot again and again (nothing is kept) instead of
            into fresh pages that end up holding the files.
    """

    threads: int
    block: int
    direct: bool = False
    reuse: bool = False

    @property
    def name(self) -> str:
        """A short name, `ceiling-direct-4x16-fresh` for instance."""
        how = "direct" if self.direct else "buffered"
        into = "reused" if self.reuse else "fresh"
        return f"ceiling-{how}-{self.threads}x{self.block // MIB}-{into}"

    @property
    def label(self) -> str:
        """The pattern in words."""
        how = "O_DIRECT" if self.direct else "preadv"
        into = "reused slots" if self.reuse else "fresh 2 MiB pages"
        many = "threads" if self.threads > 1 else "thread"
        return f"{how}, {self.threads} {many}, {self.block // MIB} MiB, {into}"


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
PATTERNS = {pattern.name: pattern for pattern in (WARM, *COLD)}


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory that holds what was read.

    Args:
        spans: (address, bytes) of every stretch to touch.
        keep: What keeps the memory alive.
        whole: Whether the spans hold the files whole, so that their sum can be checked.
    """

    spans: list[tuple[int, int]]
    keep: object
    whole: bool


Block = tuple[int, int, int, int]
"""File descriptor, offset in the file, bytes, offset in memory."""


def _up(n: int, step: int) -> int:
    """`n` rounded up to a multiple of `step`."""
    return -(-n // step) * step


def _drain(work: deque[Block], memory: memoryview, slot: memoryview | None) -> None:
    """Read blocks into their places in memory, or all into one slot, until none is left."""
    while True:
        try:
            fd, offset, wanted, at = work.popleft()
        except IndexError:
            return
        # A direct read takes whole sectors: the last one asks for more than the file has.
        asked = _up(wanted, _ALIGN)
        into = memory[at : at + asked] if slot is None else slot[:asked]
        got = 0
        while got < wanted:
            done = os.preadv(fd, [into[got:]], offset + got)
            if done == 0:
                raise OSError("the file ended early")
            got += done


def read(paths: Sequence[str], pattern: Pattern) -> Bytes:
    """Read files whole.

    Args:
        paths: The files.
        pattern: The way to read them.

    Returns:
        The memory read into.

    Raises:
        OSError: A read failed.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if pattern.direct else 0)
    sizes = [os.stat(path).st_size for path in paths]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + _up(size, HUGE))
    total = pattern.threads * pattern.block if pattern.reuse else starts[-1]
    memory, first = fresh_pages(total)
    view = memoryview(memory)[first : first + total]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
    fds = [os.open(path, flags) for path in paths]
    try:
        work = deque(
            (fd, offset, min(pattern.block, size - offset), start + offset)
            for fd, size, start in zip(fds, sizes, starts, strict=False)
            for offset in range(0, size, pattern.block)
        )
        slots = [
            view[i * pattern.block : (i + 1) * pattern.block] if pattern.reuse else None
            for i in range(pattern.threads)
        ]
        with ThreadPoolExecutor(pattern.threads) as pool:
            for done in [pool.submit(_drain, work, view, slot) for slot in slots]:
                done.result()
    finally:
        for fd in fds:
            os.close(fd)
    if pattern.reuse:
        return Bytes([(address, total)], memory, whole=False)
    spans = [(address + start, size) for start, size in zip(starts, sizes, strict=False)]
    return Bytes(spans, memory, whole=True)
