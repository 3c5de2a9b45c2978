"""Arrangement: which buffer each tensor lands in, and where in it. Pure.

The kernel's copy is several times slower when (destination - file offset)
mod 4096 is a small positive number, and adapters need each tensor on a multiple of some
alignment. So a tensor goes to the next position p with
p = file offset rounded down to its alignment (mod 4096): then the difference is zero or a small
negative number, and tensors that follow each other in the file follow each other in memory, so
one read fills them all. Small tensors only get their alignment: padding would outweigh them.
"""

from __future__ import annotations

from typing import NamedTuple

from mfload.planning.requests import Allocation, Request

BUFFER = 64 << 20
"""Bytes a buffer at most, so that no small tensor keeps much memory alive; a page that leads
to the place of the first comes on top."""

DEVICE_ALIGNMENT = 256
"""Alignment of tensors in device memory, in bytes: that of CUDA's own allocator."""

_PAGE = 4096
_SMALL = 64 << 10


class BufferSpec(NamedTuple):
    """A buffer to be had.

    Attributes:
        source: The source to map, None for memory.
        device: Number of the device whose memory it is, None for the host's.
    """

    nbytes: int
    source: int | None = None
    device: int | None = None


_Kind = tuple[int | None, bool]
"""What tensors of one buffer have in common: their device, and whether they are copied."""


class Arrangement:
    """Gives each need its buffer and position, in file order.

    Args:
        alignment: Bytes on which every tensor must lie; None for its element's size.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes.
    """

    def __init__(self, alignment: int | None, mapped: dict[int, int]) -> None:
        self.specs: list[BufferSpec] = []
        self._alignment = alignment
        self._mapped = mapped
        self._maps: dict[int, int] = {}
        # The buffers that still take tensors, and how much of each is taken.
        self._open: dict[_Kind, tuple[int, int]] = {}

    def place(
        self,
        request: Request,
        nbytes: int,
        contiguous: int | None,
        allocation: Allocation,
    ) -> tuple[int, int]:
        """Buffer and first byte.

        An array of the framework is a buffer of its own; what the framework copies shares no
        buffer with what stays.
        """
        device, owner, copied = allocation
        if owner == "framework":
            return self._new(nbytes, device=device), 0
        if device is None:
            piece = request.info.pieces[0]
            offset = piece.offset if contiguous is None else contiguous
            align = self._alignment or max(1, request.dtype.nbytes // request.dtype.elements)
            if self._mapped and contiguous is not None and offset % align == 0:
                mapped = self._map(piece.source)
                if mapped is not None:
                    return mapped, offset
            follows = nbytes < _SMALL
        else:
            # No kernel of the host's copies here, so there is no place that suits the file.
            offset, align, follows = 0, DEVICE_ALIGNMENT, True
        kind = device, copied
        number, cursor = self._open.get(kind, (-1, 0))
        at = _next(cursor, offset, align, follows)
        if number < 0 or at + nbytes > BUFFER + _PAGE:
            if number >= 0:
                self.specs[number] = BufferSpec(cursor, None, device)
            number, at = self._new(0, device=device), _next(0, offset, align, follows)
        self._open[kind] = number, at + nbytes
        return number, at

    def _new(self, nbytes: int, source: int | None = None, device: int | None = None) -> int:
        self.specs.append(BufferSpec(nbytes, source, device))
        return len(self.specs) - 1

    def _map(self, source: int) -> int | None:
        if source in self._mapped and source not in self._maps:
            self._maps[source] = self._new(self._mapped[source], source)
        return self._maps.get(source)

    def end(self) -> tuple[BufferSpec, ...]:
        """The buffers."""
        for (device, _), (number, cursor) in self._open.items():
            self.specs[number] = BufferSpec(cursor, None, device)
        return tuple(self.specs)


def _next(cursor: int, offset: int, align: int, follows: bool) -> int:
    """The next place for a tensor that lies at an offset of the file, and is aligned."""
    if follows and cursor:
        # Follow the file where it leads to an aligned place; it mostly does.
        return -(-cursor // align) * align
    wanted = (offset // align * align) % _PAGE
    return cursor + (wanted - cursor) % _PAGE
