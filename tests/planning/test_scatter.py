"""Boxes of one tensor, planned together: what NumPy gives, and each stored byte read once."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from samples import whereabouts

from mfload import dtypes, errors
from mfload.index import Box, Piece, TensorInfo
from mfload.io import buffers, pread, route
from mfload.io.pread import place as put
from mfload.loading import execute
from mfload.planning import extents
from mfload.planning.blocks import Costs, stored
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import Plan, make_plan
from mfload.planning.request import Allocation, Request
from mfload.planning.slicing import Selection, boxed, select, shape_of, strided
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

_STORED = ["U8", "I16", "F32", "BF16", "C64", "BOOL", "F4", "F6_E2M3"]
_TARGETS = {"I16": ["I32", "F32"], "F32": ["F64", "BF16"], "BF16": ["F32"], "BOOL": ["U8"]}


@dataclass
class Case:
    """A file in memory, needs of its tensors, what must come out, and how to plan."""

    file: bytes
    requests: list[Request]
    expected: list[bytes]
    wanted: Any
    costs: Costs
    alignment: int | None
    long: int


def _edges(draw: Any, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return sorted({0, length, *inner})


def _mesh(draw: Any, blocks: tuple[int, ...]) -> list[Box]:
    """A grid of boxes, some of them for several devices, some for none."""
    cuts = [list(itertools.pairwise(_edges(draw, length))) or [(0, length)] for length in blocks]
    grid = [tuple(box) for box in itertools.product(*cuts)]
    some = st.lists(st.sampled_from(grid), min_size=1, max_size=9)
    return draw(some) if draw(st.booleans()) else grid[:16]


def _any(draw: Any, blocks: tuple[int, ...]) -> list[Box]:
    """Boxes as they come, one over the other."""
    boxes: list[Box] = []
    for _ in range(draw(st.integers(1, 5))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in blocks]
        boxes.append(tuple((low, high) for low, high in ends))
    return boxes


def _array(raw: bytes, info: TensorInfo) -> Any:
    """The tensor, packed types in whole blocks."""
    dtype = info.dtype
    if dtype.elements == 1:
        return np.frombuffer(raw, dtype.numpy).reshape(info.shape)
    blocks = (*info.shape[:-1], info.shape[-1] // dtype.elements)
    return np.frombuffer(raw, f"V{dtype.nbytes}").reshape(blocks)


def _turned(box: Box, order: Sequence[int]) -> Selection:
    """A box that lands with its dims in another order."""
    shape = shape_of(box)
    steps = extents.c_strides([shape[dim] for dim in order], 1)
    return strided(box, [steps[order.index(dim)] for dim in range(len(shape))])


@st.composite
def cases(draw: Any, most: int = 12) -> Case:
    """A few tensors, each wanted in several boxes."""
    data = draw(st.binary(min_size=9, max_size=80))
    requests: list[Request] = []
    expected: list[bytes] = []
    wanted: list[int] = []
    for number in range(draw(st.integers(1, 3))):
        dtype = dtypes.TABLE[draw(st.sampled_from(_STORED))]
        rank = draw(st.integers(0 if dtype.elements == 1 else 1, 4))
        blocks = tuple(draw(st.integers(0 if n else 1, (most, 9, 6, 4)[n])) for n in range(rank))
        shape = (*blocks[:-1], blocks[-1] * dtype.elements) if rank else ()
        nbytes = dtype.size_of(shape) or 0
        raw = np.random.default_rng(number).bytes(nbytes)
        raw = bytes(byte & 1 for byte in raw) if dtype.name == "BOOL" else raw
        info = TensorInfo(f"t{number}", dtype, shape, (Piece(0, len(data), nbytes),))
        array = _array(raw, info)
        boxes = draw(st.sampled_from([_mesh, _any]))(draw, blocks)
        touched = np.zeros(blocks, np.bool_)
        for box in boxes:
            inner = tuple(slice(*ends) for ends in box)
            part = array[inner]
            ends = [(a, b) for a, b in box]
            if rank:
                ends[-1] = (ends[-1][0] * dtype.elements, ends[-1][1] * dtype.elements)
            targets = [dtype.name] * 3 + _TARGETS.get(dtype.name, [])
            to = dtypes.TABLE[draw(st.sampled_from(targets))]
            selection = boxed(info, tuple(ends))
            if dtype.elements == 1 and rank > 1 and draw(st.integers(0, 3)) == 0:
                order = draw(st.permutations(range(rank)))
                selection, part = _turned(tuple(ends), order), np.transpose(part, order)
            requests.append(Request(info, to, selection))
            if to is not dtype:
                with np.errstate(all="ignore"):
                    part = np.asarray(part).astype(to.numpy)
            expected.append(np.asarray(part).tobytes())
            touched[inner] = True
        places = np.flatnonzero(touched.reshape(-1))[:, None] * dtype.nbytes + len(data)
        wanted += (places + np.arange(dtype.nbytes)).reshape(-1).tolist()
        data += raw + draw(st.binary(max_size=5))
    order = draw(st.permutations(range(len(requests))))
    costs = Costs(
        block=draw(st.integers(16, 400)),
        merge_gap=draw(st.sampled_from([0, 1, 2, 5, 17, 60, 10_000])),
        staged=draw(st.integers(16, 400)),
        span=draw(st.integers(16, 2000)),
        row_gap=draw(st.sampled_from([None, 0, 3])),
    )
    flags = np.zeros(len(data), np.bool_)
    flags[wanted] = True
    return Case(
        data,
        [requests[n] for n in order],
        [expected[n] for n in order],
        flags,
        costs,
        draw(st.sampled_from([None, 64])),
        draw(st.sampled_from([1 << 60, 5])),
    )


def _plan(case: Case) -> Plan:
    with mock.patch.object(extents, "LONG", case.long):
        return make_plan(case.requests, costs=case.costs, alignment=case.alignment)


def _hold(case: Case, plan: Plan, memory: list[Any]) -> None:
    for (request, buffer, at), expected in zip(plan.places, case.expected, strict=True):
        assert memory[buffer][at : at + request.nbytes].tobytes() == expected


@given(cases())
@settings(max_examples=400)
def test_each_byte_is_read_once_and_all_come_right(case: Case) -> None:
    case.costs = case.costs._replace(span=0)  # Each block is one read, or a row each.
    plan = _plan(case)
    memory = [np.full(spec.nbytes, 0xAA, np.uint8) for spec in plan.buffers]
    read = np.zeros(len(case.file), np.int32)
    for block in plan.blocks:
        assert 0 < block.nbytes <= (case.costs.slot if block.staged else case.costs.block)
        places, data = whereabouts(block), np.frombuffer(case.file, np.uint8)
        read[places] += 1
        put(data[places], block.offset, block, memory)
        assert block.wanted == case.wanted[places].sum()
    _hold(case, plan, memory)
    assert read.max(initial=0) <= 1
    assert read[case.wanted].all()
    assert plan.read_bytes == read.sum()
    assert plan.wanted_bytes == case.wanted.sum()
    _check_gaps(read, case)


def _check_gaps(read: Any, case: Case) -> None:
    """What is read over is shorter than the limit."""
    over = np.concatenate([[False], (read > 0) & ~case.wanted, [False]])
    (edges,) = np.nonzero(over[1:] != over[:-1])
    gaps = edges[1::2] - edges[::2]
    assert (gaps < max(1, case.costs.merge_gap, case.costs.row_gap or 0)).all()
    if case.costs.merge_gap <= 1 and not case.costs.row_gap:
        assert not gaps.size


@pytest.mark.parametrize("way", ["pread", "map", "direct"])
@given(cases(most=400))
@settings(max_examples=60)
def test_engines_read_what_the_plan_says(way: str, case: Case) -> None:
    engine, few = ("pread", 0) if way == "map" else (way, 1 << 60)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(case.file)
        source = LocalFile(path)
        plan = _plan(case)
        legs = dict(enumerate(route.choose([(source, source.size)], engine)))
        got = 0
        real = os.preadv

        def preadv(fd: int, vector: Any, offset: int) -> int:
            nonlocal got
            done = real(fd, vector, offset)
            got += done
            return done

        memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
        maps = mock.patch.multiple(pread, _APART=1 << 60, _ROWS_A_MAP=few)
        how = {"threads": 2, "deadline": Deadline(None)}
        with mock.patch.object(os, "preadv", preadv), maps:
            execute.Transfer(plan, memory, [source], legs, **how).run()
        _hold(case, plan, memory)
        if way == "pread":
            assert got == plan.read_bytes
        del memory


@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize(
    ("rows", "columns", "gap"),
    [(1, 8, 4096), (2, 4, 4096), (8, 1, 4096), (1, 2, 4096), (1, 2, 64 << 10)],
)
def test_shards_of_some_megabytes(
    tmp_path: Path, engine: Any, rows: int, columns: int, gap: int
) -> None:
    """Blocks, rows and runs as long as they are in earnest, at an odd place in the file."""
    shape = (96, 2, 40_000)
    array = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)
    (tmp_path / "file").write_bytes(b"x" * 40 + array.tobytes() + b"tail")
    source = LocalFile(tmp_path / "file")
    info = TensorInfo("w", dtypes.TABLE["U16"], shape, (Piece(0, 40, array.nbytes),))
    cuts = [[(n * length // k, (n + 1) * length // k) for n in range(k)]
            for length, k in zip(shape, (rows, 1, columns), strict=True)]  # fmt: skip
    boxes = list(itertools.product(*cuts))
    requests = [Request(info, info.dtype, boxed(info, box)) for box in boxes]
    plan = make_plan(requests, alignment=64, costs=Costs(merge_gap=gap))
    memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
    legs = dict(enumerate(route.choose([(source, source.size)], engine)))
    execute.Transfer(plan, memory, [source], legs, threads=2, deadline=Deadline(None)).run()
    for (request, buffer, at), box in zip(plan.places, boxes, strict=True):
        part = array[tuple(slice(*ends) for ends in box)]
        assert memory[buffer][at : at + request.nbytes].tobytes() == part.tobytes()
    del memory
    assert plan.read_bytes == plan.wanted_bytes == array.nbytes


def _need(
    shape: tuple[int, ...], box: Box | None = None, to: str = "U16", at: int = 100
) -> Request:
    row = dtypes.TABLE["U16"]
    info = TensorInfo("w", row, shape, (Piece(0, at, math.prod(shape) * 2),))
    selection = None if box is None else boxed(info, box)
    return Request(info, dtypes.TABLE[to], selection, checked=to != "U16")


def test_columns_are_few_blocks_and_not_a_segment_a_row() -> None:
    requests = [_need((5000, 800), ((0, 5000), (n * 100, n * 100 + 100))) for n in range(8)]
    plan = make_plan(requests)
    (block,) = plan.blocks
    assert len(block.segments) == 8
    assert block.rows is not None
    assert -(-5000 // block.rows.together) == 4
    assert plan.staged <= Costs().staged
    assert plan.tensors_of(plan.blocks[0]) == ["w"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (0, 1, 3)])
def test_columns_at_equal_distances_are_one_copy(order: tuple[int, ...]) -> None:
    """Of tensors that are cut alike, all of which lie in one file one behind the other."""
    parts = [
        _need((6, 40), ((1, 6), (n * 10, n * 10 + 10)), at=480 * tensor)
        for tensor in range(5)
        for n in order
    ]
    plan = make_plan(parts, alignment=64)
    (block,) = plan.blocks
    assert len(block.segments) == {(0, 2, 1, 3): 20, (0, 1, 3): 15}.get(order, 5)
    data = np.arange(5 * 240, dtype=np.uint16)
    memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
    put(data.view(np.uint8)[block.offset :], block.offset, block, memory)
    for number, (request, buffer, at) in enumerate(plan.places):
        tensor, n = data.reshape(5, 6, 40)[number // len(order)], order[number % len(order)]
        found = memory[buffer][at : at + request.nbytes].view(np.uint16).reshape(5, 10)
        assert np.array_equal(found, tensor[1:, n * 10 : n * 10 + 10])
    # Where each has a place of its own, none is joined.
    lent = [Allocation(None, "framework", copied=False)] * len(parts)
    assert len(make_plan(parts, allocations=lent).blocks[0].segments) == len(parts)


def test_long_runs_go_straight_unless_several_want_them() -> None:
    shape, half = (20, 1 << 18), 1 << 17
    columns = [_need(shape, ((0, 20), (n * half, n * half + half))) for n in range(2)]
    assert make_plan(columns).staged == 0
    twice = make_plan([*columns, *columns])
    assert 0 < len(twice.blocks) <= 10
    assert all(len(block.segments) == 4 for block in twice.blocks)


def test_columns_of_one_half_are_read_over_up_to_the_gap() -> None:
    half = [_need((50, 4000), ((0, 50), (n * 1000, n * 1000 + 1000))) for n in range(2)]
    exact = make_plan(half, costs=Costs(merge_gap=4000))
    assert exact.read_bytes == exact.wanted_bytes == 50 * 4000
    over = make_plan(half, costs=Costs(merge_gap=4001))
    assert len(over.blocks) == 1
    assert (over.read_bytes, over.wanted_bytes) == (50 * 8000 - 4000, 50 * 4000)


def test_rows_of_many_small_tensors_are_few_reads() -> None:
    requests = [
        _need((8, 64), ((n, n + 1), (0, 64)), at=1024 * tensor)
        for tensor in range(1000)
        for n in range(8)
    ]
    together = make_plan(requests)
    assert len(together.blocks) == 1
    assert len(together.blocks[0].segments) == 1
    lent = Allocation(None, "framework", copied=False)
    apart = make_plan(requests, allocations=[lent] * len(requests))
    assert len(apart.blocks) == 1
    assert not apart.staged
    # In any order of the devices.
    assert len(make_plan(requests[::-1]).blocks[0].segments) == 1


def test_copies_of_many_small_tensors_are_few_reads() -> None:
    requests = [_need((512,), at=1024 * tensor) for tensor in range(4000) for _ in range(8)]
    plan = make_plan(requests)
    assert plan.read_bytes == plan.wanted_bytes == 4000 * 1024
    assert len(plan.blocks) == 2
    assert len({(place.buffer, place.at) for place in plan.places}) == len(requests)


def test_a_large_run_beside_columns_needs_no_slot() -> None:
    plan = make_plan([_need((4 << 20,), at=0), _need((10, 10), ((0, 10), (0, 5)), at=8 << 20)])
    assert [block.staged for block in plan.blocks] == [False, True]
    assert plan.staged == 190


def test_steps_and_boxes_of_one_tensor_do_not_disturb_each_other() -> None:
    data = np.arange(200, dtype=np.uint16).reshape(10, 20)
    whole = _need((10, 20), at=0)
    indices: list[Any] = [
        (slice(None), slice(0, 10)), (slice(None, None, 3), slice(1, 9, 2)), (4, slice(2, 5)),
        (slice(None), slice(10, 20)), (slice(None, None, -1),), ..., (3, 3),
    ]  # fmt: skip
    requests = [Request(whole.info, whole.dtype, select(whole.info, index)) for index in indices]
    plan = make_plan(requests)
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in plan.buffers]
    for block in plan.blocks:
        put(data.reshape(-1).view(np.uint8), 0, block, memory)
    for (request, buffer, at), index in zip(plan.places, indices, strict=True):
        assert memory[buffer][at : at + request.nbytes].tobytes() == data[index].tobytes()


def test_a_value_that_does_not_fit_names_its_tensor() -> None:
    requests = [_need((10, 10), ((0, 10), (0, 5)), "I8", 0), _need((10, 10), at=0)]
    plan = make_plan(requests)
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in plan.buffers]
    data = np.full(100, 200, np.uint16).view(np.uint8)
    (block,) = plan.blocks
    with pytest.raises(errors.LossyCastError) as info:
        put(data, 0, block, memory)
    assert info.value.tensor == "w"


def test_values_are_checked_where_a_tensor_that_is_alike_is_not() -> None:
    free, checked = _need((10, 10), ((0, 10), (0, 5)), "I8", 0), _need((10, 10), at=200)
    free = free._replace(checked=False)
    plan = make_plan([free, Request(checked.info, free.dtype, free.selection, checked=True)])
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in plan.buffers]
    data, (block,) = np.full(200, 200, np.uint16).view(np.uint8), plan.blocks
    with pytest.raises(errors.LossyCastError):
        put(data, 0, block, memory)


def test_tensors_of_one_shape_are_not_mixed_up() -> None:
    data = np.arange(400, dtype=np.uint16)
    left, right = ((0, 10), (0, 7)), ((0, 10), (5, 10))
    asked = [(0, left, "U16"), (0, right, "U16"), (200, left, "U32"), (200, right, "U16"),
             (400, right, "U16"), (400, left, "U16"), (600, left, "U16")]  # fmt: skip
    requests = [_need((10, 10), box, to, at) for at, box, to in asked]
    plan = make_plan(requests)
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in plan.buffers]
    for block in plan.blocks:
        put(data.view(np.uint8), 0, block, memory)
    for (request, buffer, at), (offset, box, _) in zip(plan.places, asked, strict=True):
        part = data[offset // 2 :][:100].reshape(10, 10)[tuple(slice(*ends) for ends in box)]
        expected = part.astype(request.dtype.numpy).tobytes()
        assert memory[buffer][at : at + request.nbytes].tobytes() == expected


def test_steps_and_conversions_pass_through_small_slots_too() -> None:
    whole = _need((9000, 1000))
    steps = select(whole.info, (slice(None), slice(None, None, 2)))
    for request in (Request(whole.info, whole.dtype, steps), _need((9000, 1000), to="F32")):
        assert 0 < make_plan([request]).staged <= Costs().staged


def test_places_may_be_given() -> None:
    requests = [_need((4, 8), ((0, 4), (n * 2, n * 2 + 2)), at=0) for n in range(4)]
    given_places = [(1, 48), (0, 0), (1, 0), (1, 16)]
    specs = [BufferSpec(16), BufferSpec(64)]
    plan = make_plan(requests, given=given_places, specs=specs)
    assert plan.buffers == tuple(specs)
    assert [(place.buffer, place.at) for place in plan.places] == given_places
    data = np.arange(32, dtype=np.uint16).reshape(4, 8)
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in specs]
    for block in plan.blocks:
        put(data.reshape(-1).view(np.uint8), 0, block, memory)
    for n, (buffer, at) in enumerate(given_places):
        assert memory[buffer][at : at + 16].tobytes() == data[:, n * 2 : n * 2 + 2].tobytes()


def test_a_witness_is_shown_shared_bytes_once() -> None:
    data = np.arange(100, dtype=np.uint8)
    requests = [_need((10, 5), ((0, 10), (n, n + 2)), at=0) for n in (3, 1, 0)]
    (block,) = make_plan([*requests, *requests]).blocks
    shown = [(at, part.tobytes()) for at, part in stored(block, [], data)]
    assert b"".join(part for _, part in shown) == data.tobytes()
    assert [at for at, _ in shown] == sorted(at for at, _ in shown)
