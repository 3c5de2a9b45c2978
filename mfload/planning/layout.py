"""Layout: which buffer each result lands in, and where in it. Pure.

The kernel copies several times slower if (destination - file offset) mod 4096 is a small positive
number, and adapters need each tensor on a multiple of some alignment. So a tensor goes to the next
place that equals its file offset, rounded down to the alignment, mod 4096. Then the difference is
zero or a small negative number, and tensors that follow each other in the file do so in memory,
so that one read fills them all. Small tensors are only aligned: padding would outweigh them.
"""

from __future__ import annotations

from typing import NamedTuple

from mfload.planning.request import Allocation, Request

BUFFER = 64 << 20
"""Bytes a buffer at most, so that no small tensor keeps much memory alive; a page that leads
to the place of the first comes on top."""

DEVICE_ALIGNMENT = 256
"""Alignment of tensors in device memory, in bytes: that of CUDA's own allocator."""

_PAGE = 4096
_SMALL = 64 << 10


class BufferSpec(NamedTuple):
    """A buffer: a map of a source, or memory of a device (by its number) or of the host."""

    nbytes: int
    source: int | None = None
    device: int | None = None


class Layout:
    """Gives each request its buffer and position, in file order.

    Args:
        alignment: Bytes on which every tensor must lie; None for its element's size.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes.
    """

    def __init__(self, alignment: int | None, mapped: dict[int, int]) -> None:
        self.specs: list[BufferSpec] = []
        self._alignment = alignment
        self._mapped = mapped
        self._maps: dict[int, int] = {}
        # Buffers that still take tensors, and how much of each is taken, by device and by whether
        # the framework copies the tensors: what is copied shares no buffer with what stays.
        self._open: dict[tuple[int | None, bool], tuple[int, int]] = {}

    def place(
        self, request: Request, nbytes: int, contiguous: int | None, allocation: Allocation
    ) -> tuple[int, int]:
        """Buffer and first byte; an array of the framework is a buffer of its own."""
        device, owner, copied = allocation
        if owner == "framework":
            return self._new(nbytes, device=device), 0
        if device is None:
            piece = request.info.pieces[0]
            offset = piece.offset if contiguous is None else contiguous
            align = self._alignment or max(1, request.dtype.nbytes // request.dtype.elements)
            if piece.source in self._mapped and contiguous is not None and offset % align == 0:
                if piece.source not in self._maps:
                    size = self._mapped[piece.source]
                    self._maps[piece.source] = self._new(size, piece.source)
                return self._maps[piece.source], offset
            follows = nbytes < _SMALL
        else:
            # The host's kernel copies nothing here, so no place suits the file better.
            offset, align, follows = 0, DEVICE_ALIGNMENT, True
        kind = device, copied
        number, cursor = self._open.get(kind, (-1, 0))
        wanted = (offset // align * align) % _PAGE
        at = cursor + (wanted - cursor) % _PAGE
        if follows and cursor:
            # Follow the file where it leads to an aligned place; it mostly does.
            at = -(-cursor // align) * align
        if number < 0 or at + nbytes > BUFFER + _PAGE:
            if number >= 0:
                self.specs[number] = BufferSpec(cursor, None, device)
            number, at = self._new(0, device=device), wanted
        self._open[kind] = number, at + nbytes
        return number, at

    def end(self) -> tuple[BufferSpec, ...]:
        """The buffers."""
        for (device, _), (number, cursor) in self._open.items():
            self.specs[number] = BufferSpec(cursor, None, device)
        return tuple(self.specs)

    def _new(self, nbytes: int, source: int | None = None, device: int | None = None) -> int:
        self.specs.append(BufferSpec(nbytes, source, device))
        return len(self.specs) - 1
