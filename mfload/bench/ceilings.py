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

from mfload.bench.extents import Extent, paths_of
from mfload.bench.memory import HUGE, fresh_pages
from mfload.bench.touch import Span

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
_MORE = tuple(Pattern(threads, 16 * MIB) for threads in (1, 8, 16))
PATTERNS = {pattern.name: pattern for pattern in (WARM, *COLD, *_MORE)}


def trial(cores: int, *, cold: bool, quick: bool) -> list[Pattern]:
    """The patterns that are worth a try on a machine of so many cores.

    Args:
        cores: How many it has.
        cold: Whether the page cache is empty.
        quick: Whether a few must do.
    """
    if not cold:
        threads = (2, 4) if quick else (1, 2, 4, 8, 16)
        return [Pattern(n, 16 * MIB) for n in threads if n <= max(2, cores)]
    if quick:
        direct = (Pattern(1, 4 * MIB, direct=True, reuse=True), Pattern(4, 4 * MIB, direct=True))
        return [*direct, WARM]
    return [pattern for pattern in COLD if pattern.block == 4 * MIB or not pattern.reuse]


def is_ceiling(name: str) -> bool:
    """Whether a name is that of a pattern."""
    return name in PATTERNS


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory that holds what was read.

    Args:
        spans: (address, bytes) of every stretch to touch: one for each extent, in their order,
            or the slots where those were used again.
        keep: What keeps the memory alive.
        whole: Whether the spans hold the extents whole, so that their sum can be checked.
    """

    spans: list[Span]
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


def _places(extents: Sequence[Extent]) -> list[int]:
    """Where in memory the page of each extent's first byte goes, and the end of all."""
    places: list[int] = []
    end = 0
    for path, start, stop in extents:
        del path
        # Small ones side by side, so that a thousand of them don't take a huge page each.
        length = _up(stop, _ALIGN) - start // _ALIGN * _ALIGN
        place = _up(end, HUGE if length >= HUGE else _ALIGN)
        places.append(place)
        end = place + length
    return [*places, _up(end, HUGE)]


def read(extents: Sequence[Extent], pattern: Pattern) -> Bytes:
    """Read stretches of files.

    Args:
        extents: The stretches. Each is read from the start of its first page.
        pattern: The way to read them.

    Returns:
        The memory read into.

    Raises:
        OSError: A read failed.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if pattern.direct else 0)
    places = _places(extents)
    total = pattern.threads * pattern.block if pattern.reuse else places[-1]
    memory, first = fresh_pages(total)
    view = memoryview(memory)[first : first + total]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
    fds: dict[str, int] = {}
    try:
        for path in paths_of(extents):
            fds[path] = os.open(path, flags)
        work = deque(
            (fds[path], offset, min(pattern.block, stop - offset), place + offset - page)
            for (path, start, stop), place in zip(extents, places, strict=False)
            for page in [start // _ALIGN * _ALIGN]
            for offset in range(page, stop, pattern.block)
        )
        slots = [
            view[i * pattern.block : (i + 1) * pattern.block] if pattern.reuse else None
            for i in range(pattern.threads)
        ]
        with ThreadPoolExecutor(pattern.threads) as pool:
            for done in [pool.submit(_drain, work, view, slot) for slot in slots]:
                done.result()
    finally:
        for fd in fds.values():
            os.close(fd)
    if pattern.reuse:
        return Bytes([(address, total)], memory, whole=False)
    spans = [
        (address + place + start % _ALIGN, stop - start)
        for (_, start, stop), place in zip(extents, places, strict=False)
    ]
    return Bytes(spans, memory, whole=True)
