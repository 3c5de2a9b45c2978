"""Packing: which process reads a slab, and in which round its parts travel. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mfload.mesh import cutting
from mfload.mesh.schedule import HEADER, Parcel

ALIGNMENT = 64
"""Parcels begin at multiples of so many bytes of a row."""


class Readers:
    """Gives each slab a reader: one that wants it, while all read about as much.

    Args:
        ranks: The processes.
        grain: Bytes that one may be ahead of its share.
    """

    def __init__(self, ranks: tuple[int, ...], grain: int) -> None:
        self.due = 0  # Bytes of all tensors so far, this one counted in.
        self._read = dict.fromkeys(ranks, 0)
        self._grain = grain
        self._last = ranks[0]

    def reader(self, nbytes: int, taking: Mapping[int, int]) -> int:
        """The reader of the next slab.

        Args:
            nbytes: Its size.
            taking: Bytes that each process wants of it.
        """
        most = self.due / len(self._read) + self._grain - nbytes
        # Who wants most of it; then who read what lies before; then who has read least.
        chosen = max(
            (rank for rank, read in self._read.items() if read <= most),
            key=lambda r: (taking.get(r, 0), r == self._last, -self._read[r], -r),
            default=min(self._read, key=lambda r: (self._read[r], r)),
        )
        self._read[chosen] += nbytes
        self._last = chosen
        return chosen


class Packer:
    """Packs parcels into rounds, each reader's in the order in which it reads them."""

    def __init__(self, ranks: tuple[int, ...], width: int) -> None:
        self._width = width
        self._local: list[Parcel] = []
        self._rounds: list[list[Parcel]] = []
        self._round = dict.fromkeys(ranks, 0)
        self._full: dict[tuple[int, int], int] = {}
        self._latest: dict[tuple[int, int, int], tuple[list[Parcel], int]] = {}

    def add(self, parcels: list[Parcel]) -> None:
        """Takes the parcels of a slab, which have one reader."""
        reader = parcels[0].reader
        if all(parcel.taker == reader for parcel in parcels):
            for parcel in parcels:
                self._append(self._local, parcel)
            return
        sent: dict[int, int] = {}
        for parcel in parcels:
            if parcel.taker != reader:
                sent[parcel.taker] = sent.get(parcel.taker, 0) + _padded(parcel.nbytes)
        full = any(self._fill(reader, to) + nbytes > self._width for to, nbytes in sent.items())
        if full and any(self._fill(reader, to) > HEADER for to in self._round):
            self._round[reader] += 1
            for to in self._round:
                self._full.pop((reader, to), None)
        if any(HEADER + nbytes > self._width for nbytes in sent.values()):
            self._one_by_one(parcels)
        else:
            self._pack(parcels)

    def _one_by_one(self, parcels: list[Parcel]) -> None:
        """Parcels that one row does not hold together: boxes of one process that overlap."""
        for parcel in parcels:
            reader, to = parcel.reader, parcel.taker
            if to != reader and self._fill(reader, to) + _padded(parcel.nbytes) > self._width:
                self._round[reader] += 1
                for other in self._round:
                    self._full.pop((reader, other), None)
            self._pack([parcel])

    def _pack(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            reader, to = parcel.reader, parcel.taker
            while len(self._rounds) <= self._round[reader]:
                self._rounds.append([])
            here = self._rounds[self._round[reader]]
            if to == reader:
                self._append(here, parcel)
                continue
            wire = self._fill(reader, to)
            used = self._append(here, parcel._replace(wire=wire))
            self._full[reader, to] = wire + used

    def _fill(self, reader: int, to: int) -> int:
        return self._full.get((reader, to), HEADER)

    def _append(self, where: list[Parcel], parcel: Parcel) -> int:
        """Adds a parcel, as a part of the one before where it goes on there; bytes of the row."""
        key = parcel.reader, parcel.taker, parcel.goal
        before, place = self._latest.get(key, (None, 0))
        if before is where:
            old = where[place]
            box = cutting.joined(old.box, parcel.box)
            end = old.at + old.nbytes == parcel.at
            row = parcel.wire < 0 or old.wire + old.nbytes == parcel.wire
            if box is not None and end and row:
                where[place] = old._replace(box=box, nbytes=old.nbytes + parcel.nbytes)
                return _padded(parcel.nbytes)
        self._latest[key] = where, len(where)
        where.append(parcel)
        return _padded(parcel.nbytes)

    def end(self) -> tuple[tuple[Parcel, ...], tuple[tuple[Parcel, ...], ...]]:
        """What stays where it is read, and the rounds."""
        return tuple(self._local), tuple(map(tuple, self._rounds))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
