from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from mfload import dtypes, errors
from mfload.index import Box, Piece, TensorInfo
from mfload.mesh import choosing, cutting, exchange, schedule as schedules
from mfload.planning.requests import Request, boxed, select

KINDS = ("U8", "BF16", "F32", "F64", "F4", "F6_E2M3")


def tensor(name: str, dtype: str, shape: tuple[int, ...], offset: int = 0) -> TensorInfo:
    row = dtypes.TABLE[dtype]
    return TensorInfo(name, row, shape, (Piece(0, offset, row.size_of(shape) or 0),))


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorInfo]:
    made: list[TensorInfo] = []
    offset = 0
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(KINDS))
        shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 8, 24)), max_size=3))
        block = dtypes.TABLE[dtype].elements
        if block > 1:
            shape = [*shape, block * draw(st.integers(0, 6))]
        made.append(tensor(f"t{number}", dtype, tuple(shape), offset))
        offset += made[-1].nbytes
    return made


@st.composite
def boxes(draw: st.DrawFn, info: TensorInfo) -> Box:
    box: list[tuple[int, int]] = []
    for dim, length in enumerate(info.shape):
        unit = info.dtype.elements if dim == len(info.shape) - 1 else 1
        start = draw(st.integers(0, length // unit))
        stop = draw(st.integers(start, length // unit))
        box.append((start * unit, stop * unit) if draw(st.booleans()) else (0, length))
    return tuple(box)


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, list[Request]]:
    """Needs of some processes, of any boxes whatever."""
    infos = draw(tensors())
    made: dict[int, list[Request]] = {}
    for rank in draw(st.lists(st.integers(0, 9), min_size=2, max_size=5, unique=True)):
        each: list[Request] = []
        for info in infos:
            widen = info.dtype.name == "BF16" and draw(st.booleans())
            dtype = dtypes.TABLE["F64"] if widen else info.dtype
            for _ in range(draw(st.integers(0, 3))):
                box = draw(boxes(info))
                each.append(Request(info, dtype, boxed(info, box)))
        made[rank] = each
    return made


def content(info: TensorInfo) -> Any:
    """Bytes of a tensor, by its smallest blocks: (…, blocks of the last dim, bytes of a block)."""
    row = info.dtype
    shape = info.shape if row.elements == 1 else (*info.shape[:-1], info.shape[-1] // row.elements)
    generator = np.random.default_rng(len(info.name) + math.prod(shape))
    return generator.integers(0, 256, (*shape, row.nbytes), np.uint8)


def cut_out(info: TensorInfo, box: Box, data: Any) -> Any:
    unit = info.dtype.elements
    if unit > 1:
        box = (*box[:-1], (box[-1][0] // unit, box[-1][1] // unit))
    return data[(*(slice(*pair) for pair in box), ...)]


@settings(max_examples=150)
@given(worlds(), st.sampled_from((4096, 8192)))
def test_every_byte_is_read_once_and_comes_where_it_is_wanted(
    requests: dict[int, list[Request]], width: int
) -> None:
    schedule = exchange.make(requests, width)
    again = exchange.make(dict(reversed(list(requests.items()))), width)
    assert schedule.digest() == again.digest()
    held = {request.info.name: request.info for each in requests.values() for request in each}
    data = {name: content(info) for name, info in held.items()}
    readers = {name: np.full(array.shape[:-1], -1) for name, array in data.items()}
    results = {
        (rank, number): np.full(goal.dtype.size_of(cutting.shape_of(goal.box)) or 0, 7, np.uint8)
        for rank, goals in schedule.goals.items()
        for number, goal in enumerate(goals)
    }
    filled = {key: np.zeros(array.size, np.int64) for key, array in results.items()}
    for parcel in schedule.parcels():
        goal = schedule.goals[parcel.taker][parcel.goal]
        seen = cut_out(goal.info, parcel.box, readers[goal.info.name])
        assert np.isin(seen, (-1, parcel.reader)).all(), "a byte has two readers"
        seen[...] = parcel.reader
        part = cut_out(goal.info, parcel.box, data[goal.info.name])
        if goal.dtype is not goal.info.dtype:
            part = np.repeat(part, goal.dtype.nbytes // goal.info.dtype.nbytes, axis=-1)
        key = parcel.taker, parcel.goal
        assert part.size == parcel.nbytes
        results[key][parcel.at : parcel.at + parcel.nbytes] = part.reshape(-1)
        filled[key][parcel.at : parcel.at + parcel.nbytes] += 1
    for rank, goals in schedule.goals.items():
        for number, goal in enumerate(goals):
            assert (filled[rank, number] == 1).all()
            whole = cut_out(goal.info, goal.box, data[goal.info.name])
            if goal.dtype is not goal.info.dtype:
                whole = np.repeat(whole, goal.dtype.nbytes // goal.info.dtype.nbytes, axis=-1)
            assert results[rank, number].tobytes() == whole.tobytes()
        wanted = {n for goal in goals for n in goal.requests}
        assert wanted == {n for n, request in enumerate(requests[rank]) if request.nbytes}
    _check_rows(schedule)


def _check_rows(schedule: schedules.Schedule) -> None:
    for parcels in schedule.rounds:
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for parcel in parcels:
            if parcel.reader != parcel.taker:
                row = rows.setdefault((parcel.reader, parcel.taker), [])
                row.append((parcel.wire, parcel.wire + parcel.nbytes))
        for row in rows.values():
            ends = sorted(row)
            assert ends[0][0] >= exchange.HEADER
            assert ends[-1][1] <= schedule.width
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert all(parcel.reader == parcel.taker for parcel in schedule.local)


def test_parts_that_overlap_share_no_row_that_is_too_short() -> None:
    info = tensor("w", "U8", (4000,))
    ends = (4000, 3999, 3998)
    each = [Request(info, info.dtype, boxed(info, ((0, end),))) for end in ends]
    schedule = exchange.make({0: [Request(info, info.dtype)], 1: each, 2: each}, 4096)
    _check_rows(schedule)
    assert sum(p.nbytes for p in schedule.parcels() if p.taker == 2) == sum(ends)


def shards(info: TensorInfo, grid: tuple[int, ...], processes: int) -> dict[int, list[Request]]:
    """Needs as a mesh makes them: equal blocks, devices of a process next to each other."""
    made: dict[int, list[Request]] = {rank: [] for rank in range(processes)}
    places = list(itertools.product(*map(range, grid)))
    for number, place in enumerate(places):
        box = tuple(
            (n * length // parts, (n + 1) * length // parts)
            for n, parts, length in zip(place, grid, info.shape, strict=True)
        )
        rank = number * processes // len(places)
        made[rank].append(Request(info, info.dtype, boxed(info, box)))
    return made


@settings(max_examples=20)
@given(
    st.integers(2, 5),
    st.sampled_from(((8, 1), (1, 8), (2, 4), (4, 2), (1, 1))),
    st.sampled_from((64, 256, 1000)),
    st.sampled_from((64, 512, 4096)),
)
def test_shares_are_even(processes: int, grid: tuple[int, int], rows: int, columns: int) -> None:
    info = tensor("w", "F32", (rows, columns))
    requests = shards(info, grid, processes)
    if grid == (1, 1):
        requests = {rank: [Request(info, info.dtype)] for rank in range(processes)}
    assume(rows % grid[0] == 0 and columns % grid[1] == 0)
    schedule = exchange.make(requests, schedules.width(processes, 256 << 20))
    for rank in range(processes):
        found = choosing.expected(requests, rank, "once")
        ahead = max(8192, info.nbytes / 32 / processes)
        assert found.read_bytes - found.over_read_bytes <= info.nbytes / processes + ahead
        assert found.over_read_bytes < 16384
        assert found.exchanged_bytes == schedule.came(rank)
    if grid == (8, 1) and 8 % processes == 0:
        # Rows are read by those who want them, where it pays to cut the tensor at all.
        assert sum(map(schedule.went, range(processes))) == 0 or info.nbytes < 16384 * processes


@given(st.integers(2, 600), st.integers(0, 1 << 30))
def test_rows_keep_within_the_overhead(count: int, overhead: int) -> None:
    if overhead < 2 * 6 * count * 4096:
        with pytest.raises(errors.MemoryLimitError, match="max_host_overhead"):
            schedules.width(count, overhead)
        return
    made = schedules.width(count, overhead)
    assert made >= 4096
    assert 6 * count * made <= overhead // 2


def test_parts_keep_within_a_limit() -> None:
    infos = [tensor(f"t{n}", "U8", (100,), 100 * n) for n in range(10)]
    requests = {
        0: [Request(i, i.dtype) for i in infos],
        1: [Request(i, i.dtype) for i in infos[::2]],
    }
    parts = exchange.parts(requests, 250)
    for part in parts:
        assert sum(requests[0][n].nbytes for n in part[0]) <= 250
    assert [n for part in parts for n in part[0]] == list(range(10))
    assert [n for part in parts for n in part[1]] == list(range(5))


class TestChoosing:
    def columns(self) -> dict[int, list[Request]]:
        return shards(tensor("w", "F32", (1024, 1024)), (1, 8), 2)

    def test_never_and_one_process(self) -> None:
        assert choosing.expected(self.columns(), 0, "never").exchange == "never"
        assert choosing.expected({0: self.columns()[0]}, 0, "once").exchange == "never"

    def test_auto_reads_where_reading_is_cheap(self) -> None:
        found = choosing.expected(self.columns(), 0, "auto", platform="cpu")
        assert found.exchange == "never"
        assert "measured" in found.note

    def test_auto_exchanges_where_links_are_fast(self) -> None:
        for rank in (0, 1):
            found = choosing.expected(self.columns(), rank, "auto", platform="gpu")
            assert found.exchange == "once"
            assert "assumed" in found.note
            assert found.read_bytes <= 0.55 * (4 << 20)

    def test_rows_are_never_exchanged(self) -> None:
        requests = shards(tensor("w", "F32", (1024, 1024)), (8, 1), 2)
        assert choosing.expected(requests, 1, "auto", platform="gpu").exchange == "never"

    def test_what_has_steps_is_read_by_who_wants_it(self) -> None:
        info = tensor("w", "F32", (16, 16))
        requests = {r: [Request(info, info.dtype, select(info, slice(None, None, 2)))]
                 for r in (0, 1)}  # fmt: skip
        found = choosing.expected(requests, 0, "once")
        assert (found.exchange, found.schedule) == ("never", None)
        assert "steps" in found.note

    def test_too_little_memory(self) -> None:
        with pytest.raises(errors.MemoryLimitError, match="max_host_overhead"):
            choosing.expected(self.columns(), 0, "once", overhead=10_000)
        found = choosing.expected(self.columns(), 0, "auto", platform="gpu", overhead=10_000)
        assert found.exchange == "never"
        assert "too small for an exchange" in found.note
