"""Plans carried out on files in memory give what NumPy gives, byte by byte, each byte once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from samples import whereabouts

from mfload import dtypes
from mfload.index import Piece, TensorInfo
from mfload.io.pread import place as put
from mfload.planning import layout, plan as planning
from mfload.planning.blocks import Costs
from mfload.planning.extents import c_strides
from mfload.planning.plan import Plan, make_plan
from mfload.planning.request import HOST, Allocation, Request
from mfload.planning.slicing import select

_STORED = ["U8", "I16", "F32", "BF16", "C64", "BOOL", "F4", "F6_E2M3"]
_LENT = Allocation(None, "framework", copied=False)
_LANDED = [HOST, HOST._replace(copied=True), _LENT]
_TARGETS = {"I16": ["I32", "F32"], "F32": ["F64", "BF16"], "BF16": ["F32"], "BOOL": ["U8"]}


@dataclass
class Case:
    """Needs of files in memory, the options of a plan, and what must come out."""

    files: list[bytes]
    requests: list[Request]
    expected: list[bytes]
    options: dict[str, Any]


def _index(draw: Any, shape: tuple[int, ...], block: int) -> Any:
    if block == 1:
        return draw(hnp.basic_indices(shape, allow_ellipsis=True))
    if not shape or shape[-1] % block:
        return Ellipsis
    count = shape[-1] // block
    low = draw(st.integers(0, count))
    high = draw(st.integers(low, count))
    lead = draw(hnp.basic_indices(shape[:-1], allow_ellipsis=False)) if len(shape) > 1 else ()
    lead = lead if isinstance(lead, tuple) else (lead,)
    return (*lead, Ellipsis, slice(low * block, high * block))


def _cut(array: Any, index: Any, block: int) -> Any:
    """What NumPy makes of an index; packed types are arrays of whole blocks."""
    if block == 1 or index is Ellipsis:
        return array[index]
    *lead, last = index
    return array[(*lead, slice(last.start // block, last.stop // block))]


@st.composite
def cases(draw: Any) -> Case:
    """A few small files, needs of them in any order, and options for the plan."""
    files: list[bytes] = []
    rows: list[tuple[TensorInfo, Any]] = []
    for source in range(draw(st.integers(1, 2))):
        data = draw(st.binary(min_size=9, max_size=100))
        for n in range(draw(st.integers(1, 5))):
            name = draw(st.sampled_from(_STORED))
            dtype = dtypes.TABLE[name]
            shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
            if dtype.size_of(shape) is None or (dtype.elements > 1 and not shape):
                shape = (*shape, 4)
            nbytes = dtype.size_of(shape)
            assert nbytes is not None
            seed = draw(st.integers(0, 9))
            raw = np.random.default_rng(seed).bytes(nbytes)
            if name == "BOOL":
                raw = bytes(byte & 1 for byte in raw)
            info = TensorInfo(f"{source}.{n}", dtype, shape, (Piece(source, len(data), nbytes),))
            if dtype.elements == 1:
                array = np.frombuffer(raw, dtype.numpy).reshape(shape)
            elif shape[-1] % dtype.elements:
                array = np.frombuffer(raw, np.uint8)
            else:
                blocks = (*shape[:-1], shape[-1] // dtype.elements)
                array = np.frombuffer(raw, f"V{dtype.nbytes}").reshape(blocks)
            rows.append((info, array))
            data += raw
        files.append(data + draw(st.binary(max_size=9)))
    requests: list[Request] = []
    expected: list[bytes] = []
    for info, array in draw(st.lists(st.sampled_from(rows), min_size=0, max_size=8)):
        index = _index(draw, info.shape, info.dtype.elements)
        target = draw(st.sampled_from([info.dtype.name, *_TARGETS.get(info.dtype.name, [])]))
        dtype = dtypes.TABLE[target]
        requests.append(Request(info, dtype, select(info, index)))
        taken = _cut(array, index, info.dtype.elements)
        if dtype is not info.dtype:
            with np.errstate(all="ignore"):
                taken = np.asarray(taken).astype(dtype.numpy)
        expected.append(np.asarray(taken).tobytes())
    mapped = draw(st.sets(st.integers(0, len(files) - 1)))
    options = {
        "alignment": draw(st.sampled_from([None, 1, 16, 64, 256])),
        "costs": Costs(
            block=draw(st.integers(16, 300)),
            merge_gap=draw(st.integers(0, 64)),
            span=0,  # How readers cut longer ones, `test_rows` says.
        ),
        "allocations": [draw(st.sampled_from(_LANDED)) for _ in requests],
        "mapped": {n: len(files[n]) for n in mapped},
    }
    return Case(files, requests, expected, options)


@dataclass
class Done:
    """Memory after a plan was carried out, and how often each byte was written."""

    memory: list[Any]
    writes: list[Any]


def carry_out(plan: Plan, files: list[bytes]) -> Done:
    """A reader that knows no system calls."""
    done = Done([], [])
    for spec in plan.buffers:
        if spec.source is None:
            done.memory.append(np.full(spec.nbytes, 0xAA, np.uint8))
        else:
            done.memory.append(np.frombuffer(files[spec.source], np.uint8))
        done.writes.append(np.zeros(spec.nbytes, np.int32))
    for block in plan.blocks:
        assert block.offset >= 0
        assert block.offset + block.span <= len(files[block.source])
        landed = np.frombuffer(files[block.source], np.uint8)[whereabouts(block)]
        put(landed, block.offset, block, done.memory)
        for segment in block.segments:
            assert block.offset <= segment.offset
            assert segment.offset + segment.nbytes <= block.offset + block.nbytes
            writes, copy, shape, steps = done.writes[segment.buffer], segment.copy, (), ()
            length = segment.nbytes
            if copy is not None:
                shape, length = copy.shape, copy.target.itemsize
                steps = copy.into or c_strides(shape, length)
            where = [4 * step for step in (*steps, 1)]  # Of counts, which have four bytes.
            np.ndarray((*shape, length), np.int32, writes, 4 * segment.at, where)[...] += 1
    return done


@given(cases())
@settings(max_examples=300)
def test_a_plan_gives_what_numpy_gives_and_writes_each_byte_once(case: Case) -> None:
    plan = make_plan(case.requests, **case.options)
    done = carry_out(plan, case.files)
    covered = [np.zeros_like(writes) for writes in done.writes]
    for (request, buffer, at), expected in zip(plan.places, case.expected, strict=True):
        assert done.memory[buffer][at : at + request.nbytes].tobytes() == expected
        covered[buffer][at : at + request.nbytes] += 1
    for spec, writes, cover in zip(plan.buffers, done.writes, covered, strict=True):
        if spec.source is None:
            # One need a byte, one write a byte, and nothing in between.
            assert (cover <= 1).all()
            assert (writes == cover).all()
        else:
            assert not writes.any()


@given(cases())
def test_blocks_are_bounded_and_skip_long_gaps(case: Case) -> None:
    plan = make_plan(case.requests, **case.options)
    costs = case.options["costs"]
    for block in plan.blocks:
        assert 0 < block.nbytes <= costs.block
        cursor = block.offset
        for segment in block.segments:
            # A gap of the limit or more is never read over.
            assert segment.offset <= cursor or 0 < segment.offset - cursor < costs.merge_gap
            # Only where bytes are shared does a segment go back.
            assert segment.offset >= cursor or block.shared is not None
            cursor = max(cursor, segment.offset + segment.nbytes)
        assert cursor == block.offset + block.nbytes
        assert 0 < block.wanted <= block.nbytes or block.shared
    assert plan.staged == max((each.nbytes for each in plan.blocks if each.staged), default=0)


@given(cases())
def test_a_plan_is_pure(case: Case) -> None:
    requests = list(case.requests)
    refuse = mock.Mock(side_effect=AssertionError("a plan touched the system"))
    with mock.patch.multiple(os, open=refuse, stat=refuse, preadv=refuse, pread=refuse):
        first = make_plan(requests, **case.options)
        second = make_plan(requests, **case.options)
    assert first == second
    assert requests == case.requests


@given(cases())
def test_alignment_is_held(case: Case) -> None:
    for request, buffer, at in make_plan(case.requests, **case.options).places:
        dtype = request.dtype
        align = case.options["alignment"] or max(1, dtype.nbytes // dtype.elements)
        assert at % align == 0, (request, buffer)


@given(cases(), st.sampled_from([5000, 9000]), st.sampled_from([1, 50]))
def test_buffers_are_bounded_unless_one_tensor_is_larger(
    case: Case, limit: int, small: int
) -> None:
    with mock.patch.multiple(layout, BUFFER=limit, _SMALL=small):
        plan = make_plan(case.requests, **case.options)
    held: dict[int, list[int]] = {}
    for request, buffer, _ in plan.places:
        held.setdefault(buffer, []).append(request.nbytes)
    for number, spec in enumerate(plan.buffers):
        if spec.source is None and spec.nbytes > limit + 4096:
            # At most a page of it leads to the tensor's place.
            assert len(held[number]) == 1
            assert spec.nbytes < held[number][0] + 4096


def test_a_tensor_that_overflows_a_buffer_begins_the_next() -> None:
    size = 3 << 20
    requests = _whole([size] * 50, start=40)
    plan = make_plan(requests, alignment=64)
    assert [spec.nbytes <= layout.BUFFER for spec in plan.buffers] == [True] * 3
    assert len({place.buffer for place in plan.places}) == 3
    # Two halves fill a buffer, wherever in a page they have to begin.
    halves = make_plan(_whole([32 << 20] * 4, start=40), alignment=64)
    assert [spec.nbytes for spec in halves.buffers] == [(64 << 20) + 40 // 64 * 64] * 2
    large = make_plan(_whole([100, layout.BUFFER + 5000, 100], start=40), alignment=64)
    sizes = [spec.nbytes for spec in large.buffers]
    assert sizes[0] < 5000
    assert layout.BUFFER + 5000 <= sizes[1] < layout.BUFFER + 9200


@given(st.lists(st.sampled_from([0, 1, 300, 1 << 16, (1 << 20) - 1, 1 << 20, 3 << 20]), min_size=1))
def test_large_tensors_of_a_device_may_have_buffers_of_their_own(sizes: list[int]) -> None:
    there = [Allocation(0, "mfload", copied=False)] * len(sizes)
    plan = make_plan(_whole(sizes, start=40), allocations=there, alone=1 << 20)
    assert [plan.buffers[buffer].nbytes for _, buffer, _ in plan.places] == sizes  # They are few.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "FEW", 0)
        plan = make_plan(_whole(sizes, start=40), allocations=there, alone=1 << 20)
    held: dict[int, list[tuple[int, int]]] = {}
    for request, buffer, at in plan.places:
        held.setdefault(buffer, []).append((at, request.nbytes))
    assert len(held) == len(plan.buffers)
    for number, places in held.items():
        if max(nbytes for _, nbytes in places) >= 1 << 20:
            assert places == [(0, plan.buffers[number].nbytes)]
        else:
            assert plan.buffers[number].nbytes <= layout.SLAB + 4096


def _whole(sizes: list[int], start: int) -> list[Request]:
    requests: list[Request] = []
    for n, size in enumerate(sizes):
        info = TensorInfo(f"t{n}", dtypes.TABLE["U8"], (size,), (Piece(0, start, size),))
        requests.append(Request(info, info.dtype))
        start += size
    return requests


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
    st.integers(9, 9000),
    st.sampled_from([None, 16, 64]),
)
def test_large_tensors_lie_just_below_their_file_offset_mod_a_page(
    sizes: list[int], start: int, alignment: int | None
) -> None:
    plan = make_plan(_whole(sizes, start), alignment=alignment)
    for request, _, at in plan.places:
        if request.nbytes >= 64 << 10:
            difference = (at - request.info.pieces[0].offset) % 4096
            assert difference == 0 or difference >= 4096 - 64


@given(st.integers(8, 200), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_tensors_at_the_alignment_of_their_data_start_are_one_read(
    start: int, units: list[int]
) -> None:
    plan = make_plan(_whole([unit * 64 for unit in units], start * 8), alignment=64)
    first = plan.places[0].request.info.pieces[0].offset
    at = first // 64 * 64
    if first % 64 == 0:
        # Where the file is as aligned as memory has to be, nothing is moved apart.
        assert len(plan.blocks) == 1
        assert len(plan.blocks[0].segments) == 1
        assert plan.places[0].at == at % 4096


@st.composite
def slices(draw: Any) -> tuple[Request, Any, int]:
    """A need of one tensor of several pages, the bytes it wants, and the file's size."""
    dtype = dtypes.TABLE[draw(st.sampled_from(["U8", "I16", "F32", "F64"]))]
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 40_000)),
            st.tuples(st.integers(1, 40), st.integers(1, 3000)),
            st.tuples(st.integers(1, 8), st.integers(1, 30), st.integers(1, 200)),
        )
    )
    start = draw(st.integers(8, 5000))
    size = math.prod(shape) * dtype.nbytes
    info = TensorInfo("t", dtype, shape, (Piece(0, start, size),))
    index = draw(hnp.basic_indices(shape, allow_ellipsis=True))
    places = np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1) * dtype.nbytes + start
    wanted = np.zeros(start + size, np.bool_)
    for byte in range(dtype.nbytes):
        wanted[places + byte] = True
    return Request(info, dtype, select(info, index)), wanted, start + size


