"""The plan in columns is the plan row by row."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from mfload import dtypes
from mfload.dlpack import Views
from mfload.frameworks import numpy_adapter
from mfload.index import Columns, Piece, TensorInfo
from mfload.planning import layout, request
from mfload.planning.blocks import Costs
from mfload.planning.plan import make_plan
from mfload.planning.request import Allocation, Request, WholeTensors

SLOW = bool(os.environ.get("MFLOAD_SLOW"))
_KINDS = ["U8", "BF16", "F32", "F64", "C64", "F4", "F6_E2M3", "F31"]


def _rows(rng: random.Random, count: int, sources: int, largest: int) -> list[TensorInfo]:
    """Tensors of several files, mostly small, back to back or with gaps, some of them empty."""
    rows: list[TensorInfo] = []
    names = rng.sample(_KINDS, rng.randint(1, len(_KINDS)))
    tidy = rng.random() < 0.5
    for source in range(sources):
        offset = rng.choice([8, 64, 4096, 4097, 5000])
        for _ in range(count):
            dtype = dtypes.lookup(rng.choice(names))
            blocks = rng.choice([0, 1, 3, 16, 100, rng.randrange(1 << 10), 16384, largest])
            shape = (blocks * dtype.elements,) if tidy else (blocks, dtype.elements)
            nbytes = blocks * max(1, dtype.nbytes)
            piece = Piece(source, offset, nbytes)
            rows.append(TensorInfo(f"{len(rows)}", dtype, shape, (piece,)))
            offset += nbytes + (0 if tidy else rng.choice([0, 0, 0, 1, 4, 5000]))
    return rows


def _options(rng: random.Random, rows: list[TensorInfo], sources: int) -> dict[str, Any]:
    ends = [8] * sources
    for row in rows:
        source, offset, nbytes, _ = row.pieces[0]
        ends[source] = max(ends[source], offset + nbytes)
    return {
        "alignment": rng.choice([None, 1, 16, 64, 256]),
        "costs": Costs(
            block=rng.choice([1 << 14, 1 << 18, 16 << 20]), merge_gap=rng.choice([0, 3, 64, 4096])
        ),
        "mapped": {n: ends[n] for n in range(sources) if rng.random() < 0.3},
        "alone": rng.choice([None, 5000, 100_000, (1 << 20) + 1]),
    }


# Seeds, not Hypothesis: to shrink a case of a thousand tensors takes minutes.
@pytest.mark.parametrize("seed", range(300 if SLOW else 80))
def test_columns_and_rows_make_the_same_plan(seed: int) -> None:
    rng = random.Random(seed)
    sources = rng.randint(1, 3)
    rows = _rows(rng, rng.choice([1, 2, 40, 300]), sources, rng.choice([10, 70_000, 1 << 19]))
    rows = [row for row in rows if rng.random() < 0.8] or rows
    if seed % 3 == 0:
        rng.shuffle(rows)
    options = _options(rng, rows, sources)
    buffer = rng.choice([5000, 300_000, 64 << 20])
    if seed % 2:
        options["allocations"] = [Allocation(seed % 4, "mfload", copied=False)] * len(rows)
    whole = WholeTensors(Columns.of(rows))
    requests = [Request(row, row.dtype) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BUFFER", buffer)
        patch.setattr(layout, "DEVICE_BUFFER", 2 * buffer)
        patch.setattr(layout, "SLAB", buffer // 2)
        patch.setattr(layout, "_DEVICE_SMALL", rng.choice([3000, 50_000, 1 << 20]))
        ours, theirs = make_plan(whole, **options), make_plan(requests, **options)
    assert list(ours.places) == list(theirs.places)
    assert ours[1:] == theirs[1:]
    assert [ours.places[n] for n in range(len(rows))] == list(theirs.places)
    for each in ("result_bytes", "read_bytes", "wanted_bytes", "mapped_bytes", "buffer_bytes"):
        assert getattr(ours, each) == getattr(theirs, each)
    assert ours.device_bytes == theirs.device_bytes
    assert ours._sum(lambda _: True) == theirs._sum(lambda _: True)
    assert not ours.copied_bytes
    assert not ours.lent_bytes
    for block in ours.blocks[:3]:
        assert ours.tensors_of(block) == theirs.tensors_of(block)


def test_a_plan_of_a_hundred_thousand_tensors_has_few_objects() -> None:
    dtype = dtypes.TABLE["F32"]
    rows = [
        TensorInfo(f"{n}", dtype, (256,), (Piece(0, n << 10, 1 << 10),)) for n in range(100_000)
    ]
    plan = make_plan(request.whole(Columns.of(rows)))
    assert [len(block.segments) for block in plan.blocks][:3] == [1, 1, 1]
    assert len(plan.blocks) < 20
    assert isinstance(plan.requests, WholeTensors)


def test_requests_in_columns_are_those_in_rows() -> None:
    rows = _rows(random.Random(0), 300, 2, 1000)
    requests = request.whole(Columns.of(rows))
    rowwise = [Request(row, row.dtype) for row in rows]
    assert isinstance(requests, WholeTensors)
    assert list(requests) == rowwise
    assert [requests[n] for n in (0, 7, -1)] == [rowwise[n] for n in (0, 7, -1)]
    assert list(requests[5:90:3]) == rowwise[5:90:3]
    assert list(request.names(requests)) == request.names(rowwise)
    assert list(request.sizes(requests)) == [each.info.nbytes for each in rowwise]
    kinds = [(row.dtype.name, row.shape) for row in rows]
    first = [row.name for n, row in enumerate(rows) if kinds.index(kinds[n]) == n]
    assert [each.info.name for each in requests.of_each_kind()] == first


def test_few_requests_and_tensors_of_pieces_stay_rows() -> None:
    rows = _rows(random.Random(0), 300, 1, 1000)
    assert type(request.whole(Columns.of(rows[:10]))) is list
    pieces = rows[0]._replace(pieces=(Piece(0, 8, 2), Piece(0, 30, 2)))
    assert type(request.whole(Columns.of([*rows, pieces]))) is list


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_numpy_makes_the_same_arrays_at_once_and_one_by_one(seed: int, readonly: bool) -> None:
    rng = random.Random(seed)
    shapes = [(), (0,), (3,), (2, 3), (1,) * 64, (0, 5), (4, 1)]
    kinds = [(dtypes.TABLE[rng.choice(["U8", "BF16", "F32"])], rng.choice(shapes)) for _ in "123"]
    memory = [np.frombuffer(rng.randbytes(9000), np.uint8) for _ in "12"]
    if not readonly:
        memory = [each.copy() for each in memory]
    kind, buffers, at = [], [], []
    while len(at) < 60:
        step, start, which = rng.choice([0, 1, 64, 100]), rng.randrange(4000), rng.randrange(3)
        buffer, by_turns = rng.randrange(2), rng.random() < 0.5
        for n in range(rng.randrange(1, 30)):
            kind.append((which + n * by_turns) % 3)
            buffers.append(buffer)
            at.append(start + n * step)
    names = [f"{n}" for n in range(len(at))]
    views = Views(names, kinds, kind, memory, np.array(buffers), np.array(at))
    adapter = numpy_adapter.make(None)
    ours, theirs = adapter.wrap(views), adapter.wrap(list(views))
    assert [view.name for view in views] == names
    assert list(views) == [views[n] for n in range(len(views))]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype, one.strides) == (other.shape, other.dtype, other.strides)
        assert str(one.flags) == str(other.flags)
        assert one.base is other.base
        assert one.ctypes.data == other.ctypes.data
        assert type(one) is np.ndarray
