"""Copies tensors to the drafts of new files.

A lot is what is written of a draft at one go. Raw bytes stay together as they lie in the old files,
in whose order they are read: parts that are cut where a draft's blocks end, so that writes go past
the page cache. Tensors that are stored in another way (compressed, in several pieces, in another
order), or converted, are put together in memory. Each write is hashed, to be compared when the
drafts are read back (see `sealing`). Memory held is a lot a reader, and a table of the lots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mfload.checking.checksums import Hasher, Stopped
from mfload.checking.renaming import Cast, Row
from mfload.checking.scan import Advance, gap, scan
from mfload.checking.sealing import Seal
from mfload.index import Piece, TensorInfo
from mfload.io.buffers import PAGE
from mfload.options import LoadOptions
from mfload.planning import lots
from mfload.planning.blocks import Block, Costs, Lot
from mfload.planning.lots import cut, joined
from mfload.planning.memory import Ledger
from mfload.planning.request import Request
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.journal import Journal
from mfload.saving.layout import FileLayout
from mfload.sources.base import Source

_LANDED = 8  # Of the overhead: a lot that is put together in memory, and what reads it.


class Copier:
    """Place that writes what it takes to drafts, and hashes each write.

    The key of a lot says which ranges of the drafts are written, each of ranges of its bytes.

    Attributes:
        resumed: Bytes that were written before.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        layouts: Sequence[FileLayout],
        sources: Sequence[Source],
        how: LoadOptions,
        hasher: Hasher,
        seal: Seal,
        journal: Journal | None,
    ) -> None:
        self._drafts, self._sources, self._how = drafts, sources, how
        self._hasher, self._seal, self._journal = hasher, seal, journal
        self._raw = [*_raw(layouts, gap(sources))]
        costs = sources[0].costs if sources else Costs()
        self._landed: list[Lot] = []
        heads: list[Block] = []
        for number, made in enumerate(layouts):
            self._landed += _landed(number, made, how, costs)
            heads += cut(Piece(number, 0, len(made.header)), BLOCK)
        # Lots of an earlier writer may have had other edges, as with another limit.
        ours = {block for lot in (*self._raw, *self._landed) for block, _ in lot.key}.union(heads)
        found = {} if journal is None else journal.found
        seal.take_over({b: found[b] for b in found.keys() & ours}, drafts, how)
        for block in found.keys() - seal.written.keys():
            drafts[block.source].count(-block.nbytes)
        self.resumed = sum(block.nbytes for block in seal.written)
        for block in heads:
            header = np.frombuffer(layouts[block.source].header, np.uint8)
            self._write(block, [header[block.offset :][: block.nbytes]])

    def run(self, advance: Advance) -> None:
        """Writes what is not written yet."""
        for some, shrinks in ((self._raw, False), (self._landed, True)):
            written = self._seal.written.keys()
            left = [lot for lot in some if any(block not in written for block, _ in lot.key)]
            if advance is not None and len(left) < len(some):
                advance(sum(lot.nbytes for lot in some) - sum(lot.nbytes for lot in left))
            scan(self._sources, left, self, self._how, advance, shrinks=shrinks)

    def take(self, lot: Lot, number: int, data: Any, stopped: Stopped) -> None:
        """Writes a lot."""
        if not lot.size:
            self._hasher.take(lot, number, data, stopped)
        for block, places in lot.key:
            self._write(block, [data[start:stop] for start, stop in places])

    def _write(self, block: Block, pieces: list[Any]) -> None:
        written = self._seal.written
        if block in written:
            return
        self._seal.write(block.source, self._drafts[block.source], block.offset, pieces)
        if self._journal is not None:
            self._journal.add(block, written[block])


def _raw(layouts: Sequence[FileLayout], gap: int) -> Iterator[Lot]:
    """Lots of the bytes that stay as they are."""
    parts = [part for number, made in enumerate(layouts) for part in _parts(number, made)]
    for block, numbers in joined([old for old, _ in parts], gap, BLOCK):
        some = [parts[n] for n in numbers]
        key: list[Any] = []
        # Parts that become neighbours are written together.
        for new, members in joined([new for _, new in some], 0, BLOCK):
            olds = [some[n][0] for n in members]
            starts = [old.offset - block.offset for old in olds]
            places = [(at, at + old.nbytes) for at, old in zip(starts, olds, strict=True)]
            key.append((new, places))
        yield lots.raw(block, key=key)


def _parts(number: int, made: FileLayout) -> Iterator[tuple[Piece, Block]]:
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
        for new in cut(Piece(number, at, nbytes), BLOCK):
            yield Piece(source, offset + new.offset - at, new.nbytes), new


def _landed(number: int, made: FileLayout, how: LoadOptions, costs: Costs) -> Iterator[Lot]:
    """Lots of what is put together in memory: small tensors in a block of a draft go together."""
    ledger, at = Ledger(how), len(made.header)
    costs = costs._replace(span=ledger.share(_LANDED))
    waiting: list[Request] = []
    start = end = 0
    for row in made.entries:
        bits, checked = row.dtype.bits, isinstance(row, Cast) and row.checked
        for first, stop in () if row.simple or not row.nbytes else _ranges(row, at, ledger):
            low, nbytes = at + first * bits // 8, (stop - first) * bits // 8
            what = f"a tensor that can't be loaded in parts is larger than {ledger.name}"
            ledger.check(nbytes, what, row.name, "at least {}")
            if waiting and (low != end or start // BLOCK != (low + nbytes - 1) // BLOCK):
                yield _lot(waiting, Piece(number, start, end - start), costs)
                waiting = []
            start, end = start if waiting else low, low + nbytes
            waiting += lots.parts(info_of(row), row.dtype, first, stop, checked=checked)
        at += row.nbytes
    if waiting:
        yield _lot(waiting, Piece(number, start, end - start), costs)


def _lot(requests: Sequence[Request], new: Piece, costs: Costs) -> Lot:
    """A lot that lies in memory as in a page of the draft, so that it is written from there."""
    lead = new.offset % PAGE
    first = new.offset - lead
    key = [(b, [(b.offset - first, b.offset - first + b.nbytes)]) for b in cut(new, BLOCK)]
    return lots.landed(requests, new.nbytes, costs, at=lead, key=key)


def info_of(row: Row) -> TensorInfo:
    """What the source says of a tensor, under the name that it gets."""
    return row.info if isinstance(row, Cast) else row


def _ranges(row: Row, at: int, ledger: Ledger) -> Iterator[tuple[int, int]]:
    """Ranges of elements of a tensor whose bytes begin at `at` of a draft."""
    info, bits = info_of(row), row.dtype.bits
    if not info.simple or info.dtype.elements > 1:
        yield from lots.ranges((info, row), ledger.share(_LANDED), ledger.most)
        return
    edges = [(b.offset - at) * 8 // bits for b in cut(Piece(0, at, row.nbytes), BLOCK)]
    edges = sorted({*edges, row.nbytes * 8 // bits})
    yield from itertools.pairwise(edges)
