from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stores
from hypothesis import assume, given, settings, strategies as st

import mfload
from mfload import dtypes, errors
from mfload.index import Box, Piece, TensorInfo
from mfload.mesh import (
    agree,
    base as mesh_base,
    load as mesh_load,
    redistribute,
    schedule as schedules,
)
from mfload.mesh.schedule import Parcel, Schedule, make_schedule
from mfload.options import LoadOptions
from mfload.planning.plan import Position
from mfload.planning.request import Request, box_of, stored_bytes
from mfload.planning.slicing import boxed, intersection
from mfload.runtime import Deadline
from mfload.sources.base import Costs
from mfload.stored import Encoding, Stored


class Hosts:
    """As much of a backend as the choice asks for.

    Args:
        platform: The kind of its devices.
    """

    def __init__(self, platform: str = "cpu") -> None:
        self._platform = platform

    def platform(self) -> str:
        return self._platform


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
        if draw(st.booleans()) and made[-1].nbytes:
            made[-1] = made[-1]._replace(pieces=draw(chunks(made[-1])))
    return made


@st.composite
def chunks(draw: st.DrawFn, info: TensorInfo) -> tuple[Piece, ...]:
    """Encoded pieces of a tensor: chunks of a grid, some of them raw or absent."""
    if info.dtype.elements > 1:
        return (info.pieces[0]._replace(stored=Stored(encodings=(Encoding("zlib", info.nbytes),))),)
    size = [-(-length // draw(st.integers(1, 5))) for length in info.shape]
    kinds = draw(st.lists(st.sampled_from(("zlib", "zlib", "raw", "fill")), min_size=1, max_size=5))
    made: list[Piece] = []
    for at in grid(info, size):
        kind = kinds[len(made) % len(kinds)]
        nbytes = info.dtype.nbytes * math.prod(stop - start for start, stop in at)
        stored = Stored(box=at, encodings=(Encoding("zlib", nbytes),) if kind == "zlib" else ())
        if kind == "fill":
            inline = bytes(info.dtype.nbytes)
            stored, nbytes = Stored(box=at, strides=(0,) * len(at), inline=inline), 0
        made.append(Piece(0, info.pieces[0].offset + len(made), nbytes, stored))
    return tuple(made)


def grid(info: TensorInfo, size: Sequence[int]) -> Iterator[Box]:
    """The boxes of chunks of one size."""
    starts = [range(0, length, n) for length, n in zip(info.shape, size, strict=True)]
    for place in itertools.product(*starts):
        ends = zip(place, size, info.shape, strict=True)
        yield tuple((start, min(start + n, length)) for start, n, length in ends)


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


# From how many bytes on parcels travel by themselves.
alone = st.sampled_from((1, 100, 64 << 10))


@settings(max_examples=150)
@given(worlds(), st.sampled_from((4096, 8192)), alone)
def test_every_byte_is_read_once_and_comes_where_it_is_wanted(
    requests: dict[int, list[Request]], width: int, least: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "ALONE", least)
        schedule = make_schedule(requests, width)
        again = make_schedule(dict(reversed(list(requests.items()))), width)
    assert schedule[3:] == again[3:]
    assert [*schedule.rounds] == [*again.rounds]
    _check_parcels(requests, schedule)


def _check_parcels(requests: dict[int, list[Request]], schedule: Schedule) -> None:
    held = {request.info.name: request.info for each in requests.values() for request in each}
    data = {name: content(info) for name, info in held.items()}
    readers = {name: np.full(array.shape[:-1], -1) for name, array in data.items()}
    results: dict[tuple[int, int], Any] = {}
    filled: dict[tuple[int, int], Any] = {}
    for parcel in itertools.chain(*schedule.rounds):
        target = parcel.target
        info, dtype = target.request.info, target.request.dtype
        seen = cut_out(info, parcel.box, readers[info.name])
        assert np.isin(seen, (-1, parcel.reader)).all(), "a byte has two readers"
        seen[...] = parcel.reader
        part = cut_out(info, parcel.box, data[info.name])
        if dtype is not info.dtype:
            part = np.repeat(part, dtype.nbytes // info.dtype.nbytes, axis=-1)
        assert part.size == parcel.nbytes
        if (same := parcel.same) is not None:
            assert (same.reader, same.box, same.same) == (parcel.reader, parcel.box, None)
            assert same.target.request.dtype is dtype
            assert any(same in round and parcel in round for round in schedule.rounds)
        for number in target.numbers:
            key = target.rank, number
            nbytes = requests[target.rank][number].nbytes
            result = results.setdefault(key, np.full(nbytes, 7, np.uint8))
            result[parcel.at : parcel.at + parcel.nbytes] = part.reshape(-1)
            count = filled.setdefault(key, np.zeros(nbytes, np.int64))
            count[parcel.at : parcel.at + parcel.nbytes] += 1
    for rank, each in requests.items():
        for number, request in enumerate(each):
            if not request.nbytes:
                assert (rank, number) not in results
                continue
            assert (filled[rank, number] == 1).all()
            whole = cut_out(request.info, box_of(request), data[request.info.name])
            if request.dtype is not request.info.dtype:
                whole = np.repeat(whole, request.dtype.nbytes // request.info.dtype.nbytes, axis=-1)
            assert results[rank, number].tobytes() == whole.tobytes()
    _check_rows(schedule)
    for info in held.values():
        _check_pieces(schedule, info)


def _check_pieces(schedule: Schedule, info: TensorInfo) -> None:
    """An encoded piece has one reader, which goes through it once, in the order of its bytes."""
    for piece in info.pieces if mesh_base.encoded(info) else ():
        assert piece.stored is not None
        whole = piece.stored.box or tuple((0, length) for length in info.shape)
        readers, end = set[int](), 0
        for parcels in schedule.rounds if piece.stored.encodings else ():
            mine = [p for p in parcels if p.target.request.info.name == info.name]
            boxes = [box for p in mine if (box := intersection(p.box, whole)) is not None]
            readers |= {p.reader for p in mine if intersection(p.box, whole) is not None}
            if boxes:
                assert end <= min(map(partial(_place, whole), boxes))
                lasts = (tuple((stop - 1, stop) for _, stop in box) for box in boxes)
                end = 1 + max(map(partial(_place, whole), lasts))
        assert len(readers) < 2, "an encoded piece has two readers"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_encoded_piece_has_one_reader_that_goes_through_it_once(data: st.DataObject) -> None:
    info = tensor("w", "F32", data.draw(st.sampled_from(((64, 96), (6, 24, 40), (3000,)))))
    info = info._replace(pieces=data.draw(chunks(info)))
    requests: dict[int, list[Request]] = {}
    for rank in range(data.draw(st.integers(2, 4))):
        many = data.draw(st.integers(0, 2))
        parts = [data.draw(boxes(info)) for _ in range(many)] or [box_of(Request(info, info.dtype))]
        requests[rank] = [Request(info, info.dtype, boxed(info, part)) for part in parts]
    _check_parcels(requests, make_schedule(requests, 4096))
    _agree(requests, 4096)


@pytest.mark.parametrize("few", [(16, 17), (40, 48)])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_slab_that_travels_in_steps_may_begin_with_rows_that_no_one_wants(
    encoded: bool, few: tuple[int, int]
) -> None:
    info = tensor("w", "F32", (64, 96))
    if encoded:
        stored = Stored(encodings=(Encoding("zlib", info.nbytes),))
        info = info._replace(pieces=(Piece(0, 0, 1000, stored),))
    for boxes in ((few, (16, 48)), ((16, 48), few)):
        parts = [Request(info, info.dtype, boxed(info, (rows, (0, 96)))) for rows in boxes]
        requests = {rank: [part] for rank, part in enumerate(parts)}
        _check_parcels(requests, make_schedule(requests, 4096))


def test_what_its_reader_alone_wants_of_an_encoded_piece_comes_in_its_turn() -> None:
    info = tensor("w", "F32", (64, 96))
    stored = Stored(encodings=(Encoding("zlib", info.nbytes),))
    info = info._replace(pieces=(Piece(0, 0, 1000, stored),))
    first = Request(info, info.dtype, boxed(info, ((0, 40), (0, 96))))
    schedule = make_schedule({0: [Request(info, info.dtype)], 1: [first]}, 4096)
    assert len(schedule.rounds) > 2
    _check_pieces(schedule, info)


def test_columns_of_chunks_are_read_by_those_that_want_them() -> None:
    info = tensor("w", "F32", (64, 128))
    chunk = Encoding("zlib", 64 * 32 * 4)
    stored = [Stored(box=box, encodings=(chunk,)) for box in grid(info, (64, 32))]
    info = info._replace(pieces=tuple(Piece(0, n, 1000, each) for n, each in enumerate(stored)))
    schedule = make_schedule(shards(info, (1, 4), 4), 4096)
    assert not schedule.travels
    assert schedule.read == dict.fromkeys(range(4), 1000)
    whole = {rank: [Request(info, info.dtype)] for rank in range(4)}
    schedule = make_schedule(whole, 4096)
    assert sum(schedule.read.values()) == 4000
    assert mesh_load.amounts(whole, rows=True)[:2] == (4000, 1000)
    assert mesh_load.amounts(shards(info, (1, 8), 4), rows=True)[:2] == (1000, 1000)
    assert mesh_load.amounts(shards(info, (4, 1), 4), rows=True)[0] == 4000


@pytest.mark.parametrize("strides", [(1, 64), (128, -1)])
def test_encoded_pieces_in_another_order_than_c_are_read_by_each_that_wants_them(
    strides: tuple[int, ...],
) -> None:
    # Their rows are all over the piece: to send some rows, it would be decoded in each round.
    info, plain = tensor("w", "F32", (64, 128)), tensor("x", "F32", (64, 128), 5000)
    stored = Stored(strides=strides, encodings=(Encoding("zlib", info.nbytes),))
    info = info._replace(pieces=(Piece(0, 0, 5000, stored),))
    requests = {rank: [Request(i, i.dtype) for i in (info, plain)] for rank in range(3)}
    requests[3] = [Request(plain, plain.dtype)]
    schedule = make_schedule(requests, 4096)
    _check_rows(schedule)
    _agree(requests, 4096)
    for rank in range(4):
        mine = [p for p in itertools.chain(*schedule.rounds) if p.target.rank == rank]
        own = [p for p in mine if p.target.request.info is info]
        assert [(p.reader, p.box, p.at) for p in own] == [(rank, ((0, 64), (0, 128)), 0)][
            rank // 3 :
        ]
    assert sum(schedule.read.values()) == 3 * 5000 + plain.nbytes
    assert max(schedule.read.values()) <= sum(schedule.read.values()) / 4 + 8192
    _, note = mesh_load.exchanged(requests, LoadOptions(exchange="once"), Hosts(), ())
    assert "except 1 tensor with encoded pieces not in C order" in note
    most, share, came = mesh_load.amounts({0: requests[0][:1], 1: requests[1][:1]}, rows=True)
    assert (most, share, came) == (5000, 5000, 0)


def _place(whole: Box, box: Box) -> int:
    """The first element of a box among those of another, in C order."""
    at = 0
    for (start, stop), (first, _) in zip(whole, box, strict=True):
        at = at * (stop - start) + first - start
    return at


def _check_rows(schedule: Schedule) -> None:
    for parcels in schedule.rounds:
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for parcel in parcels:
            if parcel.reader != parcel.target.rank:
                row = rows.setdefault((parcel.reader, parcel.target.rank), [])
                row.append((parcel.wire, parcel.wire + parcel.nbytes))
        for row in rows.values():
            ends = sorted(row)
            assert ends[0][0] >= schedules.HEADER.size
            assert ends[-1][1] <= schedule.width
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    for parcel in itertools.chain(*schedule.rounds):
        assert (parcel.wire == 0) == (parcel.reader == parcel.target.rank)


def test_parts_that_overlap_share_no_row_that_is_too_short() -> None:
    info = tensor("w", "U8", (4000,))
    ends = (4000, 3999, 3998)
    each = [Request(info, info.dtype, boxed(info, ((0, end),))) for end in ends]
    schedule = make_schedule({0: [Request(info, info.dtype)], 1: each, 2: each}, 4096)
    _check_rows(schedule)
    every = itertools.chain(*schedule.rounds)
    assert sum(p.nbytes for p in every if p.target.rank == 2) == sum(ends)


@pytest.mark.parametrize("shape", [(20000, 3), (2, 30001)])
def test_packed_elements_stay_together_where_rows_share_bytes(shape: tuple[int, int]) -> None:
    info = tensor("w", "F4", shape)
    requests = {rank: [Request(info, info.dtype)] for rank in range(2)}
    schedule = make_schedule(requests, 1 << 20)
    parcels = list(itertools.chain(*schedule.rounds))
    assert sum(p.nbytes for p in parcels) == 2 * info.nbytes
    assert all(boxed(info, p.box) is None for p in parcels)
    with pytest.raises(errors.MemoryLimitError):
        make_schedule(requests, 4096)


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
    width, _ = mesh_load.exchanged(requests, LoadOptions(exchange="once"), Hosts(), ())
    assert width is not None
    schedule = make_schedule(requests, width)
    for rank in range(processes):
        assert schedule.read[rank] <= info.nbytes / processes + max(
            8192, info.nbytes / 32 / processes
        )
    assert sum(schedule.read.values()) == info.nbytes
    if grid == (8, 1) and 8 % processes == 0:
        # Rows are read by those who want them, where it pays to cut the tensor at all.
        moved = sum(schedule.received.values())
        assert moved == 0 or info.nbytes < 16384 * processes


@settings(deadline=None)
@given(st.integers(2, 64), st.integers(0, 1 << 30))
def test_rows_keep_within_the_overhead(count: int, overhead: int) -> None:
    info = tensor("w", "U8", (100,))
    requests = {rank: [Request(info, info.dtype)] for rank in range(count)}
    options = LoadOptions(exchange="once", max_host_overhead=overhead)
    held = mesh_base.GLOO.held * count
    if overhead < 2 * held * 4096:
        with pytest.raises(errors.MemoryLimitError, match="max_host_overhead"):
            mesh_load.exchanged(requests, options, Hosts(), ())
        return
    width, _ = mesh_load.exchanged(requests, options, Hosts(), ())
    assert width is not None
    assert width >= 4096
    assert held * width <= overhead // 2


def test_batches_keep_within_a_limit() -> None:
    infos = [tensor(f"t{n}", "U8", (100,), 100 * n) for n in range(10)]
    requests = {
        0: [Request(i, i.dtype) for i in infos],
        1: [Request(i, i.dtype) for i in infos[::2]],
    }
    batches = redistribute.batches(requests, 250)
    for batch in batches:
        assert sum(requests[0][n].nbytes for n in batch[0]) <= 250
    assert [n for batch in batches for n in batch[0]] == list(range(10))
    assert [n for batch in batches for n in batch[1]] == list(range(5))


LINKS = stores.MemoryLink, stores.DirectLink, stores.LinkOfDevices


def bytes_of(memory: Any) -> Any:
    """Memory of a buffer, on the host or on a simulated device."""
    return memory if isinstance(memory, np.ndarray) else memory.owner.bytes[: memory.nbytes]


class TestRun:
    """Processes are threads, which swap rows in memory."""

    def _run(
        self,
        requests: dict[int, list[Request]],
        read: Any,
        width: int = 4096,
        kind: Any = stores.MemoryLink,
    ) -> list[Any]:
        swaps = stores.Swaps(len(requests))

        def process(rank: int) -> list[Any]:
            schedule = make_schedule(requests, width, rank)
            backend: Any = stores.Backend(rank, None, swaps)
            group = agree.ProcessGroup(backend, sorted(requests), Deadline(None))
            link: Any = kind(rank, sorted(requests), width, swaps)
            sizes = [request.nbytes for request in requests[rank]]
            memory: list[Any] = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
            if kind is stores.LinkOfDevices:
                memory = [link.result(n, nbytes) for n, nbytes in enumerate(sizes)]
            places = [[Position(r, n, 0)] for n, r in enumerate(requests[rank])]
            come: list[int] = []
            try:
                redistribute.run(
                    schedule,
                    group,
                    link,
                    read(rank),
                    redistribute.Results(memory, places, come.append),
                )
            finally:
                if kind is stores.LinkOfDevices:
                    link.close()
            every = {(r.info.name, r.dtype.name, box_of(r)): r for r in requests[rank]}
            assert sum(come) == sum(stored_bytes([r]) for r in every.values())
            if kind is stores.LinkOfDevices:
                memory = [bytes_of(each) for each in memory]
                for device in link.devices:
                    device.assert_clean(result=True)
            return memory

        return stores.all_at_once([lambda rank=rank: process(rank) for rank in requests])

    @settings(max_examples=60, deadline=None)
    @given(worlds(), alone, st.sampled_from(LINKS))
    def test_values(self, requests: dict[int, list[Request]], least: int, kind: Any) -> None:
        def delivered(request: Request) -> Any:
            info = request.info
            part = cut_out(info, box_of(request), content(info))
            times = request.dtype.nbytes // info.dtype.nbytes
            return np.repeat(part, times, axis=-1).reshape(-1)

        def read(rank: int) -> Any:
            def run(wanted: Any, given: Any, memory: Any) -> None:
                for request, (buffer, at) in zip(wanted, given, strict=True):
                    part = delivered(request)
                    bytes_of(memory[buffer])[at : at + part.size] = part

            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules, "ALONE", least)
            found = self._run(requests, read, kind=kind)
        for rank, memory in zip(requests, found, strict=True):
            assert not isinstance(memory, Exception), memory
            for request, array in zip(requests[rank], memory, strict=True):
                assert array.tobytes() == delivered(request).tobytes()

    @pytest.mark.parametrize("least", [1, 64 << 10])
    @pytest.mark.parametrize("kind", LINKS)
    def test_an_error_stops_all_after_the_same_round(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, least: int
    ) -> None:
        monkeypatch.setattr(schedules, "ALONE", least)
        requests = shards(tensor("w", "F32", (64, 256)), (1, 8), 2)
        calls = [0, 0]

        def read(rank: int) -> Any:
            def run(wanted: Any, given: Any, memory: Any) -> None:
                calls[rank] += 1
                if rank == 1 and calls[1] == 3:
                    raise errors.ReadError("the disk is gone")

            return run

        other, own = self._run(requests, read, kind=kind)
        assert isinstance(own, errors.ReadError)
        assert isinstance(other, errors.ProcessError)
        assert "process 1 failed" in str(other)
        assert "ReadError: the disk is gone" in str(other)
        assert calls == [4, 3]  # While the rows with the error travel, the next are read.

    @pytest.mark.parametrize("pressed", [False, True])
    def test_one_that_does_not_come_to_the_rows_ends_all(self, pressed: bool) -> None:
        """It failed before, or Ctrl-C came while it waited for the others."""
        requests, swaps = shards(tensor("w", "F32", (64, 256)), (1, 8), 2), stores.Swaps(2, 5)

        class Pressed(stores.MemoryLink):
            def finish(self, check: Any) -> Any:
                return super().finish(check)[0], KeyboardInterrupt()

        def process(rank: int) -> None:
            backend: Any = stores.Backend(rank, None, swaps)
            if pressed and rank == 1:
                backend.link = lambda ranks, width, _: Pressed(rank, ranks, width, swaps)
            group = agree.ProcessGroup(backend, [0, 1], Deadline(None))
            link: Any = stores.MemoryLink(rank, [0, 1], 4096, swaps)
            memory = [np.zeros(request.nbytes, np.uint8) for request in requests[rank]]
            places = [[Position(request, n, 0)] for n, request in enumerate(requests[rank])]
            try:
                if rank == 1 and not pressed:
                    raise errors.MemoryLimitError("no memory")
                schedule = make_schedule(requests, 4096, rank)
                redistribute.run(
                    schedule, group, link, lambda *_: None, redistribute.Results(memory, places)
                )
            except BaseException as error:
                group.fail(error)
                raise

        other, own = stores.all_at_once([lambda rank=rank: process(rank) for rank in (0, 1)])
        assert isinstance(own, KeyboardInterrupt if pressed else errors.MemoryLimitError), own
        assert isinstance(other, errors.ProcessError), other
        assert "process 1 failed" in str(other)

    def test_its_own_error_counts_where_the_others_failed_with_it(self) -> None:
        class Late(stores.MemoryLink):
            def finish(self, check: Any) -> Any:
                raise errors.ProcessError("process 0 failed, and this load with it")

        def read(wanted: Any, given: Any, memory: Any) -> None:
            raise errors.ReadError("the disk is gone")

        requests, swaps = shards(tensor("w", "F32", (64, 256)), (1, 8), 2), stores.Swaps(2)
        backend: Any = stores.Backend(1, None, swaps)
        group = agree.ProcessGroup(backend, [0, 1], Deadline(None))
        group.enter = lambda *_: None
        memory = [np.zeros(request.nbytes, np.uint8) for request in requests[1]]
        places = [[Position(request, n, 0)] for n, request in enumerate(requests[1])]
        link: Any = Late(1, [0, 1], 4096, swaps)
        schedule = make_schedule(requests, 4096, 1)
        with pytest.raises(errors.ReadError, match="the disk is gone"):
            redistribute.run(schedule, group, link, read, redistribute.Results(memory, places))


class TestChoosing:
    def columns(self) -> dict[int, list[Request]]:
        return shards(tensor("w", "F32", (1024, 1024)), (1, 8), 2)

    def choose(
        self,
        requests: Any,
        wished: str,
        platform: str,
        overhead: int | None = None,
        sources: Any = (),
    ) -> Any:
        options = LoadOptions(exchange=wished, max_host_overhead=overhead)  # type: ignore[arg-type]
        return mesh_load.exchanged(requests, options, Hosts(platform), sources)

    def test_never(self) -> None:
        assert self.choose(self.columns(), "never", "gpu") == (None, "")

    def test_auto_reads_where_reading_is_cheap(self) -> None:
        width, note = self.choose(self.columns(), "auto", "cpu")
        assert width is None
        assert "of which a byte costs as much as reading 20 (measured)" in note
        assert "2 MiB at most a process, or 2 MiB and 1 MiB exchanged" in note
        whole = {rank: self.columns()[rank] * 2 for rank in range(2)}
        assert self.choose(whole, "auto", "cpu")[0] is None

    def test_auto_exchanges_columns_of_a_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Each of eight would ask it for whole rows, and a byte of it costs as much as some moved.
        server = SimpleNamespace(costs=Costs(concurrency=8))
        columns = shards(tensor("w", "F32", (1024, 1024)), (1, 8), 8)
        assert self.choose(columns, "auto", "cpu", sources=[server])[0] is None
        monkeypatch.setattr(
            Hosts, "transport", mesh_base.ProcessTransport(3, 4 << 20), raising=False
        )
        width, note = self.choose(columns, "auto", "cpu", sources=[server])
        assert width is not None
        assert "4 MiB at most a process, or 512 KiB and 448 KiB exchanged" in note
        assert "reading 1.5 (measured)" in note
        rows = shards(tensor("w", "F32", (1024, 1024)), (8, 1), 8)
        assert self.choose(rows, "auto", "cpu", sources=[server])[0] is None

    @pytest.mark.parametrize(("machines", "price"), [(1, 0.625), (2, 1.25), (4, 2.5)])
    def test_processes_of_a_machine_share_the_link_to_a_store(
        self, machines: int, price: float
    ) -> None:
        whole = tensor("w", "F32", (1024, 1024))
        requests: Any = {n: [Request(whole, whole.dtype)] for n in range(4)}
        store: Any = SimpleNamespace(costs=Costs(concurrency=8), shared_link=True)
        lying = [f"store {n % machines}" for n in range(4)]
        given: Any = requests, LoadOptions(), Hosts("cpu"), [store], lying
        width, note = mesh_load.exchanged(*given)
        assert (width is not None) == (machines == 1)
        assert f"reading {price:g} (measured)" in note

    def test_auto_exchanges_where_links_are_fast(self) -> None:
        width, note = self.choose(self.columns(), "auto", "gpu")
        assert "assumed" in note
        schedule = make_schedule(self.columns(), width)
        assert max(schedule.read.values()) <= 0.55 * (4 << 20)

    def test_what_travels_through_hosts_has_their_price(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = tensor("w", "F32", (1024, 1024))
        requests = {rank: [Request(whole, whole.dtype)] for rank in range(2)}
        assert self.choose(requests, "auto", "gpu")[0] is not None
        through_hosts = mesh_base.ProcessTransport(2.5, 4 << 20, by_devices=False)
        monkeypatch.setattr(Hosts, "transport", through_hosts, raising=False)
        width, note = self.choose(requests, "auto", "gpu")
        assert width is None
        assert "reading 2.5 (measured)" in note

    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_a_seed_holds_on_devices_is_taken_from_there(self, rank: int) -> None:
        # By all, also by those that do not see its devices.
        whole = tensor("w", "F32", (1024, 1024))
        requests: Any = {n: [Request(whole, whole.dtype)] for n in range(2)}
        seed = SimpleNamespace(costs=Costs(concurrency=2))
        if rank == 0:
            seed.lying = print
        said: list[str] = []

        def gather(what: str, text: str) -> dict[int, str]:
            said.append(text)
            return {0: "held", 1: ""}

        group: Any = SimpleNamespace(ranks=(0, 1), rank=rank, gather=gather)
        loader: Any = SimpleNamespace(options=LoadOptions(), sources=[seed])
        given: Any = Hosts("gpu"), group, None, None
        arrays, note = mesh_load._exchange(requests, loader, *given)  # pyright: ignore[reportPrivateUsage]
        assert arrays is None
        assert note == "each process reads its own: a source holds it on devices"
        assert said == ["server" if rank else "held"]

    def test_rows_are_never_exchanged(self) -> None:
        requests = shards(tensor("w", "F32", (1024, 1024)), (8, 1), 2)
        assert self.choose(requests, "auto", "gpu")[0] is None

    def test_too_little_memory(self) -> None:
        with pytest.raises(errors.MemoryLimitError, match="max_host_overhead"):
            self.choose(self.columns(), "once", "cpu", 10_000)
        width, note = self.choose(self.columns(), "auto", "gpu", 10_000)
        assert width is None
        assert "too small for an exchange" in note


def _seen(parcel: Parcel) -> tuple[Any, ...]:
    """All of a parcel that sender and receiver both go by."""
    (rank, request, box, _), same = parcel.target, parcel.same
    part = rank, request.info.name, request.dtype.name, request.checked, box
    return (*part, parcel.reader, parcel.box, parcel.at, parcel.nbytes, parcel.wire, same is None)


def _agree(requests: dict[int, list[Request]], width: int) -> None:
    """Each process's own schedule has those parcels of all that it sends, keeps or gets."""
    whole = make_schedule(requests, width)
    own = {rank: make_schedule(requests, width, rank) for rank in requests}
    for rank, one in own.items():
        assert one._replace(rounds=whole.rounds, received=whole.received) == whole
        assert one.received[rank] == whole.received[rank]
        for mine, every in zip(one.rounds, whole.rounds, strict=True):
            involved = [p for p in every if rank in (p.reader, p.target.rank)]
            # Only its reader asks where the same bytes are.
            assert [_seen(p)[:-1] for p in mine] == [_seen(p)[:-1] for p in involved]
            sent = [_seen(p) for p in mine if p.reader == rank]
            assert sent == [_seen(p) for p in involved if p.reader == rank]
            for parcel in mine:
                numbers = parcel.target.numbers
                mates = [requests[parcel.target.rank][n] for n in numbers]
                assert all(box_of(each) == parcel.target.box for each in mates)
                assert {each.info.name for each in mates} == {parcel.target.request.info.name}
    for number, every in enumerate(whole.rounds):
        for a, b in itertools.permutations(requests, 2):
            sent = [_seen(p)[:-1] for p in own[a].rounds[number] if p.target.rank == b]
            taken = [_seen(p)[:-1] for p in own[b].rounds[number] if p.reader == a]
            assert [p for p in sent if p[5] == a] == taken
        wired = [p for p in every if p.wire]
        alone = Counter((p.reader, p.target.rank) for p in wired if p.nbytes >= schedules.ALONE)
        assert whole.most[number] >= max(alone.values(), default=0)
        small = [p.wire + p.nbytes for p in wired if p.nbytes < schedules.ALONE]
        assert width >= whole.front[number] >= max(small, default=0)
    assert whole.travels == any(p.wire for p in itertools.chain(*whole.rounds))


@settings(max_examples=150, deadline=None)
@given(worlds(), st.sampled_from((4096, 8192)), alone)
def test_what_one_sends_is_what_the_other_takes(
    requests: dict[int, list[Request]], width: int, least: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "ALONE", least)
        _agree(requests, width)


@st.composite
def models(draw: st.DrawFn) -> dict[int, list[Request]]:
    """Needs of a model whose layers are alike, on meshes of its processes."""
    count = draw(st.sampled_from((2, 3, 4, 6, 8)))
    made: dict[int, list[Request]] = {rank: [] for rank in range(count)}
    offset, widen = 0, draw(st.booleans())
    grids = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)]
    kinds = [
        (draw(st.sampled_from((8, 64, 256))), draw(st.sampled_from((16, 512))), draw(_in(grids)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    for layer, (kind, (rows, columns, grid)) in itertools.product(range(3), enumerate(kinds)):
        info = tensor(f"{layer}.{kind}", "BF16", (rows, columns), offset)
        offset += info.nbytes
        dtype = dtypes.TABLE["F32"] if widen else info.dtype
        for number in range(max(count, math.prod(grid))):
            a, b = divmod(number % math.prod(grid), grid[1])
            box = tuple(
                (n * length // parts, (n + 1) * length // parts)
                for n, parts, length in zip((a, b), grid, info.shape, strict=True)
            )
            made[number % count].append(Request(info, dtype, boxed(info, box)))
    return made


def _in(values: Any) -> Any:
    return st.sampled_from(values)


@settings(max_examples=100, deadline=None)
@given(models(), st.sampled_from((4096, 65536)))
def test_tensors_that_are_alike_are_scheduled_alike_by_all(
    requests: dict[int, list[Request]], width: int
) -> None:
    _agree(requests, width)


def many(count: int, layers: int) -> dict[int, list[Request]]:
    """Needs of many processes: embeddings by columns, norms whole, weights by rows."""
    wanted, offset = list[mesh_base.TensorShares](), 0
    known: dict[Any, tuple[mesh_base.DeviceShare, ...]] = {}
    for n in range(layers):
        for kind, shape in (("c", (512, 8192)), ("n", (4096,)), ("r", (8192, 512))):
            info = tensor(f"{kind}{n}", "BF16", shape, offset)
            offset += info.nbytes
            if kind not in known:
                one = [[(0, length)] * count for length in shape]
                if kind != "n":
                    dim, step = "rc".index(kind), max(shape) // count
                    one[dim] = [(r * step, r * step + step) for r in range(count)]
                shares = [
                    mesh_base.DeviceShare(r, 0, tuple(b[r] for b in one)) for r in range(count)
                ]
                known[kind] = tuple(shares)
            wanted.append(mesh_base.TensorShares(info, info.dtype, False, known[kind]))
    return mesh_base.requests(wanted)


def _calls(requests: dict[int, list[Request]], width: int) -> int:
    """The calls of functions that the schedule of a process takes."""
    seen = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(profile)
    try:
        made = make_schedule(requests, width, 1)
    finally:
        sys.setprofile(None)
    stored = {
        i.name: sum(p.nbytes for p in i.pieces) for each in requests.values() for i, *_ in each
    }
    assert sum(made.read.values()) == sum(stored.values())
    return seen


def test_the_work_grows_with_what_a_process_sends_and_receives() -> None:
    calls = [_calls(many(count, 16), 1 << 20) for count in (64, 256)]
    assert calls[1] < 6 * calls[0]  # Of all parcels there are sixteen times as many.


def test_narrow_rows_take_no_more_work_before_the_first_round() -> None:
    info = tensor("w", "BF16", (512, 8192))
    requests = {rank: [Request(info, info.dtype)] for rank in range(64)}
    wide, narrow = (_calls(requests, width) for width in (1 << 20, 4096))
    assert narrow < 1.5 * wide
    assert len(make_schedule(requests, 4096, 1).rounds) > 30


def test_chunks_and_layers_that_are_alike_take_the_work_of_one() -> None:
    def model(layers: int, chunks: int) -> dict[int, list[Request]]:
        infos, at = list[TensorInfo](), 0
        for layer in range(layers):
            info, pieces = tensor(f"{layer}", "BF16", (512, 512)), list[Piece]()
            for box in grid(info, (512 // chunks, 512 // chunks)):
                nbytes = 2 * (512 // chunks) ** 2
                stored = Stored(box=box, encodings=(Encoding("zlib", nbytes),))
                pieces.append(Piece(0, at, 1000 + len(pieces) % 7 + layer, stored))
                at += 2000
            infos.append(info._replace(pieces=tuple(pieces)))
        return {rank: [Request(i, i.dtype) for i in infos] for rank in range(32)}

    few, many_chunks, many_layers = (
        _calls(model(*given), 1 << 14) for given in ((1, 4), (1, 16), (16, 4))
    )
    # Each chunk of all takes some 15 calls, and one process would take 200 for each that wants it.
    assert many_chunks - few < 40 * (256 - 16)
    assert many_layers - few < 40 * (256 - 16)
    _agree(model(2, 4), 1 << 14)


def test_another_version_of_the_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, swaps = shards(tensor("w", "F32", (64, 256)), (1, 8), 2), stores.Swaps(2, 5)
    made = [make_schedule(requests, 4096, 0)]
    monkeypatch.setattr(schedules, "_EVEN", 7)
    monkeypatch.setattr(schedules, "_LEAST", 1024)
    made.append(make_schedule(requests, 4096, 1))
    assert made[0].digest != made[1].digest

    def process(rank: int) -> None:
        backend: Any = stores.Backend(rank, None, swaps)
        group = agree.ProcessGroup(backend, [0, 1], Deadline(None))
        link: Any = stores.MemoryLink(rank, [0, 1], 4096, swaps)
        memory = [np.zeros(request.nbytes, np.uint8) for request in requests[rank]]
        places = [[Position(request, n, 0)] for n, request in enumerate(requests[rank])]
        redistribute.run(
            made[rank], group, link, lambda *_: None, redistribute.Results(memory, places)
        )

    for found in stores.all_at_once([lambda rank=rank: process(rank) for rank in (0, 1)]):
        assert isinstance(found, errors.ProcessError), found
        assert "do not have the same schedule" in str(found)


def test_another_version_of_mfload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    group: Any = SimpleNamespace(
        deadline=Deadline(None), agree=lambda what, lines: said.append(lines[0])
    )
    mesh_load.agree_on_inputs(group, [], [], LoadOptions(), [])
    monkeypatch.setattr(mfload, "__version__", "0.0.9")
    mesh_load.agree_on_inputs(group, [], [], LoadOptions(), [])
    assert said[0].startswith("mfload: ")
    assert said[2] == "mfload: 0.0.9" != said[0]
