"""Which way a load goes: engines, threads, slots and waves, chosen before data is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mfload import errors, planning, waves
from mfload.frameworks.adapter import Adapter
from mfload.index import Index
from mfload.io import buffers, probes, route as routing
from mfload.io.blocks import Costs
from mfload.io.source import LocalFile
from mfload.placement import Need
from mfload.planning import Plan
from mfload.preview import Preview
from mfload.settings import Settings

_PLAIN = (None, "C", "raw")  # A piece's box, order and encoding.
_MAX_RANK = 64  # NumPy's, and every view is a NumPy array first.
_MAX_SPAN = 2**63 - 1
_LEAST_BLOCK = 64 << 10
_MOST_THREADS = 8
# Reads past the page cache wait for the disk, not for a core: as many as keep it busy, in
# blocks whose slots stay in the processor's cache until they are copied out.
_DIRECT_THREADS = 4
_DIRECT_BLOCK = 4 << 20
_PAGE = buffers.PAGE


class Preparation:
    """The way a load goes, decided once: every wave of it goes the same way.

    Opens the files, reads nothing.

    Args:
        needs: What is wanted, as `check` lets it pass.
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        settings: How.

    Attributes:
        route: The leg of each source that is used, by its number.
        threads: Readers at once.
        waves: Positions of the needs that are loaded together, wave by wave.
        notes: What was decided without being asked for.

    Raises:
        MemoryLimitError: A tensor that must be copied is larger than the overhead allowed.
        SourceError: A file can't be opened or has changed.
    """

    def __init__(
        self,
        needs: Sequence[Need],
        index: Index,
        sources: Sequence[LocalFile],
        adapter: Adapter,
        settings: Settings,
    ) -> None:
        self._needs = needs
        self._sources = sources
        self._adapter = adapter
        self._settings = settings
        self.waves = waves.groups(needs, adapter, settings)
        wanted: dict[int, int] = {}
        for need in needs:
            source = need.info.pieces[0].source
            stored = need.info.nbytes if need.selection is None else need.nbytes
            wanted[source] = wanted.get(source, 0) + stored
        used = sorted(wanted)
        legs = settings.deadline.bound(
            lambda: routing.choose([(sources[n], wanted[n]) for n in used], settings.engine),
            "opening the files",
        )
        self.route = dict(zip(used, legs, strict=True))
        self.threads = settings.threads or _threads(legs)
        self._direct = any(leg.engine == "direct" for leg in legs)
        block = _DIRECT_BLOCK if self._direct else Costs().block
        self._costs = _costs(settings, self.threads, block)
        self.notes = (*index.notes, *self._decided())

    def _decided(self) -> Iterator[str]:
        adapter = self._adapter
        if len(self.waves) > 1:
            yield (
                f"loaded in {len(self.waves)} waves, since {adapter.name} copies tensors; the "
                "buffers of a wave go before the next"
            )
        if parted := waves.apart(self._needs, self.waves):
            yield (
                f"{parted} tensors are read once a wave, since their parts together exceed the "
                "overhead; a larger max_host_overhead= reads them once"
            )
        lent = waves.lendable(self._needs, adapter, self._settings)
        rest = (need.info.name for n, need in enumerate(self._needs) if n not in lent)
        missing = len(set(rest))
        if self._settings.landing == "framework" and adapter.on_host and missing:
            yield (
                f"{missing} tensors land in mfload's memory: "
                f"{adapter.name} can't lend any for their dtypes"
            )

    @property
    def costs(self) -> Costs:
        """What a read may be."""
        return self._costs

    def plan(self, needs: Sequence[Need]) -> Plan:
        """The plan of a wave, or of all."""
        route = self.route
        return planning.make(
            needs,
            alignment=self._adapter.alignment,
            costs=self._costs,
            separate=waves.lendable(needs, self._adapter, self._settings),
            mapped={n: self._sources[n].size for n in route if route[n].engine == "mmap"},
        )

    def overhead(self, made: Plan) -> int:
        """The most bytes that a plan made here holds beside the result."""
        slots = min(self._slot(made) * self.threads, made.read_bytes + 2 * _PAGE * self.threads)
        waiting = waves.copied([place.need for place in made.places], self._adapter)
        limit = waves.waiting_limit(waiting, self._adapter, self._settings)
        # Slots are gone before the framework copies, so the two don't add up.
        return max(slots, min(sum(need.nbytes for need in waiting), limit))

    def _slot(self, made: Plan) -> int:
        """The most bytes that a reader's slot holds."""
        costs = self._costs
        if not self._direct:
            return max(made.staged + 2 * _PAGE if made.staged else 0, costs.merge_gap)
        return max(costs.block, made.staged) + 2 * _PAGE

    def _copied(self, made: Plan) -> int:
        """Bytes of a plan that are copied in memory once they were read, at most."""
        direct = {number for number, leg in self.route.items() if leg.engine == "direct"}
        placed = sum(b.wanted for b in made.blocks if b.staged or b.source in direct)
        waiting = waves.copied([place.need for place in made.places], self._adapter)
        return placed + sum(need.nbytes for need in waiting)

    def preview(self) -> Preview:
        """All of it, for people."""
        made = self.plan(self._needs)
        plans = (made,)
        notes = self.notes
        if len(self.waves) > 1:
            plans = tuple(self.plan([self._needs[n] for n in wave]) for wave in self.waves)
            notes += ("this plan shows its waves as one",)
        overhead = max(self.overhead(each) for each in plans)
        return Preview(
            made,
            tuple(self.route.values()),
            self._adapter.name,
            overhead,
            self.threads,
            notes,
            read_bytes=sum(each.read_bytes for each in plans),
            wanted_bytes=sum(each.wanted_bytes for each in plans),
            copied_bytes=sum(self._copied(each) for each in plans),
            peak_bytes=overhead + sum(_padding(each) for each in plans),
        )