@given(slices(), st.sampled_from([16 << 20, 16 << 10]))
@settings(max_examples=200)
def test_no_page_is_read_that_holds_nothing_asked_for(
    case: tuple[Request, Any, int], block: int
) -> None:
    request, wanted, _ = case
    plan = make_plan([request], costs=Costs(block=block, merge_gap=4096, span=0))
    seen = np.zeros_like(wanted)
    for each in plan.blocks:
        places = whereabouts(each)
        seen[places] = True
        for page in set((places // 4096).tolist()):
            assert wanted[page * 4096 : (page + 1) * 4096].any()
    assert not (wanted & ~seen).any()
    assert plan.wanted_bytes == request.nbytes == wanted.sum()
    assert plan.read_bytes - plan.wanted_bytes == seen.sum() - wanted.sum()


def test_figures_count_what_is_read_over() -> None:
    requests = _whole([100, 50, 100], start=64)
    plan = make_plan([requests[0], requests[2]])
    assert (plan.read_bytes, plan.wanted_bytes, plan.result_bytes) == (250, 200, 200)
    apart = make_plan([requests[0], requests[2]], costs=Costs(merge_gap=50))
    assert (len(apart.blocks), apart.read_bytes) == (2, 200)
    assert apart.buffer_bytes >= 200
    assert apart.mapped_bytes == 0


def test_neighbours_in_two_files_are_two_reads() -> None:
    # The second file's tensor begins at the byte where the first file's ends.
    ends, begins = (
        Request(TensorInfo(name, dtypes.TABLE["U8"], (64,), (Piece(source, offset, 64),)), row)
        for name, source, offset, row in (
            ("ends", 0, 64, dtypes.TABLE["U8"]),
            ("begins", 1, 128, dtypes.TABLE["U8"]),
        )
    )
    plan = make_plan([ends, begins])
    assert plan.places[1].at == plan.places[0].at + 64
    assert [(block.source, block.offset) for block in plan.blocks] == [(0, 64), (1, 128)]


def test_only_what_suits_a_map_is_mapped() -> None:
    first, odd, last = (
        Request(TensorInfo(name, dtypes.TABLE["F32"], (4,), (Piece(0, offset, 16),)), dtype)
        for name, offset, dtype in (
            ("first", 64, dtypes.TABLE["F32"]),
            ("odd", 80, dtypes.TABLE["F32"]),
            ("cast", 128, dtypes.TABLE["F64"]),
        )
    )
    plan = make_plan([first, odd, last], alignment=64, mapped={0: 144})
    assert plan.mapped_bytes == 16
    assert plan.places[0].at == 64
    assert (plan.wanted_bytes, plan.read_bytes) == (32, 64)
    assert [spec.source for spec in plan.buffers] == [0, None]


def test_separate_needs_begin_a_buffer_each() -> None:
    plan = make_plan(_whole([10, 20, 30], start=41), allocations=[HOST, _LENT, HOST])
    place = plan.places[1]
    assert (place.at, plan.buffers[place.buffer].nbytes) == (0, 20)
    assert place.buffer not in {plan.places[0].buffer, plan.places[2].buffer}


def test_the_tensors_of_a_block_are_named() -> None:
    plan = make_plan(_whole([100, 50, 100], start=64), costs=Costs(block=128))
    assert [plan.tensors_of(block) for block in plan.blocks] == [["t0"], ["t0", "t1", "t2"], ["t2"]]


def test_bfloat16_is_what_the_table_says() -> None:
    # The cases above compare with ml_dtypes; they would agree on anything else too.
    assert dtypes.TABLE["BF16"].numpy == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_empty_tensors_read_nothing(count: int) -> None:
    plan = make_plan(_whole([0] * count, start=64))
    assert plan.blocks == ()
    assert len(plan.places) == count
    assert plan.read_bytes == plan.result_bytes == 0
    assert plan.buffer_bytes < 4096
