"""Copies tensors to the drafts of new files.

Raw bytes are streamed from the old files, in their order: parts that stay together, cut where a
draft's blocks end so that writes go past the page cache. Tensors that are stored in another way
(compressed, in several pieces, in another order) are loaded in slabs. Each write is hashed, to be
compared when the drafts are read back (see `sealing`). Memory held is a block a reader, the slabs
that are read ahead, and a table of the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.checking.checksums import Hasher, Stopped
from mfload.checking.renaming import Cast
from mfload.checking.scan import Advance, check_unchanged, cut, gap, joined
from mfload.checking.sealing import Seal
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Index, Piece
from mfload.loading import stream
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.blocks import Block
from mfload.planning.request import Request
from mfload.planning.slicing import boxed, slabs
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.journal import Journal
from mfload.saving.layout import Layout
from mfload.sources.base import Source


class Copier:
    """Observer that writes what it is shown to drafts, and hashes each write.

    Attributes:
        resumed: Bytes that were written before.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        layouts: Sequence[Layout],
        sources: Sequence[Source],
        hasher: Hasher,
        seal: Seal,
        journal: Journal | None,
    ) -> None:
        self.drafts, self.layouts = drafts, layouts
        self.written = seal.written
        self.written |= journal.found if journal else {}
        self.resumed = sum(block.nbytes for block in self.written)
        self._hasher, self._seal, self._journal = hasher, seal, journal
        for number, made in enumerate(layouts):
            header = np.frombuffer(made.header, np.uint8)
            for block in cut(Block(number, 0, header.size, ())):
                self._write(block, [header[block.offset :][: block.nbytes]])
        parts = [part for number, made in enumerate(layouts) for part in _parts(number, made)]
        self._parts = {
            block: [parts[n] for n in numbers]
            for block, numbers in joined([old for old, _ in parts], gap(sources), BLOCK)
        }

    def left(self, advance: Advance) -> list[Block]:
        """The blocks of the sources that are still to be read."""
        if not self.resumed:
            return [*self._parts]
        found: list[Block] = []
        for block, parts in self._parts.items():
            written = joined([new for _, new in parts], 0, BLOCK)
            if not all(new in self.written for new, _ in written):
                found.append(block)
            elif advance is not None:
                advance(block.nbytes)
        return found

    def saw(self, source: int, offset: int, data: Any, stopped: Stopped) -> None:
        """Takes the next block; parts that become neighbours are written together."""
        self._hasher.saw(source, offset, data, stopped)
        parts = self._parts[Block(source, offset, data.size, ())]
        pieces = [data[old.offset - offset :][: old.nbytes] for old, _ in parts]
        for block, numbers in joined([new for _, new in parts], 0, BLOCK):
            self._write(block, [pieces[n] for n in numbers])

    def load(
        self, index: Index, sources: Sequence[Source], how: LoadOptions, advance: Advance
    ) -> None:
        """Loads the tensors that are not one raw range each, in slabs, and writes them."""
        slabs = [s for n, made in enumerate(self.layouts) for s in _slabs(n, made, how)]
        # What a slab becomes, cut where blocks end; neighbours in a block are written together.
        parts = [(n, part) for n, (_, new) in enumerate(slabs) for part in _cut(new)]
        blocks = [*_blocks([part for _, part in parts])]
        wanted = {parts[n][0] for block, each in blocks if block not in self.written for n in each}
        if advance is not None:
            advance(sum(new.nbytes for n, (_, new) in enumerate(slabs) if n not in wanted))
        if not wanted:
            return
        if (seconds := how.deadline.seconds) is not None:
            seconds = max(0.0, min(seconds, how.deadline.left()))
        numbers = sorted(wanted)
        requests = [slabs[n][0] for n in numbers]
        given = index, sources, NumpyAdapter(), how.replace(timeout=seconds, allocator="mfload")
        sizes = [each.nbytes for each in requests]
        with stream.stream(stream.Tensors(*given, requests, sizes, None), False) as opened:
            self._take(iter(numbers), opened, slabs, parts, blocks, how, advance)
        check_unchanged(sources, {p.source for s in requests for p in s.info.pieces}, how)

    def _take(
        self,
        numbers: Iterator[int],
        opened: stream.Stream[Any],
        slabs: Sequence[tuple[Request, Piece]],
        parts: Sequence[tuple[int, Piece]],
        blocks: Sequence[tuple[Block, list[int]]],
        how: LoadOptions,
        advance: Advance,
    ) -> None:
        """Writes slabs as they come, in the order of the drafts."""
        here, data = -1, np.empty(0, np.uint8)
        for block, each in blocks:
            if block in self.written:
                continue
            pieces: list[Any] = []
            for n in each:
                number, part = parts[n]
                while here < number:
                    how.deadline.left()
                    here = next(numbers)
                    # The slab before goes before the next one comes, but for the end of it that
                    # is written together with that.
                    pieces = [np.array(piece) for piece in pieces]
                    data = np.empty(0, np.uint8)
                    data = np.ascontiguousarray(next(opened)[1]).reshape(-1).view(np.uint8)
                    if advance is not None:
                        advance(data.size)
                at = part.offset - slabs[number][1].offset
                pieces.append(data[at : at + part.nbytes])
            self._write(block, pieces)
            del pieces

    def _write(self, block: Block, pieces: list[Any]) -> None:
        if block in self.written:
            return
        self._seal.write(block.source, self.drafts[block.source], block.offset, pieces)
        if self._journal is not None:
            self._journal.add(block, self.written[block])