def _padding(made: Plan) -> int:
    """Bytes of a plan's buffers that belong to no result."""
    return made.buffer_bytes - (made.result_bytes - made.mapped_bytes)


def check(needs: Sequence[Need], index: Index) -> None:
    """Refuses by name what is legal in an index and can't become an array.

    Raises:
        UnsupportedShapeError: A shape that no array can have.
        UnsupportedDtypeError: A dtype that mfload does not know, or pieces that the plan can't
            slice: it knows one raw piece a tensor, in C order.
    """
    for need in needs:
        piece = need.info.pieces[0]
        if len(need.info.pieces) != 1 or piece[3:] != _PLAIN:
            raise errors.UnsupportedDtypeError(
                "the tensor is stored in a way that mfload can't read yet",
                file=index.files[piece.source],
                tensor=need.info.name,
                expected="one raw piece in C order",
                found=f"{len(need.info.pieces)} pieces, {piece.encoding}, {piece.order} order",
            )
        shape = need.info.shape
        # Without a zero among its dims, a tensor is no larger than its file.
        large = 0 in shape and _span(need) > _MAX_SPAN
        if need.dtype.known and len(shape) <= _MAX_RANK and not large:
            continue
        file = index.files[need.info.pieces[0].source]
        if not need.dtype.known:
            raise errors.UnsupportedDtypeError(
                "the dtype is not known to mfload",
                file=file,
                tensor=need.info.name,
                found=need.dtype.name,
            )
        raise errors.UnsupportedShapeError(
            "no array can have this shape",
            file=file,
            tensor=need.info.name,
            expected=f"at most {_MAX_RANK} dims, and strides that fit 63 bits",
            found=str(shape),
        )


def _span(need: Need) -> int:
    """Bytes that strides have to reach over, were the dims of no length of length one."""
    count = math.prod(filter(None, need.info.shape[:_MAX_RANK]))
    return count * max(need.info.dtype.nbytes, need.dtype.nbytes)


def _threads(legs: Sequence[routing.Leg]) -> int:
    wanted = min(probes.cores(), _MOST_THREADS)
    if any(leg.engine == "direct" for leg in legs):
        return max(wanted, _DIRECT_THREADS)
    return wanted


def threads_at_most(settings: Settings) -> int:
    """Readers at once, at most, whatever files there are."""
    return settings.threads or max(min(probes.cores(), _MOST_THREADS), _DIRECT_THREADS)


def least(threads: int) -> int:
    """The least overhead that leaves each of some readers a slot."""
    return threads * (_LEAST_BLOCK + 3 * _PAGE)


def _costs(settings: Settings, threads: int, block: int) -> Costs:
    limit = settings.max_host_overhead
    gap = Costs().merge_gap if settings.merge_gap is None else settings.merge_gap
    if limit is None:
        return Costs(block=block, merge_gap=gap)
    block = min(block, limit // threads // _PAGE * _PAGE - 2 * _PAGE)
    if block < _LEAST_BLOCK:
        raise errors.UsageError(
            "max_host_overhead is too small for a slot a reader",
            expected=f"{least(threads)} bytes or more, or fewer threads",
            found=limit,
        )
    return Costs(block=block, merge_gap=gap)
