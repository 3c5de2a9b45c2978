"""Layout: which buffer each result lands in, and where in it. Pure.

The kernel copies several times slower if (destination - file offset) mod 4096 is a small positive
number, and adapters need each tensor on a multiple of some alignment. So a tensor goes to the next
place that equals its file offset, rounded down to the alignment, mod 4096. Then the difference is
zero or a small negative number, and tensors that follow each other in the file do so in memory,
so that one read fills them all. Small tensors are only aligned: padding would outweigh them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload.dtypes import DType
from mfload.planning.request import Allocation, Request

BUFFER = 64 << 20
"""Bytes a buffer at most, so that no small tensor keeps much memory alive; a page that leads
to the place of the first comes on top."""

DEVICE_BUFFER = 256 << 20
"""The same on a device, which takes its time for each (H200: 0.07 ms to make, as long to free).

Tensors below 1 MiB share none with larger ones there, whose memory a norm would keep."""

FEW = 1024
"""Tensors of a load up to which small ones have buffers of their own there: some ms for all."""

SLAB = 16 << 20
"""The same for the small tensors on a device where large ones have buffers of their own."""

DEVICE_ALIGNMENT = 256
"""Alignment of tensors in device memory, in bytes: that of CUDA's own allocator."""

_PAGE = 4096
_SMALL = 64 << 10
_DEVICE_SMALL = 1 << 20
_Kind = tuple[int | None, bool, bool]
_HOST: _Kind = (None, False, False)  # In host memory, and not copied afterwards.
_MANY = 32  # From so many on, arrays are faster than one after the other.
_FEW = 8  # After fewer the next ones are placed without arrays, which cost more than they save.


def evenly(alike: Any, *steps: Any) -> list[int]:
    """Where groups of neighbours that are alike, at equal distances, begin; and the end of all.

    `alike` says of each neighbour whether it is as the one before, `steps` how far behind that.
    """
    breaks = ~alike
    for step in steps:
        breaks[1:] |= alike[:-1] & (np.diff(step) != 0)
    return [0, *(np.flatnonzero(breaks) + 1).tolist(), len(alike) + 1]


class BufferSpec(NamedTuple):
    """A buffer: a map of a source, or memory of a device (by its number) or of the host.

    With both, it is memory that the source has on the device, and takes no more of it.
    """

    nbytes: int
    source: int | None = None
    device: int | None = None


class Packed(NamedTuple):
    """Small results that lie one behind the other: where each begins behind the first."""

    starts: Sequence[int]
    nbytes: int
    alignment: int


