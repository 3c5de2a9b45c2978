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

from mfload.placement import Need

BUFFER = 64 << 20
"""Bytes a buffer at most, so that no small tensor keeps much memory alive; a page that leads
to the place of the first comes on top."""

_PAGE = 4096
_SMALL = 64 << 10


class BufferSpec(NamedTuple):
    """A buffer to be had.

    Attributes:
        nbytes: Length in bytes.
        source: The source to map, None for memory.
    """

    nbytes: int
    source: int | None = None


class Arrangement:
    """Gives each need its buffer and position, in file order.

    Args:
        alignment: Bytes on which every tensor must lie; None for its element's size.
        mapped: Sources that may be mapped instead of read, with their sizes in bytes.
    """

    def __init__(self, alignment: int | None, mapped: dict[int, int]) -> None:
        self._specs: list[BufferSpec] = []
        self._alignment = alignment
        self._mapped = mapped
        self._maps: dict[int, int] = {}
        self._open = -1  # The buffer that still takes tensors.
        self._cursor = 0

    def place(
        self, need: Need, nbytes: int, contiguous: int | None, *, alone: bool
    ) -> tuple[int, int]:
        """Buffer and first byte."""
        if alone:
            return self._new(nbytes), 0
        piece = need.info.pieces[0]
        offset = piece.offset if contiguous is None else contiguous
        align = self._alignment or max(1, need.dtype.nbytes // need.dtype.elements)
        if self._mapped and contiguous is not None and offset % align == 0:
            mapped = self._map(piece.source)
            if mapped is not None:
                return mapped, offset
        at = self._next(nbytes, offset, align)
        if self._open < 0 or at + nbytes > BUFFER + _PAGE:
            self._close()
            self._open, self._cursor = self._new(0), 0
            at = self._next(nbytes, offset, align)
        self._cursor = at + nbytes
        return self._open, at

    def _next(self, nbytes: int, offset: int, align: int) -> int:
        if nbytes < _SMALL and self._cursor:
            # Follow the file where it leads to an aligned place; it mostly does.
            return -(-self._cursor // align) * align
        wanted = (offset // align * align) % _PAGE
        return self._cursor + (wanted - self._cursor) % _PAGE

    def _new(self, nbytes: int, source: int | None = None) -> int:
        self._specs.append(BufferSpec(nbytes, source))
        return len(self._specs) - 1

    def _map(self, source: int) -> int | None:
        if source in self._mapped and source not in self._maps:
            self._maps[source] = self._new(self._mapped[source], source)
        return self._maps.get(source)

    def is_map(self, buffer: int) -> bool:
        """Whether a buffer is a map of a file, which needs no reading."""
        return self._specs[buffer].source is not None

    def _close(self) -> None:
        if self._open >= 0:
            self._specs[self._open] = BufferSpec(self._cursor)

    def end(self) -> tuple[BufferSpec, ...]:
        """The buffers."""
        self._close()
        return tuple(self._specs)