def _parts(number: int, made: Layout) -> Iterator[tuple[Piece, Piece]]:
    """Raw parts of the old files, and where each goes: cut where the blocks of the new file end.

    Tensors that stay neighbours go together.
    """
    at = len(made.header)
    runs: list[tuple[int, int, int, int]] = []  # Source, offset, bytes, and where they go.
    for row in made.entries:
        if not row.simple:
            runs.append((-1, 0, 0, 0))
            at += row.nbytes
            continue
        piece: Piece = row.pieces[0]
        source, offset, nbytes, start = runs[-1] if runs else (-1, 0, 0, 0)
        if (source, offset + nbytes) == (piece.source, piece.offset):
            runs[-1] = source, offset, nbytes + piece.nbytes, start
        else:
            runs.append((piece.source, piece.offset, piece.nbytes, at))
        at += piece.nbytes
    for source, offset, nbytes, at in runs:
        for new in _cut(Piece(number, at, nbytes)):
            yield Piece(source, offset + new.offset - at, new.nbytes), new


def _cut(part: Piece) -> Iterator[Piece]:
    """A range of a draft, cut where its blocks end."""
    at, end = part.offset, part.offset + part.nbytes
    while at < end:
        stop = min(end, (at // BLOCK + 1) * BLOCK)
        yield Piece(part.source, at, stop - at)
        at = stop


def _blocks(parts: Sequence[Piece]) -> Iterator[tuple[Block, list[int]]]:
    """Joins neighbours in the same block of a draft: the same ones, however slabs were cut."""

    def place(n: int) -> tuple[int, int]:
        return parts[n].source, parts[n].offset // BLOCK

    for _, group in itertools.groupby(range(len(parts)), place):
        numbers = list(group)
        for block, each in joined([parts[n] for n in numbers], 0, BLOCK):
            yield block, [numbers[n] for n in each]


def _slabs(number: int, made: Layout, how: LoadOptions) -> Iterator[tuple[Request, Piece]]:
    """The tensors that are to be loaded, in slabs that follow each other, and where each goes."""
    at, limit = len(made.header), how.max_host_overhead
    whole = OVERHEAD if limit is None else limit
    most = min(stream.BATCH, whole // 4)
    for row in made.entries:
        if not row.simple and row.nbytes:
            info, checked = (row.info, row.checked) if isinstance(row, Cast) else (row, False)
            boxes = [None] if row.dtype.elements > 1 else slabs(info, row.nbytes, most, whole)
            start = at
            for box in boxes:
                part = None if box is None else boxed(info, box)
                request = Request(info, row.dtype, part, checked)
                if limit is not None and request.nbytes > limit:
                    raise errors.MemoryLimitError(
                        "a tensor that can't be loaded in parts is larger than max_host_overhead",
                        tensor=row.name,
                        expected=f"at least {errors.amount(request.nbytes, limit)}",
                        found=errors.amount(limit, limit),
                    )
                yield request, Piece(number, start, request.nbytes)
                start += request.nbytes
        at += row.nbytes