class Layout:
    """Gives each request its buffer and position, in file order.

    Args:
        alignment: Bytes on which every tensor must lie; None for its element's size.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes.
        alone: Bytes from which on a tensor that lands on a device has a buffer of its own.
    """

    def __init__(
        self, alignment: int | None, mapped: dict[int, int], alone: int | None = None
    ) -> None:
        self.specs: list[BufferSpec] = []
        self._alignment = alignment
        self._mapped, self._alone = mapped, alone
        self._maps: dict[int, int] = {}
        # Buffers that still take tensors, and how much of each is taken, by device, by whether
        # the framework copies the tensors, and by whether they are small: what is copied shares no
        # buffer with what stays.
        self._open: dict[_Kind, tuple[int, int]] = {}

    def place(
        self, request: Request, nbytes: int, contiguous: int | None, allocation: Allocation
    ) -> tuple[int, int]:
        """Buffer and first byte; an array of the framework has a buffer of its own."""
        device, owner, copied, _ = allocation
        apart = device is not None and self._alone is not None and nbytes >= self._alone
        if owner == "source":
            self.specs.append(BufferSpec(0, request.info.pieces[0].source, device))
            return len(self.specs) - 1, 0
        if owner == "framework" or apart:
            self.specs.append(BufferSpec(nbytes, None, device))
            return len(self.specs) - 1, 0
        if device is None:
            piece = request.info.pieces[0]
            offset = piece.offset if contiguous is None else contiguous
            align = self._alignment or max(1, request.dtype.nbytes // request.dtype.elements)
            if piece.source in self._mapped and contiguous is not None and offset % align == 0:
                return self._map(piece.source), offset
            follows = nbytes < _SMALL
        else:
            # The host's kernel copies nothing here, so no place suits the file better.
            offset, align, follows = 0, DEVICE_ALIGNMENT, True
        small = device is not None and nbytes < _DEVICE_SMALL
        return self._next(offset, nbytes, align, follows, (device, copied, small))

    def packed(self, dtype: DType, lengths: Sequence[int]) -> Packed | None:
        """How results of a tensor are placed together; None if each has a place of its own."""
        align, starts, cursor = self._alignment or max(1, dtype.nbytes // dtype.elements), [], 0
        for nbytes in lengths:
            starts.append(-(-cursor // align) * align)
            cursor = starts[-1] + nbytes
        return Packed(starts, cursor, align) if max(lengths) < _SMALL and cursor < BUFFER else None

    def place_packed(
        self, packed: Packed, source: int, offset: int, allocation: Allocation
    ) -> list[tuple[int, int]]:
        """Buffer and first byte of each; nothing if they have to be placed one by one."""
        device, owner, copied, _ = allocation
        if device is not None or owner == "framework" or source in self._mapped:
            return []
        buffer, at = self._next(
            offset, packed.nbytes, packed.alignment, True, (None, copied, False)
        )
        return [(buffer, at + start) for start in packed.starts]

    def place_all(self, sources: Any, offsets: Any, sizes: Any, aligns: Any) -> tuple[Any, Any]:
        """The same for whole tensors in mfload's memory on the host, in columns."""
        buffer, at = np.empty_like(sizes), np.empty_like(sizes)
        # Neighbours that are placed in the same way: large ones, small ones, those of one map.
        mapped = np.isin(sources, list(self._mapped)) & (offsets % aligns == 0)
        way = np.where(mapped, sources + 2, sizes < _SMALL)
        edges = np.flatnonzero(np.diff(way)) + 1
        for first, end in itertools.pairwise([0, *edges.tolist(), len(way)]):
            if way[first] > 1:
                buffer[first:end] = self._map(int(sources[first]))
                at[first:end] = offsets[first:end]
                continue
            follows, width, pause = way[first] == 1, _MANY, 0
            while first < end:
                each = int(offsets[first]), int(sizes[first]), int(aligns[first])
                number, start = self._next(*each, follows, _HOST)
                buffer[first], at[first] = number, start
                first += 1
                pause -= 1
                if follows and end - first >= _MANY and pause < 0:
                    # Small ones follow each other: the next begins as far behind as the size of
                    # this one, rounded up to its alignment, if this begins on a multiple of that.
                    stop = min(end, first + width)
                    size, align = sizes[first - 1 : stop - 1], aligns[first:stop]
                    starts = start + np.cumsum(-(-size // align) * align)
                    previous = np.concatenate(([start], starts[:-1]))
                    fits = starts + sizes[first:stop] <= BUFFER + _PAGE
                    wrong = np.flatnonzero(~fits | (previous % align > 0) | (previous + size == 0))
                    count = int(wrong[0]) if wrong.size else stop - first
                    width = _MANY if wrong.size else 2 * width
                    pause = 0 if count >= _FEW else _MANY
                    if count:
                        buffer[first : first + count] = number
                        at[first : first + count] = starts[:count]
                        first += count
                        self._open[_HOST] = number, int(starts[count - 1] + sizes[first - 1])
        return buffer, at

    def place_there(self, sizes: Any, device: int) -> tuple[Any, Any]:
        """The same for whole tensors in mfload's buffers on a device, in columns."""
        buffer, at, most = np.empty_like(sizes), np.empty_like(sizes), self._most() + _PAGE
        large = np.full(len(sizes), False) if self._alone is None else sizes >= self._alone
        small = (sizes < _DEVICE_SMALL) & ~large
        found: list[tuple[Any, int]] = [([n], int(sizes[n])) for n in np.flatnonzero(large)]
        for numbers in map(np.flatnonzero, (small, ~small & ~large)):
            size = sizes[numbers]
            ends = np.cumsum(-(-size // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT)
            starts = np.concatenate(([0], ends[:-1]))
            ends, first = starts + size, 0
            while first < len(numbers):
                start = starts[first]
                end = max(first + 1, int(np.searchsorted(ends, start + most, "right")))
                found.append((numbers[first:end], int(ends[end - 1] - start)))
                at[numbers[first:end]] = starts[first:end] - start
                first = end
        at[large] = 0
        # In the order of the first tensor of each.
        for numbers, nbytes in sorted(found, key=lambda one: one[0][0]):
            buffer[numbers] = len(self.specs)
            self.specs.append(BufferSpec(nbytes, None, device))
        return buffer, at

    def _most(self) -> int:
        """Bytes of a buffer on a device at most."""
        return DEVICE_BUFFER if self._alone is None else SLAB

    def _map(self, source: int) -> int:
        """The buffer that maps a source."""
        if source not in self._maps:
            self._maps[source] = len(self.specs)
            self.specs.append(BufferSpec(self._mapped[source], source))
        return self._maps[source]

    def _next(
        self, offset: int, nbytes: int, align: int, follows: bool, kind: _Kind
    ) -> tuple[int, int]:
        """Buffer and first byte behind the tensor before, of the same kind."""
        device = kind[0]
        number, cursor = self._open.get(kind, (-1, 0))
        wanted = (offset // align * align) % _PAGE
        at = cursor + (wanted - cursor) % _PAGE
        if follows and cursor:
            # Follow the file where it leads to an aligned place; it mostly does.
            at = -(-cursor // align) * align
        most = BUFFER if device is None else self._most()
        if number < 0 or at + nbytes > most + _PAGE:
            if number >= 0:
                self.specs[number] = BufferSpec(cursor, None, device)
            number, at = len(self.specs), wanted
            self.specs.append(BufferSpec(0, None, device))
        self._open[kind] = number, at + nbytes
        return number, at

    def end(self) -> tuple[BufferSpec, ...]:
        """The buffers."""
        for (device, _, _), (number, cursor) in self._open.items():
            self.specs[number] = BufferSpec(cursor, None, device)
        return tuple(self.specs)
