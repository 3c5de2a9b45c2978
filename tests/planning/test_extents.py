"""Runs of a selection: which ranges are read, which are read over."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import dtypes
from mfload.index import Piece, TensorInfo
from mfload.planning import extents
from mfload.planning.blocks import Costs, Rows
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import select

COSTS = Costs()


def _need(shape: tuple[int, ...], index: Any, dtype: str = "F32", to: str | None = None) -> Request:
    row = dtypes.TABLE[dtype]
    info = TensorInfo("w", row, shape, (Piece(3, 1000, row.size_of(shape) or 0),))
    return Request(info, dtypes.TABLE[to or dtype], select(info, index))


def _ranges(request: Request, costs: Costs = COSTS) -> list[tuple[int, int]]:
    return [(1000 + cell.offset, cell.nbytes) for cell in extents.of_tensor([request], costs)]


def _part(request: Request) -> extents.BoxCopy:
    """The part of a request that is read at once."""
    (cell,) = extents.of_tensor([request], COSTS)
    (part,) = cell.parts
    return part


def test_a_whole_tensor_is_one_plain_segment() -> None:
    request = _need((10, 20), ...)
    assert extents.of_tensor([request], COSTS) == [
        extents.Extent(0, 800, 800, (extents.BoxCopy(0, 0, 800, 0),))
    ]
    assert extents.contiguous(request) == 1000


@pytest.mark.parametrize(
    ("index", "offset"),
    [
        (slice(2, 5), 1000 + 2 * 80),
        (4, 1000 + 4 * 80),
        ((4, slice(3, 9)), 1000 + 4 * 80 + 12),
        ((slice(3, 4), slice(None, None, 1)), 1000 + 3 * 80),
        ((slice(9, 8, -1), slice(None)), 1000 + 9 * 80),
        ((7, slice(5, 4, -1)), 1000 + 7 * 80 + 20),
        ((7, slice(5, 6, 9)), 1000 + 7 * 80 + 20),
    ],
)
def test_what_lies_together_is_contiguous(index: Any, offset: int) -> None:
    request = _need((10, 20), index)
    assert extents.contiguous(request) == offset
    assert _ranges(request) == [(offset, request.nbytes)]


@pytest.mark.parametrize(
    "index",
    [slice(None, None, 2), (slice(None), slice(0, 19)), slice(None, None, -1), (slice(None), 3)],
)
def test_what_lies_apart_or_backwards_is_not(index: Any) -> None:
    assert extents.contiguous(_need((10, 20), index)) is None


def test_a_conversion_is_never_contiguous() -> None:
    request = _need((10, 20), ..., to="F64")
    assert extents.contiguous(request) is None
    copy = _part(request).copy
    assert copy is not None
    assert (copy.source, copy.target) == (np.dtype("f4"), np.dtype("f8"))


def test_columns_far_apart_are_read_row_by_row() -> None:
    request = _need((50, 32_000), (slice(None), slice(8, 16)))
    (cell,) = extents.of_tensor([request], COSTS)
    assert cell == extents.Extent(
        32, 50 * 32, 50 * 32, (extents.BoxCopy(0, 32, 50 * 32, 0),), Rows(range(50), 128_000, 32, 0)
    )


def test_columns_that_lie_closer_than_the_gap_are_read_over() -> None:
    request = _need((50, 512), (slice(None), slice(8, 16)))
    assert _ranges(request) == [(1000 + 32, 49 * 2048 + 32)]
    apart, over = (
        extents.of_tensor([request], Costs(merge_gap=2048 - 32 + more))[0] for more in (0, 1)
    )
    assert (apart.nbytes, apart.wanted) == (50 * 32, 50 * 32)
    assert (over.nbytes, over.rows) == (49 * 2048 + 32, None)


def test_many_rows_are_shared_out_and_rows_of_a_server_are_requests_of_their_own() -> None:
    request = _need((9000, 32_000), (slice(None), slice(8, 16)))
    counts = [len(cell.rows.numbers) for cell in extents.of_tensor([request], COSTS) if cell.rows]
    assert counts == [4096, 4096, 808]
    assert len(extents.of_tensor([request], Costs(concurrency=8))) == 9000


def test_columns_of_a_list_are_not_a_cell_a_row() -> None:
    request = _need((3000, 4000), (slice(None), [7, 3, 3, 900]))
    (cell,) = extents.of_tensor([request], COSTS)
    assert (cell.offset, cell.wanted, len(cell.parts)) == (12, 3000 * 3 * 4, 4)


def test_rows_of_a_list_are_numbered_from_the_first_in_the_file() -> None:
    request = _need((5000, 32_000), ([7, 3, 3, 4000], slice(8, 16)))
    (cell,) = extents.of_tensor([request], COSTS)
    assert (cell.offset, cell.rows) == (3 * 128_000 + 32, Rows([4, 0, 0, 3997], 128_000, 32, 0))
    assert cell.parts == (extents.BoxCopy(0, 3 * 128_000 + 32, 128, 0),)


def test_a_span_longer_than_a_block_is_cut_by_rows() -> None:
    request = _need((1000, 512), (slice(None), slice(8, 16)))
    (block,) = make_plan([request], costs=Costs(block=10_000)).blocks
    # Five rows at once: 4 * 2048 + 32 bytes.
    assert (block.offset, block.rows) == (1032, Rows(range(1000), 2048, 32, 5))
    assert block.nbytes == 200 * (4 * 2048 + 32)
    assert len(_ranges(request, Costs(block=10_000, span=20_000))) == 100


def test_a_row_longer_than_a_block_is_cut_within() -> None:
    request = _need((2, 100_000), ..., to="F64")
    ranges = _ranges(request, Costs(block=4096))
    assert all(length <= 4096 for _, length in ranges)
    assert sum(length for _, length in ranges) == 800_000


def test_steps_backwards_start_at_the_last_byte() -> None:
    request = _need((10,), slice(None, None, -1), "U8")
    part = _part(request)
    assert (part.offset, part.nbytes) == (0, 10)
    assert part.copy is not None
    assert (part.copy.start, part.copy.strides) == (9, (-1,))


def test_nothing_is_read_for_nothing() -> None:
    assert make_plan([_need((10, 20), slice(3, 3)), _need((0, 20), ...)]).blocks == ()


def test_packed_elements_move_as_bytes() -> None:
    request = _need((4, 64), (slice(None, None, 2), slice(8, 24)), "F4")
    (cell,) = extents.of_tensor([request], COSTS)
    assert (cell.offset, cell.nbytes) == (4, 64 + 8)
    assert cell.wanted == request.nbytes == 16


def test_lists_of_rows_are_not_kept(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"a": np.zeros((4096, 8), np.float32)})
    with mfload.open(path) as opened:
        part, rows = opened.get_slice("a"), np.random.default_rng(0)
        for number in range(20):
            if number == 2:
                tracemalloc.start()
                before, _ = tracemalloc.get_traced_memory()
            part[rows.integers(0, 4096, 10_000).tolist(), :4]
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert after - before < 1 << 20
