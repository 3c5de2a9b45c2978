"""From needs to a preview: engines, threads, slots and waves, chosen before data is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mfload import errors, planning
from mfload.frameworks.adapter import Adapter
from mfload.index import Index
from mfload.io import buffers, probes, route as routing
from mfload.io.blocks import Costs
from mfload.io.source import LocalFile
from mfload.placement import Need
from mfload.preview import Preview
from mfload.settings import OVERHEAD, Settings

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


def prepare(
    needs: Sequence[Need],
    index: Index,
    sources: Sequence[LocalFile],
    adapter: Adapter,
    settings: Settings,
) -> Preview:
    """Plans a load and chooses its route; opens the files, reads nothing.

    Args:
        needs: What is wanted, as `check` lets it pass.
        index: The checkpoint's table.
        sources: Its files.
        adapter: The framework.
        settings: How.

    Raises:
        MemoryLimitError: A tensor that must be copied is larger than the overhead allowed.
        SourceError: A file can't be opened or has changed.
    """
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
    route = dict(zip(used, legs, strict=True))
    threads = settings.threads or _threads(legs)
    direct = any(leg.engine == "direct" for leg in legs)
    costs = _costs(settings, threads, _DIRECT_BLOCK if direct else Costs().block)
    notes = list(index.notes)
    groups = len(waves(needs, adapter, settings))
    if groups > 1:
        notes.append(
            f"loaded in {groups} waves, since {adapter.name} copies tensors; this plan shows "
            "them as one, the buffers of a wave go before the next"
        )
    lent = lendable(needs, adapter, settings)
    if settings.landing == "framework" and adapter.on_host and len(lent) < len(needs):
        notes.append(
            f"{len(needs) - len(lent)} tensors land in mfload's memory: "
            f"{adapter.name} can't lend any for their dtypes"
        )
    made = planning.make(
        needs,
        alignment=adapter.alignment,
        costs=costs,
        separate=lent,
        mapped={n: sources[n].size for n in used if route[n].engine == "mmap"},
    )
    slot = costs.block + 2 * _PAGE if direct or made.staged else costs.merge_gap
    slots = min(slot * threads, made.read_bytes + 2 * _PAGE * threads)
    waiting = copied(needs, adapter)
    # Slots are gone before the framework copies, so the two don't add up.
    held = min(sum(need.nbytes for need in waiting), _waiting(waiting, adapter, settings))
    overhead = max(slots, held)
    return Preview(made, tuple(legs), adapter.name, overhead, threads, tuple(notes))


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


def _costs(settings: Settings, threads: int, block: int) -> Costs:
    limit = settings.max_host_overhead
    if limit is None:
        return Costs(block=block)
    block = min(block, limit // threads // _PAGE * _PAGE - 2 * _PAGE)
    if block < _LEAST_BLOCK:
        raise errors.UsageError(
            "max_host_overhead is too small for a slot a reader",
            expected=f"{threads * (_LEAST_BLOCK + 3 * _PAGE)} bytes or more, or fewer threads",
            found=limit,
        )
    return Costs(block=block)


def lendable(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> frozenset[int]:
    """Positions of the needs that land in the framework's own memory."""
    if settings.landing != "framework" or not adapter.on_host:
        return frozenset()
    return frozenset(n for n, need in enumerate(needs) if need.dtype.name in adapter.lendable)


def copied(needs: Sequence[Need], adapter: Adapter) -> list[Need]:
    """The needs that the framework copies out of mfload's memory."""
    if not adapter.on_host:
        return list(needs)
    names = {name for name, form in adapter.forms.items() if form.how == "copy"}
    return [need for need in needs if need.dtype.name in names] if names else []


def waves(needs: Sequence[Need], adapter: Adapter, settings: Settings) -> list[list[int]]:
    """Groups of needs; what the framework copies never exceeds the overhead in any.

    Raises:
        MemoryLimitError: One tensor exceeds it alone.
    """
    waiting = copied(needs, adapter)
    limit = _waiting(waiting, adapter, settings)
    if sum(need.nbytes for need in waiting) <= limit:
        return [list(range(len(needs)))]
    names = {need.info.name for need in waiting}
    groups: list[list[int]] = [[]]
    held = 0
    for n, need in enumerate(needs):
        nbytes = need.nbytes if need.info.name in names else 0
        if nbytes and held + nbytes > limit:
            groups.append([])
            held = 0
        held += nbytes
        groups[-1].append(n)
    return groups


def _waiting(waiting: Sequence[Need], adapter: Adapter, settings: Settings) -> int:
    """Bytes of tensors that may wait at once to be copied by the framework."""
    if not waiting:
        return 0
    limit = settings.max_host_overhead
    largest = max(waiting, key=lambda need: need.nbytes)
    if limit is None:
        return max(OVERHEAD, largest.nbytes)
    if largest.nbytes > limit:
        raise errors.MemoryLimitError(
            f"{adapter.name} must copy the tensor, which is larger than the overhead",
            tensor=largest.info.name,
            expected=f"max_host_overhead of {largest.nbytes} bytes or more",
            found=limit,
        )
    return limit
